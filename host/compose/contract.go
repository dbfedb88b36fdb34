package compose

import (
	"fmt"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
)

// contract compares what a consumer was built against with what its provider was built against. Only what the consumer
// relies on counts: every method and field it knows must mean the same at the other end. What only the provider knows is
// newer and harmless.
func (c *checker) contract(consumer, provider part, n *kernelv1.Need) {
	mine, err := service(consumer.manifest, n.GetService())
	if err != nil || mine == nil {
		return
	}
	theirs, err := service(provider.manifest, n.GetService())
	if err != nil || theirs == nil {
		return
	}
	cmp := &comparison{seen: map[protoreflect.FullName]bool{}}
	cmp.service(mine, theirs)
	if len(cmp.found) == 0 {
		return
	}
	d := c.fail(consumer.entry, "use", CodeContract, "%q and %q were built against different versions of %s", consumer.name, provider.name, n.GetService())
	for _, f := range cmp.found {
		d.note("%s", f)
	}
	c.here(d, provider)
	d.hint("build both against the same version of the contract")
}

// service finds a service among the descriptors of a manifest; nil without error if the manifest carries none, which
// plugins in other languages may leave out.
func service(m *kernelv1.Manifest, name string) (protoreflect.ServiceDescriptor, error) {
	if len(m.GetDescriptors()) == 0 {
		return nil, nil
	}
	var set descriptorpb.FileDescriptorSet
	if err := proto.Unmarshal(m.GetDescriptors(), &set); err != nil {
		return nil, err
	}
	files, err := protodesc.NewFiles(&set)
	if err != nil {
		return nil, err
	}
	d, err := files.FindDescriptorByName(protoreflect.FullName(name))
	if err == protoregistry.NotFound {
		return nil, nil
	}
	s, _ := d.(protoreflect.ServiceDescriptor)
	return s, err
}

type comparison struct {
	found []string
	seen  map[protoreflect.FullName]bool
}

func (c *comparison) add(format string, args ...any) {
	c.found = append(c.found, fmt.Sprintf(format, args...))
}

func (c *comparison) service(mine, theirs protoreflect.ServiceDescriptor) {
	for i := range mine.Methods().Len() {
		m := mine.Methods().Get(i)
		o := theirs.Methods().ByName(m.Name())
		if o == nil {
			c.add("method %s is missing in the provider", m.Name())
			continue
		}
		if m.IsStreamingClient() != o.IsStreamingClient() || m.IsStreamingServer() != o.IsStreamingServer() {
			c.add("method %s streams differently", m.Name())
		}
		c.message(m.Input(), o.Input())
		c.message(m.Output(), o.Output())
	}
}

func (c *comparison) message(mine, theirs protoreflect.MessageDescriptor) {
	if c.seen[mine.FullName()] {
		return
	}
	c.seen[mine.FullName()] = true
	if mine.FullName() != theirs.FullName() {
		c.add("message %s is %s in the provider", mine.FullName(), theirs.FullName())
		return
	}
	for i := range mine.Fields().Len() {
		f := mine.Fields().Get(i)
		o := theirs.Fields().ByNumber(f.Number())
		switch {
		case o == nil:
			c.add("field %s.%s is missing in the provider", mine.Name(), f.Name())
		case f.Name() != o.Name():
			c.add("field %s.%s is called %s in the provider", mine.Name(), f.Name(), o.Name())
		case f.Kind() != o.Kind() || f.Cardinality() != o.Cardinality() || f.IsMap() != o.IsMap():
			c.add("field %s.%s has another type in the provider", mine.Name(), f.Name())
		case f.Message() != nil:
			c.message(f.Message(), o.Message())
		case f.Enum() != nil && f.Enum().FullName() != o.Enum().FullName():
			c.add("field %s.%s has another type in the provider", mine.Name(), f.Name())
		}
	}
}

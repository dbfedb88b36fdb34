// Package plugin is what a plugin author imports.
//
// A plugin is a value of type [Plugin] and one line of main:
//
//	func main() { plugin.Main(Plugin) }
//
// Its life is told by four steps. The host first asks for the manifest, which is everything static in the value: name,
// needs, offers, listeners, tools. It then checks the whole composition, and only if that holds starts the process for
// good and calls Apply, once, with the row's config. Apply provides capabilities, registers listeners and tools, and names
// what must be undone. Nothing of it is reachable before Apply returned without an error and every other registration
// of the generation is in place. When the generation ends, what Apply did is undone newest first.
//
// Apply may do less than the manifest says, never more: registering something undeclared is an error.
//
// The same value runs unchanged inside the host or a test (see package plugintest) and as a process of its own.
package plugin

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/invopop/jsonschema"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	"github.com/cordon-host/cordon/capability/event"
)

// KernelVersion is the minor version of the kernel protocol this package speaks.
const KernelVersion = 1

// Plugin is a plugin with a config of type C, a struct with json and jsonschema tags.
type Plugin[C any] struct {
	Name    string
	Version string

	// Needs are the capabilities Apply and its handlers call.
	Needs []Need
	// Offers are the capabilities Apply may provide.
	Offers []Offer
	// Listens are the events Apply may register listeners for, one each.
	Listens []Listen
	// Emits are the events the plugin dispatches.
	Emits []Emit
	// Appends are the session event types it appends; a name ending in "/" is a prefix.
	Appends []string
	// Tools are the names of the tools Apply may register.
	Tools []string
	// Contexts are the contributions to a model's runtime context that Apply may register.
	Contexts []Contribution
	// Confines says that the plugin runs things, confined as the policy capability resolves it.
	Confines bool

	// Unconfined asks for a process outside the confinement of plugins, for one that builds sandboxes or works where sessions do. The row
	// must grant it.
	Unconfined bool

	// Default is the config before the row's own values are laid over it. Nil means the zero value.
	Default func() C

	Apply func(ctx *Context, config C) error
}

// Need is a capability a plugin calls.
type Need struct {
	Capability string
	Desc       *grpc.ServiceDesc
	// Optional: the plugin also works without it.
	Optional bool
}

// Offer is a capability a plugin provides.
type Offer struct {
	Capability string
	Desc       *grpc.ServiceDesc
}

// Contribution is one part of what a model is told about its situation. Contributions are shown in ascending order.
type Contribution struct {
	Name  string
	Order int32
}

// Listen declares a listener. Make one with [ListenTo].
type Listen struct {
	event string
	kind  kernelv1.Listener_Kind
	// Prepend puts the listener before those that do not.
	Prepend bool
}

// ListenTo declares an around listener for ev.
func ListenTo[Q, A proto.Message](ev event.Event[Q, A], prepend bool) Listen {
	return Listen{event: ev.Name, kind: kernelv1.Listener_AROUND, Prepend: prepend}
}

// Emit declares an event the plugin dispatches. Make one with [Emits].
type Emit struct{ decl *kernelv1.EventDecl }

// Emits declares that the plugin dispatches ev.
func Emits[Q, A proto.Message](ev event.Event[Q, A]) Emit {
	return Emit{&kernelv1.EventDecl{
		Event: ev.Name, Request: ev.Request(), Reply: ev.Reply(),
		FailClosed: ev.FailClosed, FixedRequest: ev.FixedRequest,
	}}
}

// program is a Plugin with its config type erased.
type program interface {
	manifest() (*kernelv1.Manifest, error)
	apply(ctx *Context, config []byte) error
	services() []*grpc.ServiceDesc
}

func (p Plugin[C]) services() []*grpc.ServiceDesc {
	var out []*grpc.ServiceDesc
	for _, o := range p.Offers {
		out = append(out, o.Desc)
	}
	return out
}

// Manifest is what Describe answers.
func (p Plugin[C]) Manifest() (*kernelv1.Manifest, error) { return p.manifest() }

func (p Plugin[C]) manifest() (*kernelv1.Manifest, error) {
	if p.Name == "" || p.Apply == nil {
		return nil, errors.New("plugin value: Name and Apply must be set")
	}
	schema, err := configSchema[C]()
	if err != nil {
		return nil, fmt.Errorf("plugin %s: config schema: %w", p.Name, err)
	}
	m := &kernelv1.Manifest{
		Name: p.Name, Version: p.Version,
		KernelMin: KernelVersion, KernelMax: KernelVersion,
		ConfigSchema: schema,
		Appends:      p.Appends, Tools: p.Tools, Confines: p.Confines, Unconfined: p.Unconfined,
	}
	files := &fileSet{set: &descriptorpb.FileDescriptorSet{}, seen: map[string]bool{}}
	for _, n := range p.Needs {
		m.Needs = append(m.Needs, &kernelv1.Need{Capability: n.Capability, Service: n.Desc.ServiceName, Optional: n.Optional})
		if err := files.add(n.Desc); err != nil {
			return nil, err
		}
	}
	for _, o := range p.Offers {
		m.Offers = append(m.Offers, &kernelv1.Offer{Capability: o.Capability, Service: o.Desc.ServiceName})
		if err := files.add(o.Desc); err != nil {
			return nil, err
		}
	}
	for i, l := range p.Listens {
		m.Listeners = append(m.Listeners, &kernelv1.Listener{Event: l.event, Kind: l.kind, Prepend: l.Prepend, Index: uint32(i)})
	}
	for _, c := range p.Contexts {
		m.Contexts = append(m.Contexts, &kernelv1.Context{Name: c.Name, Order: c.Order})
	}
	for _, e := range p.Emits {
		m.Events = append(m.Events, e.decl)
	}
	if m.Descriptors, err = proto.Marshal(files.set); err != nil {
		return nil, err
	}
	return m, nil
}

func (p Plugin[C]) apply(ctx *Context, raw []byte) error {
	config, err := p.config(raw)
	if err != nil {
		return err
	}
	return p.Apply(ctx, config)
}

// config lays the row's values over the defaults. The host has checked them against the schema already; this holds for
// programmatic use too.
func (p Plugin[C]) config(raw []byte) (C, error) {
	var config C
	if p.Default != nil {
		config = p.Default()
	}
	if len(bytes.TrimSpace(raw)) == 0 || string(bytes.TrimSpace(raw)) == "null" {
		return config, nil
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&config); err != nil {
		return config, fmt.Errorf("%s: config: %w", p.Name, err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return config, fmt.Errorf("%s: config: more than one JSON value", p.Name)
	}
	return config, nil
}

// configSchema is the JSON Schema of C. Fields are optional unless tagged jsonschema:"required"; unknown ones are errors.
func configSchema[C any]() ([]byte, error) {
	r := jsonschema.Reflector{
		Anonymous:                  true,
		DoNotReference:             true,
		RequiredFromJSONSchemaTags: true,
	}
	return json.Marshal(r.Reflect(new(C)))
}

// fileSet collects the descriptors of contracts with what they import, each file once, imports first.
type fileSet struct {
	set  *descriptorpb.FileDescriptorSet
	seen map[string]bool
}

func (f *fileSet) add(desc *grpc.ServiceDesc) error {
	d, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(desc.ServiceName))
	if err != nil {
		return fmt.Errorf("contract %s: %w", desc.ServiceName, err)
	}
	f.file(d.ParentFile())
	return nil
}

func (f *fileSet) file(fd protoreflect.FileDescriptor) {
	if f.seen[fd.Path()] {
		return
	}
	f.seen[fd.Path()] = true
	for i := range fd.Imports().Len() {
		f.file(fd.Imports().Get(i).FileDescriptor)
	}
	f.set.File = append(f.set.File, protodesc.ToFileDescriptorProto(fd))
}

// offered reports whether the manifest offers capability, and its contract.
func offered(m *kernelv1.Manifest, capability string) (string, bool) {
	i := slices.IndexFunc(m.GetOffers(), func(o *kernelv1.Offer) bool { return o.GetCapability() == capability })
	if i < 0 {
		return "", false
	}
	return m.GetOffers()[i].GetService(), true
}

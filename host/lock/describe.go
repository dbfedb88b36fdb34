package lock

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	"github.com/cordon-host/cordon/host/compose"
)

// Describe is the interface of the plugin with that manifest.
func Describe(m *kernelv1.Manifest) (Interface, error) {
	raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		return Interface{}, fmt.Errorf("manifest of plugin %s: %w", m.GetName(), err)
	}
	sum := sha256.Sum256(raw)
	out := Interface{
		Manifest: hex.EncodeToString(sum[:]), Version: m.GetVersion(), Kernel: min(m.GetKernelMax(), compose.KernelVersion),
		Services: map[string]string{},
	}
	var set descriptorpb.FileDescriptorSet
	if err := proto.Unmarshal(m.GetDescriptors(), &set); err != nil {
		return Interface{}, fmt.Errorf("descriptors of plugin %s: %w", m.GetName(), err)
	}
	var services []string
	for _, n := range m.GetNeeds() {
		services = append(services, n.GetService())
	}
	for _, o := range m.GetOffers() {
		services = append(services, o.GetService())
	}
	for _, s := range services {
		if out.Services[s], err = descriptors(&set, s); err != nil {
			return Interface{}, fmt.Errorf("descriptors of plugin %s: %w", m.GetName(), err)
		}
	}
	return out, nil
}

// descriptors is the digest of a service's file and of everything that file imports, without comments; empty if the set does not
// have the service.
func descriptors(set *descriptorpb.FileDescriptorSet, service string) (string, error) {
	files := map[string]*descriptorpb.FileDescriptorProto{}
	var home string
	for _, f := range set.GetFile() {
		files[f.GetName()] = f
		for _, s := range f.GetService() {
			name := s.GetName()
			if f.GetPackage() != "" {
				name = f.GetPackage() + "." + name
			}
			if name == service {
				home = f.GetName()
			}
		}
	}
	if home == "" {
		return "", nil
	}
	reached := map[string]bool{}
	var reach func(string)
	reach = func(name string) {
		if files[name] == nil || reached[name] {
			return
		}
		reached[name] = true
		for _, d := range files[name].GetDependency() {
			reach(d)
		}
	}
	reach(home)
	h := sha256.New()
	for _, name := range slices.Sorted(maps.Keys(reached)) {
		f := proto.CloneOf(files[name])
		f.SourceCodeInfo = nil
		raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(f)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(h, "%q %d\n", name, len(raw))
		h.Write(raw)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

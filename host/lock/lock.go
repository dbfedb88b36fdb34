// Package lock is the lock file of a composition: which code its rows may run, by digest.
//
// Trust is one person's, kept outside the tree, and ends with the first byte that changes. The lock file is the composition's: it
// lies beside the compose file, is reviewed and versioned with it, and says of each row what exactly somebody accepted. `cordon
// lock` writes it; a host started with --locked runs nothing else. Without --locked the file decides nothing: it only tells
// which rows run what was accepted.
//
// The file is YAML of one strict form. Whatever [Parse] does not know is an error: a key that is ignored would be a check that is
// skipped.
package lock

import (
	"bytes"
	"fmt"
	"maps"
	"slices"

	"gopkg.in/yaml.v3"

	"github.com/cordon-host/cordon/host/compose"
)

// FileName is the name of the lock file, beside its compose file.
const FileName = "compose.lock"

// Format is the version of the file format this package reads and writes.
const Format = 1

// File is what a lock file says.
type File struct {
	// Entries are the accepted rows, by id.
	Entries map[string]*Entry
}

// Entry is what was accepted for one row.
type Entry struct {
	Program
	Interface

	place  compose.Position
	places map[string]compose.Position // of the values, by name as [Entry.values] has them
}

// Program is the code of a row.
type Program struct {
	Executable string // sha256, hex
	// Built says what made the executable; the zero Toolchain for one that was there already.
	Built Toolchain
}

// Toolchain is a Go compiler and the platform it compiled for. The same sources make the same executable only with the same
// toolchain.
type Toolchain struct {
	Go       string // go1.26.1
	Platform string // linux/amd64
}

func (t Toolchain) String() string { return t.Go + " for " + t.Platform }

// Interface is what a program says of itself.
type Interface struct {
	Manifest string // sha256, hex
	Version  string
	// Kernel is the version of the kernel protocol that host and plugin speak with each other.
	Kernel uint32
	// Services has the contract of each service the plugin needs or offers: the sha256 of its descriptors, or empty where the
	// plugin carries none.
	Services map[string]string
}

// prefix of digests, so that another algorithm can be told apart one day.
const prefix = "sha256:"

// noDescriptors stands for the contract of a service whose plugin carries no descriptors.
const noDescriptors = "none"

func contract(digest string) string {
	if digest == "" {
		return noDescriptors
	}
	return prefix + digest
}

// value is one fact about a row, as text.
type value struct{ name, text string }

// values are the facts of an entry in the order of the file.
func (e *Entry) values() []value {
	out := []value{{"executable", prefix + e.Executable}}
	if e.Built != (Toolchain{}) {
		out = append(out, value{"built.go", e.Built.Go}, value{"built.platform", e.Built.Platform})
	}
	out = append(out, value{"manifest", prefix + e.Manifest}, value{"version", e.Version}, value{"kernel", fmt.Sprint(e.Kernel)})
	for _, name := range slices.Sorted(maps.Keys(e.Services)) {
		out = append(out, value{servicePrefix + name, contract(e.Services[name])})
	}
	return out
}

const servicePrefix = "services."

// header tells a reader what the file is for.
const header = `# Which code this composition may run. Written by "cordon lock"; a host started with --locked runs nothing else.
`

// Bytes is the file as it is written: the same entries always give the same bytes.
func (f *File) Bytes() ([]byte, error) {
	entries := &yaml.Node{Kind: yaml.MappingNode}
	for _, id := range slices.Sorted(maps.Keys(f.Entries)) {
		e := f.Entries[id]
		row := &yaml.Node{Kind: yaml.MappingNode}
		put(row, "executable", text(prefix+e.Executable))
		if e.Built != (Toolchain{}) {
			built := &yaml.Node{Kind: yaml.MappingNode}
			put(built, "go", text(e.Built.Go))
			put(built, "platform", text(e.Built.Platform))
			put(row, "built", built)
		}
		put(row, "manifest", text(prefix+e.Manifest))
		put(row, "version", text(e.Version))
		put(row, "kernel", number(e.Kernel))
		if len(e.Services) > 0 {
			services := &yaml.Node{Kind: yaml.MappingNode}
			for _, name := range slices.Sorted(maps.Keys(e.Services)) {
				put(services, name, text(contract(e.Services[name])))
			}
			put(row, "services", services)
		}
		put(entries, id, row)
	}
	root := &yaml.Node{Kind: yaml.MappingNode}
	put(root, "lock", number(Format))
	put(root, "entries", entries)
	out := bytes.NewBufferString(header)
	enc := yaml.NewEncoder(out)
	enc.SetIndent(2)
	if err := enc.Encode(root); err != nil {
		return nil, err
	}
	return out.Bytes(), enc.Close()
}

func put(n *yaml.Node, key string, value *yaml.Node) { n.Content = append(n.Content, text(key), value) }

// text is a string that YAML of any version reads as one.
func text(s string) *yaml.Node {
	n := &yaml.Node{}
	if err := n.Encode(s); err != nil {
		n.SetString(s)
	}
	return n
}

func number(n uint32) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!int", Value: fmt.Sprint(n)}
}

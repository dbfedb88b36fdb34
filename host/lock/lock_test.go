package lock

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	"github.com/cordon-host/cordon/host/compose"
)

var update = flag.Bool("update", false, "write golden files instead of comparing with them")

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("%v; run go test -update", err)
	}
	if got != string(want) {
		t.Errorf("%s differs; run go test -update and look at the change\n--- got\n%s\n--- want\n%s", path, got, want)
	}
}

func sum(c string) string { return strings.Repeat(c, 64) }

func sample() *File {
	return &File{Entries: map[string]*Entry{
		"zeta": {
			Program:   Program{Executable: sum("a")},
			Interface: Interface{Manifest: sum("b"), Version: "1.0", Kernel: 1},
		},
		"bash": {
			Program:   Program{Executable: sum("1"), Built: Toolchain{"go1.26.1", "linux/amd64"}},
			Interface: Interface{Manifest: sum("2"), Version: "", Kernel: 1, Services: map[string]string{"cordon.shell.v1.Shell": sum("3"), "cordon.policy.v1.Policy": ""}},
		},
		"yes": { // a version that YAML would read as something else
			Program:   Program{Executable: sum("4")},
			Interface: Interface{Manifest: sum("5"), Version: "no", Kernel: 2},
		},
	}}
}

var same = cmp.Options{cmpopts.IgnoreUnexported(Entry{}), cmpopts.EquateEmpty()}

func TestWrittenAndReadAgain(t *testing.T) {
	text, err := sample().Bytes()
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "sample.lock", string(text))
	got, diags := Parse("compose.lock", text)
	if err := diags.Err(); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(sample(), got, same); d != "" {
		t.Error(d)
	}
	if changes := Diff(sample(), got); len(changes) != 0 {
		t.Errorf("what was read differs from what was written: %v", changes)
	}
	again, err := got.Bytes()
	if err != nil || !bytes.Equal(again, text) {
		t.Errorf("written twice it differs: %v", err)
	}
}

// TestStrict: what is not known or not whole is an error, with its place.
func TestStrict(t *testing.T) {
	text, err := sample().Bytes()
	if err != nil {
		t.Fatal(err)
	}
	good := string(text)
	var out strings.Builder
	for _, tt := range []struct{ name, text string }{
		{"empty", ""},
		{"only a comment", "# x\n"},
		{"not YAML", "lock: 1\nentries: {\n"},
		{"conflict", "<<<<<<< HEAD\nlock: 1\n=======\n"},
		{"a list", "- 1\n"},
		{"two documents", good + "---\nlock: 1\n"},
		{"unknown key", good + "more: 1\n"},
		{"no version", strings.Replace(good, "lock: 1\n", "", 1)},
		{"another version", strings.Replace(good, "lock: 1\n", "lock: 2\n", 1)},
		{"quoted version", strings.Replace(good, "lock: 1\n", "lock: \"1\"\n", 1)},
		{"no entries", "lock: 1\n"},
		{"entries as null", "lock: 1\nentries:\n"},
		{"unknown key of an entry", strings.Replace(good, "    kernel: 1\n", "    kernel: 1\n    sha1: x\n", 1)},
		{"key twice", strings.Replace(good, "    kernel: 1\n", "    kernel: 1\n    kernel: 2\n", 1)},
		{"entry twice", good + "  bash:\n    kernel: 1\n"},
		{"missing", strings.Replace(good, "    manifest: sha256:"+sum("2")+"\n", "", 1)},
		{"digest without its kind", strings.Replace(good, "sha256:"+sum("a"), sum("a"), 1)},
		{"digest too short", strings.Replace(good, sum("a"), sum("a")[1:], 1)},
		{"digest in capitals", strings.Replace(good, sum("a"), sum("A"), 1)},
		{"digest empty", strings.Replace(good, "sha256:"+sum("a"), `""`, 1)},
		{"digest is a number", strings.Replace(good, "sha256:"+sum("a"), "12", 1)},
		{"digest is a list", strings.Replace(good, "sha256:"+sum("a"), "[1]", 1)},
		{"bad id", strings.Replace(good, "  zeta:", "  Zeta/..:", 1)},
		{"bad service", strings.Replace(good, "cordon.shell.v1.Shell:", "../x:", 1)},
		{"alias", strings.Replace(good, "sha256:"+sum("a"), "&x sha256:"+sum("a"), 1)},
		{"tag", strings.Replace(good, "sha256:"+sum("a"), "!!binary "+sum("a"), 1)},
		{"kernel below zero", strings.Replace(good, "kernel: 1", "kernel: -1", 1)},
		{"kernel as octal", strings.Replace(good, "kernel: 1", "kernel: 01", 1)},
		{"empty toolchain", strings.Replace(good, "go: go1.26.1", `go: ""`, 1)},
		{"half a toolchain", strings.Replace(good, "      go: go1.26.1\n", "", 1)},
		{"null toolchain", strings.Replace(good, "    built:\n      go: go1.26.1\n      platform: linux/amd64\n", "    built:\n", 1)},
		{"two mistakes", strings.NewReplacer("kernel: 1\n", "kernel: x\n").Replace(good)},
		{"speaks to the terminal", "lock: 1\nentries: {}\n\"\\e[2J\x1b[2J\": 1\n"},
	} {
		if tt.text == good {
			t.Fatalf("%s: nothing was changed", tt.name)
		}
		f, diags := Parse("compose.lock", []byte(tt.text))
		if f != nil || !diags.HasErrors() {
			t.Errorf("%s: accepted", tt.name)
			continue
		}
		for _, d := range diags {
			if d.Code != compose.CodeLockFile || d.Place.File != "compose.lock" {
				t.Errorf("%s: %v", tt.name, d)
			}
		}
		out.WriteString("== " + tt.name + "\n")
		if err := diags.Text(&out); err != nil {
			t.Fatal(err)
		}
	}
	golden(t, "strict.golden", out.String())
	// The control.
	if _, diags := Parse("compose.lock", text); diags.HasErrors() {
		t.Errorf("the good file: %v", diags.Err())
	}
	// A file that is too large, and one that is not text.
	for _, bad := range [][]byte{bytes.Repeat([]byte("#"), MaxFileSize+1), {0xff, 0xfe}} {
		if _, diags := Parse("compose.lock", bad); !diags.HasErrors() {
			t.Error("accepted")
		}
	}
}

func TestReadRefusesWhatIsNoFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, FileName)
	f, digest, diags := Read(path)
	if f != nil || digest != "" || diags != nil {
		t.Errorf("no file: %v %q %v", f, digest, diags)
	}
	text, err := sample().Bytes()
	if err != nil {
		t.Fatal(err)
	}
	real := filepath.Join(dir, "real")
	if err := os.WriteFile(real, text, 0o600); err != nil {
		t.Fatal(err)
	}
	if f, digest, diags := Read(real); f == nil || len(digest) != 64 || diags != nil {
		t.Errorf("the control: %v %q %v", f, digest, diags)
	}
	if err := os.Symlink(real, path); err != nil {
		t.Fatal(err)
	}
	if f, _, diags := Read(path); f != nil || !diags.HasErrors() {
		t.Error("followed a link")
	}
	if f, _, diags := Read(dir); f != nil || !diags.HasErrors() {
		t.Error("read a directory")
	}
}

func TestDiff(t *testing.T) {
	next := sample()
	delete(next.Entries, "zeta")
	next.Entries["bash"].Built.Go = "go1.26.2"
	next.Entries["bash"].Executable = sum("9")
	next.Entries["bash"].Services = map[string]string{"cordon.shell.v1.Shell": sum("8"), "cordon.fs.v1.Fs": sum("7")}
	next.Entries["new"] = &Entry{Program: Program{Executable: sum("6")}, Interface: Interface{Manifest: sum("6"), Version: "2", Kernel: 1}}
	var out strings.Builder
	for _, c := range Diff(sample(), next) {
		out.WriteString(c.Text())
	}
	golden(t, "diff.golden", out.String())
	if all := Diff(nil, next); len(all) != 3 || slices.ContainsFunc(all, func(c Change) bool { return c.Kind != Added }) {
		t.Errorf("without a lock file everything is new: %v", all)
	}
}

// TestCheck pins what a person reads when something is refused: both digests, the file, both places and the command.
func TestCheck(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	text := "cordon: 1\nplugins:\n"
	for _, id := range []string{"bash", "yes", "zeta", "other"} {
		text += "  - {id: " + id + ", use: ./bin/" + id + "}\n"
		if err := os.WriteFile(filepath.Join(dir, "bin", id), []byte("#!/bin/sh\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	file := filepath.Join(dir, "compose.yml")
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	plan, diags := compose.Load(file, os.LookupEnv)
	if err := diags.Err(); err != nil {
		t.Fatal(err)
	}
	raw, err := sample().Bytes()
	if err != nil {
		t.Fatal(err)
	}
	accepted, diags := Parse(filepath.Join(dir, FileName), raw)
	if err := diags.Err(); err != nil {
		t.Fatal(err)
	}
	programs := map[string]Program{
		"bash": {Executable: sum("f"), Built: Toolchain{"go1.26.2", "linux/amd64"}}, "yes": sample().Entries["yes"].Program, "zeta": {Executable: sum("e")}, "other": {Executable: sum("d")},
	}
	interfaces := map[string]Interface{"yes": {Manifest: sum("0"), Version: "no", Kernel: 1}, "bash": sample().Entries["bash"].Interface}
	var out strings.Builder
	show := func(name string, ds compose.Diagnostics) {
		out.WriteString("== " + name + "\n")
		if err := ds.Text(&out); err != nil {
			t.Fatal(err)
		}
	}
	c := Checker{File: accepted, Path: filepath.Join(dir, FileName), Plan: plan, Accept: "cordon lock -f compose.yml"}
	show("programs", c.Programs(programs))
	show("interfaces", c.Interfaces(interfaces))
	c.File = nil
	show("no lock file", c.Programs(map[string]Program{"yes": programs["yes"]}))
	golden(t, "check.golden", strings.ReplaceAll(out.String(), dir+"/", ""))

	// The control: what was accepted passes.
	c.File = accepted
	good := map[string]Program{}
	same := map[string]Interface{}
	for id, e := range sample().Entries {
		good[id], same[id] = e.Program, e.Interface
	}
	if ds := slices.Concat(c.Programs(good), c.Interfaces(same)); len(ds) != 0 {
		t.Errorf("refused what is accepted: %v", ds.Err())
	}
	// The toolchain tells why a digest differs; it decides nothing.
	moved := good["bash"]
	moved.Built.Go = "go1.99"
	if ds := c.Programs(map[string]Program{"bash": moved}); len(ds) != 0 {
		t.Errorf("the same bytes from another toolchain are refused: %v", ds.Err())
	}
	for _, w := range []struct {
		want, have Toolchain
		says       string
	}{
		{Toolchain{}, Toolchain{}, "other contents"}, {Toolchain{"a", "b"}, Toolchain{"a", "b"}, "the sources are others"},
		{Toolchain{"a", "b"}, Toolchain{"a", "c"}, "another toolchain"}, {Toolchain{}, Toolchain{"a", "b"}, "built from source by a for b"}, {Toolchain{"a", "b"}, Toolchain{}, "this file was there"},
	} {
		if got := why(w.want, w.have); !strings.Contains(got, w.says) {
			t.Errorf("%v to %v: %q", w.want, w.have, got)
		}
	}
}

// TestContracts: the digest of a service is that of its own contract. A comment, another service's file or the order of the files do not
// change it; a field of a message it imports does.
func TestContracts(t *testing.T) {
	set := func(edit func(a, b, c *descriptorpb.FileDescriptorProto), order ...int) *kernelv1.Manifest {
		a := &descriptorpb.FileDescriptorProto{Name: proto.String("a.proto"), Package: proto.String("p"), Dependency: []string{"b.proto"}, Service: []*descriptorpb.ServiceDescriptorProto{{Name: proto.String("A")}}}
		b := &descriptorpb.FileDescriptorProto{Name: proto.String("b.proto"), Package: proto.String("p"), MessageType: []*descriptorpb.DescriptorProto{{Name: proto.String("M")}}}
		c := &descriptorpb.FileDescriptorProto{Name: proto.String("c.proto"), Package: proto.String("q"), Service: []*descriptorpb.ServiceDescriptorProto{{Name: proto.String("C")}}}
		edit(a, b, c)
		files := []*descriptorpb.FileDescriptorProto{a, b, c}
		var s descriptorpb.FileDescriptorSet
		for _, i := range order {
			s.File = append(s.File, files[i])
		}
		raw, err := proto.Marshal(&s)
		if err != nil {
			t.Fatal(err)
		}
		return &kernelv1.Manifest{
			Name: "x", KernelMax: 7, Descriptors: raw, Needs: []*kernelv1.Need{{Service: "p.A"}, {Service: "p.None"}}, Offers: []*kernelv1.Offer{{Service: "q.C"}},
		}
	}
	of := func(m *kernelv1.Manifest) Interface {
		i, err := Describe(m)
		if err != nil {
			t.Fatal(err)
		}
		return i
	}
	plain := of(set(func(a, b, c *descriptorpb.FileDescriptorProto) {}, 0, 1, 2))
	if plain.Services["p.A"] == "" || plain.Services["q.C"] == "" || plain.Services["p.A"] == plain.Services["q.C"] || plain.Services["p.None"] != "" || len(plain.Services) != 3 {
		t.Fatalf("services %v", plain.Services)
	}
	if plain.Kernel != compose.KernelVersion {
		t.Errorf("kernel protocol %d", plain.Kernel)
	}
	other := of(set(func(a, b, c *descriptorpb.FileDescriptorProto) {
		c.Syntax = proto.String("proto3")
		a.SourceCodeInfo = &descriptorpb.SourceCodeInfo{Location: []*descriptorpb.SourceCodeInfo_Location{{}}}
	}, 2, 1, 0))
	if other.Services["p.A"] != plain.Services["p.A"] || other.Services["q.C"] == plain.Services["q.C"] {
		t.Errorf("services %v, were %v", other.Services, plain.Services)
	}
	field := of(set(func(a, b, c *descriptorpb.FileDescriptorProto) { b.MessageType[0].Name = proto.String("N") }, 0, 1, 2))
	if field.Services["p.A"] == plain.Services["p.A"] {
		t.Error("a message of an import changed and the contract did not")
	}
	if _, err := Describe(&kernelv1.Manifest{Descriptors: []byte{0xff}}); err == nil {
		t.Error("descriptors that are none were accepted")
	}
}

func FuzzParse(f *testing.F) {
	good, err := sample().Bytes()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	for _, s := range []string{"", "lock: 1\nentries: {}\n", "lock: 1\nentries: {a: &x {executable: *x}}\n", "? [a]\n: b\n", "--- !!map {}\n", "lock: 1\nentries: {a: {services: {a: none}}}\n"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		file, diags := Parse("compose.lock", data)
		if (file == nil) != diags.HasErrors() {
			t.Fatalf("file %v, diagnostics %v", file, diags)
		}
		if err := diags.Text(&strings.Builder{}); err != nil {
			t.Fatal(err)
		}
		if file == nil {
			return
		}
		// What was accepted means the same when it is written and read again.
		text, err := file.Bytes()
		if err != nil {
			t.Fatal(err)
		}
		again, diags := Parse("compose.lock", text)
		if err := diags.Err(); err != nil {
			t.Fatalf("%v\n%s", err, text)
		}
		if d := cmp.Diff(file, again, same); d != "" {
			t.Fatal(d)
		}
	})
}

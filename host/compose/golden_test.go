package compose

import (
	"bytes"
	"flag"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
)

var update = flag.Bool("update", false, "rewrite the expected part of the golden files")

// separator is the line between the parts of a golden file: the compose file, then optional files of other names
// ("manifest ID", "builtin NAME" or "env"), then what is expected.
const separator = "----------"

// TestGolden runs every testdata/*.golden: a compose file above a dashed line, the diagnostics below. A part headed
// "manifest ID" is the manifest of that row as JSON, "env" lists NAME=VALUE.
func TestGolden(t *testing.T) {
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(here, "testdata", "*.golden"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no golden files: %v", err)
	}
	for _, name := range files {
		t.Run(strings.TrimSuffix(filepath.Base(name), ".golden"), func(t *testing.T) {
			data, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			g := parseGolden(t, string(data))
			got := g.run(t)
			if *update {
				if err := os.WriteFile(name, []byte(g.head+separator+"\n"+got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if got != g.want {
				t.Errorf("got:\n%s\nwant:\n%s", got, g.want)
			}
		})
	}
}

type golden struct {
	head, compose, want string
	env                 map[string]string
	manifests, builtins map[string]*kernelv1.Manifest
}

func parseGolden(t *testing.T, text string) golden {
	t.Helper()
	g := golden{env: map[string]string{}, manifests: map[string]*kernelv1.Manifest{}, builtins: map[string]*kernelv1.Manifest{}}
	parts := strings.Split(text, separator)
	g.compose = parts[0]
	for _, part := range parts[1:] {
		head, body, _ := strings.Cut(part, "\n")
		kind, name, _ := strings.Cut(strings.TrimSpace(head), " ")
		switch kind {
		case "":
			g.want = body
			g.head = text[:len(text)-len(body)-len(separator)-1]
		case "env":
			for line := range strings.Lines(body) {
				k, v, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
				g.env[k] = v
			}
		case "manifest", "builtin":
			m, schema := &kernelv1.Manifest{KernelMin: 1, KernelMax: 1}, ""
			body, schema, _ = strings.Cut(body, "schema:")
			if err := protojson.Unmarshal([]byte(body), m); err != nil {
				t.Fatalf("%s %s: %v", kind, name, err)
			}
			m.ConfigSchema = []byte(schema)
			if m.KernelMax == 0 {
				m.KernelMin, m.KernelMax = 1, 1
			}
			if kind == "manifest" {
				g.manifests[name] = m
			} else {
				g.builtins[name] = m
			}
		default:
			t.Fatalf("unknown part %q", kind)
		}
	}
	return g
}

func (g golden) lookup(name string) (string, bool) {
	v, ok := g.env[name]
	return v, ok
}

// run loads and checks the composition in a directory with the plugins the golden files use.
func (g golden) run(t *testing.T) string {
	t.Helper()
	dir := plugins(t)
	t.Chdir(dir)
	if err := os.WriteFile(FileName, []byte(g.compose), 0o644); err != nil {
		t.Fatal(err)
	}
	plan, diags := Load(FileName, g.lookup)
	if plan != nil && len(g.manifests) > 0 {
		diags = Join(diags, Check(plan, g.manifests, g.builtins))
	}
	var out bytes.Buffer
	if err := diags.Text(&out); err != nil {
		t.Fatal(err)
	}
	for _, name := range slices.Sorted(maps.Keys(g.env)) {
		if strings.HasPrefix(name, "SECRET") && strings.Contains(out.String(), g.env[name]) {
			t.Errorf("diagnostics show the value of %s", name)
		}
	}
	if strings.Contains(out.String(), "hunter2") {
		t.Error("diagnostics show a secret of the file")
	}
	return strings.ReplaceAll(out.String(), filepath.Dir(mustExecutable(t)), "BESIDE")
}

func mustExecutable(t *testing.T) string {
	t.Helper()
	self, err := os.Executable()
	if err == nil {
		self, err = filepath.EvalSymlinks(self)
	}
	if err != nil {
		t.Fatal(err)
	}
	return self
}

// plugins makes a directory with plugins of all kinds: a to d are executables, pkg and policy main packages, lib a
// package that is not, empty one without Go files, data a file that is not executable.
func plugins(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	write := func(name, text string, mode os.FileMode) {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"a", "b", "c", "d"} {
		write("bin/"+name, "#!/bin/sh\n", 0o755)
	}
	write("bin/data", "text\n", 0o644)
	write("go.mod", "module example.test/tree\n\ngo 1.26\n", 0o644)
	write("pkg/main.go", "package main\n\nfunc main() {}\n", 0o644)
	write("sandbox-policy/main.go", "package main\n\nfunc main() {}\n", 0o644)
	write("lib/lib.go", "package lib\n", 0o644)
	write("empty/README", "nothing\n", 0o644)
	return dir
}

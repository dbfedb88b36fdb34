package build

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// tree writes files below a new directory and dates everything back, so that fingerprints may rely on it.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range files {
		write(t, filepath.Join(dir, name), text)
	}
	return dir
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func open(t *testing.T) *Cache {
	t.Helper()
	c, err := Open(filepath.Join(t.TempDir(), "cache"))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

var module = map[string]string{
	"go.mod":           "module example.test/m\n\ngo 1.26\n",
	"p/main.go":        "package main\n\nimport \"example.test/m/q\"\n\nfunc main() { print(q.Text) }\n",
	"q/q.go":           "package q\n\nimport _ \"embed\"\n\n//go:embed data/*.txt\nvar Text string\n",
	"q/q_test.go":      "package q\n",
	"q/data/a.txt":     "hello",
	"unrelated/u.go":   "package unrelated\n",
	"q/ignored_no.txt": "x",
}

func rel(t *testing.T, root string, files []File) []string {
	t.Helper()
	var out []string
	for _, f := range files {
		r, err := filepath.Rel(root, f.Path)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, r)
	}
	return out
}

func inputs(t *testing.T, c *Cache, dir string) *Inputs {
	t.Helper()
	in, err := c.Inputs(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	return in
}

func output(t *testing.T, b *Binary) string {
	t.Helper()
	out, err := exec.Command(b.Path).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return string(out)
}

func TestInputsListWhatLeadsToTheBinary(t *testing.T) {
	dir := tree(t, module)
	in := inputs(t, open(t), filepath.Join(dir, "p"))
	want := []string{"go.mod", "p/main.go", "q/data/a.txt", "q/q.go"}
	if got := rel(t, dir, in.Files); !slices.Equal(got, want) {
		t.Errorf("files %q, want %q", got, want)
	}
	if in.Package != "example.test/m/p" || in.Root != dir {
		t.Errorf("package %s in %s", in.Package, in.Root)
	}
	elsewhere := tree(t, module)
	if again := inputs(t, open(t), filepath.Join(elsewhere, "p")); again.Digest != in.Digest {
		t.Error("digest depends on where the tree is")
	}
}

func TestDigestChangesWithEveryInput(t *testing.T) {
	dir := tree(t, module)
	c := open(t)
	last := inputs(t, c, filepath.Join(dir, "p")).Digest
	for _, step := range []struct {
		name string
		do   func()
	}{
		{"source", func() { write(t, filepath.Join(dir, "q/q.go"), module["q/q.go"]+"\n// changed\n") }},
		{"embedded file", func() { write(t, filepath.Join(dir, "q/data/a.txt"), "hullo") }},
		{"go.mod", func() { write(t, filepath.Join(dir, "go.mod"), module["go.mod"]+"\n// changed\n") }},
		{"new source", func() { write(t, filepath.Join(dir, "p/more.go"), "package main\n") }},
		{"removed source", func() {
			os.Remove(filepath.Join(dir, "p/more.go"))
			write(t, filepath.Join(dir, "p/other.go"), "package main\n")
		}},
		{"embedded file renamed", func() {
			os.Rename(filepath.Join(dir, "q/data/a.txt"), filepath.Join(dir, "q/data/b.txt"))
		}},
	} {
		step.do()
		got := inputs(t, c, filepath.Join(dir, "p")).Digest
		if got == last {
			t.Errorf("%s: digest is the same", step.name)
		}
		last = got
	}
	write(t, filepath.Join(dir, "unrelated/u.go"), "package unrelated // changed\n")
	if got := inputs(t, c, filepath.Join(dir, "p")).Digest; got != last {
		t.Error("digest changed with a file that does not lead to the binary")
	}
}

func TestBuildRunsTheCompilerOnce(t *testing.T) {
	dir := tree(t, module)
	c := open(t)
	b, err := c.Build(t.Context(), inputs(t, c, filepath.Join(dir, "p")))
	if err != nil {
		t.Fatal(err)
	}
	if got := output(t, b); got != "hello" {
		t.Errorf("program prints %q", got)
	}
	if sum, err := Digest(b.Path); err != nil || sum != b.SHA256 {
		t.Errorf("digest %s, %v, want %s", sum, err, b.SHA256)
	}
	info, err := os.Stat(b.Path)
	if err != nil || info.Mode().Perm() != 0o500 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	// Without a compiler, the second time still works: it is not run.
	in := inputs(t, c, filepath.Join(dir, "p"))
	broken := *in.tool
	broken.Go = filepath.Join(dir, "no-go")
	in.tool = &broken
	again, err := c.Build(t.Context(), in)
	if err != nil || *again != *b {
		t.Errorf("second build: %v, %v", again, err)
	}
	write(t, filepath.Join(dir, "q/data/a.txt"), "other")
	b, err = c.Build(t.Context(), inputs(t, c, filepath.Join(dir, "p")))
	if err != nil {
		t.Fatal(err)
	}
	if got := output(t, b); got != "other" {
		t.Errorf("after a change the program prints %q", got)
	}
}

func TestRememberedInputsNeedNoGo(t *testing.T) {
	dir := tree(t, module)
	c := open(t)
	// Files are only trusted to be unchanged once their times are old enough to tell; await that instead of assuming it.
	p := filepath.Join(dir, "p")
	deadline := time.After(2 * time.Duration(racy))
	for c.remembered(p) == nil {
		select {
		case <-deadline:
			t.Fatal("inputs are never remembered")
		case <-time.After(50 * time.Millisecond):
			inputs(t, c, p)
		}
	}
	first := c.remembered(p)
	for _, step := range []struct {
		name string
		do   func()
	}{
		{"content with the old times", func() {
			path := filepath.Join(dir, "q/q.go")
			info, _ := os.Stat(path)
			write(t, path, strings.Replace(module["q/q.go"], "Text", "Tixt", 1))
			os.Chtimes(path, info.ModTime(), info.ModTime())
		}},
		{"new file", func() { write(t, filepath.Join(dir, "q/new.go"), "package q\n") }},
		{"nested module", func() { write(t, filepath.Join(dir, "q/go.mod"), "module x\n") }},
		{"vanished file", func() { os.Remove(filepath.Join(dir, "q/data/a.txt")) }},
	} {
		if c.remembered(p) == nil {
			t.Fatalf("%s: not remembered before", step.name)
		}
		step.do()
		if c.remembered(p) != nil {
			t.Errorf("%s: not noticed", step.name)
		}
		// Back to the start, by content.
		os.Remove(filepath.Join(dir, "q/new.go"))
		os.Remove(filepath.Join(dir, "q/go.mod"))
		write(t, filepath.Join(dir, "q/q.go"), module["q/q.go"])
		write(t, filepath.Join(dir, "q/data/a.txt"), module["q/data/a.txt"])
	}
	if again := c.remembered(p); again == nil || again.Digest != first.Digest {
		t.Error("the same content is not recognised")
	}
}

// TestNothingOfTheTreeRuns: a tree may try to have something executed while it is looked at and built.
func TestNothingOfTheTreeRuns(t *testing.T) {
	files := map[string]string{
		"go.mod":    "module example.test/m\n\ngo 1.26\n",
		"p/main.go": "package main\n\n//go:generate sh -c \"touch $MARKER\"\n\nimport \"os\"\n\nfunc init() { os.WriteFile(os.Getenv(\"MARKER\"), nil, 0o600) }\n\nfunc main() {}\n",
		"p/c.go":    "package main\n\n// #cgo CFLAGS: -fplugin=evil.so\nimport \"C\"\n",
		"p/d.go":    "//go:build !cgo\n\npackage main\n",
	}
	dir := tree(t, files)
	marker := filepath.Join(t.TempDir(), "marker")
	script := filepath.Join(dir, "evil.sh")
	write(t, script, "#!/bin/sh\ntouch "+marker+"\n")
	if err := os.Chmod(script, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("MARKER", marker)
	t.Setenv("GOFLAGS", "-toolexec="+script)
	t.Setenv("CC", script)
	write(t, filepath.Join(dir, "go.work"), "go 1.26\n\nuse .\n\nuse ./missing\n")
	if git, err := exec.LookPath("git"); err == nil {
		for _, args := range [][]string{{"init", "-q"}, {"config", "core.fsmonitor", script}} {
			cmd := exec.Command(git, args...)
			cmd.Dir = dir
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("git %v: %v: %s", args, err, out)
			}
		}
		// The control: this is what the go command would set off.
		cmd := exec.Command(git, "status")
		cmd.Dir = dir
		_ = cmd.Run()
		if _, err := os.Stat(marker); err != nil {
			t.Error("control: git status did not run the script, so the test proves less")
		}
		os.Remove(marker)
	}
	c := open(t)
	in := inputs(t, c, filepath.Join(dir, "p"))
	b, err := c.Build(t.Context(), in)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(marker); !errors.Is(err, os.ErrNotExist) {
		t.Fatal("something of the tree ran")
	}
	if slices.Contains(rel(t, dir, in.Files), "p/c.go") {
		t.Error("a cgo file is an input")
	}
	// The control: run, the program leaves its marker.
	output(t, b)
	if _, err := os.Stat(marker); err != nil {
		t.Errorf("control: %v", err)
	}
}

func TestChangedBetweenListingAndBuild(t *testing.T) {
	dir := tree(t, module)
	c := open(t)
	in := inputs(t, c, filepath.Join(dir, "p"))
	changed := filepath.Join(dir, "q/q.go")
	write(t, changed, module["q/q.go"]+"\n// evil\n")
	_, err := c.Build(t.Context(), in)
	var ce *ChangedError
	if !errors.As(err, &ce) || !slices.Equal(ce.Files, []string{changed}) {
		t.Fatalf("got %v, want a ChangedError about %s", err, changed)
	}
	write(t, changed, module["q/q.go"])
	if _, err := c.Build(t.Context(), in); err != nil {
		t.Errorf("with the listed content back: %v", err)
	}
}

func TestBuildErrors(t *testing.T) {
	for _, tc := range []struct {
		name, file, text string
		want             []string
	}{
		{"type error", "p/main.go", "package main\n\nfunc main() { var x int = \"s\" }\n", []string{"p/main.go:3:27", "cannot use"}},
		{"syntax error", "p/main.go", "package main\n\nfunc main( {\n", []string{"main.go:3:12"}},
		{"missing module", "p/main.go", "package main\n\nimport _ \"example.test/other/x\"\n\nfunc main() {}\n", []string{"example.test/other/x", "hint: "}},
		{"not main", "p/main.go", "package p\n", []string{"package is not main"}},
		{"absolute replace", "go.mod", "module example.test/m\n\ngo 1.26\n\nreplace example.test/o => /tmp/o\n", []string{"absolute path /tmp/o", "relative"}},
		{"newer Go", "go.mod", "module example.test/m\n\ngo 1.99.0\n", []string{"newer Go"}},
		{"broken go.mod", "go.mod", "mod ule\n", []string{"go.mod"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			files := map[string]string{"go.mod": module["go.mod"], "p/main.go": "package main\n\nfunc main() {}\n"}
			files[tc.file] = tc.text
			dir := tree(t, files)
			c := open(t)
			in, err := c.Inputs(t.Context(), filepath.Join(dir, "p"))
			if err == nil {
				_, err = c.Build(t.Context(), in)
			}
			var be *Error
			if !errors.As(err, &be) {
				t.Fatalf("got %v, want an *Error", err)
			}
			for _, w := range tc.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("error lacks %q:\n%v", w, err)
				}
			}
			if strings.Contains(err.Error(), c.Dir()) {
				t.Errorf("error names the private copy:\n%v", err)
			}
		})
	}
}

func TestReplacedByDirectory(t *testing.T) {
	dir := tree(t, map[string]string{
		"plugin/go.mod":  "module example.test/m\n\ngo 1.26\n\nrequire example.test/lib v0.0.0\n\nrequire example.test/unused v0.0.0\n\nreplace example.test/lib => ../lib\n\nreplace example.test/unused => ../unused\n",
		"plugin/main.go": "package main\n\nimport \"example.test/lib\"\n\nfunc main() { print(lib.Text) }\n",
		"lib/go.mod":     "module example.test/lib\n\ngo 1.26\n",
		"lib/lib.go":     "package lib\n\nconst Text = \"lib\"\n",
		"unused/go.mod":  "module example.test/unused\n\ngo 1.26\n",
	})
	c := open(t)
	in := inputs(t, c, filepath.Join(dir, "plugin"))
	want := []string{"lib/go.mod", "lib/lib.go", "plugin/go.mod", "plugin/main.go", "unused/go.mod"}
	if got := rel(t, dir, in.Files); !slices.Equal(got, want) {
		t.Errorf("files %q, want %q", got, want)
	}
	b, err := c.Build(t.Context(), in)
	if err != nil {
		t.Fatal(err)
	}
	if got := output(t, b); got != "lib" {
		t.Errorf("program prints %q", got)
	}
}

func TestVendored(t *testing.T) {
	dir := tree(t, map[string]string{
		"go.mod":                               "module example.test/m\n\ngo 1.26\n\nrequire example.test/lib v1.0.0\n",
		"main.go":                              "package main\n\nimport \"example.test/lib\"\n\nfunc main() { print(lib.Text) }\n",
		"vendor/modules.txt":                   "# example.test/lib v1.0.0\n## explicit; go 1.26\nexample.test/lib\n",
		"vendor/example.test/lib/lib.go":       "package lib\n\nconst Text = \"vendored\"\n",
		"vendor/example.test/lib/lib_other.go": "//go:build ignore\n\npackage lib\n",
	})
	c := open(t)
	in := inputs(t, c, dir)
	want := []string{"go.mod", "main.go", "vendor/example.test/lib/lib.go", "vendor/modules.txt"}
	if got := rel(t, dir, in.Files); !slices.Equal(got, want) {
		t.Errorf("files %q, want %q", got, want)
	}
	b, err := c.Build(t.Context(), in)
	if err != nil {
		t.Fatal(err)
	}
	if got := output(t, b); got != "vendored" {
		t.Errorf("program prints %q", got)
	}
}

func TestAssemblyIncludes(t *testing.T) {
	dir := tree(t, map[string]string{
		"go.mod":     module["go.mod"],
		"p/main.go":  "package main\n\nfunc f()\n\nfunc main() { f() }\n",
		"p/f.s":      "#include \"textflag.h\"\n#include \"../inc/a.h\"\n\nTEXT ·f(SB), NOSPLIT, $0-0\n\tRET\n",
		"inc/a.h":    "#include \"../inc/b.h\"\n",
		"inc/b.h":    "#define X 1\n",
		"inc/none.h": "",
	})
	c := open(t)
	in := inputs(t, c, filepath.Join(dir, "p"))
	want := []string{"go.mod", "inc/a.h", "inc/b.h", "p/f.s", "p/main.go"}
	if got := rel(t, dir, in.Files); !slices.Equal(got, want) {
		t.Errorf("files %q, want %q", got, want)
	}
	if _, err := c.Build(t.Context(), in); err != nil {
		t.Error(err)
	}
}

// TestInputsAll: listed together, packages have what they have alone, and a bad one spoils none of the others.
func TestInputsAll(t *testing.T) {
	dir := tree(t, map[string]string{
		"go.mod":     module["go.mod"],
		"main.go":    "package main\n\nfunc main() {}\n",
		"a/main.go":  "package main\n\nimport _ \"example.test/m/lib\"\n\nfunc main() {}\n",
		"b/main.go":  "package main\n\nimport _ \"example.test/m/none\"\n\nfunc main() {}\n",
		"lib/lib.go": "package lib\n",
		"o/go.mod":   "module example.test/o\n\ngo 1.26\n",
		"o/main.go":  "package main\n\nfunc main() {}\n",
	})
	names := []string{".", "a", "lib", "o", "b", "missing"}
	var dirs []string
	for _, n := range names {
		dirs = append(dirs, filepath.Join(dir, n))
	}
	good := 4 // lib is no main package, which shows only afterwards
	for _, n := range []int{good, len(dirs)} {
		got := open(t).InputsAll(t.Context(), dirs[:n])
		for i, l := range got {
			alone, err := open(t).Inputs(t.Context(), dirs[i])
			if (l.Err == nil) != (err == nil) || l.Err == nil && (l.Inputs.Digest != alone.Digest || l.Inputs.Package != alone.Package) {
				t.Errorf("%s: %+v, %v; alone %+v, %v", names[i], l.Inputs, l.Err, alone, err)
			}
		}
	}
	if in := inputs(t, open(t), dirs[0]); !slices.Equal(rel(t, dir, in.Files), []string{"go.mod", "main.go"}) {
		t.Errorf("the package in the root has %q", rel(t, dir, in.Files))
	}
}

func TestBuildAll(t *testing.T) {
	dir := tree(t, map[string]string{
		"go.mod":    module["go.mod"],
		"a/main.go": "package main\n\nfunc main() { print(\"a\") }\n",
		"b/main.go": "package main\n\nfunc main() { print(undefined) }\n",
		"c/main.go": "package main\n\nfunc main() { print(\"c\") }\n",
		// The same last element twice.
		"x/same/main.go": "package main\n\nfunc main() { print(\"x\") }\n",
		"y/same/main.go": "package main\n\nfunc main() { print(\"y\") }\n",
	})
	c := open(t)
	all := func(names ...string) []Result {
		var ins []*Inputs
		for _, n := range names {
			ins = append(ins, inputs(t, c, filepath.Join(dir, n)))
		}
		return c.BuildAll(t.Context(), ins)
	}
	r := all("a", "c")
	for i, want := range []string{"a", "c"} {
		if r[i].Err != nil {
			t.Fatal(r[i].Err)
		}
		if got := output(t, r[i].Binary); got != want {
			t.Errorf("program prints %q, want %q", got, want)
		}
	}
	r = all("x/same", "y/same")
	for i, want := range []string{"x", "y"} {
		if r[i].Err != nil {
			t.Fatal(r[i].Err)
		}
		if got := output(t, r[i].Binary); got != want {
			t.Errorf("program prints %q, want %q", got, want)
		}
	}
	c = open(t)
	r = all("a", "b", "c")
	var be *Error
	if r[0].Err != nil || r[2].Err != nil || !errors.As(r[1].Err, &be) || !strings.Contains(be.Output, "undefined") {
		t.Errorf("errors %v, %v, %v", r[0].Err, r[1].Err, r[2].Err)
	}
}

// TestConcurrentBuilds: several caches on one directory, as several processes have them.
func TestConcurrentBuilds(t *testing.T) {
	dir := tree(t, module)
	shared := filepath.Join(t.TempDir(), "cache")
	type answer struct {
		b   *Binary
		err error
	}
	answers := make(chan answer)
	const n = 4
	for range n {
		go func() {
			c, err := Open(shared)
			if err != nil {
				answers <- answer{nil, err}
				return
			}
			in, err := c.Inputs(context.Background(), filepath.Join(dir, "p"))
			if err != nil {
				answers <- answer{nil, err}
				return
			}
			b, err := c.Build(context.Background(), in)
			answers <- answer{b, err}
		}()
	}
	var first *Binary
	for range n {
		a := <-answers
		if a.err != nil {
			t.Error(a.err)
			continue
		}
		if first == nil {
			first = a.b
		}
		if *a.b != *first {
			t.Errorf("builds differ: %v, %v", a.b, first)
		}
	}
	left, err := os.ReadDir(filepath.Join(shared, tmpDir))
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestBuildStopsWithItsContext(t *testing.T) {
	dir := tree(t, module)
	c := open(t)
	in := inputs(t, c, filepath.Join(dir, "p"))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.Build(ctx, in); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestStage(t *testing.T) {
	dir := tree(t, map[string]string{"tool": "#!/bin/sh\necho old\n", "data": "x"})
	tool := filepath.Join(dir, "tool")
	if err := os.Chmod(tool, 0o755); err != nil {
		t.Fatal(err)
	}
	c := open(t)
	b, err := c.Stage(tool)
	if err != nil {
		t.Fatal(err)
	}
	// Replaced after the check, the checked bytes run.
	write(t, tool, "#!/bin/sh\necho new\n")
	if got := output(t, b); got != "old\n" {
		t.Errorf("staged program prints %q", got)
	}
	if sum, err := Digest(b.Path); err != nil || sum != b.SHA256 {
		t.Errorf("digest %s, %v, want %s", sum, err, b.SHA256)
	}
	info, err := os.Stat(b.Path)
	if err != nil || info.Mode().Perm() != 0o500 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if n, err := c.Stage(tool); err != nil || n.SHA256 == b.SHA256 {
		t.Errorf("changed program: %v, %v", n, err)
	}
	for _, bad := range []string{filepath.Join(dir, "data"), dir, filepath.Join(dir, "none"), os.DevNull} {
		if b, err := c.Stage(bad); err == nil {
			t.Errorf("%s was staged as %s", bad, b.Path)
		}
	}
}

func TestOpenRefusesWhatOthersCanWrite(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir); err == nil {
		t.Error("a cache open to others was accepted")
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(t.TempDir(), link); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(link); err == nil {
		t.Error("a symbolic link was accepted")
	}
	if _, err := Open(filepath.Join(t.TempDir(), "a", "b")); err != nil {
		t.Errorf("control: %v", err)
	}
}

func TestOutputIsPrintable(t *testing.T) {
	err := failed(&Inputs{Dir: "d"}, &goError{"build", errors.New("exit status 1"), "a\x1b[31mb\n" + strings.Repeat("line\n", 100)}, nil)
	if bytes.ContainsRune([]byte(err.Error()), 0x1b) || strings.Count(err.Error(), "\n") > maxOutput+3 {
		t.Errorf("got %q", err)
	}
}

// TestPrune: what was used longest ago goes, but nothing that any process may still run.
func TestPrune(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cache")
	open := func() *Cache {
		c, err := Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	tool := filepath.Join(t.TempDir(), "tool")
	stage := func(c *Cache, n int) *Binary {
		write(t, tool, fmt.Sprintf("#!/bin/sh\necho %d\n", n))
		if err := os.Chmod(tool, 0o755); err != nil {
			t.Fatal(err)
		}
		b, err := c.Stage(tool)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	// What the test process holds stands for several processes, of which all but one have ended.
	release := func(b *Binary) {
		inUse.mu.Lock()
		defer inUse.mu.Unlock()
		inUse.files[b.Path].Close()
		delete(inUse.files, b.Path)
	}
	held := stage(open(), 0)
	half := filepath.Join(dir, tmpDir, "build-1", "src")
	write(t, filepath.Join(half, "x"), "x")
	fresh := filepath.Join(dir, tmpDir, "build-2")
	write(t, filepath.Join(fresh, "x"), "x")
	old := time.Now().Add(-2 * abandoned)
	if err := os.Chtimes(filepath.Dir(half), old, old); err != nil {
		t.Fatal(err)
	}
	past := time.Now().Add(-time.Hour)
	if err := os.Chtimes(held.Path, past, past); err != nil {
		t.Fatal(err)
	}
	var first *Binary
	for n := 1; n <= kept+10; n++ {
		b := stage(open(), n)
		release(b)
		if n == 1 {
			first = b
			if err := os.Chtimes(b.Path, past, past); err != nil {
				t.Fatal(err)
			}
		}
	}
	entries, err := os.ReadDir(filepath.Join(dir, execDir))
	if err != nil || len(entries) != kept+1 {
		t.Errorf("%d programs are kept, %v; want %d and the one in use", len(entries), err, kept)
	}
	if got := output(t, held); got != "0\n" {
		t.Errorf("the program in use prints %q", got)
	}
	if _, err := os.Stat(first.Path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("control: the oldest program is still there: %v", err)
	}
	if _, err := os.Stat(half); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("what a killed build left is still there: %v", err)
	}
	if _, err := os.Stat(fresh); err != nil {
		t.Errorf("control: a build that may still run lost its files: %v", err)
	}
	// Staged again, it is made again.
	if got := output(t, stage(open(), 1)); got != "1\n" {
		t.Errorf("staged again it prints %q", got)
	}
}

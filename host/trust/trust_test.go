package trust

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cordon-host/cordon/host/build"
	"github.com/cordon-host/cordon/host/compose"
	"github.com/cordon-host/cordon/host/lock"
)

const composition = `cordon: 1
plugins:
  - {id: pkg, use: ./pkg}
  - {id: tool, use: ./bin/tool}
  - {id: off, use: ./bin/off, disabled: true}
`

// deployment is a tree with a package, an executable and a row that is off.
type deployment struct {
	dir, compose string
	cache        *build.Cache
	store        *Store
}

func write(t *testing.T, path, text string, mode os.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
}

func deploy(t *testing.T) *deployment {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "compose.yml"), composition, 0o644)
	write(t, filepath.Join(dir, "go.mod"), "module example.test/m\n\ngo 1.26\n", 0o644)
	write(t, filepath.Join(dir, "pkg/main.go"), "package main\n\nimport \"example.test/m/lib\"\n\nfunc main() { print(lib.Text) }\n", 0o644)
	write(t, filepath.Join(dir, "lib/lib.go"), "package lib\n\nconst Text = \"pkg\"\n", 0o644)
	write(t, filepath.Join(dir, "bin/tool"), "#!/bin/sh\necho tool\n", 0o755)
	write(t, filepath.Join(dir, "bin/off"), "#!/bin/sh\necho off\n", 0o755)
	outside := t.TempDir()
	cache, err := build.Open(filepath.Join(outside, "cache"))
	if err != nil {
		t.Fatal(err)
	}
	return &deployment{dir, filepath.Join(dir, "compose.yml"), cache, Open(filepath.Join(outside, "trust"))}
}

// survey looks at the tree as a host does before it builds.
func (d *deployment) survey(t *testing.T) *Tree {
	t.Helper()
	plan, diags := compose.Load(d.compose, os.LookupEnv)
	if err := diags.Err(); err != nil {
		t.Fatal(err)
	}
	inputs := map[string]*build.Inputs{}
	for _, e := range plan.Entries {
		if e.Kind != compose.Package {
			continue
		}
		in, err := d.cache.Inputs(t.Context(), e.Target)
		if err != nil {
			t.Fatal(err)
		}
		inputs[e.ID] = in
	}
	tree, err := Survey(plan, inputs)
	if err != nil {
		t.Fatal(err)
	}
	return tree
}

func TestTrust(t *testing.T) {
	d := deploy(t)
	tree := d.survey(t)
	var u *UntrustedError
	if err := d.store.Check(tree); !errors.As(err, &u) || u.Reason != NeverTrusted {
		t.Fatalf("a tree nobody trusted: %v", err)
	}
	if want := "cordon trust -f " + d.compose; !strings.Contains(u.Error(), want) {
		t.Errorf("error does not say %q:\n%v", want, u)
	}
	if err := d.store.Trust(tree); err != nil {
		t.Fatal(err)
	}
	if err := d.store.Check(d.survey(t)); err != nil {
		t.Fatalf("a trusted tree: %v", err)
	}
	if err := d.store.Forget(tree.Path()); err != nil {
		t.Fatal(err)
	}
	if err := d.store.Check(tree); !errors.As(err, &u) || u.Reason != NeverTrusted {
		t.Errorf("a forgotten tree: %v", err)
	}
	if err := d.store.Forget(tree.Path()); err != nil {
		t.Errorf("forgetting twice: %v", err)
	}
}

// TestOneTreeDoesNotVouchForAnother: the same content elsewhere was not agreed to.
func TestOneTreeDoesNotVouchForAnother(t *testing.T) {
	a, b := deploy(t), deploy(t)
	if err := a.store.Trust(a.survey(t)); err != nil {
		t.Fatal(err)
	}
	if err := a.store.Check(b.survey(t)); err == nil {
		t.Error("another tree of the same content is trusted")
	}
	if err := a.store.Check(a.survey(t)); err != nil {
		t.Errorf("control: %v", err)
	}
}

// TestChangesAreNamed: whatever leads to execution ends the agreement when it changes, and the error says what it was.
func TestChangesAreNamed(t *testing.T) {
	for _, tc := range []struct {
		name                        string
		do                          func(d *deployment)
		changed, appeared, vanished []string
	}{
		{"nothing", func(*deployment) {}, nil, nil, nil},
		{"source", func(d *deployment) {
			write(t, filepath.Join(d.dir, "pkg/main.go"), "package main\n\nfunc main() {}\n", 0o644)
		},
			[]string{"pkg/main.go"}, nil, []string{"lib/lib.go"}},
		{"source of another package", func(d *deployment) {
			write(t, filepath.Join(d.dir, "lib/lib.go"), "package lib\n\nconst Text = \"evil\"\n", 0o644)
		}, []string{"lib/lib.go"}, nil, nil},
		{"new source", func(d *deployment) {
			write(t, filepath.Join(d.dir, "pkg/init.go"), "package main\n\nfunc init() {}\n", 0o644)
		},
			nil, []string{"pkg/init.go"}, nil},
		{"go.mod", func(d *deployment) {
			write(t, filepath.Join(d.dir, "go.mod"), "module example.test/m\n\ngo 1.25\n", 0o644)
		},
			[]string{"go.mod"}, nil, nil},
		{"go.sum", func(d *deployment) { write(t, filepath.Join(d.dir, "go.sum"), "", 0o644) }, nil, []string{"go.sum"}, nil},
		{"executable", func(d *deployment) { write(t, filepath.Join(d.dir, "bin/tool"), "#!/bin/sh\necho evil\n", 0o755) },
			[]string{"bin/tool"}, nil, nil},
		{"compose file", func(d *deployment) { write(t, d.compose, composition+"# changed\n", 0o644) },
			[]string{"compose.yml"}, nil, nil},
		{"row enabled", func(d *deployment) {
			write(t, d.compose, strings.Replace(composition, "disabled: true", "disabled: false", 1), 0o644)
		}, []string{"compose.yml"}, []string{"bin/off"}, nil},
		{"executable of a row that is off", func(d *deployment) { write(t, filepath.Join(d.dir, "bin/off"), "x", 0o755) }, nil, nil, nil},
		{"another file", func(d *deployment) { write(t, filepath.Join(d.dir, "README"), "x", 0o644) }, nil, nil, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d := deploy(t)
			if err := d.store.Trust(d.survey(t)); err != nil {
				t.Fatal(err)
			}
			tc.do(d)
			err := d.store.Check(d.survey(t))
			if tc.changed == nil && tc.appeared == nil && tc.vanished == nil {
				if err != nil {
					t.Errorf("not trusted: %v", err)
				}
				return
			}
			var u *UntrustedError
			if !errors.As(err, &u) || u.Reason != Changed {
				t.Fatalf("got %v", err)
			}
			for _, kind := range []struct {
				name      string
				got, want []string
			}{{"changed", u.Changed, tc.changed}, {"new", u.Appeared, tc.appeared}, {"gone", u.Vanished, tc.vanished}} {
				var want []string
				for _, name := range kind.want {
					want = append(want, filepath.Join(d.dir, name))
					if line := kind.name + ": " + name; !strings.Contains(u.Error(), line) {
						t.Errorf("error does not say %q:\n%v", line, u)
					}
				}
				if !slices.Equal(kind.got, want) {
					t.Errorf("%s: %q, want %q", kind.name, kind.got, want)
				}
			}
		})
	}
}

// TestNothingIsBuiltOrRunBeforeTrust: until somebody agreed, only reading happens.
func TestNothingIsBuiltOrRunBeforeTrust(t *testing.T) {
	d := deploy(t)
	marker := filepath.Join(t.TempDir(), "marker")
	write(t, filepath.Join(d.dir, "bin/tool"), "#!/bin/sh\ntouch "+marker+"\n", 0o755)
	write(t, filepath.Join(d.dir, "pkg/main.go"), "package main\n\nimport \"os\"\n\n//go:generate touch "+marker+"\n\nfunc init() { os.WriteFile(\""+marker+"\", nil, 0o600) }\n\nfunc main() {}\n", 0o644)
	tree := d.survey(t)
	if err := d.store.Check(tree); err == nil {
		t.Fatal("trusted")
	}
	if _, err := os.Stat(marker); !errors.Is(err, os.ErrNotExist) {
		t.Error("something ran")
	}
	for _, dir := range []string{"bin", "exec"} {
		made, err := os.ReadDir(filepath.Join(d.cache.Dir(), dir))
		if err != nil || len(made) > 0 {
			t.Errorf("something was made: %v, %v", made, err)
		}
	}
	// The control: built and run, both leave their marker.
	pkg, err := d.cache.Build(t.Context(), tree.inputs["pkg"])
	if err != nil {
		t.Fatal(err)
	}
	tool, err := d.cache.Stage(filepath.Join(d.dir, "bin/tool"))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range []*build.Binary{pkg, tool} {
		os.Remove(marker)
		if err := exec.Command(p.Path).Run(); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(marker); err != nil {
			t.Errorf("control: %s leaves no marker: %v", p.Path, err)
		}
	}
}

// TestWhatRunsIsWhatWasTrusted: what changes after the check is neither built nor run.
func TestWhatRunsIsWhatWasTrusted(t *testing.T) {
	d := deploy(t)
	tree := d.survey(t)
	if err := d.store.Trust(tree); err != nil {
		t.Fatal(err)
	}
	tool := filepath.Join(d.dir, "bin/tool")
	staged, err := d.cache.Stage(tool)
	if err != nil {
		t.Fatal(err)
	}
	if err := tree.Same(tool, staged.SHA256); err != nil {
		t.Errorf("control: %v", err)
	}
	write(t, filepath.Join(d.dir, "lib/lib.go"), "package lib\n\nconst Text = \"evil\"\n", 0o644)
	write(t, tool, "#!/bin/sh\necho evil\n", 0o755)
	var changed *build.ChangedError
	if b, err := d.cache.Build(t.Context(), tree.inputs["pkg"]); !errors.As(err, &changed) {
		t.Errorf("changed package: %v, %v", b, err)
	}
	if staged, err = d.cache.Stage(tool); err != nil {
		t.Fatal(err)
	}
	if err := tree.Same(tool, staged.SHA256); err == nil {
		t.Error("a changed executable is the same")
	}
	if err := tree.Same(filepath.Join(d.dir, "bin/off"), ""); err == nil {
		t.Error("an executable nobody looked at is the same")
	}
}

func TestSurveyLeavesNothingOut(t *testing.T) {
	d := deploy(t)
	plan, _ := compose.Load(d.compose, os.LookupEnv)
	if tree, err := Survey(plan, nil); err == nil {
		t.Errorf("a package whose inputs are not known is covered by %d files", tree.Len())
	}
	tree := d.survey(t)
	os.Remove(filepath.Join(d.dir, "bin/tool"))
	if _, err := Survey(plan, tree.inputs); err == nil {
		t.Error("an executable that is gone is covered")
	}
}

func TestStoreRefusesWhatOthersCanWrite(t *testing.T) {
	d := deploy(t)
	tree := d.survey(t)
	if err := d.store.Trust(tree); err != nil {
		t.Fatal(err)
	}
	record := d.store.path(tree.Path())
	info, err := os.Stat(record)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("record has mode %v, %v", info.Mode(), err)
	}
	var u *UntrustedError
	for _, tc := range []struct {
		name     string
		do, undo func() error
	}{
		{"record", func() error { return os.Chmod(record, 0o622) }, func() error { return os.Chmod(record, 0o600) }},
		{"directory", func() error { return os.Chmod(d.store.dir, 0o777) }, func() error { return os.Chmod(d.store.dir, 0o700) }},
		{"link", func() error {
			return errors.Join(os.Rename(record, record+".real"), os.Symlink(record+".real", record))
		}, func() error { return os.Rename(record+".real", record) }},
	} {
		if err := tc.do(); err != nil {
			t.Fatal(err)
		}
		if err := d.store.Check(tree); err == nil || errors.As(err, &u) {
			t.Errorf("%s: got %v", tc.name, err)
		}
		if err := tc.undo(); err != nil {
			t.Fatal(err)
		}
		if err := d.store.Check(tree); err != nil {
			t.Errorf("%s: control: %v", tc.name, err)
		}
	}
	if os.Geteuid() == 0 {
		if err := os.Chown(record, 12345, 12345); err != nil {
			t.Fatal(err)
		}
		if err := d.store.Check(tree); err == nil {
			t.Error("a record of another user was believed")
		}
	}
	for _, text := range []string{"", "{}", "not json", `{"format":1,"path":"/elsewhere"}`} {
		os.Remove(record)
		write(t, record, text, 0o600)
		if err := d.store.Check(tree); err == nil {
			t.Errorf("record %q was believed", text)
		}
	}
	open := t.TempDir()
	if err := os.Chmod(open, 0o770); err != nil {
		t.Fatal(err)
	}
	if err := Open(open).Trust(tree); err == nil {
		t.Error("a store open to others was accepted")
	}
}

func TestProtected(t *testing.T) {
	d := deploy(t)
	got := d.survey(t).Protected()
	for _, want := range []string{"compose.yml", "compose.lock", "pkg", "lib", "go.mod", "go.sum", "vendor", "bin/tool"} {
		if !slices.Contains(got, filepath.Join(d.dir, want)) {
			t.Errorf("%s is not protected: %q", want, got)
		}
	}
	for _, p := range got {
		if p == d.dir || strings.HasPrefix(p, filepath.Join(d.dir, "pkg")+"/") {
			t.Errorf("%s is more than needed", p)
		}
	}
	if !slices.IsSorted(got) {
		t.Errorf("not sorted: %q", got)
	}
	// A source that is a link: what it points to is protected too.
	target := filepath.Join(t.TempDir(), "real.go")
	write(t, target, "package main\n\nfunc main() {}\n", 0o644)
	os.Remove(filepath.Join(d.dir, "pkg/main.go"))
	if err := os.Symlink(target, filepath.Join(d.dir, "pkg/main.go")); err != nil {
		t.Fatal(err)
	}
	if got := d.survey(t).Protected(); !slices.Contains(got, target) {
		t.Errorf("%s is not protected: %q", target, got)
	}
}

func TestLayout(t *testing.T) {
	tree, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(tree, "compose.yml")
	write(t, file, composition, 0o644)
	home := t.TempDir()
	run := t.TempDir()
	if err := os.Chmod(run, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("XDG_STATE_HOME", home)
	t.Setenv("XDG_RUNTIME_DIR", run)
	l, err := LayoutOf(file, "")
	if err != nil {
		t.Fatal(err)
	}
	if len(l.ID) != 16 || l.StateDir != filepath.Join(home, "cordon", l.ID) {
		t.Errorf("layout %+v", l)
	}
	link := filepath.Join(t.TempDir(), "link.yml")
	if err := os.Symlink(file, link); err != nil {
		t.Fatal(err)
	}
	if other, err := LayoutOf(link, ""); err != nil || other.ID != l.ID {
		t.Errorf("through a link: %+v, %v", other, err)
	}
	for _, dir := range []string{l.StateDir, l.RunDir, l.TrustDir, l.CacheDir} {
		info, err := os.Stat(dir)
		if err != nil || info.Mode().Perm() != 0o700 {
			t.Errorf("%s: %v, %v", dir, info, err)
		}
		if !slices.ContainsFunc(l.Hidden(), func(h string) bool { return within(dir, h) }) {
			t.Errorf("%s is not hidden", dir)
		}
	}
	state := filepath.Join(t.TempDir(), "state")
	o, err := LayoutOf(file, state)
	if err != nil || o.StateDir != filepath.Join(state, l.ID) || o.RunDir == l.RunDir {
		t.Errorf("with --state: %+v, %v", o, err)
	}

	inside := filepath.Join(tree, "sub", "state")
	if _, err := LayoutOf(file, inside); err == nil || !strings.Contains(err.Error(), "--state") {
		t.Errorf("state inside the tree: %v", err)
	}
	// By way of a link too.
	out := filepath.Join(t.TempDir(), "out")
	if err := os.Symlink(tree, out); err != nil {
		t.Fatal(err)
	}
	if _, err := LayoutOf(file, filepath.Join(out, "state")); err == nil {
		t.Error("state inside the tree by way of a link was accepted")
	}
	left, err := os.ReadDir(tree)
	if err != nil || len(left) != 1 {
		t.Errorf("something was made inside the tree: %v, %v", left, err)
	}
	// A runtime directory that is no good: another's, open, missing or too long.
	if err := os.Chmod(run, 0o755); err != nil {
		t.Fatal(err)
	}
	long := filepath.Join(t.TempDir(), strings.Repeat("x", 80))
	if err := os.Mkdir(long, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{run, "", "relative", filepath.Join(run, "missing"), long} {
		t.Setenv("XDG_RUNTIME_DIR", bad)
		l, err := LayoutOf(file, "")
		if err != nil || !strings.HasPrefix(l.RunDir, "/tmp/cordon-") {
			t.Errorf("XDG_RUNTIME_DIR=%q: %+v, %v", bad, l, err)
			continue
		}
		if err := os.Remove(l.RunDir); err != nil {
			t.Error(err)
		}
	}
}

func TestPrivate(t *testing.T) {
	dir := t.TempDir()
	link := filepath.Join(dir, "link")
	real := filepath.Join(dir, "real")
	if err := errors.Join(os.Mkdir(real, 0o700), os.Symlink(real, link)); err != nil {
		t.Fatal(err)
	}
	if err := makePrivate(real); err != nil {
		t.Errorf("control: %v", err)
	}
	if err := makePrivate(link); err == nil {
		t.Error("a symbolic link was accepted")
	}
	if err := os.Chmod(real, 0o750); err != nil {
		t.Fatal(err)
	}
	if err := makePrivate(real); err == nil {
		t.Error("a directory others can read was accepted")
	}
	write(t, filepath.Join(dir, "file"), "", 0o600)
	if err := makePrivate(filepath.Join(dir, "file")); err == nil {
		t.Error("a file was accepted")
	}
	if os.Geteuid() == 0 {
		if err := errors.Join(os.Chmod(real, 0o700), os.Chown(real, 12345, 12345)); err != nil {
			t.Fatal(err)
		}
		if err := makePrivate(real); err == nil {
			t.Error("another user's directory was accepted")
		}
	}
}

func TestShellWord(t *testing.T) {
	for in, want := range map[string]string{
		"/a/b.yml": "/a/b.yml",
		"/a b":     "'/a b'",
		"/it's":    `'/it'\''s'`,
		"":         "''",
	} {
		if got := shellWord(in); got != want {
			t.Errorf("shellWord(%q) = %s, want %s", in, got, want)
		}
	}
}

// TestLockIsPartOfTheTree: a lock file that is there leads to execution as much as the compose file does. With takes one file as it is now
// and leaves what was found of the others.
func TestLockIsPartOfTheTree(t *testing.T) {
	d := deploy(t)
	without := d.survey(t)
	if err := d.store.Trust(without); err != nil {
		t.Fatal(err)
	}
	path := lock.Path(without.plan)
	if !slices.Contains(without.Protected(), path) {
		t.Errorf("%s is not protected while it does not exist", path)
	}
	file := File{Path: path, SHA256: strings.Repeat("a", 64)}
	with, err := Survey(without.plan, without.inputs, file)
	if err != nil {
		t.Fatal(err)
	}
	var u *UntrustedError
	if err := d.store.Check(with); !errors.As(err, &u) || !slices.Equal(u.Appeared, []string{path}) {
		t.Errorf("a lock file that appeared: %v", err)
	}
	if got := without.With(file); got.Digest() != with.Digest() || without.Digest() == with.Digest() {
		t.Error("With is another tree than one that was surveyed with the file")
	}
	if err := d.store.Trust(without.With(file)); err != nil {
		t.Fatal(err)
	}
	if err := d.store.Check(with); err != nil {
		t.Errorf("the control: %v", err)
	}
	changed := with.With(File{Path: path, SHA256: strings.Repeat("b", 64)})
	if err := d.store.Check(changed); !errors.As(err, &u) || !slices.Equal(u.Changed, []string{path}) {
		t.Errorf("a lock file that changed: %v", err)
	}
	if changed.Len() != with.Len() || with.Len() != without.Len()+1 {
		t.Errorf("%d, %d and %d files", without.Len(), with.Len(), changed.Len())
	}
	if err := d.store.Check(without); !errors.As(err, &u) || !slices.Equal(u.Vanished, []string{path}) {
		t.Errorf("a lock file that is gone: %v", err)
	}
	// Files that a compose file includes are read like itself, and trusted like it.
	plan := *without.plan
	plan.Files = append(slices.Clone(plan.Files), compose.File{Path: filepath.Join(d.dir, "more.yml"), SHA256: strings.Repeat("c", 64)})
	included, err := Survey(&plan, without.inputs)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.store.Check(included); !errors.As(err, &u) || !slices.Equal(u.Appeared, []string{filepath.Join(d.dir, "more.yml")}) {
		t.Errorf("an included file: %v", err)
	}
	if !slices.Contains(included.Protected(), filepath.Join(d.dir, "more.yml")) {
		t.Error("an included file is not protected")
	}
}

//go:build unix

package fskit

import (
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/sandbox"
)

// The containment matrix: what a path leads to, and whether it may be changed. Verdicts are judged on the disk.
func TestMatrix(t *testing.T) {
	const (
		yes     = "" // the target changes, and nothing else
		denied  = "FS_SANDBOX_DENIED"
		irreg   = "FS_NOT_REGULAR_FILE"
		missing = "FS_NOT_FOUND"
	)
	for _, c := range []struct {
		name, path string
		target     string // below the base; empty where there is nothing to look at
		exists     bool   // an edit finds a file there
		want       string // in workspace-write
		danger     string // in danger-full-access, where it is not yes
	}{
		{name: "inside, relative", path: "in.txt", target: "/ws/in.txt", exists: true},
		{name: "inside, absolute", path: "$W/sub/in.txt", target: "/ws/sub/in.txt", exists: true},
		{name: "inside, new", path: "sub/new.txt", target: "/ws/sub/new.txt"},
		{name: "inside, new directories", path: "a/b/c.txt", target: "/ws/a/b/c.txt"},
		{name: "inside by way of outside", path: "$B/outside/../ws/in.txt", target: "/ws/in.txt", exists: true},
		{name: "inside by a link to a directory", path: "back/in.txt", target: "/ws/sub/in.txt", exists: true},
		{name: "inside by a link to a file", path: "inlink", target: "/ws/sub/in.txt", exists: true},
		{name: "inside by a link from outside", path: "$B/outside/in/in.txt", target: "/ws/in.txt", exists: true},
		{name: "a link that leads nowhere, inside", path: "dangling-in", target: "/ws/sub/new.txt"},
		{name: "an alias of the root", path: "$B/alias/in.txt", target: "/ws/in.txt", exists: true},
		{name: "an alias of the root, new", path: "$B/alias/new.txt", target: "/ws/new.txt"},
		{name: "repeated separators", path: "$B//ws/./sub//in.txt", target: "/ws/sub/in.txt", exists: true},
		{name: "an odd name", path: "-odd dir\n/ä \"$x\" 'y'.txt", target: "/ws/-odd dir\n/ä \"$x\" 'y'.txt"},
		{name: "a hard link", path: "hard.txt", target: "/ws/hard.txt", exists: true},

		{name: "absolute outside", path: "$B/outside/secret.txt", target: "/outside/secret.txt", exists: true, want: denied},
		{name: "absolute outside, new", path: "$B/outside/new.txt", target: "/outside/new.txt", want: denied},
		{name: "a neighbour with the root as a prefix", path: "$B/ws-more/x.txt", target: "/ws-more/x.txt", want: denied},
		{name: "`..` out", path: "../outside/secret.txt", target: "/outside/secret.txt", exists: true, want: denied},
		{name: "`..` out through a link", path: "back/../../outside/secret.txt", target: "/outside/secret.txt", exists: true, want: denied},
		{name: "`..` behind a link is not where it looks", path: "uplink/../secret.txt", target: "/outside/secret.txt", exists: true, want: denied},
		{name: "a linked directory out", path: "out/secret.txt", target: "/outside/secret.txt", exists: true, want: denied},
		{name: "a new file under one", path: "out/new.txt", target: "/outside/new.txt", want: denied},
		{name: "new directories under one", path: "out/p/q.txt", target: "/outside/p/q.txt", want: denied},
		{name: "a linked file out", path: "filelink", target: "/outside/secret.txt", exists: true, want: denied},
		{name: "a link that leads nowhere, outside", path: "dangling", target: "/outside/new.txt", want: denied},
		{name: "the directory above", path: "..", want: denied, danger: irreg},
		{name: "the root of the file system", path: "/", want: denied, danger: irreg},
		{name: "far above the root", path: "../../../../../../../../../..", want: denied, danger: irreg},

		{name: "the root itself", path: "$W", want: irreg, danger: irreg},
		{name: "the root itself, relative", path: ".", want: irreg, danger: irreg},
		{name: "the root with a separator", path: "$W/", want: irreg, danger: irreg},
		{name: "a directory", path: "sub", want: irreg, danger: irreg},
		{name: "a directory with a separator", path: "sub/", want: irreg, danger: irreg},
		{name: "a new name with a separator", path: "new/", want: irreg, danger: irreg},
		{name: "a file with a separator", path: "in.txt/", want: missing, danger: missing},
		{name: "below a file", path: "in.txt/x", want: missing, danger: missing},
		{name: "`..` behind nothing", path: "none/../in.txt", want: missing, danger: missing},
		{name: "a link to itself", path: "loop", want: "FS_IO_ERROR", danger: "FS_IO_ERROR"},
		{name: "no path", path: "", want: missing, danger: missing},
		{name: "spaces", path: " \t", want: missing, danger: missing},
		{name: "a NUL", path: "a\x00b", want: "FS_IO_ERROR", danger: "FS_IO_ERROR"},

		{name: "temp", path: "/tmp/t.txt", target: "/state/tmp/s1/t.txt", exists: true, danger: "elsewhere"},
		{name: "temp, new", path: "/tmp/d/new.txt", target: "/state/tmp/s1/d/new.txt", danger: "elsewhere"},
		{name: "temp by its other name", path: "/var/tmp/t.txt", target: "/state/tmp/s1/t.txt", exists: true, danger: "elsewhere"},
		{name: "temp by a link", path: "totemp/t.txt", target: "/state/tmp/s1/t.txt", exists: true, danger: "elsewhere"},
		{name: "temp by a link in temp", path: "/tmp/home", target: "/state/tmp/s1/t.txt", exists: true, danger: "elsewhere"},
		{name: "out of temp by a link", path: "/tmp/escape/secret.txt", target: "/outside/secret.txt", exists: true, want: denied, danger: "elsewhere"},
		{name: "out of temp by `..`", path: "/tmp/../$B/outside/secret.txt", target: "/outside/secret.txt", exists: true, want: denied},
		{name: "temp where the host has it", path: "$T/t.txt", target: "/state/tmp/s1/t.txt", exists: true, want: denied},
		{name: "temp itself", path: "/tmp", want: irreg, danger: irreg},

		{name: "hidden", path: "$B/state/key", target: "/state/key", exists: true, want: denied},
		{name: "hidden, new", path: "$B/state/new", target: "/state/new", want: denied},
		{name: "protected", path: "compose.yml", target: "/ws/compose.yml", exists: true, want: denied},
		{name: "protected by a link", path: "compose-link", target: "/ws/compose.yml", exists: true, want: denied},
		{name: "protected by an alias", path: "$B/alias/compose.yml", target: "/ws/compose.yml", exists: true, want: denied},
		{name: "below a protected directory", path: ".git/hooks/pre-commit", target: "/ws/.git/hooks/pre-commit", exists: true, want: denied},
		{name: "below a protected directory, new", path: ".git/hooks/pre-push", target: "/ws/.git/hooks/pre-push", want: denied},
		{name: "protected, before it exists", path: "cordon.lock", target: "/ws/cordon.lock", want: denied},
		{name: "protected, before its directory exists", path: "dir/inner.lock", target: "/ws/dir/inner.lock", want: denied},
		{name: "beside what is protected", path: ".git/config", target: "/ws/.git/config"},
	} {
		for _, mode := range sandbox.Modes() {
			want := c.want
			switch mode {
			case sandbox.ReadOnly:
				want = denied
				if c.path == "" || c.path == " \t" {
					want = missing
				} else if c.path == "a\x00b" {
					want = "FS_IO_ERROR"
				}
			case sandbox.DangerFullAccess:
				if c.danger == "elsewhere" {
					continue // it is the machine's own /tmp
				}
				want = c.danger
			}
			t.Run(c.name+"/write/"+string(mode), func(t *testing.T) {
				a := newArena(t)
				before := a.tree()
				got, err := a.write(mode, c.path, "new\n")
				if reason(err) != want {
					t.Fatalf("%v, want %s", err, want)
				}
				a.changed(before, want == yes, c.target, "file new\n")
				if want == yes && got.Created == c.exists {
					t.Errorf("created %v", got.Created)
				}
			})
			t.Run(c.name+"/edit/"+string(mode), func(t *testing.T) {
				a := newArena(t)
				before := a.tree()
				_, err := a.fs.Edit(t.Context(), a.policy(mode), a.path(c.path), "old", "new", false, Precondition{})
				if want == yes && !c.exists {
					want = "FS_STALE_VERSION"
				}
				if reason(err) != want {
					t.Fatalf("%v, want %s", err, want)
				}
				a.changed(before, want == yes, c.target, "file new\n")
			})
		}
	}
}

// changed checks that the target changed to what it should be, and that nothing else did.
func (a *arena) changed(before map[string]string, yes bool, target, want string) {
	a.t.Helper()
	after := a.tree()
	if yes {
		if after[target] != want {
			a.t.Errorf("%s is %q, want %q", target, after[target], want)
		}
		for p, what := range after {
			if before[p] == "" && what == "dir" && sandbox.Contains(p, target) {
				delete(after, p) // was made on the way
			}
		}
		delete(after, target)
		delete(before, target)
	}
	if d := cmp.Diff(before, after); d != "" {
		a.t.Errorf("something else changed (-before +after):\n%s", d)
	}
}

func TestDenialTexts(t *testing.T) {
	a := newArena(t)
	for _, c := range []struct {
		mode       sandbox.Mode
		path, want string
	}{
		{sandbox.ReadOnly, "in.txt", `cannot write "$W/in.txt": file access denied under read-only mode`},
		{sandbox.WorkspaceWrite, "$B/outside/x", `cannot write "$B/outside/x": file access denied under workspace-write mode`},
		{sandbox.WorkspaceWrite, "../x", `cannot write "$W/../x": file access denied under workspace-write mode`},
		{"bogus", "in.txt", `cannot write "$W/in.txt": file access denied under bogus mode`},
	} {
		if _, err := a.write(c.mode, c.path, "x"); err == nil || fault.Message(err) != a.path(c.want) {
			t.Errorf("%v, want %s", err, a.path(c.want))
		}
		if _, err := a.fs.Edit(t.Context(), a.policy(c.mode), a.path(c.path), "old", "x", false, Precondition{}); err == nil || fault.Message(err) != a.path(c.want) {
			t.Errorf("edit: %v, want %s", err, a.path(c.want))
		}
	}
}

// A workspace that is the whole machine takes writes everywhere except where this machine runs from.
func TestMatrixMachineRoot(t *testing.T) {
	a := newArena(t)
	p := a.policy(sandbox.WorkspaceWrite)
	p.Root = "/"
	if _, err := a.fs.Write(t.Context(), p, a.base+"/outside/new.txt", []byte("x"), Precondition{}); err != nil || content(t, a.base+"/outside/new.txt") != "x" {
		t.Errorf("write below the root: %v", err)
	}
	for _, path := range []string{"/etc/cordon-test", "/usr/bin/cordon-test", "/bin/cordon-test", "/proc/sys/kernel/core_pattern", "/dev/cordon-test", "/run/cordon-test", a.base + "/state/x", a.ws + "/compose.yml"} {
		if _, err := a.fs.Write(t.Context(), p, path, []byte("x"), Precondition{}); reason(err) != "FS_SANDBOX_DENIED" {
			t.Errorf("%s: %v", path, err)
		}
		if content(t, path) == "x" {
			t.Errorf("%s was written", path)
		}
	}
	for _, path := range []string{"/", "/.", "//"} {
		if _, err := a.fs.Write(t.Context(), p, path, []byte("x"), Precondition{}); reason(err) != "FS_NOT_REGULAR_FILE" {
			t.Errorf("%s: %v", path, err)
		}
	}
}

// A workspace below /tmp stays the workspace; the rest of /tmp is the session's.
func TestMatrixBelowTemp(t *testing.T) {
	a := newArena(t)
	root := sandbox.CanonicalPath(t.TempDir())
	must(t, os.WriteFile(root+"/in.txt", []byte("old\n"), 0o644))
	neighbour := sandbox.CanonicalPath(t.TempDir())
	p := a.policy(sandbox.WorkspaceWrite)
	p.Root = root
	if _, err := a.fs.Write(t.Context(), p, "in.txt", []byte("new"), Precondition{}); err != nil || content(t, root+"/in.txt") != "new" {
		t.Errorf("inside: %v", err)
	}
	if _, err := a.fs.Write(t.Context(), p, neighbour+"/x.txt", []byte("x"), Precondition{}); err != nil || content(t, neighbour+"/x.txt") != "(none)" || content(t, a.temp+neighbour[len("/tmp"):]+"/x.txt") != "x" {
		t.Errorf("beside: %v", err)
	}
	p.Mode = sandbox.ReadOnly
	if got, err := a.fs.Read(t.Context(), p, "in.txt", Window{Offset: 1, Limit: 9, MaxBytes: 99}); err != nil || len(got.Lines) != 1 {
		t.Errorf("read inside: %v", err)
	}
}

// A call without a session has no temp directory, and none of its writes lands in the machine's.
func TestMatrixNoTemp(t *testing.T) {
	a := newArena(t)
	p := a.policy(sandbox.WorkspaceWrite)
	p.Temp = ""
	name := "/tmp/cordon-fskit-no-temp.txt"
	if _, err := a.fs.Write(t.Context(), p, name, []byte("x"), Precondition{}); reason(err) != "FS_SANDBOX_DENIED" || content(t, name) != "(none)" {
		t.Errorf("%v", err)
	}
	if _, err := a.fs.Write(t.Context(), p, "in.txt", []byte("x"), Precondition{}); err != nil {
		t.Error(err)
	}
}

// A root that is a link by now is not what the policy meant, wherever it leads.
func TestMatrixSwappedRoot(t *testing.T) {
	a := newArena(t)
	must(t, os.Rename(a.ws, a.base+"/moved"))
	must(t, os.Symlink(a.base+"/outside", a.ws))
	before := a.tree()
	for _, mode := range []sandbox.Mode{sandbox.ReadOnly, sandbox.WorkspaceWrite} {
		for _, root := range []string{a.ws, a.base + "/alias", a.base + "/moved/", "moved", "", "."} {
			p := a.policy(mode)
			p.Root = root
			if _, err := a.fs.Write(t.Context(), p, a.base+"/outside/secret.txt", []byte("x"), Precondition{}); reason(err) != "FS_IO_ERROR" {
				t.Errorf("%s, root %q: write: %v", mode, root, err)
			}
			if _, err := a.fs.Read(t.Context(), p, a.base+"/outside/secret.txt", Window{Offset: 1, Limit: 1, MaxBytes: 9}); reason(err) != "FS_IO_ERROR" {
				t.Errorf("%s, root %q: read: %v", mode, root, err)
			}
		}
	}
	if d := cmp.Diff(before, a.tree()); d != "" {
		t.Error(d)
	}
}

// What is protected or hidden may be spelled over links, and need not exist.
func TestMatrixSpelledGuards(t *testing.T) {
	a := newArena(t)
	must(t, os.Symlink("sub/future.yml", a.ws+"/future-link"))
	p := a.policy(sandbox.WorkspaceWrite)
	p.Protected = []string{a.base + "/alias/none/deep/inner.lock", a.ws + "/back/in.txt", a.ws + "/future-link", a.base + "/alias/inlink"}
	p.Hidden = []string{a.base + "/alias/none/vault", a.ws + "/code/../code"}
	for _, path := range []string{"none/deep/inner.lock", "sub/in.txt", "sub/future.yml", "future-link", "none/vault/x", "code/x"} {
		if _, err := a.fs.Write(t.Context(), p, path, []byte("x"), Precondition{}); reason(err) != "FS_SANDBOX_DENIED" {
			t.Errorf("%s: %v", path, err)
		}
	}
	if _, err := a.fs.Write(t.Context(), p, "none/deep/inner.lock2", []byte("x"), Precondition{}); err != nil {
		t.Error(err)
	}
}

package fskit

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/fs"
	"github.com/cordon-host/cordon/capability/sandbox"
	"github.com/cordon-host/cordon/internal/testenv"
)

// inNamespace reports whether a test may mount: it runs again in a mount namespace of its own, and only there.
func inNamespace(t *testing.T) bool {
	t.Helper()
	const inside = "FSKIT_TEST_NAMESPACE"
	if os.Getenv(inside) == t.Name() {
		must(t, unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
		return true
	}
	testenv.Require(t, "mount-namespace", func() error {
		cmd := exec.CommandContext(t.Context(), "true")
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
		return cmd.Run()
	})
	self, err := os.Executable()
	must(t, err)
	cmd := exec.CommandContext(t.Context(), self, "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), inside+"="+t.Name())
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Errorf("%v\n%s", err, out)
	}
	return false
}

// A directory that is mounted in two places.
func TestMountedTwice(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	a := newArena(t)
	bind := func(from, to string) {
		must(t, os.MkdirAll(a.base+"/"+to, 0o755))
		must(t, unix.Mount(a.base+"/"+from, a.base+"/"+to, "", unix.MS_BIND, ""))
		t.Cleanup(func() { must(t, unix.Unmount(a.base+"/"+to, 0)) })
	}
	bind("ws", "again")
	bind("outside", "ws/code")
	bind("ws/.git/hooks", "ws/sub")
	bind("state", "outside/dir")
	for path, want := range map[string]string{
		"$B/again/new.txt":     "", // recognizes an alias-equivalent root by filesystem identity for a missing target
		"$B/again/d/e/new.txt": "",
		"$B/again/compose.yml": fs.SandboxDenied, // and what is protected in it
		"$B/again/cordon.lock": fs.SandboxDenied,
		"$B/outside/x.txt":     fs.SandboxDenied,
		"sub/pre-push":         fs.SandboxDenied, // a protected directory by another name
		"sub/pre-commit":       fs.SandboxDenied,
		"code/mounted.txt":     "", // what the owner mounts into the workspace belongs to it
	} {
		_, err := a.write(sandbox.WorkspaceWrite, path, "new")
		if reason(err) != want {
			t.Errorf("%s: %v, want %q", path, err, want)
		}
		real := a.path(path)
		if !strings.HasPrefix(real, "/") {
			real = a.ws + "/" + real
		}
		if got := content(t, real); (got == "new") != (want == "") {
			t.Errorf("%s: holds %q", path, got)
		}
	}
	if _, err := a.fs.Read(t.Context(), a.policy(sandbox.ReadOnly), a.base+"/outside/dir/key", wide(1, 1)); reason(err) != fs.SandboxDenied {
		t.Errorf("hidden by another name: %v", err)
	}
}

// A file system that is full or read-only keeps what it has, and is not littered.
func TestDiskFull(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	a := newArena(t)
	must(t, unix.Mount("tmpfs", a.ws+"/code", "tmpfs", 0, "size=64k"))
	t.Cleanup(func() { must(t, unix.Unmount(a.ws+"/code", 0)) })
	big := strings.Repeat("x", 1<<20)
	must(t, second(a.write(sandbox.WorkspaceWrite, "code/a.txt", "old\n")))
	refused := func(err error, want string) {
		t.Helper()
		if reason(err) != fs.IOError || !strings.HasSuffix(fault.Message(err), want) {
			t.Errorf("%v, want %s", err, want)
		}
		if got := content(t, a.ws+"/code/a.txt"); got != "old\n" {
			t.Errorf("the file holds %d bytes", len(got))
		}
		if names, _ := filepath.Glob(a.ws + "/code/.*"); len(names) > 0 {
			t.Errorf("left behind: %q", names)
		}
	}
	refused(second(a.write(sandbox.WorkspaceWrite, "code/a.txt", big)), "no space left on device")
	refused(second(a.write(sandbox.WorkspaceWrite, "code/new.txt", big)), "no space left on device")
	refused(second(a.fs.Edit(t.Context(), a.policy(sandbox.WorkspaceWrite), "code/a.txt", "old", big, false, Precondition{})), "no space left on device")
	if content(t, a.ws+"/code/new.txt") != "(none)" {
		t.Error("a part of a file was made")
	}
	must(t, second(a.write(sandbox.WorkspaceWrite, "code/b.txt", "small"))) // the space is back
	must(t, unix.Mount("", a.ws+"/code", "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	refused(second(a.write(sandbox.WorkspaceWrite, "code/a.txt", "new")), "read-only file system")
	refused(second(a.write(sandbox.WorkspaceWrite, "code/c.txt", "new")), "read-only file system")
	refused(second(a.write(sandbox.WorkspaceWrite, "code/d/c.txt", "new")), "read-only file system")
}

//go:build unix

package fskit

import (
	"errors"
	iofs "io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/sandbox"
	"github.com/cordon-host/cordon/internal/testenv"
)

// arenaVar is where tests may make their directories: outside /tmp, which stands for something else in every confined mode.
const arenaVar = "FSKIT_TEST_ARENA"

// arena is a workspace and what lies around it, on a real disk.
type arena struct {
	t    *testing.T
	base string
	ws   string
	temp string // of the session
	fs   *FS
}

func newArena(t *testing.T) *arena {
	t.Helper()
	parent := os.Getenv(arenaVar)
	if parent == "" && os.Geteuid() == 0 {
		parent = "/var/lib"
	}
	if parent == "" {
		cache, err := os.UserCacheDir()
		must(t, err)
		must(t, os.MkdirAll(cache, 0o700))
		parent = cache
	}
	base, err := os.MkdirTemp(parent, "cordon-fskit-test-")
	must(t, err)
	base = sandbox.CanonicalPath(base)
	must(t, os.Chmod(base, 0o755))
	t.Cleanup(func() { must(t, os.RemoveAll(base)) })
	a := &arena{t: t, base: base, ws: base + "/ws", temp: base + "/state/tmp/s1", fs: &FS{}}
	for _, dir := range []string{"ws/sub", "ws/-odd dir\n", "outside/dir", "state/tmp/s1", "ws/.git/hooks", "ws/code"} {
		must(t, os.MkdirAll(filepath.Join(base, dir), 0o755))
	}
	for _, file := range []string{"ws/in.txt", "ws/sub/in.txt", "outside/secret.txt", "outside/hard.txt", "outside/dir/x.txt", "state/tmp/s1/t.txt", "state/key", "ws/compose.yml", "ws/.git/hooks/pre-commit"} {
		a.put(file, "old\n")
	}
	for link, to := range map[string]string{
		"ws/out": base + "/outside", "ws/back": base + "/ws/sub", "ws/inlink": "sub/in.txt", "ws/filelink": base + "/outside/secret.txt",
		"ws/dangling": base + "/outside/new.txt", "ws/dangling-in": "sub/new.txt", "ws/loop": "loop", "alias": "ws",
		"ws/uplink": "../outside/dir", "ws/totemp": "/tmp", "ws/compose-link": "compose.yml", "outside/in": base + "/ws",
		"state/tmp/s1/escape": base + "/outside", "state/tmp/s1/home": "/tmp/t.txt",
	} {
		must(t, os.Symlink(to, filepath.Join(base, link)))
	}
	must(t, os.Link(base+"/outside/hard.txt", base+"/ws/hard.txt"))
	return a
}

// policy is the arena's in a mode.
func (a *arena) policy(m sandbox.Mode) Policy {
	return Policy{
		Mode: m, Root: a.ws, Temp: a.temp,
		Protected: []string{a.ws + "/compose.yml", a.ws + "/.git/hooks", a.ws + "/cordon.lock", a.ws + "/dir/inner.lock"},
		Hidden:    []string{a.base + "/state"},
	}
}

// path is a path with $B, $W and $T filled in; relative ones stay.
func (a *arena) path(p string) string {
	return strings.NewReplacer("$B", a.base, "$W", a.ws, "$T", a.temp).Replace(p)
}

func (a *arena) put(name, content string) {
	a.t.Helper()
	must(a.t, os.WriteFile(filepath.Join(a.base, name), []byte(content), 0o644))
}

func (a *arena) write(m sandbox.Mode, path, content string) (Written, error) {
	return a.fs.Write(a.t.Context(), a.policy(m), a.path(path), []byte(content), Precondition{})
}

// tree is every path below the arena with what it is and holds.
func (a *arena) tree() map[string]string {
	a.t.Helper()
	out := map[string]string{}
	must(a.t, filepath.WalkDir(a.base, func(p string, d iofs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel := strings.TrimPrefix(p, a.base)
		switch {
		case d.Type()&os.ModeSymlink != 0:
			target, err := os.Readlink(p)
			out[rel] = "link " + target
			return err
		case d.IsDir():
			out[rel] = "dir"
			return nil
		case !d.Type().IsRegular():
			out[rel] = d.Type().String()
			return nil
		}
		data, err := os.ReadFile(p)
		out[rel] = "file " + string(data)
		return err
	}))
	return out
}

func content(t testing.TB, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if errors.Is(err, iofs.ErrNotExist) {
		return "(none)"
	}
	must(t, err)
	return string(data)
}

func reason(err error) string {
	if err == nil {
		return ""
	}
	if r := fault.Reason(err); r != "" {
		return r
	}
	return err.Error()
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestAsUser runs what depends on who asks as an ordinary user, too.
func TestAsUser(t *testing.T) {
	cred := testenv.User(t)
	a := newArena(t)
	home := a.base + "/home"
	must(t, os.Mkdir(home, 0o755))
	must(t, os.Chown(home, int(cred.Uid), int(cred.Gid)))
	self, err := os.Executable()
	must(t, err)
	binary, err := os.ReadFile(self)
	must(t, err)
	must(t, os.WriteFile(home+"/test", binary, 0o755))
	cmd := exec.CommandContext(t.Context(), home+"/test", "-test.run=^Test(Matrix|Reads|Race|Permissions|Precondition|Dangling|Atomic)", "-test.short="+boolText(testing.Short()))
	cmd.Dir, cmd.Env = home, append(os.Environ(), arenaVar+"="+home, "HOME="+home)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: cred}
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "PASS") {
		t.Errorf("%v\n%s", err, out)
	}
}

func boolText(b bool) string {
	if b {
		return "true"
	}
	return "false"
}

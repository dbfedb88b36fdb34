//go:build linux

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	sandboxv1 "github.com/cordon-host/cordon/api/sandbox/v1"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/sandbox"
	"github.com/cordon-host/cordon/plugin/launch"
)

func TestConfinedWrites(t *testing.T) {
	requireBwrap(t)
	a := newArena(t, arenaBase(t))
	o := a.confined("read-only", `echo hi >a.txt`)
	if there(a.ws+"/a.txt") || !sandbox.ClassifyDenial(o.ExitCode(), o.stderr, o.reply.GetDenialSignatures()) {
		t.Errorf("read-only: %v", o)
	}
	if line, failed := sandbox.ClassifyRunnerFailure(o.ExitCode(), o.stderr, o.reply.GetRunnerFailureRules()); failed {
		t.Errorf("a denial was taken for a runner failure: %s", line)
	}
	o = a.confined("workspace-write", `echo hi >a.txt; mkdir -p sub/x; ln a.txt b.txt; mv b.txt sub/x/; chmod 700 sub; echo x >>.git/config; echo x >conf/other; rm f`)
	if read(t, a.ws+"/a.txt") != "hi\n" || !there(a.ws+"/sub/x/b.txt") || read(t, a.ws+"/.git/config") != "secret\nx\n" || read(t, a.ws+"/conf/other") != "x\n" || there(a.ws+"/f") || o.Code != 0 {
		t.Errorf("workspace-write: %v", o)
	}
	if fi, err := os.Stat(a.ws + "/a.txt"); err != nil || int(fi.Sys().(*syscall.Stat_t).Uid) != os.Geteuid() {
		t.Errorf("the new file's owner is another: %v", err)
	}
	// A protected name that is not there can be made; the enforcement vector says so.
	o = a.confined("workspace-write", `echo x >absent.lock`)
	if got := o.reply.GetEnforcement().GetRights()["protected-absent"]; !there(a.ws+"/absent.lock") || got != "none" {
		t.Errorf("absent protected name: %q, %v", got, o)
	}
}

func TestConfinedExit(t *testing.T) {
	requireBwrap(t)
	a := newArena(t, arenaBase(t))
	for script, want := range map[string]int{
		"exit 0": 0, "exit 1": 1, "exit 42": 42, "exit 125": 125, "exit 126": 126, "exit 255": 255,
		"kill -9 $$": 137, "kill -15 $$": 143, "kill -11 $$": 139,
	} {
		o := a.confined("read-only", script)
		if o.Code != want || o.stdout != "" || o.stderr != "" {
			t.Errorf("%s: %v", script, o)
		}
	}
	reply, err := a.confine("read-only", "/", "no-such-program")
	must(t, err)
	if o := a.start(launch.Spec{Launch: reply.GetLaunch()}); o.Code != 127 || !strings.Contains(o.stderr, "no-such-program") {
		t.Errorf("missing program: %v", o)
	}
	reply, err = a.confine("read-only", "/", "/etc/passwd")
	must(t, err)
	if o := a.start(launch.Spec{Launch: reply.GetLaunch()}); o.Code != 126 {
		t.Errorf("not a program: %v", o)
	}
}

// Arguments never become script text, whatever they look like.
func TestConfinedArguments(t *testing.T) {
	requireBwrap(t)
	a := newArena(t, arenaBase(t))
	words := []string{"a b", "", "-n", "--", "$(id)", "`id`", "'\"", "x\ny", "*", "\\", "\xff", "ü", "--bind", "eval"}
	reply, err := a.confine("read-only", "/", append([]string{"printf", "<%s>"}, words...)...)
	must(t, err)
	want := ""
	for _, w := range words {
		want += "<" + w + ">"
	}
	if o := a.start(launch.Spec{Launch: reply.GetLaunch()}); o.stdout != want {
		t.Errorf("got %v\nwant %q", o, want)
	}
	for _, builtin := range []string{"eval", "exit", ".", "cd"} {
		reply, err := a.confine("read-only", "/", builtin, "echo built-in; exit 3")
		must(t, err)
		if o := a.start(launch.Spec{Launch: reply.GetLaunch()}); o.Code != 127 && o.Code != 126 || strings.Contains(o.stdout, "built-in") {
			t.Errorf("%s was taken for a shell's: %v", builtin, o)
		}
	}
}

func TestConfinedStreams(t *testing.T) {
	requireBwrap(t)
	a := newArena(t, arenaBase(t))
	data := bytes.Repeat([]byte("\x00\xff\r\n\x1b[2J"), 100_000)
	o := a.confined("read-only", `cat; printf '\376' >&2`, func(s *launch.Spec) { s.Stdin = bytes.NewReader(data) })
	if o.stdout != string(data) || o.stderr != "\xfe" || o.Code != 0 {
		t.Errorf("%d of %d bytes, %q, %d", len(o.stdout), len(data), o.stderr, o.Code)
	}
	if o := a.confined("read-only", `cat; read x || echo eof`); o.stdout != "eof\n" {
		t.Errorf("without stdin: %v", o)
	}
	// Exactly the three, and the one ls reads the directory with.
	if o := a.confined("workspace-write", `ls /proc/self/fd | tr '\n' ' '`); o.stdout != "0 1 2 3 " {
		t.Errorf("descriptors: %v", o)
	}
}

func TestConfinedNames(t *testing.T) {
	requireBwrap(t)
	base := arenaBase(t)
	for _, name := range []string{"plain", "with space", "new\nline", "-rf", "*?[a]", "--bind", "quo'te\"", "$(id)", "ünï", "\xff\xfe", "trailing\n", "a;b&c"} {
		a := newArena(t, base+"/"+name)
		if o := a.confined("workspace-write", `echo x >here; pwd; cd sub && echo y >there; echo z >"$OUT/no"; echo s >>"$W/conf/compose.yml"`); read(t, a.ws+"/here") != "x\n" || read(t, a.ws+"/sub/there") != "y\n" || there(a.out+"/no") ||
			read(t, a.ws+"/conf/compose.yml") != "secret\n" || !strings.HasPrefix(o.stdout, a.ws+"\n") {
			t.Errorf("%q: %v", name, o)
		}
	}
}

func TestConfinedWorkingDirectory(t *testing.T) {
	requireBwrap(t)
	a := newArena(t, arenaBase(t))
	must(t, os.Symlink("sub", a.ws+"/to-sub"))
	for _, c := range []struct{ cwd, want string }{
		{a.ws, a.ws}, {a.ws + "/sub", a.ws + "/sub"}, {a.ws + "/to-sub", a.ws + "/sub"}, {a.out, a.out}, {"/", "/"}, {"/usr", "/usr"}, {"/tmp", "/tmp"}, {"/proc", "/proc"},
	} {
		for _, mode := range []string{"read-only", "workspace-write"} {
			reply, err := a.confine(mode, c.cwd, "sh", "-c", "pwd -P; readlink /proc/self/cwd")
			must(t, err)
			if o := a.start(launch.Spec{Launch: reply.GetLaunch()}); o.stdout != c.want+"\n"+c.want+"\n" {
				t.Errorf("%s in %s: %v", mode, c.cwd, o)
			}
		}
	}
	hidden := t.TempDir() // below /tmp
	for _, cwd := range []string{hidden, a.state, a.ws + "/deep/state"} {
		if _, err := a.confine("read-only", cwd, "true"); fault.Reason(err) != reasonNotExpressible {
			t.Errorf("cwd %s: %v", cwd, err)
		}
	}
}

func TestConfinedWorkspaceBelowTemp(t *testing.T) {
	requireBwrap(t)
	a := newArena(t, sandbox.CanonicalPath(t.TempDir()))
	a.session = "s"
	o := a.confined("workspace-write", `echo x >new; echo y >/tmp/scratch && cat /tmp/scratch; ls "$OUT"`)
	if read(t, a.ws+"/new") != "x\n" || there("/tmp/scratch") || !strings.HasPrefix(o.stdout, "y\n") || strings.Contains(o.stdout, "f\n") {
		t.Errorf("workspace-write: %v", o)
	}
	for _, script := range []string{`echo x >>conf/compose.yml`, `mv conf c2`, `rm -r plugins/one`} {
		if o := a.confined("workspace-write", script); o.Code == 0 || read(t, a.ws+"/conf/compose.yml") != "secret\n" || !there(a.ws+"/plugins/one/main.go") {
			t.Errorf("%s: %v", script, o)
		}
	}
	o = a.confined("read-only", `cat f; echo x >ro; echo x >/tmp/ro; ls /tmp`)
	if !strings.HasPrefix(o.stdout, "secret\n") || there(a.ws+"/ro") || strings.Contains(o.stdout, "ro\n") {
		t.Errorf("read-only: %v", o)
	}
}

func TestConfinedTemp(t *testing.T) {
	requireBwrap(t)
	a := newArena(t, arenaBase(t))
	a.session = "one\n-rf"
	if o := a.confined("workspace-write", `echo x >/tmp/kept; cat /var/tmp/kept; cat "$(mktemp)"; echo "$TMPDIR"`); o.stdout != "x\n/tmp\n" || o.Code != 0 {
		t.Errorf("first call: %v", o)
	}
	if o := a.confined("workspace-write", `cat /tmp/kept`); o.stdout != "x\n" {
		t.Errorf("second call of the session: %v", o)
	}
	a.session = "two"
	if o := a.confined("workspace-write", `cat /tmp/kept`); o.Code == 0 {
		t.Errorf("another session: %v", o)
	}
	dirs, err := filepath.Glob(a.in.tempDir + "/*")
	must(t, err)
	if len(dirs) != 2 {
		t.Errorf("session directories: %q", dirs)
	}
	for _, d := range append(dirs, a.in.tempDir) {
		if fi, err := os.Stat(d); err != nil || fi.Mode().Perm() != 0o700 {
			t.Errorf("%s: %v, %v", d, fi.Mode(), err)
		}
	}
	a.session = ""
	if o := a.confined("workspace-write", `echo x >/tmp/y && ls -A /tmp`); o.stdout != "y\n" {
		t.Errorf("without a session: %v", o)
	}
	// Read-only mode has none, and no other place to write either, but for the call's own shared memory.
	o := a.confined("read-only", `for d in /tmp /var/tmp /run /dev /dev/pts / "$HOME" "$W" /proc /sys /var /usr; do (echo x >"$d/new") 2>/dev/null && echo "$d"; done; mktemp 2>/dev/null; echo "[$TMPDIR]"; echo x >/dev/shm/x && cat /dev/shm/x`,
		func(s *launch.Spec) { s.Env = append(s.Env, "TMPDIR=/somewhere") })
	if o.stdout != "[]\nx\n" {
		t.Errorf("writable in read-only mode: %v", o)
	}
}

func TestConfinedDevices(t *testing.T) {
	requireBwrap(t)
	a := newArena(t, arenaBase(t))
	for _, mode := range []string{"read-only", "workspace-write"} {
		o := a.confined(mode, `echo x >/dev/null && head -c1 /dev/zero >/dev/null && head -c1 /dev/urandom >/dev/null && head -c1 /dev/random >/dev/null &&
			! echo x 2>/dev/null >/dev/full && [ -c /dev/tty ] && [ -d /dev/shm ] && [ -c /dev/ptmx ] && [ -d /dev/pts ] && : >>/dev/stdout && echo fine; ls /dev | tr '\n' ' '`)
		if want := "fine\ncore fd full null ptmx pts random shm stderr stdin stdout tty urandom zero "; o.stdout != want {
			t.Errorf("%s: %v", mode, o)
		}
	}
	if _, err := exec.LookPath("script"); err == nil {
		if o := a.confined("read-only", `script -qec 'tty; exit 3' /dev/null`); o.Code != 3 || !strings.HasPrefix(o.stdout, "/dev/pts/") {
			t.Errorf("a terminal of its own: %v", o)
		}
	}
}

func TestConfinedGit(t *testing.T) {
	requireBwrap(t)
	if _, err := exec.LookPath("git"); err != nil {
		t.Skip("no git here")
	}
	a := newArena(t, arenaBase(t))
	o := a.confined("workspace-write", `mkdir repo && cd repo && git init -q . && git config user.email a@b && git config user.name n && echo x >f && git add -A && git commit -qm one && git status --porcelain && git log --oneline | wc -l`)
	if strings.TrimSpace(o.stdout) != "1" || o.Code != 0 {
		t.Errorf("%v", o)
	}
	if o := a.confined("read-only", `cd repo && git status --porcelain && git log --oneline | wc -l`); strings.TrimSpace(o.stdout) != "1" {
		t.Errorf("read-only: %v", o)
	}
}

// A variable like LD_PRELOAD acts on the command, not on bubblewrap, which works outside the sandbox it builds.
func TestConfinedEnvironment(t *testing.T) {
	requireBwrap(t)
	a := newArena(t, arenaBase(t))
	debug := func(s *launch.Spec) { s.Env = append(s.Env, "LD_DEBUG=files") }
	const mark = "initialize program: "
	if o := a.plain("exec bwrap --version", debug); !strings.Contains(o.stderr, mark) || !strings.Contains(o.stderr, "bwrap") {
		t.Skipf("this C library does not tell: %v", o)
	}
	o := a.confined("read-only", `/bin/cat /dev/null`, debug)
	if strings.Contains(o.stderr, mark+probed.path) || !strings.Contains(o.stderr, mark+"/bin/cat") {
		t.Errorf("loaded: %v", grep(o.stderr, mark))
	}
	o = a.confined("workspace-write", `printf '%s|' "$A" "$B" "$PWD" "$SSH_AUTH_SOCK" "$DBUS_SESSION_BUS_ADDRESS"`, func(s *launch.Spec) {
		s.Env = append(s.Env, "A=new\nline", "B=", "SSH_AUTH_SOCK=/tmp/x", "DBUS_SESSION_BUS_ADDRESS=unix:path=/run/x", "PWD=/wrong")
	})
	if o.stdout != "new\nline||"+a.ws+"|||" {
		t.Errorf("%v", o)
	}
}

func grep(text, word string) (found []string) {
	for line := range strings.Lines(text) {
		if strings.Contains(line, word) {
			found = append(found, line)
		}
	}
	return found
}

// tree lists everything below a directory with its mode and size.
func tree(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	must(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		size := fi.Size()
		if d.IsDir() {
			size = 0
		}
		_, err = fmt.Fprintf(&b, "%s %v %d\n", path, fi.Mode(), size)
		return err
	}))
	return b.String()
}

func TestConfinedLeavesNoResidue(t *testing.T) {
	requireBwrap(t)
	a := newArena(t, arenaBase(t))
	before := tree(t, a.base)
	for _, mode := range []string{"read-only", "workspace-write"} {
		a.confined(mode, "true")
	}
	// Also when the whole sandbox is killed halfway.
	reply, err := a.confine("workspace-write", a.ws, "sleep", "1000")
	must(t, err)
	p, err := launch.Start(t.Context(), launch.Spec{Launch: reply.GetLaunch(), Env: a.env()})
	must(t, err)
	must(t, syscall.Kill(p.Pid(), syscall.SIGKILL))
	p.Wait()
	if after := tree(t, a.base); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
}

func TestConfinedEnds(t *testing.T) {
	requireBwrap(t)
	a := newArena(t, arenaBase(t))
	script := `(trap "" TERM HUP; setsid sh -c 'trap "" TERM; sleep 300; :' "$TOKEN" >/dev/null 2>&1 </dev/null) & sh -c 'sleep 300; :' "$TOKEN" & echo up; wait`
	start := func(ctx context.Context) *launch.Process {
		reply, err := a.confine("workspace-write", a.ws, "sh", "-c", script)
		must(t, err)
		up := &signalWriter{first: make(chan struct{})}
		p, err := launch.Start(ctx, launch.Spec{Launch: reply.GetLaunch(), Env: a.env(), Stdout: up, Grace: time.Second})
		must(t, err)
		<-up.first
		// The two in the background start in their own time.
		for end := time.Now().Add(30 * time.Second); len(a.running()) < 2; time.Sleep(5 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatal("control: nothing runs")
			}
		}
		return p
	}
	ctx, cancel := context.WithCancel(t.Context())
	p := start(ctx)
	cancel()
	if r := p.Wait(); !errors.Is(r.Cause, context.Canceled) {
		t.Errorf("%+v", r)
	}
	if left := a.running(); len(left) > 0 {
		t.Errorf("cancelled, and %v still run", left)
	}
	// The runner killed from outside.
	p = start(t.Context())
	must(t, syscall.Kill(p.Pid(), syscall.SIGKILL))
	p.Wait()
	for end := time.Now().Add(10 * time.Second); len(a.running()) > 0; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("killed, and %v still run", a.running())
		}
	}
}

// signalWriter tells when the first output has come.
type signalWriter struct {
	once  sync.Once
	first chan struct{}
	mu    sync.Mutex
	buf   bytes.Buffer
}

func (w *signalWriter) Write(p []byte) (int, error) {
	w.once.Do(func() { close(w.first) })
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.buf.Write(p)
}

func (w *signalWriter) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.buf.String()
}

func TestConfinedAtOnce(t *testing.T) {
	requireBwrap(t)
	a := newArena(t, arenaBase(t))
	a.session = "s"
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() {
			o := a.confined("workspace-write", fmt.Sprintf(`echo %d >n%d; cat n%d; echo x >/tmp/%d`, i, i, i, i))
			if o.stdout != fmt.Sprintln(i) || o.Code != 0 {
				t.Errorf("%d: %v", i, o)
			}
		})
	}
	wg.Wait()
}

func TestConfinedRefusals(t *testing.T) {
	requireBwrap(t)
	a := newArena(t, arenaBase(t))
	must(t, os.Symlink(a.ws, a.base+"/alias"))
	must(t, os.Symlink("conf/compose.yml", a.ws+"/compose-link.yml"))
	must(t, os.Symlink("conf", a.ws+"/conf-link"))
	must(t, os.Link(a.ws+"/conf/compose.yml", a.ws+"/conf/hard.yml"))
	must(t, os.MkdirAll(a.ws+"/bin", 0o755))
	good := func() *sandboxv1.ConfineRequest {
		return &sandboxv1.ConfineRequest{Argv: []string{"true"}, Cwd: "/", Mode: "workspace-write", WorkspaceRoot: a.ws + "/sub"}
	}
	for _, c := range []struct {
		name   string
		edit   func(*sandboxv1.ConfineRequest, *surroundings)
		code   codes.Code
		reason string
		word   string
	}{
		{"good", func(*sandboxv1.ConfineRequest, *surroundings) {}, codes.OK, "", ""},
		{"no argv", func(r *sandboxv1.ConfineRequest, _ *surroundings) { r.Argv = nil }, codes.InvalidArgument, reasonInvalid, "argv"},
		{"empty program", func(r *sandboxv1.ConfineRequest, _ *surroundings) { r.Argv = []string{""} }, codes.InvalidArgument, reasonInvalid, "argv"},
		{"dash", func(r *sandboxv1.ConfineRequest, _ *surroundings) { r.Argv = []string{"-c"} }, codes.InvalidArgument, reasonInvalid, "dash"},
		{"danger", func(r *sandboxv1.ConfineRequest, _ *surroundings) { r.Mode = "danger-full-access" }, codes.InvalidArgument, reasonInvalid, "mode"},
		{"no mode", func(r *sandboxv1.ConfineRequest, _ *surroundings) { r.Mode = "" }, codes.InvalidArgument, reasonInvalid, "mode"},
		{"relative root", func(r *sandboxv1.ConfineRequest, _ *surroundings) { r.WorkspaceRoot = "ws" }, codes.InvalidArgument, reasonInvalid, "absolute"},
		{"missing root", func(r *sandboxv1.ConfineRequest, _ *surroundings) { r.WorkspaceRoot = "/gone" }, codes.InvalidArgument, reasonInvalid, "/gone"},
		{"root is a file", func(r *sandboxv1.ConfineRequest, _ *surroundings) { r.WorkspaceRoot = a.ws + "/f" }, codes.InvalidArgument, reasonInvalid, "not a directory"},
		{"root is a link", func(r *sandboxv1.ConfineRequest, _ *surroundings) { r.WorkspaceRoot = a.base + "/alias" }, codes.InvalidArgument, reasonInvalid, "canonical"},
		{"root has dots", func(r *sandboxv1.ConfineRequest, _ *surroundings) { r.WorkspaceRoot = a.ws + "/sub/.." }, codes.InvalidArgument, reasonInvalid, "canonical"},
		{"missing cwd", func(r *sandboxv1.ConfineRequest, _ *surroundings) { r.Cwd = a.ws + "/gone" }, codes.InvalidArgument, reasonInvalid, "gone"},
		{"cwd is a file", func(r *sandboxv1.ConfineRequest, _ *surroundings) { r.Cwd = a.ws + "/f" }, codes.InvalidArgument, reasonInvalid, "not a directory"},
		{"session leads elsewhere", func(r *sandboxv1.ConfineRequest, _ *surroundings) { r.Session = "../x" }, codes.InvalidArgument, reasonInvalid, "session id"},
		{"root in the state", func(r *sandboxv1.ConfineRequest, _ *surroundings) { r.WorkspaceRoot = a.state }, codes.FailedPrecondition, reasonNotExpressible, "state"},
		{"root is /", func(r *sandboxv1.ConfineRequest, _ *surroundings) { r.WorkspaceRoot = "/" }, codes.FailedPrecondition, reasonNotExpressible, "runs on"},
		{"root is /usr", func(r *sandboxv1.ConfineRequest, _ *surroundings) { r.WorkspaceRoot = "/usr" }, codes.FailedPrecondition, reasonNotExpressible, "runs on"},
		{"root in /proc", func(r *sandboxv1.ConfineRequest, _ *surroundings) { r.WorkspaceRoot = "/proc/sys" }, codes.FailedPrecondition, reasonNotExpressible, "/proc"},
		{"protected link", func(r *sandboxv1.ConfineRequest, in *surroundings) {
			r.WorkspaceRoot, in.protected = a.ws, []string{a.ws + "/compose-link.yml"}
		}, codes.FailedPrecondition, reasonNotExpressible, "symbolic link"},
		{"protected behind a link", func(r *sandboxv1.ConfineRequest, in *surroundings) {
			r.WorkspaceRoot, in.protected = a.ws, []string{a.ws + "/conf-link/compose.yml"}
		}, codes.FailedPrecondition, reasonNotExpressible, "symbolic link"},
		{"protected by way of a link outside", func(r *sandboxv1.ConfineRequest, in *surroundings) {
			r.WorkspaceRoot, in.protected = a.ws, []string{a.base + "/alias/f"}
		}, codes.OK, "", ""},
		{"protected hard link", func(r *sandboxv1.ConfineRequest, in *surroundings) {
			r.WorkspaceRoot, in.protected = a.ws, []string{a.ws + "/conf/compose.yml"}
		}, codes.FailedPrecondition, reasonNotExpressible, "hard links"},
		{"root in a protected directory", func(r *sandboxv1.ConfineRequest, in *surroundings) { in.protected = []string{a.ws} }, codes.FailedPrecondition, reasonNotExpressible, "inside the protected path"},
	} {
		in := a.in
		req := good()
		c.edit(req, &in)
		b := *a
		b.in = in
		_, err := b.provider().Confine(t.Context(), req)
		if status.Code(err) != c.code || fault.Reason(err) != c.reason || c.word != "" && !strings.Contains(err.Error(), c.word) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	// What only matters for writing does not stop reading.
	req := good()
	req.WorkspaceRoot, req.Mode = "/", "read-only"
	reply, err := a.provider().Confine(t.Context(), req)
	must(t, err)
	if o := a.start(launch.Spec{Launch: reply.GetLaunch()}); o.Code != 0 {
		t.Errorf("read-only with root /: %v", o)
	}
	// bubblewrap itself must not be writable from inside.
	b := a.provider()
	b.verdict.selected.(*bwrap).path = a.ws + "/bin/bwrap"
	req = good()
	req.WorkspaceRoot = a.ws + "/bin"
	if _, err := b.Confine(t.Context(), req); fault.Reason(err) != sandbox.ReasonUnavailable {
		t.Errorf("bubblewrap in the workspace: %v", err)
	}
}

// fakeBwrap puts a script called bwrap first on PATH.
func fakeBwrap(t *testing.T, script string, mode os.FileMode) (surroundings, string) {
	t.Helper()
	dir := arenaBase(t)
	must(t, os.WriteFile(dir+"/bwrap", []byte("#!/bin/sh\n"+script), 0o755))
	must(t, os.Chmod(dir+"/bwrap", mode))
	return surroundings{getenv: func(name string) string {
		if name == "PATH" {
			return dir
		}
		return os.Getenv(name)
	}}, dir
}

func TestUnavailable(t *testing.T) {
	quiet := slog.New(slog.DiscardHandler)
	for _, c := range []struct {
		name, script string
		mode         os.FileMode
		config       Config
		words        []string
	}{
		{"missing", "", 0o644, Plugin.Default(), []string{"bwrap is not on PATH", "install bubblewrap"}},
		{"namespaces refused", "echo 'bwrap: Creating new namespace failed: Operation not permitted' >&2; exit 1", 0o755, Plugin.Default(), []string{"bwrap: Creating new namespace failed", "kernel ", "fix: "}},
		{"procfs refused", "echo \"bwrap: Can't mount proc on /newroot/proc: Operation not permitted\" >&2; exit 1", 0o755, Plugin.Default(), []string{"mount(2)"}},
		{"silent", "exit 1", 0o755, Plugin.Default(), []string{"without a word"}},
		{"writable by others", "exit 0", 0o757, Plugin.Default(), []string{"can be written by others"}},
		{"runs things unconfined", `while [ "$1" != -- ]; do shift || exit 0; done; shift; exec "$@"`, 0o755, Plugin.Default(), []string{strings.TrimSpace(stagePrefix)}},
		{"slow", `[ "$1" = --version ] || exec sleep 1000`, 0o755, Config{Runner: "bwrap", ProbeTimeoutMs: 300}, []string{"did not end in time", "probeTimeoutMs"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			in, dir := fakeBwrap(t, c.script, c.mode)
			p := newProvider(c.config, quiet, in)
			_, err := p.Confine(t.Context(), &sandboxv1.ConfineRequest{Argv: []string{"touch", dir + "/ran"}, Cwd: "/", Mode: "read-only", WorkspaceRoot: "/"})
			if fault.Reason(err) != sandbox.ReasonUnavailable || status.Code(err) != codes.FailedPrecondition {
				t.Fatalf("got %v", err)
			}
			for _, w := range append(c.words, `sandbox mode "read-only" is requested but no sandbox backend is usable on this host`, "Runner failure: bwrap: ") {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%q is not in %v", w, err)
				}
			}
			if there(dir + "/ran") {
				t.Error("the command ran")
			}
		})
	}
}

// The verdict stands until somebody asks again, unless it was only for want of time.
func TestUnavailableVerdictIsCached(t *testing.T) {
	requireBwrap(t)
	in, dir := fakeBwrap(t, "exit 1", 0o755)
	counted := dir + "/count"
	must(t, os.WriteFile(dir+"/bwrap", []byte("#!/bin/sh\n[ \"$1\" = --version ] || echo x >>"+counted+"\nexit 1\n"), 0o755))
	p := newProvider(Plugin.Default(), slog.New(slog.DiscardHandler), in)
	req := &sandboxv1.ConfineRequest{Argv: []string{"true"}, Cwd: "/", Mode: "read-only", WorkspaceRoot: "/"}
	for range 3 {
		if _, err := p.Confine(t.Context(), req); fault.Reason(err) != sandbox.ReasonUnavailable {
			t.Fatalf("got %v", err)
		}
	}
	if got := read(t, counted); got != "x\n" {
		t.Errorf("probed %d times", strings.Count(got, "x"))
	}
	must(t, os.Remove(dir+"/bwrap"))
	must(t, os.Symlink(probed.path, dir+"/bwrap"))
	if _, err := p.Confine(t.Context(), req); err == nil {
		t.Error("the verdict changed by itself")
	}
	reply, err := p.Inspect(t.Context(), &sandboxv1.InspectRequest{ProbeAgain: true})
	must(t, err)
	if reply.GetSelected() != "bwrap" || reply.GetEnforcement().GetLevel() != "full" || reply.GetRunners()[0].GetVersion() == "" {
		t.Errorf("after looking again: %v", reply)
	}
	if _, err := p.Confine(t.Context(), req); err != nil {
		t.Errorf("after looking again: %v", err)
	}
}

// A host where seccomp forbids new namespaces: the inside of a sandbox is one.
func TestUnavailableUnderSeccomp(t *testing.T) {
	requireBwrap(t)
	a := newArena(t, arenaBase(t))
	o := a.confined("read-only", `"$H" inspect`)
	for _, w := range []string{"usable false", "reason bwrap: ", "; kernel ", "fix ", "SANDBOX_UNAVAILABLE"} {
		if w == "SANDBOX_UNAVAILABLE" {
			w = "no sandbox backend is usable on this host"
		}
		if !strings.Contains(o.stdout, w) {
			t.Errorf("%q is not in %v", w, o)
		}
	}
}

// TestConfinedOpenRights shows that what the enforcement vector calls none is open, so that the vector stays honest and a
// runner that closes it has to say so.
func TestConfinedOpenRights(t *testing.T) {
	requireBwrap(t)
	a := newArena(t, arenaBase(t))
	rights := (&bwrap{}).enforcement().GetRights()
	a.listen("unix", "@"+a.token)
	a.confined("read-only", `"$H" connect "@$TOKEN"`)
	if got := heard(a, outcome{}); got != (rights["abstract-socket"] == "none") {
		t.Errorf("abstract socket reached: %v, vector %q", got, rights["abstract-socket"])
	}
	must(t, syscall.Mkfifo(a.out+"/fifo", 0o666))
	f, err := os.OpenFile(a.out+"/fifo", os.O_RDWR|syscall.O_NONBLOCK, 0)
	must(t, err)
	defer f.Close()
	a.confined("read-only", `echo x >"$OUT/fifo"`)
	must(t, f.SetReadDeadline(time.Now().Add(100*time.Millisecond)))
	n, _ := f.Read(make([]byte, 10))
	if (n > 0) != (rights["fifo"] == "none") {
		t.Errorf("fifo written: %v, vector %q", n > 0, rights["fifo"])
	}
	if o := a.confined("read-only", `cat "$OUT/f"`); (o.stdout == "secret\n") != (rights["read"] == "none") {
		t.Errorf("reading outside: %v, vector %q", o, rights["read"])
	}
}

// Looking again must not disturb the calls that go on meanwhile.
func TestConfinedWhileLookingAgain(t *testing.T) {
	requireBwrap(t)
	a := newArena(t, arenaBase(t))
	p := newProvider(Config{Runner: "auto", ProbeTimeoutMs: 60000}, slog.New(slog.DiscardHandler), a.in)
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			if r, err := p.Inspect(t.Context(), &sandboxv1.InspectRequest{ProbeAgain: true}); err != nil || r.GetSelected() != "bwrap" {
				t.Errorf("%v, %v", r, err)
			}
		})
		wg.Go(func() {
			for range 5 {
				if _, err := p.Confine(t.Context(), &sandboxv1.ConfineRequest{Argv: []string{"true"}, Cwd: a.ws, Mode: "workspace-write", WorkspaceRoot: a.ws}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

// A confined command has its grace period, too: it is told to end, and killed only when it does not.
func TestConfinedTermination(t *testing.T) {
	requireBwrap(t)
	a := newArena(t, arenaBase(t))
	for _, c := range []struct {
		script string
		grace  time.Duration
		code   int
		out    string
	}{
		{`trap 'echo bye; exit 9' TERM; echo up; while :; do sleep 0.01; done`, time.Minute, 9, "up\nbye\n"},
		{`echo up; exec sleep 1000`, time.Minute, 143, "up\n"},
		{`trap '' TERM; echo up; while :; do sleep 1; done`, 50 * time.Millisecond, -1, "up\n"},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		reply, err := a.confine("read-only", a.ws, "sh", "-c", c.script)
		must(t, err)
		up := &signalWriter{first: make(chan struct{})}
		p, err := launch.Start(ctx, launch.Spec{Launch: reply.GetLaunch(), Env: a.env(), Stdout: up, Grace: c.grace})
		must(t, err)
		<-up.first
		cancel()
		if r := p.Wait(); r.Code != c.code || up.String() != c.out || !errors.Is(r.Cause, context.Canceled) {
			t.Errorf("%s: %+v, %q", c.script, r, up.String())
		}
	}
}

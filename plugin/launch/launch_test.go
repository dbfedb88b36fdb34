//go:build linux

package launch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	sandboxv1 "github.com/cordon-host/cordon/api/sandbox/v1"
	"github.com/cordon-host/cordon/capability/sandbox"
)

func TestMain(m *testing.M) {
	// As a helper this binary starts a command and is killed: see TestParentDeath.
	if argv := os.Getenv("LAUNCH_TEST_ARGV"); argv != "" {
		p, err := Start(context.Background(), Spec{Argv: []string{"/bin/sh", "-c", argv}, Stdout: os.Stdout})
		if err != nil {
			panic(err)
		}
		p.Wait()
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

var path = []string{"PATH=/usr/local/bin:/usr/bin:/bin"}

func sh(script string, args ...string) Spec {
	return Spec{Argv: append([]string{"sh", "-c", script, "sh"}, args...), Env: path, Grace: 5 * time.Second}
}

func run(t *testing.T, spec Spec) (Result, string, string) {
	t.Helper()
	var out, errs bytes.Buffer
	spec.Stdout, spec.Stderr = &out, &errs
	p, err := Start(t.Context(), spec)
	must(t, err)
	return p.Wait(), out.String(), errs.String()
}

func TestExit(t *testing.T) {
	for _, c := range []struct {
		script string
		code   int
		signal syscall.Signal
	}{
		{"exit 0", 0, 0}, {"exit 1", 1, 0}, {"exit 42", 42, 0}, {"exit 126", 126, 0}, {"exit 255", 255, 0},
		{"kill -TERM $$", -1, syscall.SIGTERM}, {"kill -KILL $$", -1, syscall.SIGKILL},
	} {
		r, _, _ := run(t, sh(c.script))
		if r.Code != c.code || r.Signal != c.signal || r.Cause != nil {
			t.Errorf("%s: %+v", c.script, r)
		}
		if e := r.ExitCode(); (e == nil) != (c.signal != 0) || e != nil && *e != c.code {
			t.Errorf("%s: ExitCode() = %v", c.script, e)
		}
	}
}

func TestStreamsPassUnchanged(t *testing.T) {
	data := make([]byte, 3<<20)
	for i := range data {
		data[i] = byte(i * i >> 7)
	}
	file := t.TempDir() + "/in"
	must(t, os.WriteFile(file, data, 0o600))
	f, err := os.Open(file)
	must(t, err)
	defer f.Close()
	r, w, err := os.Pipe()
	must(t, err)
	go func() {
		defer w.Close()
		_, _ = w.Write(data)
	}()
	defer r.Close()
	for name, in := range map[string]io.Reader{"memory": bytes.NewReader(data), "file": f, "pipe": r} {
		spec := sh("cat; echo oops >&2")
		spec.Stdin = in
		res, out, errs := run(t, spec)
		if res.Code != 0 || out != string(data) || errs != "oops\n" {
			t.Errorf("%s: %+v, %d bytes, %q", name, res, len(out), errs)
		}
	}
}

func TestStdinIsNull(t *testing.T) {
	r, out, _ := run(t, sh("readlink /proc/self/fd/0; cat; tty"))
	if !strings.HasPrefix(out, "/dev/null\nnot a tty") {
		t.Errorf("%+v %q", r, out)
	}
}

// A reader that never ends must not outlive the command, nor take from the file what the command did not get.
func TestStdinOutlivesCommand(t *testing.T) {
	r, w, err := os.Pipe()
	must(t, err)
	defer r.Close()
	spec := sh("exit 3")
	spec.Stdin = r
	if res, _, _ := run(t, spec); res.Code != 3 {
		t.Errorf("%+v", res)
	}
	// Only goleak's check at the end proves that the relay has ended; here, that the file is still usable.
	_, err = w.Write([]byte("x"))
	must(t, err)
	w.Close()
	if got, err := io.ReadAll(r); err != nil || string(got) != "x" {
		t.Errorf("left in stdin: %q, %v", got, err)
	}
}

func TestSharedWriterKeepsOrder(t *testing.T) {
	var both bytes.Buffer
	spec := sh("for i in 1 2 3 4 5; do echo out$i; echo err$i >&2; done")
	spec.Stdout, spec.Stderr = &both, &both
	p, err := Start(t.Context(), spec)
	must(t, err)
	p.Wait()
	var want strings.Builder
	for i := 1; i <= 5; i++ {
		fmt.Fprintf(&want, "out%d\nerr%d\n", i, i)
	}
	if both.String() != want.String() {
		t.Errorf("got %q", both.String())
	}
}

type failingWriter struct{}

func (failingWriter) Write([]byte) (int, error) { return 0, errors.New("full") }

func TestWriterFails(t *testing.T) {
	spec := sh("trap '' PIPE; while echo y; do :; done 2>/dev/null; exit 7")
	spec.Stdout = failingWriter{}
	p, err := Start(t.Context(), spec)
	must(t, err)
	if r := p.Wait(); r.Code != 7 || r.OutputErr == nil || r.OutputErr.Error() != "full" {
		t.Errorf("%+v", r)
	}
}

func TestOwnSessionAndGroup(t *testing.T) {
	r, out, _ := run(t, sh("ps -o pid=,pgid=,sid= -p $$; exec 2>&-; : </dev/tty || echo no tty"))
	f := strings.Fields(out)
	if len(f) < 3 || f[0] != f[1] || f[1] != f[2] {
		t.Errorf("%+v pid, pgid, sid = %q", r, out)
	}
}

func TestDescriptors(t *testing.T) {
	// An inherited descriptor, as a careless parent leaves it.
	leak, err := unix.Open(t.TempDir(), unix.O_RDONLY|unix.O_DIRECTORY, 0)
	must(t, err)
	defer unix.Close(leak)
	// Control: without this package it reaches a child.
	_, err = unix.FcntlInt(uintptr(leak), unix.F_SETFD, 0)
	must(t, err)
	control, err := exec.Command("sh", "-c", fmt.Sprintf("readlink /proc/self/fd/%d", leak)).Output()
	if err != nil || len(control) == 0 {
		t.Fatalf("the control did not inherit: %q, %v", control, err)
	}

	l := &sandboxv1.Launch{
		Argv:  []string{"/bin/sh", "-c", `ls /proc/self/fd | tr '\n' ' '; cat <&3; cat <&4; (echo x >/proc/self/fd/3) 2>/dev/null || echo sealed; pwd; echo $A $B $C`},
		Cwd:   "/",
		Files: []*sandboxv1.LaunchFile{{Content: []byte("one,")}, {Content: []byte("two\n")}},
		Env:   []*sandboxv1.EnvVar{{Name: "A", Value: "a2"}}, UnsetEnv: []string{"B"},
	}
	_, out, errs := run(t, Spec{Launch: l, Env: append([]string{"A=a1", "B=b1", "C=c1"}, path...)})
	// ls has one more: the directory it lists.
	if want := "0 1 2 3 4 5 one,two\nsealed\n/\na2 c1\n"; out != want {
		t.Errorf("got %q, want %q (%s)", out, want, errs)
	}
}

func TestEnvironmentByDescriptor(t *testing.T) {
	l := &sandboxv1.Launch{
		Argv:     []string{"/bin/sh", "-c", `/usr/bin/env | /usr/bin/sort | /usr/bin/tr '\n' ' '; /usr/bin/tr '\0' '|' <&4`},
		Files:    []*sandboxv1.LaunchFile{{Content: []byte("x")}},
		Env:      []*sandboxv1.EnvVar{{Name: "A", Value: "2"}},
		EnvWords: []string{"--setenv"},
	}
	_, out, errs := run(t, Spec{Launch: l, Env: []string{"LD_PRELOAD=/evil.so", "A=1", "E="}})
	if !strings.HasSuffix(out, "--setenv|LD_PRELOAD|/evil.so|--setenv|A|2|--setenv|E||") || strings.Contains(out, "LD_PRELOAD=") {
		t.Errorf("got %q (%s)", out, errs)
	}
}

func TestEnvironment(t *testing.T) {
	dir := sandbox.CanonicalPath(t.TempDir())
	_, out, _ := run(t, Spec{Argv: []string{"/usr/bin/env"}, Env: []string{"A=1", "B=x=y", "A=2"}, Dir: dir})
	if want := "A=2\nB=x=y\nPWD=" + dir + "\n"; out != want {
		t.Errorf("got %q, want %q", out, want)
	}
	if _, out, _ := run(t, Spec{Argv: []string{"/usr/bin/env"}}); out != "" {
		t.Errorf("an empty environment has %q", out)
	}
	for _, bad := range []string{"A", "=x", "", "A=\x00"} {
		if _, err := Start(t.Context(), Spec{Argv: []string{"/bin/true"}, Env: []string{bad}}); err == nil {
			t.Errorf("environment %q was accepted", bad)
		}
	}
}

func TestStartErrors(t *testing.T) {
	ended, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("enough"))
	dir := t.TempDir()
	must(t, os.WriteFile(dir+"/plain", nil, 0o644))
	for _, c := range []struct {
		name  string
		ctx   context.Context
		spec  Spec
		want  string
		blame bool // a runner's fault
	}{
		{name: "nothing", spec: Spec{}, want: "either a launch or an argv"},
		{name: "both", spec: Spec{Argv: []string{"x"}, Launch: &sandboxv1.Launch{}}, want: "either a launch or an argv"},
		{name: "no program", spec: Spec{Argv: []string{""}}, want: ErrArgv.Error()},
		{name: "empty launch", spec: Spec{Launch: &sandboxv1.Launch{}}, want: ErrArgv.Error()},
		{name: "grace", spec: Spec{Argv: []string{"x"}, Grace: -1}, want: "grace"},
		{name: "aborted", ctx: ended, spec: sh("echo ran >" + dir + "/ran"), want: "aborted before spawn: enough"},
		{name: "missing", spec: Spec{Argv: []string{"/gone/runner"}, Dir: dir}, want: "no such file", blame: true},
		{name: "not on PATH", spec: Spec{Argv: []string{"no-such-program"}, Env: path, Dir: dir}, want: "executable file not found", blame: true},
		{name: "relative PATH", spec: Spec{Argv: []string{"plain"}, Env: []string{"PATH=.:"}, Dir: dir}, want: "executable file not found", blame: true},
		{name: "not executable", spec: Spec{Argv: []string{dir + "/plain"}, Dir: dir}, want: "permission denied", blame: true},
		{name: "workdir", spec: Spec{Argv: []string{"/bin/sh"}, Dir: dir + "/gone"}, want: "no such file"},
		{name: "NUL", spec: Spec{Argv: []string{"/bin/sh", "a\x00b"}}, want: "invalid argument"},
	} {
		ctx := c.ctx
		if ctx == nil {
			ctx = t.Context()
		}
		c.spec.Stdin, c.spec.Stdout = os.Stdin, io.Discard
		_, err := Start(ctx, c.spec)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
			continue
		}
		argv0 := ""
		if len(c.spec.Argv) > 0 {
			argv0 = c.spec.Argv[0]
		}
		if got := sandbox.IsRunnerSpawnFailure(err, argv0, c.spec.Dir); got != c.blame {
			t.Errorf("%s: blamed on the runner: %v", c.name, got)
		}
	}
	if _, err := os.Stat(dir + "/ran"); err == nil {
		t.Error("an aborted command ran")
	}
}

// lines is a writer that tells when a line has come.
type lines struct {
	mu  sync.Mutex
	buf bytes.Buffer
	c   chan string
}

func newLines() *lines { return &lines{c: make(chan string, 100)} }

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.buf.Write(p)
	for {
		line, err := l.buf.ReadString('\n')
		if err != nil {
			l.buf.WriteString(line)
			return len(p), nil
		}
		l.c <- strings.TrimSpace(line)
	}
}

func (l *lines) next(t *testing.T) string {
	t.Helper()
	select {
	case s := <-l.c:
		return s
	case <-time.After(30 * time.Second):
		t.Fatal("no line came")
		return ""
	}
}

// alive reports whether a process runs. Killed ones may be zombies of an init that is slow to reap; those do not.
func alive(pid string) bool {
	n, err := strconv.Atoi(pid)
	if err != nil {
		panic(err)
	}
	p, ok := readProcess(n)
	return ok && !p.dead()
}

func TestTermination(t *testing.T) {
	for _, c := range []struct {
		name   string
		script string // prints the pids it wants to be gone, then "ready"
		grace  time.Duration
		check  func(t *testing.T, r Result)
	}{
		{"a handler finishes in its own way", `trap 'exit 9' TERM; echo ready; while :; do sleep 0.01; done`, 20 * time.Second,
			func(t *testing.T, r Result) {
				if r.Code != 9 {
					t.Errorf("%+v", r)
				}
			}},
		{"the default action", `echo ready; sleep 100`, 20 * time.Second, func(t *testing.T, r Result) {
			if r.Signal != syscall.SIGTERM {
				t.Errorf("%+v", r)
			}
		}},
		{"a leader that ignores SIGTERM", `trap '' TERM; echo ready; while :; do sleep 1; done`, 50 * time.Millisecond, func(t *testing.T, r Result) {
			if r.Signal != syscall.SIGKILL {
				t.Errorf("%+v", r)
			}
		}},
		{"a grandchild that ignores SIGTERM and outlives the leader", `(trap '' TERM; exec >/dev/null 2>&1; while :; do sleep 1; done) & echo $!; echo ready; wait`, 50 * time.Millisecond, nil},
		{"the same one, holding the output", `(trap '' TERM; while :; do sleep 1; done) & echo $!; echo ready; wait`, 50 * time.Millisecond, nil},
		{"a session of its own", `setsid sh -c 'trap "" TERM; echo $$; echo ready; while :; do sleep 1; done' & wait`, 50 * time.Millisecond, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			spec := sh(c.script)
			spec.Grace = c.grace
			l := newLines()
			spec.Stdout = l
			p, err := Start(ctx, spec)
			must(t, err)
			pids := []string{strconv.Itoa(p.Pid())}
			for line := l.next(t); line != "ready"; line = l.next(t) {
				pids = append(pids, line)
			}
			for _, pid := range pids {
				if !alive(pid) {
					t.Fatalf("control: %s is not running", pid)
				}
			}
			cause := errors.New("the client went away")
			cancel(cause)
			r := p.Wait()
			if r.Cause != cause {
				t.Errorf("cause = %v", r.Cause)
			}
			for _, pid := range pids {
				if alive(pid) {
					t.Errorf("%s still runs", pid)
				}
			}
			if c.check != nil {
				c.check(t, r)
			}
			p.Terminate(nil) // after the end: nothing to do
		})
	}
}

func TestNothingOfTheGroupIsLeft(t *testing.T) {
	r, out, _ := run(t, sh("sleep 100 >/dev/null 2>&1 & echo $!"))
	if pid := strings.TrimSpace(out); alive(pid) || r.Code != 0 || r.Cut {
		t.Errorf("%+v, %s alive: %v", r, pid, alive(pid))
	}
}

func TestPipeHolder(t *testing.T) {
	spec := sh("setsid sh -c 'echo $$; exec sleep 100' & sleep 0.2; echo up")
	spec.Grace = 100 * time.Millisecond
	r, out, _ := run(t, spec)
	f := strings.Fields(out)
	if len(f) != 2 || f[1] != "up" || r.Code != 0 || !r.Cut {
		t.Fatalf("%+v %q", r, out)
	}
	// It left the group and nobody terminated the command: it is not this package's to end.
	pid, err := strconv.Atoi(f[0])
	must(t, err)
	must(t, syscall.Kill(pid, syscall.SIGKILL))
}

// gate is a writer that blocks until it is opened.
type gate struct {
	open    chan struct{}
	blocked chan struct{} // gets one value for every write
	buf     bytes.Buffer
}

func newGate() *gate { return &gate{open: make(chan struct{}), blocked: make(chan struct{}, 100)} }

func (g *gate) Write(p []byte) (int, error) {
	g.blocked <- struct{}{}
	<-g.open
	return g.buf.Write(p)
}

// A slow reader gets everything, however long it takes after the end of the command.
func TestSlowReader(t *testing.T) {
	g := newGate()
	spec := sh("head -c 60000 /dev/zero")
	spec.Stdout, spec.Grace = g, time.Millisecond
	p, err := Start(t.Context(), spec)
	must(t, err)
	<-p.exited
	select {
	case <-p.Done():
		t.Error("Wait would return before the output was taken")
	case <-g.blocked:
	}
	close(g.open)
	if r := p.Wait(); g.buf.Len() != 60000 || r.Cut {
		t.Errorf("%+v, %d bytes", r, g.buf.Len())
	}
}

func TestBlockedReaderAndTermination(t *testing.T) {
	g := newGate()
	spec := sh("yes")
	spec.Stdout, spec.Grace = g, 20*time.Millisecond
	p, err := Start(t.Context(), spec)
	must(t, err)
	<-g.blocked
	p.Terminate(nil)
	if r := p.Wait(); !r.Cut || r.Cause == nil {
		t.Errorf("%+v", r)
	}
	close(g.open) // lets the abandoned copy end
}

// The command dies with this process, and not with the thread that happened to start it.
func TestParentDeath(t *testing.T) {
	pidFile := t.TempDir() + "/pid"
	helper := exec.Command("/proc/self/exe")
	helper.Env = append(os.Environ(), "LAUNCH_TEST_ARGV=echo $$ >"+pidFile+"; echo up; exec sleep 100")
	out, err := helper.StdoutPipe()
	must(t, err)
	must(t, helper.Start())
	if _, err := io.ReadFull(out, make([]byte, 3)); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(pidFile)
	must(t, err)
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	must(t, err)
	fd, err := unix.PidfdOpen(pid, 0)
	must(t, err)
	defer unix.Close(fd)
	must(t, helper.Process.Kill())
	_ = helper.Wait()
	if n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 30000); n != 1 {
		t.Errorf("the command outlived its parent: %v", err)
	}
}

func TestManyAtOnce(t *testing.T) {
	var wg sync.WaitGroup
	for i := range 40 {
		wg.Go(func() {
			r, out, _ := run(t, sh(`echo "$1"; exit "$1"`, strconv.Itoa(i)))
			if r.Code != i || out != fmt.Sprintln(i) {
				t.Errorf("%d: %+v %q", i, r, out)
			}
		})
	}
	wg.Wait()
	var zombies []int
	for _, p := range processes() {
		if p.parent == os.Getpid() && p.dead() {
			zombies = append(zombies, p.pid)
		}
	}
	if len(zombies) > 0 {
		t.Errorf("zombies: %v", zombies)
	}
	fds, err := filepath.Glob("/proc/self/fd/*")
	must(t, err)
	var pipes []string
	for _, fd := range fds {
		if to, _ := os.Readlink(fd); strings.HasPrefix(to, "pipe:") || strings.Contains(to, "memfd:") {
			pipes = append(pipes, to)
		}
	}
	if n := len(slices.Compact(pipes)); n > 6 { // the test binary's own stdio and the runtime's
		t.Errorf("%d pipes are still open: %v", n, pipes)
	}
}

func FuzzParseStat(f *testing.F) {
	f.Add([]byte("12 (a) b) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 99 20"))
	f.Add([]byte(")"))
	f.Add([]byte(""))
	f.Fuzz(func(t *testing.T, b []byte) { parseStat(1, b) })
}

package cli

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
	sandboxv1 "github.com/cordon-host/cordon/api/sandbox/v1"
	"github.com/cordon-host/cordon/capability/fault"
)

// confining is a fake whose runner is a program that starts the command as its child, as bwrap does, or no program at all.
func confining(runner ...string) *fake {
	f := newFake()
	f.confine = func(r *controlv1.ConfineRequest) (*sandboxv1.ConfineReply, error) {
		return &sandboxv1.ConfineReply{
			Launch: &sandboxv1.Launch{
				Argv: append(runner, r.GetArgv()...), Cwd: r.GetCwd(),
				Env: []*sandboxv1.EnvVar{{Name: "CONFINED", Value: r.GetMode()}},
			},
			Runner: "bwrap",
			RunnerFailureRules: []*sandboxv1.RunnerFailureRule{
				{AllowedExitCodes: []int32{1}, FatalSignatures: []string{"bwrap: "}},
			},
		}, nil
	}
	return f
}

func TestRun(t *testing.T) {
	for _, tt := range []struct {
		name, stdin string
		args        []string
		code        int
		stdout      string
		stderr      string
		started     int
	}{
		{"output and code", "", []string{"--mode", "workspace-write", "--", "sh", "-c", "echo $CONFINED; echo no >&2; exit 42"}, 42, "workspace-write\n", "no\n", 1},
		{"stdin", "a\x00b\xff\n", []string{"--", "cat"}, 0, "a\x00b\xff\n", "", 1},
		{"no dashes, flags of the command", "", []string{"printf", "%s", "--mode"}, 0, "--mode", "", 1},
		{"death by signal", "", []string{"--", "sh", "-c", "kill -9 $$"}, 137, "", "", 1},
		{"danger needs no host", "", []string{"--mode", "danger-full-access", "--", "sh", "-c", "echo ${CONFINED-free}"}, 0, "free\n", "", 0},
		{"code 125 of the command", "", []string{"--", "sh", "-c", "exit 125"}, 125, "", "", 1},
		{"runner failed", "", []string{"--", "sh", "-c", "echo 'bwrap: Creating new namespace failed' >&2; exit 1"}, 125, "", "bwrap: Creating new namespace failed\ncordon: error: the sandbox runner failed, the command did not run: bwrap: Creating new namespace failed\ncordon: hint: cordon doctor says what works\n", 1},
		{"no such command", "", []string{"--", "no-such-command"}, 127, "", "cordon: error: no-such-command: no such command in PATH\n", 0},
		{"no such path", "", []string{"--", "./no-such"}, 127, "", "cordon: error: ./no-such: no such command\n", 0},
		{"not executable", "", []string{"--", "./compose.yml"}, 126, "", "cordon: error: ./compose.yml: is not executable\n", 0},
		{"a directory", "", []string{"--", "/"}, 126, "", "cordon: error: /: is a directory\n", 0},
		{"no such directory", "", []string{"--cwd", "/no/such", "--", "true"}, 125, "", "cordon: error: cwd /no/such: no such file or directory\n", 0},
		{"a file as directory", "", []string{"--cwd", "/etc/passwd", "--", "true"}, 125, "", "cordon: error: cwd /etc/passwd: not a directory\n", 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := confining()
			s := newShell(t, f).input(tt.stdin)
			code := s.run(append([]string{"run"}, tt.args...)...)
			if code != tt.code || s.stdout.String() != tt.stdout || s.stderr.String() != tt.stderr {
				t.Errorf("exit code %d, stdout %q, stderr %q\nwant %d, %q, %q", code, s.stdout, s.stderr, tt.code, tt.stdout, tt.stderr)
			}
			if f.started != tt.started || f.stopped != tt.started {
				t.Errorf("%d hosts started, %d stopped, want %d", f.started, f.stopped, tt.started)
			}
		})
	}
}

func TestRunPassesBytesUnchanged(t *testing.T) {
	all := make([]byte, 1<<20)
	for i := range all {
		all[i] = byte(i ^ i>>8)
	}
	s := newShell(t, confining()).input(string(all))
	if code := s.run("run", "--", "cat"); code != 0 {
		t.Fatalf("exit code %d: %s", code, s.stderr)
	}
	if !bytes.Equal([]byte(s.stdout.String()), all) {
		t.Error("output differs from input")
	}
}

func TestRunRefusals(t *testing.T) {
	for _, tt := range []struct {
		name   string
		err    error
		stderr string
	}{
		{"no runner", fault.New(codes.FailedPrecondition, "SANDBOX_UNAVAILABLE", "no sandbox backend is usable"), "cordon: error: no sandbox backend is usable\ncordon: hint: cordon doctor says why no runner is usable\n"},
		{"unconfined default", fault.New(codes.InvalidArgument, "BAD_MODE", "x"), "cordon: error: the deployment's default mode has no sandbox\ncordon: hint: repeat with --mode danger-full-access if that is meant\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFake()
			f.confine = func(*controlv1.ConfineRequest) (*sandboxv1.ConfineReply, error) { return nil, tt.err }
			s := newShell(t, f)
			witness := filepath.Join(t.TempDir(), "ran")
			if code := s.run("run", "--", "touch", witness); code != 125 || s.stderr.String() != tt.stderr {
				t.Errorf("exit code %d, stderr %q", code, s.stderr)
			}
			if _, err := os.Stat(witness); err == nil {
				t.Error("the command ran")
			}
		})
	}
}

// runner is a launcher that stays in front of the command and dies of signals, as bwrap does. It is a copy of sh, so that it is
// another program than any command.
func runner(t *testing.T) []string {
	t.Helper()
	sh, err := os.Open("/bin/sh")
	if err != nil {
		t.Fatal(err)
	}
	defer sh.Close()
	path := filepath.Join(t.TempDir(), "runner")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o700)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(f, sh); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	return []string{path, "-c", `"$@" & wait $!; exit $?`, "runner"}
}

func TestRunPassesSignalsOn(t *testing.T) {
	for _, tt := range []struct {
		name   string
		runner []string
	}{
		{"to the command itself", nil},
		{"to the command below a runner", runner(t)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newShell(t, confining(tt.runner...))
			code := make(chan int)
			go func() {
				code <- s.run("run", "--", "bash", "-c", `trap 'echo got usr1' USR1; trap 'echo got term; exit 7' TERM; echo ready $$; while :; do read -t 1 </dev/zero; done`)
			}()
			s.stdout.await(t, "ready")
			me := os.Getpid()
			if err := syscall.Kill(me, syscall.SIGUSR1); err != nil {
				t.Fatal(err)
			}
			s.stdout.await(t, "got usr1")
			if err := syscall.Kill(me, syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			if got := <-code; got != 7 {
				t.Errorf("exit code %d, want 7; stderr %s", got, s.stderr)
			}
		})
	}
}

// A command that ignores interrupts ends when the person insists.
func TestRunInsisting(t *testing.T) {
	s := newShell(t, confining())
	code := make(chan int)
	go func() {
		code <- s.run("run", "--", "bash", "-c", `trap 'echo no' INT; echo ready; while :; do read -t 1 </dev/zero; done`)
	}()
	s.stdout.await(t, "ready")
	for range insist {
		n := strings.Count(s.stdout.String(), "no")
		if err := syscall.Kill(os.Getpid(), syscall.SIGINT); err != nil {
			t.Fatal(err)
		}
		if n < insist-1 {
			s.stdout.await(t, strings.Repeat("no\n", n+1))
		}
	}
	if got := <-code; got != 128+15 {
		t.Errorf("exit code %d, want 143 (terminated)", got)
	}
}

func TestRunInterruptedBeforeTheCommand(t *testing.T) {
	f := newFake()
	entered := make(chan struct{})
	f.confine = func(*controlv1.ConfineRequest) (*sandboxv1.ConfineReply, error) {
		close(entered)
		return confining().confine(&controlv1.ConfineRequest{Argv: []string{"touch", "ran"}})
	}
	s := newShell(t, f)
	ctx, cancel := context.WithCancelCause(t.Context())
	code := make(chan int)
	go func() { code <- s.world.run(ctx, []string{"run", "--", "sleep", "1000"}) }()
	<-entered
	cancel(&interrupted{syscall.SIGINT})
	if got := <-code; got != 130 {
		t.Errorf("exit code %d, want 130: %s", got, s.stderr)
	}
}

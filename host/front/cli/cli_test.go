package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
	sandboxv1 "github.com/cordon-host/cordon/api/sandbox/v1"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/host/compose"
)

// commands are all commands a person can find.
func commands(root *cobra.Command) []*cobra.Command {
	out := []*cobra.Command{root}
	for _, c := range root.Commands() {
		if !c.Hidden && c.Name() != "help" && c.Name() != "completion" {
			out = append(out, commands(c)...)
		}
	}
	return out
}

func TestHelp(t *testing.T) {
	for _, c := range commands((&app{}).root()) {
		name := strings.ReplaceAll(c.CommandPath(), " ", "-")
		t.Run(name, func(t *testing.T) {
			if c.Example == "" || c.Short == "" || c.Long == "" {
				t.Errorf("%s lacks an example or a description", c.CommandPath())
			}
			s := newShell(t, newFake())
			args := append(strings.Fields(c.CommandPath())[1:], "--help")
			if code := s.run(args...); code != 0 || s.stderr.String() != "" {
				t.Fatalf("exit code %d, stderr %q", code, s.stderr)
			}
			golden(t, "help/"+name+".txt", s.stdout.String())
		})
	}
}

func TestExitCodes(t *testing.T) {
	f := func(change func(*fake)) *fake {
		f := newFake()
		change(f)
		return f
	}
	call := func(r *controlv1.CallReply, err error) *fake {
		return f(func(f *fake) {
			f.call = func(_ context.Context, _ *controlv1.CallRequest) (*controlv1.CallReply, error) { return r, err }
		})
	}
	knob := func(err error) *fake {
		return f(func(f *fake) {
			f.knob = func(*controlv1.KnobRequest) (*controlv1.KnobReply, error) { return nil, err }
		})
	}
	bad := compose.Diagnostics{{Code: "C101", Severity: compose.Error, Message: "unknown key \"x\"", Place: compose.Position{File: "compose.yml", Line: 2, Column: 1}}}
	for _, tt := range []struct {
		name   string
		fake   *fake
		args   string
		code   int
		stderr string // a part of it; empty: nothing at all
	}{
		{"done", newFake(), "call bash {}", 0, ""},
		{"no arguments", newFake(), "", 0, ""},
		{"tool failed", call(&controlv1.CallReply{IsError: true, Texts: []string{"Error: no"}, ErrorCode: "INVALID_ARGUMENTS"}, nil), "call bash {}", 1, ""},
		{"unknown tool", call(&controlv1.CallReply{IsError: true, Texts: []string{"Error: no"}, ErrorCode: "TOOL_NOT_FOUND"}, nil), "call bsh {}", 1, "hint: cordon tools"},
		{"no sandbox", call(&controlv1.CallReply{IsError: true, Texts: []string{"Error: no"}, ErrorCode: "SANDBOX_UNAVAILABLE"}, nil), "call bash {}", 4, "hint: cordon doctor"},
		{"log failed", call(nil, fault.New(codes.Unavailable, "LOG_FAILED", "call could not be recorded")), "call bash {}", 4, "cordon: error: call could not be recorded\n"},
		{"bad cwd", call(nil, fault.New(codes.InvalidArgument, "BAD_SESSION", "cwd /x does not exist")), "call bash {} --cwd /x", 2, "cordon: error: cwd /x does not exist\n"},

		{"unknown command", newFake(), "cal bash", 2, "cordon: error: unknown command \"cal\"\ncordon: hint: did you mean call?\n"},
		{"one letter wrong", newFake(), "tolls", 2, "cordon: hint: did you mean tools?\n"},
		{"far from any command", newFake(), "qqqqqq", 2, "cordon: hint: see cordon --help\n"},
		{"unknown flag", newFake(), "call bash --anwser reject", 2, "cordon: error: unknown flag: --anwser\ncordon: hint: see cordon call --help\n"},
		{"missing argument", newFake(), "call", 2, "cordon: error: call: TOOL is missing\n"},
		{"surplus argument", newFake(), "call bash {} {}", 2, "unexpected argument"},
		{"surplus argument of another", newFake(), "tools x", 2, "unexpected argument"},
		{"bad answer", newFake(), "call bash {} --answer yes", 2, "--answer must be allow-once or reject, got \"yes\""},
		{"bad confirm", newFake(), "call bash {} --answer allow-once --confirm yes", 2, "--confirm must be danger-full-access"},
		{"confirm alone", newFake(), "call bash {} --confirm danger-full-access", 2, "--confirm goes with --answer allow-once"},
		{"session and cwd", newFake(), "call bash {} --session s1 --cwd /", 2, "--cwd is of a new session"},
		{"bad mode", newFake(), "mode s1 write", 2, "sandbox mode must be one of"},
		{"bad policy", newFake(), "approval s1 always", 2, "approval policy must be one of"},

		{"composition", f(func(f *fake) {
			f.startErr = &failure{code: exitComposition, err: errors.New("x"), text: "compose.yml:2:1: error C101: no\n"}
		}), "tools", 3, "compose.yml:2:1: error C101: no\n"},
		{"validate", f(func(f *fake) { f.diagnostics = bad }), "validate", 3, "compose.yml:2:1: error C101: unknown key \"x\"\n"},
		{"validate warning", f(func(f *fake) {
			f.diagnostics = compose.Diagnostics{{Code: "C410", Severity: compose.Warning, Message: "idle"}}
		}), "validate", 0, "warning C410: idle"},
		{"validate clean", newFake(), "validate", 0, ""},
		{"environment", f(func(f *fake) { f.startErr = failf(exitEnvironment, "state directory: permission denied") }), "tools", 4, "cordon: error: state directory: permission denied\n"},
		{"untrusted", f(func(f *fake) { f.startErr = failf(exitTrust, "/srv/compose.yml is not trusted\nhint: run it") }), "call bash {}", 5, "cordon: error: /srv/compose.yml is not trusted\ncordon: hint: run it\n"},
		{"untrusted validate", f(func(f *fake) { f.startErr = failf(exitTrust, "not trusted") }), "validate", 5, "not trusted"},
		{"trust", newFake(), "trust", 0, ""},

		{"no compose file", newFake(), "status -f /no/such.yml", 3, "cordon: error: compose file /no/such.yml: no such file or directory\n"},
		{"no host", newFake(), "status", 1, "cordon: hint: cordon up starts one\n"},
		{"no host to approve", newFake(), "approve list --code x", 1, "no host runs this deployment"},
		{"busy", f(func(f *fake) { f.busy = 1 }), "up", 1, "another host (pid 4711) runs this deployment"},
		{"bad code", f(func(f *fake) { f.running = true }), "call bash {} --code wrong", 1, "cordon: error: login code is wrong or was used\n"},
		{"answer without code", f(func(f *fake) { f.running = true }), "call bash {} --answer reject", 1, "cordon: hint: repeat with --code"},
		{"approve without code", f(func(f *fake) { f.running = true }), "approve list", 2, "--code is missing"},
		{"no such session", newFake(), "log s9", 1, "session \"s9\" does not exist"},
		{"no session yet", newFake(), "log last", 1, "there are no sessions yet"},
		{"preset of no session", newFake(), "preset", 2, "preset: SESSION is missing"},
		{"presets of a session", newFake(), "preset --list s1", 2, "preset: unexpected argument \"s1\""},
		{"preset mistyped confirmation", newFake(), "preset s1 all --confirm yes", 2, "--confirm must be danger-full-access"},
		{"unknown preset", knob(fault.New(codes.InvalidArgument, "UNKNOWN_PRESET", "unknown preset \"x\" (available: a, b)")), "preset s1 x", 2, "cordon: error: unknown preset \"x\" (available: a, b)\n"},
		{"preset without authority", knob(fault.New(codes.PermissionDenied, "AUTHORITY_REQUIRED", "not you")), "preset s1 all", 1, "cordon: error: not you\ncordon: hint: repeat with --code and the one-use code of the running host; danger-full-access also takes --confirm danger-full-access\n"},
		{"reload", f(func(f *fake) { f.running = true }), "reload good", 0, ""},
		{"reload what is broken", f(func(f *fake) { f.running = true }), "reload broken", 1, "cordon: error: broken does not build\n"},
		{"reload nothing", f(func(f *fake) { f.running = true }), "reload x", 1, "entry \"x\" is not in the composition"},
		{"reload without a host", newFake(), "reload good", 1, "cordon: hint: cordon up starts one\n"},
		{"logs without a host", newFake(), "logs", 1, "cordon: hint: cordon up starts one\n"},
		{"logs of no such entry", f(func(f *fake) { f.running = true }), "logs x", 1, "entry \"x\" is not in the composition"},
		{"logs bad level", newFake(), "logs --level loud", 2, "--level: log level must be one of trace, debug, info, warn, error, got \"loud\""},
		{"logs empty level", newFake(), "logs --set-level=", 2, "--set-level: log level must be one of"},
		{"logs bad tail", newFake(), "logs --tail -5", 2, "--tail must be a number of records"},
		{"logs set and follow", newFake(), "logs --set-level info --follow", 2, "--set-level prints no records"},
		{"prompt of no such session", newFake(), "prompt s9", 1, "session \"s9\" does not exist"},
		{"no runner", f(func(f *fake) { f.inspect = &sandboxv1.InspectReply{} }), "doctor", 4, ""},

		{"run usage", newFake(), "run", 125, "COMMAND is missing"},
		{"run bad flag", newFake(), "run --moed x -- true", 125, "unknown flag"},
		{"run bad mode", newFake(), "run --mode x -- true", 125, "sandbox mode must be one of"},
		{"run untrusted", f(func(f *fake) { f.startErr = failf(exitTrust, "not trusted") }), "run -- true", 125, "not trusted"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newShell(t, tt.fake)
			code := s.run(strings.Fields(tt.args)...)
			if code != tt.code {
				t.Errorf("exit code %d, want %d", code, tt.code)
			}
			if got := s.stderr.String(); !strings.Contains(got, tt.stderr) || tt.stderr == "" && got != "" {
				t.Errorf("stderr %q, want %q", got, tt.stderr)
			}
			for line := range strings.Lines(s.stderr.String()) {
				if !strings.HasPrefix(line, "cordon: ") && !strings.Contains(line, " C") {
					t.Errorf("line on stderr without its prefix: %q", line)
				}
			}
			if tt.fake.started != tt.fake.stopped {
				t.Errorf("%d hosts started, %d stopped", tt.fake.started, tt.fake.stopped)
			}
		})
	}
}

func TestNoComposeFile(t *testing.T) {
	s := newShell(t, newFake())
	s.world.dir = t.TempDir()
	if code := s.run("tools"); code != exitComposition || !strings.Contains(s.stderr.String(), "name one with -f") {
		t.Errorf("exit code %d, %s", code, s.stderr)
	}
}

func TestComposeFileIsFoundUpward(t *testing.T) {
	s := newShell(t, newFake())
	want := filepath.Join(s.world.dir, "compose.yml")
	below := filepath.Join(s.world.dir, "a", "b")
	if err := os.MkdirAll(below, 0o700); err != nil {
		t.Fatal(err)
	}
	s.world.dir = below
	other := filepath.Join(below, "x.yml")
	if err := os.WriteFile(other, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	var got place
	open := s.world.open
	s.world.open = func(p place) deployment { got = p; return open(p) }
	for _, tt := range []struct {
		args           []string
		compose, state string
	}{
		{[]string{"tools"}, want, ""},
		{[]string{"tools", "-f", "x.yml", "--state", "st"}, other, filepath.Join(below, "st")},
		{[]string{"-f", other, "--state", "/st", "tools"}, other, "/st"},
	} {
		if code := s.run(tt.args...); code != 0 {
			t.Fatalf("exit code %d: %s", code, s.stderr)
		}
		if resolved, err := filepath.EvalSymlinks(filepath.Dir(got.compose)); err == nil {
			got.compose = filepath.Join(resolved, filepath.Base(got.compose))
		}
		if got.compose != tt.compose || got.state != tt.state {
			t.Errorf("%v: compose %s, state %q; want %s, %q", tt.args, got.compose, got.state, tt.compose, tt.state)
		}
	}
}

func TestVersion(t *testing.T) {
	s := newShell(t, newFake())
	if code := s.run("--version"); code != 0 || s.stdout.String() != version()+"\n" {
		t.Errorf("exit code %d, %q", code, s.stdout)
	}
}

// A host that another command runs for its own duration is waited for.
func TestAttachWaitsForAnotherCommand(t *testing.T) {
	f := newFake()
	f.busy = 3
	s := newShell(t, f)
	if code := s.run("tools"); code != 0 || f.started != 1 || f.stopped != 1 {
		t.Errorf("exit code %d, started %d, stopped %d: %s", code, f.started, f.stopped, s.stderr)
	}
}

func TestErrorTextIsEscaped(t *testing.T) {
	f := newFake()
	f.startErr = fmt.Errorf("entry \x1b[2Kx")
	s := newShell(t, f)
	if code := s.run("tools"); code != 1 || s.stderr.String() != "cordon: error: entry \\u{1b}[2Kx\n" {
		t.Errorf("exit code %d, %q", code, s.stderr)
	}
}

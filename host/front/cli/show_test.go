package cli

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
	sandboxv1 "github.com/cordon-host/cordon/api/sandbox/v1"
	"github.com/cordon-host/cordon/host"
)

// furnished is a fake with something of everything.
func furnished() *fake {
	f := newFake()
	f.running = true
	f.status.Entries = []*controlv1.EntryStatus{
		{Id: "policy", Plugin: "sandbox-policy", Version: "0.1.0", State: "active", Generation: 1, Pid: 101, Digest: "aa", Tier: "locked", Provides: []string{"policy"}, Place: "compose.yml:8"},
		{Id: "bash", Plugin: "tool-bash", Version: "0.1.0", State: "active", Generation: 3, Pid: 105, Digest: "bb", Tier: "development", Needs: []string{"shell", "policy"}, Tools: []string{"bash"}, Place: "compose.yml:20",
			Crash: &controlv1.Crash{TimeMs: 1_700_000_001_234, Generation: 2, Exit: "exit code 2", Stderr: "main.main()", Trace: "panic: boom\n\ngoroutine 1 [running]:\nmain.main()"}},
		{Id: "mirror", Plugin: "mirror", State: "failed", Problem: "exit status 2\nstderr: no token", Listens: []string{"approval/request"}, Place: "compose.yml:24"},
	}
	f.tools = []*controlv1.Tool{
		{Name: "bash", Description: "Run a command.\nNo state is kept.", InputSchema: []byte(`{"type":"object","properties":{"command":{"type":"string"}}}`), Entry: "bash"},
		{Name: "read", Description: "Read \u00a0a file.", InputSchema: []byte(`{}`), Entry: "fs"},
	}
	f.sessions = []*controlv1.SessionInfo{
		{Id: "s0", Cwd: "/srv/a", CreatedMs: 1_700_000_000_000, Events: 12},
		{Id: "s1", Cwd: "/srv/b\nc", CreatedMs: 1_700_000_001_234, Events: 3, Live: true},
	}
	f.events = []*controlv1.LogEvent{
		{Seq: 0, TimeMs: 1_700_000_001_234, Type: "turn/start", Turn: 1, Data: []byte(`{"turn":1}`), Hash: "aa"},
		{Seq: 1, TimeMs: 1_700_000_001_240, Type: "sandbox/mode", Data: []byte(`{"mode":"workspace-write"}`), Hash: "bb"},
		{Seq: 2, TimeMs: 1_700_000_001_250, Type: "tool/call", Turn: 1, Data: []byte("{\"name\":\"b\u00a0ash\"}"), Hash: "cc"},
	}
	f.lines = []*controlv1.LogLine{
		{TimeMs: 1_700_000_001_234, Level: "info", Entry: "bash", Generation: 1, Stream: "log", Message: "hello", Attributes: []byte(`{"n":1,"text":"two words","word":"one","g":{"a":[1]}}`)},
		{TimeMs: 1_700_000_001_240, Level: "error", Entry: "bash", Generation: 1, Stream: "host", Message: "plugin crashed", Attributes: []byte(`{"exit":"exit code 2","trace":"panic: boom\n\ngoroutine 1 [running]:\nmain.main()\n"}`)},
		{TimeMs: 1_700_000_001_250, Level: "info", Entry: "bash", Generation: 2, Stream: "stdout", Message: "clear \x1b[2J\n2023-11-14 22:13:21.250  error  policy@1 log: forged", Dropped: 12, Truncated: true},
		{TimeMs: 1_700_000_001_260, Level: "warn", Entry: "policy", Stream: "host", Message: "no generation"},
	}
	f.presets = &controlv1.PresetsReply{DefaultPreset: "read-only", Presets: []*controlv1.Preset{
		{Name: "read-only", Sandbox: "read-only", Approval: "ask", Description: "Look only."},
		{Name: "all", Sandbox: "danger-full-access", Approval: "never"},
	}}
	f.prompts = map[string]*controlv1.PromptReply{
		"": {},
		"s1": {Text: "Policy: \u00a0one.\n\nPolicy: two.", Sections: []*controlv1.PromptSection{
			{Name: "sandbox:policy", Order: 110, Entry: "policy", Text: "Policy: \u00a0one."},
			{Name: "approval:policy", Order: 115, Entry: "approval", Text: "Policy: two."},
		}},
	}
	f.inspect = &sandboxv1.InspectReply{
		Selected: "bwrap",
		Runners: []*sandboxv1.RunnerReport{
			{Name: "bwrap", Usable: true, Version: "0.11.0"},
			{Name: "landlock", Reason: "not built into this version", Fix: "none is needed"},
		},
		Enforcement: &sandboxv1.Enforcement{Level: "full", Rights: map[string]string{"write": "full", "create": "full", "xattr": "partial", "tcp": "none"}},
	}
	return f
}

func TestOutputs(t *testing.T) {
	for _, tt := range []struct {
		golden string
		tty    bool
		args   string
	}{
		{"status.txt", false, "status"},
		{"status.json", false, "status --json"},
		{"tools.txt", false, "tools"},
		{"tools-terminal.txt", true, "tools"},
		{"tools.json", false, "tools --json"},
		{"sessions.txt", false, "sessions"},
		{"sessions.json", false, "sessions --json"},
		{"log.txt", false, "log last"},
		{"log-terminal.txt", true, "log s1"},
		{"log.jsonl", false, "log s1 --json"},
		{"logs.txt", false, "logs"},
		{"logs-terminal.txt", true, "logs bash"},
		{"logs.jsonl", false, "logs --json"},
		{"presets.txt", false, "preset --list"},
		{"presets.json", false, "preset --list --json"},
		{"prompt.txt", false, "prompt last"},
		{"prompt-terminal.txt", true, "prompt s1"},
		{"prompt.json", false, "prompt s1 --json"},
		{"prompt-nothing.txt", false, "prompt"},
		{"prompt-nothing.json", false, "prompt --json"},
	} {
		t.Run(tt.golden, func(t *testing.T) {
			s := newShell(t, furnished())
			s.world.outTTY = tt.tty
			if code := s.run(strings.Fields(tt.args)...); code != 0 || s.stderr.String() != "" {
				t.Fatalf("exit code %d: %s", code, s.stderr)
			}
			golden(t, tt.golden, s.stdout.String())
		})
	}
}

func TestLogsFlags(t *testing.T) {
	for _, tt := range []struct {
		args string
		want *controlv1.LogsRequest
		set  *controlv1.SetLogLevelRequest
	}{
		{"logs", &controlv1.LogsRequest{Tail: -1}, nil},
		{"logs bash --tail 3 --level warn", &controlv1.LogsRequest{Entry: "bash", Tail: 3, Level: "warn"}, nil},
		{"logs --tail 0", &controlv1.LogsRequest{}, nil},
		{"logs --set-level debug", nil, &controlv1.SetLogLevelRequest{Level: "debug"}},
		{"logs bash --set-level trace", nil, &controlv1.SetLogLevelRequest{Entry: "bash", Level: "trace"}},
	} {
		f := furnished()
		s := newShell(t, f)
		if code := s.run(strings.Fields(tt.args)...); code != 0 || s.stderr.String() != "" || tt.set != nil && s.stdout.String() != "" {
			t.Errorf("%s: exit code %d, stdout %q, stderr %q", tt.args, code, s.stdout, s.stderr)
		}
		if tt.want != nil && (len(f.logsAsked) != 1 || f.logsAsked[0].String() != tt.want.String()) {
			t.Errorf("%s: asked for %v", tt.args, f.logsAsked)
		}
		if tt.set != nil && (len(f.levels) != 1 || len(f.logsAsked) != 0 || f.levels[0].String() != tt.set.String()) {
			t.Errorf("%s: set %v, asked for %v", tt.args, f.levels, f.logsAsked)
		}
	}
}

func TestLogsFollow(t *testing.T) {
	s := newShell(t, furnished())
	code := make(chan int)
	go func() { code <- s.run("logs", "--follow") }()
	s.stdout.await(t, "no generation\n")
	if err := syscall.Kill(os.Getpid(), syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	if got := <-code; got != exitSignal+int(syscall.SIGINT) {
		t.Errorf("exit code %d", got)
	}
}

func TestDoctor(t *testing.T) {
	f := furnished()
	machine := []fact{{Name: "kernel", Value: "Linux 6.12"}, {Name: "landlock", Value: "off", Problem: "it was not enabled at boot", Fix: "add landlock to lsm="}}
	s := newShell(t, f)
	a := &app{world: s.world}
	if err := a.printDoctor(f.inspect, machine); err != nil {
		t.Fatal(err)
	}
	if err := a.printJSON(newDoctorDocument(f.inspect, machine)); err != nil {
		t.Fatal(err)
	}
	none := &sandboxv1.InspectReply{Runners: []*sandboxv1.RunnerReport{{Name: "bwrap", Reason: "not in PATH", Fix: "apt-get install bubblewrap"}}}
	if err := a.printDoctor(none, machine[:1]); err != nil {
		t.Fatal(err)
	}
	if err := a.printJSON(newDoctorDocument(none, machine[:1])); err != nil {
		t.Fatal(err)
	}
	golden(t, "doctor.txt", s.stdout.String())
	if code := s.run("doctor"); code != 0 {
		t.Errorf("exit code %d: %s", code, s.stderr)
	}
	for _, fact := range facts() {
		if fact.Name == "" || fact.Value == "" || (fact.Problem == "") != (fact.Fix == "") {
			t.Errorf("incomplete: %+v", fact)
		}
	}
}

func TestKnob(t *testing.T) {
	for _, tt := range []struct {
		args   string
		want   *controlv1.KnobRequest
		stdout string
	}{
		{"mode s1", &controlv1.KnobRequest{Session: "s1", Knob: "mode"}, "read-only\n"},
		{"mode last read-only", &controlv1.KnobRequest{Session: "s1", Knob: "mode", Value: "read-only"}, ""},
		{"mode s1 danger-full-access --confirm danger-full-access", &controlv1.KnobRequest{Session: "s1", Knob: "mode", Value: "danger-full-access", Confirm: "danger-full-access"}, ""},
		{"preset last", &controlv1.KnobRequest{Session: "s1", Knob: "preset"}, "read-only\n"},
		{"preset s0 workspace-write", &controlv1.KnobRequest{Session: "s0", Knob: "preset", Value: "workspace-write"}, ""},
		{"preset s1 danger-full-access --confirm danger-full-access", &controlv1.KnobRequest{Session: "s1", Knob: "preset", Value: "danger-full-access", Confirm: "danger-full-access"}, ""},
		{"preset s1 careful --json", &controlv1.KnobRequest{Session: "s1", Knob: "preset", Value: "careful"}, `{"session":"s1","knob":"preset","value":"read-only","source":"default","changed":true}` + "\n"},
		{"approval s1", &controlv1.KnobRequest{Session: "s1", Knob: "approval"}, "read-only\n"},
		{"approval s1 never --json", &controlv1.KnobRequest{Session: "s1", Knob: "approval", Value: "never"}, `{"session":"s1","knob":"approval","value":"read-only","source":"default","changed":true}` + "\n"},
	} {
		t.Run(tt.args, func(t *testing.T) {
			f := furnished()
			var got *controlv1.KnobRequest
			f.knob = func(r *controlv1.KnobRequest) (*controlv1.KnobReply, error) {
				got = r
				return &controlv1.KnobReply{Value: "read-only", Source: "default", Changed: true}, nil
			}
			s := newShell(t, f)
			if code := s.run(strings.Fields(tt.args)...); code != 0 || s.stdout.String() != tt.stdout || s.stderr.String() != "" {
				t.Errorf("exit code %d, stdout %q, stderr %q", code, s.stdout, s.stderr)
			}
			if got.String() != tt.want.String() {
				t.Errorf("asked for %v, want %v", got, tt.want)
			}
		})
	}
}

func TestTrustAndValidateJSON(t *testing.T) {
	s := newShell(t, newFake())
	compose := filepath.Join(s.world.dir, "compose.yml")
	if code := s.run("trust", "--json", "-f", compose); code != 0 || s.stdout.String() != `{"compose":"`+compose+`","digest":"abc","files":12}`+"\n" {
		t.Errorf("exit code %d, %q", code, s.stdout)
	}
	s = newShell(t, newFake())
	if code := s.run("validate", "--json"); code != 0 || s.stdout.String() != "{\"diagnostics\":[],\"entries\":[]}\n" {
		t.Errorf("exit code %d, %q", code, s.stdout)
	}
	f := newFake()
	f.runs = []host.Runs{{Entry: "bash", Tier: host.Locked, Digest: "aa"}}
	s = newShell(t, f)
	if code := s.run("validate", "--json"); code != 0 || s.stdout.String() != "{\"diagnostics\":[],\"entries\":[{\"id\":\"bash\",\"tier\":\"locked\",\"digest\":\"aa\"}]}\n" {
		t.Errorf("exit code %d, %q", code, s.stdout)
	}
	f = newFake()
	f.startErr = coded(&host.LockError{Diagnostics: bad502})
	s = newShell(t, f)
	if code := s.run("validate", "--json"); code != exitTrust || !strings.Contains(s.stdout.String(), `"code":"C502"`) || s.stderr.String() != "" {
		t.Errorf("exit code %d, %q, %q", code, s.stdout, s.stderr)
	}
}

func TestUp(t *testing.T) {
	f := furnished()
	s := newShell(t, f)
	ready := filepath.Join(t.TempDir(), "ready")
	code := make(chan int)
	go func() { code <- s.run("up", "--ready-file", ready) }()
	s.stdout.await(t, "\nready after 812 ms\n")
	s.stderr.await(t, "cordon: login code: "+fakeCode+"\n")
	if strings.Contains(s.stdout.String(), fakeCode) {
		t.Error("the login code is on stdout")
	}
	f.codes[0]("next-code")
	s.stderr.await(t, "cordon: the login code was used; the next one: next-code\n")
	text, err := os.ReadFile(ready)
	for err != nil { // it is written last
		if t.Context().Err() != nil {
			t.Fatal(err)
		}
		text, err = os.ReadFile(ready)
	}
	if string(text) != "4711\n" {
		t.Errorf("ready file has %q", text)
	}
	if err := syscall.Kill(os.Getpid(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if got := <-code; got != 0 || f.stopped != 1 {
		t.Errorf("exit code %d, stopped %d times", got, f.stopped)
	}
	if _, err := os.Stat(ready); !os.IsNotExist(err) {
		t.Errorf("ready file is still there: %v", err)
	}
	golden(t, "up.txt", s.stdout.String())
}

func TestUpHostEnds(t *testing.T) {
	f := furnished()
	s := newShell(t, f)
	code := make(chan int)
	go func() { code <- s.run("up", "--json") }()
	s.stdout.await(t, "\n")
	close(f.done)
	if got := <-code; got != 1 || !strings.Contains(s.stderr.String(), "the host has stopped by itself") {
		t.Errorf("exit code %d: %s", got, s.stderr)
	}
}

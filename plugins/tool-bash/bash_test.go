package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	approvalv1 "github.com/cordon-host/cordon/api/approval/v1"
	policyv1 "github.com/cordon-host/cordon/api/policy/v1"
	shellv1 "github.com/cordon-host/cordon/api/shell/v1"
	toolsv1 "github.com/cordon-host/cordon/api/tools/v1"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/sandbox"
	"github.com/cordon-host/cordon/capability/shell"
	"github.com/cordon-host/cordon/plugin"
	"github.com/cordon-host/cordon/plugin/plugintest"
)

// world is everything the tool calls, with the order in which it did.
type world struct {
	shellv1.UnimplementedShellServer
	run     func(context.Context, *shellv1.RunRequest) (*shellv1.RunReply, error)
	resolve func() (*policyv1.ResolveReply, error)
	answer  func(context.Context, *approvalv1.ApprovalRequest) (*approvalv1.ApprovalReply, error)

	mu    sync.Mutex
	steps []proto.Message
}

func (w *world) note(m proto.Message) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.steps = append(w.steps, proto.Clone(m))
}

// did are the names of the steps, and the last request of type M.
func did[M proto.Message](w *world) (names string, last M) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []string
	for _, m := range w.steps {
		all = append(all, strings.ToLower(strings.TrimSuffix(string(m.ProtoReflect().Descriptor().Name()), "Request")))
		if m, ok := m.(M); ok {
			last = m
		}
	}
	return strings.Join(all, " "), last
}

func (w *world) Run(ctx context.Context, r *shellv1.RunRequest) (*shellv1.RunReply, error) {
	w.note(r)
	return w.run(ctx, r)
}

type policyFake struct {
	policyv1.UnimplementedPolicyServer
	*world
}

func (p policyFake) Resolve(_ context.Context, r *policyv1.ResolveRequest) (*policyv1.ResolveReply, error) {
	p.note(r)
	return p.resolve()
}

type approvalFake struct {
	approvalv1.UnimplementedApprovalServer
	*world
}

func (a approvalFake) Request(ctx context.Context, r *approvalv1.ApprovalRequest) (*approvalv1.ApprovalReply, error) {
	a.note(r)
	return a.answer(ctx, r)
}

// bashes runs the command for real, without any sandbox: what a shell provider does is not this plugin's test.
func bashes(ctx context.Context, root string, r *shellv1.RunRequest) (*shellv1.RunReply, error) {
	cmd := exec.CommandContext(ctx, "bash", "-c", r.GetCommand())
	if cmd.Dir = r.GetWorkdir(); cmd.Dir == "" {
		cmd.Dir = root
	}
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	_ = cmd.Run() // the exit code says it
	code := int32(cmd.ProcessState.ExitCode())
	return &shellv1.RunReply{
		ExitCode: &code, Sandbox: &shellv1.SandboxFacts{Mode: "read-only", Runner: "bwrap", Enforcement: "full"},
		Stdout: &shellv1.Output{Data: []byte(stdout.String()), TotalBytes: int64(stdout.Len())},
		Stderr: &shellv1.Output{Data: []byte(stderr.String()), TotalBytes: int64(stderr.Len())},
	}, nil
}

func newWorld(mode, root string) *world {
	return &world{
		run: func(ctx context.Context, r *shellv1.RunRequest) (*shellv1.RunReply, error) {
			return bashes(ctx, root, r)
		},
		resolve: func() (*policyv1.ResolveReply, error) {
			return &policyv1.ResolveReply{Mode: mode, WorkspaceRoot: root}, nil
		},
		answer: func(context.Context, *approvalv1.ApprovalRequest) (*approvalv1.ApprovalReply, error) {
			return &approvalv1.ApprovalReply{Outcome: "allowed-once", Grant: "g1"}, nil
		},
	}
}

func (w *world) options(confines, policy, approval bool) []plugintest.Option {
	facts := shell.Facts{Confines: confines}
	if confines {
		facts.SandboxMode = sandbox.ReadOnly
	}
	opts := []plugintest.Option{plugintest.Fake("shell", &shellv1.Shell_ServiceDesc, w), plugintest.FactsOf("shell", facts)}
	if policy {
		opts = append(opts, plugintest.Fake("policy", &policyv1.Policy_ServiceDesc, policyFake{world: w}))
	}
	if approval {
		opts = append(opts, plugintest.Fake("approval", &approvalv1.Approval_ServiceDesc, approvalFake{world: w}))
	}
	return opts
}

func start(t *testing.T, w *world) *plugintest.Plugin {
	t.Helper()
	return plugintest.Start(t, Plugin, w.options(true, true, true)...)
}

var inSession = plugin.Call{Session: "s", Agent: "mcp/x/s", Turn: 1}

// call sends the arguments past the schema, as they are.
func call(t *testing.T, p *plugintest.Plugin, c plugin.Call, arguments string) *toolsv1.CallReply {
	t.Helper()
	r, err := toolsv1.NewToolsClient(p.Conn()).Call(p.Stamp(t.Context(), c), &toolsv1.CallRequest{Name: "bash", Arguments: []byte(arguments)})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func shown(r *toolsv1.CallReply) string {
	var all []string
	for _, c := range r.GetContent() {
		all = append(all, c.GetText())
	}
	return strings.Join(all, "|")
}

func TestResults(t *testing.T) {
	root := t.TempDir()
	for _, tt := range []struct{ name, command, want string }{
		{"returns stdout for a successful command", "echo hi", "hi\n"},
		{"reports (no output) for silent commands", "true", "(no output)"},
		{"marks stderr sections", "echo out; echo err >&2", "out\n[stderr]\nerr\n"},
		{"reports non-zero exits without isError", "echo no; exit 3", "no\n[exit code: 3]"},
		{"silent failure", "exit 4", "(no output)\n[exit code: 4]"},
		{"keeps control bytes", `printf 'a\033[31mb\000c'`, "a\x1b[31mb\x00c"},
		{"shows what is not UTF-8", `printf 'a\377\376b'`, "a\uFFFD\uFFFDb\n[stdout is not valid UTF-8; each undecodable byte is shown as U+FFFD]"},
		{"a clean exit-0 whose output ENDS in marker-like text is NOT read as a failure", `printf 'x\n[exit code: 1]'`, "x\n[exit code: 1]\n"},
		{"honors workdir", "pwd", root + "\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := start(t, newWorld("read-only", root))
			arguments, _ := json.Marshal(map[string]string{"command": tt.command})
			r, err := p.CallTool(p.Stamp(t.Context(), inSession), "bash", arguments)
			if err != nil {
				t.Fatal(err)
			}
			if shown(r) != tt.want || r.GetIsError() {
				t.Errorf("%q (isError %v), want %q", shown(r), r.GetIsError(), tt.want)
			}
		})
	}
}

func TestMeta(t *testing.T) {
	p := start(t, newWorld("read-only", t.TempDir()))
	r := call(t, p, inSession, `{"command":"echo hi; exit 3"}`)
	var got map[string]any
	if err := json.Unmarshal(r.GetMeta(), &got); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{"mode": "read-only", "denied": false, "exitCode": 3.0, "timedOut": false, "runner": "bwrap", "enforcement": "full", "stdoutBytes": 3.0, "stderrBytes": 0.0}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

func TestRender(t *testing.T) {
	out := func(s string) *shellv1.Output { return &shellv1.Output{Data: []byte(s), TotalBytes: int64(len(s))} }
	cut := func(s, path string) *shellv1.Output {
		return &shellv1.Output{Data: []byte(s), Truncated: true, SpillPath: path}
	}
	code := func(n int32) *int32 { return &n }
	denied := &shellv1.SandboxFacts{Mode: "read-only", Denied: true}
	const hint = "[sandbox: escalation available — retry this exact command once with sandbox_permissions (the narrowest wider mode that suffices) + justification; the approval prompt asks the user]"
	for _, tt := range []struct {
		name  string
		reply *shellv1.RunReply
		hint  bool
		want  string
	}{
		{"renders stderr-only output without a stdout prefix", &shellv1.RunReply{ExitCode: code(0), Stderr: out("e\n")}, true, "[stderr]\ne\n"},
		{"adds a separator when stdout does not end with a newline", &shellv1.RunReply{ExitCode: code(0), Stdout: out("o"), Stderr: out("e")}, true, "o\n[stderr]\ne"},
		{"appends exit-code markers after a newline for unterminated output", &shellv1.RunReply{ExitCode: code(2), Stdout: out("o")}, true, "o\n[exit code: 2]"},
		{"renders signal kills without the timeout marker when not timed out", &shellv1.RunReply{Signal: "SIGKILL", Stdout: out("o\n")}, true, "o\n[killed by signal: SIGKILL]"},
		{"reports a timeout that exited 0 (trapped signal) without a kill marker", &shellv1.RunReply{ExitCode: code(0), TimedOut: true, TimeoutMs: 100, Stdout: out("o\n")}, true, "o\n[timed out after 100ms]"},
		{"orders the timeout marker before a kill marker", &shellv1.RunReply{Signal: "SIGTERM", TimedOut: true, TimeoutMs: 5000}, true, "(no output)\n[timed out after 5000ms]\n[killed by signal: SIGTERM]"},
		{"reports truncation with the spill path", &shellv1.RunReply{ExitCode: code(0), Stdout: cut("tail\n", "/s/o.log")}, true, "tail\n[output truncated; full output: /s/o.log]"},
		{"notes truncation with a fallback when the spill path is missing", &shellv1.RunReply{ExitCode: code(0), Stderr: cut("tail", "")}, true, "[stderr]\ntail\n[output truncated; full output: (unavailable)]"},
		{"truncation of both streams", &shellv1.RunReply{ExitCode: code(1), Stdout: cut("o", "/o"), Stderr: cut("e", "/e")}, true, "o\n[output truncated; full output: /o]\n[stderr]\ne\n[output truncated; full output: /e]\n[exit code: 1]"},
		{"reports sandbox denials before exit status and hints only when escalation is advertised", &shellv1.RunReply{ExitCode: code(1), Stderr: out("bash: a: Read-only file system\n"), Sandbox: denied}, true,
			"[stderr]\nbash: a: Read-only file system\n[sandbox: file access denied under read-only mode]\n" + hint + "\n[exit code: 1]"},
		{"no hint without escalation", &shellv1.RunReply{ExitCode: code(1), Stderr: out("x"), Sandbox: denied}, false,
			"[stderr]\nx\n[sandbox: file access denied under read-only mode]\n[exit code: 1]"},
		{"everything, in order", &shellv1.RunReply{Signal: "SIGKILL", TimedOut: true, TimeoutMs: 9, Stdout: cut("o\xff", "/o"), Stderr: out("e\xfe"), Sandbox: denied}, true,
			"o\uFFFD\n[output truncated; full output: /o]\n[stdout is not valid UTF-8; each undecodable byte is shown as U+FFFD]\n[stderr]\ne\uFFFD\n[stderr is not valid UTF-8; each undecodable byte is shown as U+FFFD]\n" +
				"[sandbox: file access denied under read-only mode]\n" + hint + "\n[timed out after 9ms]\n[killed by signal: SIGKILL]"},
		{"a tail that starts inside a character is still text", &shellv1.RunReply{ExitCode: code(0), Stdout: cut("é—x"[1:], "/o")}, true, "—x\n[output truncated; full output: /o]"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := render(tt.reply, tt.hint)
			if got != tt.want {
				t.Errorf("%q\nwant %q", got, tt.want)
			}
			// exit parse is the inverse of the markers (round-trip)
			_, s := shell.ParseExitStatus(got)
			if want := (shell.ExitStatus{Code: int(tt.reply.GetExitCode()), Signal: tt.reply.GetSignal()}); s != want {
				t.Errorf("reads back as %+v, want %+v", s, want)
			}
		})
	}
}

func FuzzRender(f *testing.F) {
	f.Add([]byte("out\n"), []byte(""), int32(0), false)
	f.Add([]byte("x\n[exit code: 1]"), []byte{0xff}, int32(0), true)
	f.Fuzz(func(t *testing.T, stdout, stderr []byte, code int32, truncated bool) {
		r := &shellv1.RunReply{ExitCode: &code, Stdout: &shellv1.Output{Data: stdout, Truncated: truncated}, Stderr: &shellv1.Output{Data: stderr}}
		text := render(r, true)
		if _, err := proto.Marshal(plugin.Text(text)); err != nil {
			t.Fatalf("%q cannot be sent: %v", text, err)
		}
		if _, s := shell.ParseExitStatus(text); s != (shell.ExitStatus{Code: int(code)}) {
			t.Fatalf("%q reads back as %+v", text, s)
		}
	})
}

// rejects value-invalid args, and schema-invalid ones that came past the schema: nothing of the world is asked
func TestBadArguments(t *testing.T) {
	for _, tt := range []struct{ arguments, want string }{
		{`{}`, "invalid command: expected a non-empty string"},
		{`{"command":""}`, "invalid command: expected a non-empty string"},
		{`{"command":" \n"}`, "invalid command: expected a non-empty string"},
		{`{"command":null}`, "invalid command: expected a non-empty string"},
		{`{"command":7}`, "invalid command: expected a string, got a number"},
		{`{"command":"true","description":""}`, "invalid description: expected a non-empty string"},
		{`{"command":"true","description":"  "}`, "invalid description: expected a non-empty string"},
		{`{"command":"true","timeoutMs":0}`, "invalid timeoutMs: expected a positive number, got 0"},
		{`{"command":"true","timeoutMs":-5}`, "invalid timeoutMs: expected a positive number, got -5"},
		{`{"command":"true","timeoutMs":"5"}`, `invalid timeoutMs: expected a positive number, got "5"`},
		{`{"command":"true","timeoutMs":null}`, "invalid timeoutMs: expected a positive number, got null"},
		{`{"command":"true","timeoutMs":1e999}`, "invalid timeoutMs: expected a positive number, got 1e999"},
		{`{"command":"true","workdir":""}`, `invalid workdir: expected a path, got ""`},
		{`{"command":"true","sandbox_permissions":"workspace-write"}`, "invalid escalation: sandbox_permissions requires a justification"},
		{`{"command":"true","justification":"because"}`, "invalid escalation: justification is only valid together with sandbox_permissions"},
		{`{"command":"true","sandbox_permissions":"workspace-write","justification":" "}`, "invalid justification: expected a non-empty sentence"},
		{`{"command":"true","sandbox_permissions":"yolo","justification":"because"}`, `invalid sandbox_permissions: sandbox mode must be one of "read-only", "workspace-write" or "danger-full-access", got "yolo"`},
		{`{"command":"true","env":{"A":"b"}}`, `invalid arguments: json: unknown field "env"`},
		{`{"command":"true","stdin":"x"}`, `invalid arguments: json: unknown field "stdin"`},
		{`{"command":"true","grant":"g"}`, `invalid arguments: json: unknown field "grant"`},
		{`{"command":"true"} {}`, "invalid arguments: expected one JSON object"},
		{`[]`, "invalid arguments: json: cannot unmarshal array into Go value"},
		{`{`, "invalid arguments: unexpected EOF"},
	} {
		w := newWorld("read-only", "/")
		p := start(t, w)
		r := call(t, p, inSession, tt.arguments)
		if !r.GetIsError() || r.GetErrorCode() != "INVALID_ARGUMENTS" || !strings.HasPrefix(shown(r), tt.want) {
			t.Errorf("%s: %q (%s), want %q", tt.arguments, shown(r), r.GetErrorCode(), tt.want)
		}
		if steps, _ := did[*shellv1.RunRequest](w); steps != "" {
			t.Errorf("%s: did %s", tt.arguments, steps)
		}
		if r := call(t, p, inSession, `{"command":"true"}`); r.GetIsError() { // still usable
			t.Errorf("after %s: %s", tt.arguments, shown(r))
		}
	}
}

func TestSchema(t *testing.T) {
	for _, confines := range []bool{true, false} {
		w := newWorld("read-only", "/")
		p := plugintest.Start(t, Plugin, w.options(confines, true, true)...)
		if len(p.Tools()) != 1 || p.Tools()[0].GetName() != "bash" {
			t.Fatalf("tools %v", p.Tools())
		}
		var schema struct {
			Properties map[string]struct {
				Type        string
				Description string
				Enum        []string
			}
			Required             []string
			AdditionalProperties *bool
		}
		if err := json.Unmarshal(p.Tools()[0].GetInputSchema(), &schema); err != nil {
			t.Fatal(err)
		}
		want := []string{"command", "description", "timeoutMs", "workdir"}
		if confines {
			want = append(want, "justification", "sandbox_permissions")
			if got := schema.Properties["sandbox_permissions"].Enum; !cmp.Equal(got, []string{"workspace-write", "danger-full-access"}) {
				t.Errorf("the enum is always the full closed set, got %v", got)
			}
		}
		for _, name := range want {
			if schema.Properties[name].Description == "" || schema.Properties[name].Type == "" {
				t.Errorf("property %s: %+v", name, schema.Properties[name])
			}
		}
		if len(schema.Properties) != len(want) || !cmp.Equal(schema.Required, []string{"command"}) || schema.AdditionalProperties == nil || *schema.AdditionalProperties {
			t.Errorf("confines %v: schema %+v", confines, schema)
		}
		for arguments, ok := range map[string]bool{
			`{"command":"true"}`: true, `{"command":"true","run_in_background":true}`: false, `{"command":"true","env":{}}`: false,
			`{}`: false, `{"command":1}`: false, `{"command":"true","timeoutMs":"1"}`: false,
			`{"command":"true","sandbox_permissions":"read-only","justification":"x"}`: false,
		} { // rejects schema-invalid args
			r, err := p.CallTool(t.Context(), "bash", arguments)
			if err != nil || r.GetIsError() == ok {
				t.Errorf("%s: %v, %v", arguments, r, err)
			}
		}
	}
}

func TestLoad(t *testing.T) {
	// fails load when a confining executor has no shared sandbox-policy resolver
	_, err := plugintest.Load(t, Plugin, newWorld("", "").options(true, false, true)...)
	if want := "tool-bash: the mounted shell confines but the policy capability is missing"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("loads with %v, want %q", err, want)
	}
	plugintest.Start(t, Plugin, newWorld("", "").options(false, false, false)...)
}

func TestContext(t *testing.T) { // contributes the exit-code habit as its prompt section
	p := start(t, newWorld("read-only", "/"))
	got, err := p.Context(p.Stamp(t.Context(), inSession), "tool:bash")
	if want := "Check the [exit code: N] marker on every bash result; investigate failures before moving on."; err != nil || got != want {
		t.Errorf("%q, %v", got, err)
	}
	if m := p.Manifest().GetContexts(); len(m) != 1 || m[0].GetOrder() != 105 {
		t.Errorf("contributions %v", m)
	}
}

func TestEscalation(t *testing.T) {
	const toWrite = `{"command":"touch x","sandbox_permissions":"workspace-write","justification":"to write"}`
	const toFull = `{"command":"touch x","sandbox_permissions":"danger-full-access","justification":"to write"}`
	outcome := func(o string) func(context.Context, *approvalv1.ApprovalRequest) (*approvalv1.ApprovalReply, error) {
		return func(context.Context, *approvalv1.ApprovalRequest) (*approvalv1.ApprovalReply, error) {
			return &approvalv1.ApprovalReply{Outcome: o}, nil
		}
	}
	for _, tt := range []struct {
		name      string
		mode      string
		call      plugin.Call
		noService bool
		answer    func(context.Context, *approvalv1.ApprovalRequest) (*approvalv1.ApprovalReply, error)
		arguments string
		steps     string
		want      string
		code      string
	}{
		{name: "runs a granted foreground call under the approved mode", mode: "read-only", call: inSession, arguments: toWrite, steps: "resolve approval run"},
		{name: "the session routes the question where a front end names no agent", mode: "read-only", call: plugin.Call{Session: "s"}, arguments: toWrite, steps: "resolve approval run"},
		{name: "evaluates widening against the session's mode", mode: "workspace-write", call: inSession, arguments: toFull, steps: "resolve approval run"},
		{name: "rejects non-widening escalation without prompting", mode: "workspace-write", call: inSession, arguments: toWrite, steps: "resolve",
			want: `sandbox escalation to "workspace-write" is not strictly wider than this call's current "workspace-write" mode`, code: "ESCALATION_NOT_WIDER"},
		{name: "nothing is wider than everything", mode: "danger-full-access", call: inSession, arguments: toFull, steps: "resolve",
			want: `sandbox escalation to "danger-full-access" is not strictly wider than this call's current "danger-full-access" mode`, code: "ESCALATION_NOT_WIDER"},
		{name: "fails closed when approval is not composed", mode: "read-only", call: inSession, noService: true, arguments: toWrite, steps: "resolve",
			want: `sandbox escalation to "workspace-write" requires approval, but no approval service is composed`, code: "ESCALATION_NO_APPROVAL"},
		{name: "fails closed when approval cannot be routed", mode: "read-only", arguments: toWrite, steps: "resolve",
			want: `sandbox escalation to "workspace-write" requires approval, but the call has no agent to route it through`, code: "ESCALATION_NO_AGENT"},
		{name: "maps an approval rejected to its distinct failure", mode: "read-only", call: inSession, answer: outcome("rejected"), arguments: toWrite, steps: "resolve approval",
			want: `the user rejected escalating this command to "workspace-write"`, code: "ESCALATION_REJECTED"},
		{name: "maps an approval cancelled to its distinct failure", mode: "read-only", call: inSession, answer: outcome("cancelled"), arguments: toWrite, steps: "resolve approval",
			want: `approval for escalating to "workspace-write" was cancelled`, code: "ESCALATION_CANCELLED"},
		{name: "maps an approval unavailable to its distinct failure", mode: "read-only", call: inSession, answer: outcome("unavailable"), arguments: toWrite, steps: "resolve approval",
			want: `sandbox escalation to "workspace-write" requires approval, but no approval channel is available`, code: "ESCALATION_UNAVAILABLE"},
		{name: "keeps the exhaustiveness backstop for a rogue approval implementation", mode: "read-only", call: inSession, answer: outcome("always"), arguments: toWrite, steps: "resolve approval",
			want: "unreachable variant in EscalationOutcome", code: "ESCALATION_UNRECOGNIZED"},
		{name: "an allowance without a grant", mode: "read-only", call: inSession, answer: outcome("allowed-once"), arguments: toWrite, steps: "resolve approval",
			want: `approval for escalating to "workspace-write" came without a grant`, code: "ESCALATION_UNRECOGNIZED"},
		{name: "approval itself fails", mode: "read-only", call: inSession, arguments: toWrite, steps: "resolve approval",
			answer: func(context.Context, *approvalv1.ApprovalRequest) (*approvalv1.ApprovalReply, error) {
				return nil, fault.New(codes.Unavailable, "PLUGIN_CRASHED", "user-approval ended")
			}, want: "user-approval ended", code: "PLUGIN_CRASHED"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(tt.mode, t.TempDir())
			if tt.answer != nil {
				w.answer = tt.answer
			}
			p := plugintest.Start(t, Plugin, w.options(true, true, !tt.noService)...)
			r := call(t, p, tt.call, tt.arguments)
			steps, run := did[*shellv1.RunRequest](w)
			if steps != tt.steps {
				t.Errorf("did %q, want %q", steps, tt.steps)
			}
			if tt.want != "" {
				if !r.GetIsError() || shown(r) != tt.want || r.GetErrorCode() != tt.code {
					t.Errorf("%q (%s), want %q (%s)", shown(r), r.GetErrorCode(), tt.want, tt.code)
				}
				return
			}
			if r.GetIsError() || run.GetGrant() != "g1" {
				t.Errorf("%q, ran with %v", shown(r), run)
			}
		})
	}
}

func TestQuestion(t *testing.T) {
	root := t.TempDir()
	w := newWorld("read-only", root)
	p := start(t, w)
	call(t, p, inSession, `{"command":"make install","workdir":"sub/dir","sandbox_permissions":"danger-full-access","justification":"it writes to /usr"}`)
	_, got := did[*approvalv1.ApprovalRequest](w)
	want := &approvalv1.ApprovalRequest{
		Tool: "bash", Reason: "escalate sandbox to danger-full-access: it writes to /usr",
		Widening: &approvalv1.Widening{From: "read-only", To: "danger-full-access", Capability: "shell"},
		Subject:  &approvalv1.Subject{Kind: "command", Text: "make install", Cwd: root + "/sub/dir"},
	}
	if !proto.Equal(got, want) {
		t.Errorf("asked %v, want %v", got, want)
	}
	// The next call carries no grant: an approval holds for one.
	call(t, p, inSession, `{"command":"make install"}`)
	if _, run := did[*shellv1.RunRequest](w); run.GetGrant() != "" {
		t.Errorf("ran with %v", run)
	}
}

func TestEscalationWithoutSandbox(t *testing.T) { // rejects injected escalation without a sandbox
	w := newWorld("read-only", "/")
	p := plugintest.Start(t, Plugin, w.options(false, true, true)...)
	r := call(t, p, inSession, `{"command":"true","sandbox_permissions":"workspace-write","justification":"x"}`)
	if steps, _ := did[*shellv1.RunRequest](w); steps != "" || shown(r) != "sandbox_permissions is not available in this composition (no sandboxing executor to escalate)" {
		t.Errorf("%q, did %q", shown(r), steps)
	}
}

func TestRequest(t *testing.T) {
	for _, tt := range []struct {
		name, arguments string
		noPolicy        bool
		want            *shellv1.RunRequest
		err             string
	}{
		{name: "defaults to the session's root, which the shell knows", arguments: `{"command":"x","description":"d"}`, want: &shellv1.RunRequest{Command: "x"}},
		{name: "an explicit absolute workdir overrides the session cwd", arguments: `{"command":"x","workdir":"/else where"}`, want: &shellv1.RunRequest{Command: "x", Workdir: "/else where"}},
		{name: "a relative workdir is resolved against the session cwd", arguments: `{"command":"x","workdir":"a/../b"}`, want: &shellv1.RunRequest{Command: "x", Workdir: "/ws/a/../b"}},
		{name: "a time limit", arguments: `{"command":"x","timeoutMs":1500}`, want: &shellv1.RunRequest{Command: "x", TimeoutMs: 1500}},
		{name: "a fraction counts up", arguments: `{"command":"x","timeoutMs":0.2}`, want: &shellv1.RunRequest{Command: "x", TimeoutMs: 1}},
		{name: "an absurd one is cut", arguments: `{"command":"x","timeoutMs":1e300}`, want: &shellv1.RunRequest{Command: "x", TimeoutMs: maxTimeoutMs}},
		{name: "falls back to the executor default without a policy", noPolicy: true, arguments: `{"command":"x"}`, want: &shellv1.RunRequest{Command: "x"}},
		{name: "a relative workdir without a policy", noPolicy: true, arguments: `{"command":"x","workdir":"a"}`, err: `invalid workdir: "a" is relative`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld("read-only", "/ws")
			w.run = func(context.Context, *shellv1.RunRequest) (*shellv1.RunReply, error) { return &shellv1.RunReply{}, nil }
			p := plugintest.Start(t, Plugin, w.options(!tt.noPolicy, !tt.noPolicy, true)...)
			r := call(t, p, inSession, tt.arguments)
			_, got := did[*shellv1.RunRequest](w)
			if tt.err != "" {
				if !strings.HasPrefix(shown(r), tt.err) || got != nil {
					t.Errorf("%q, ran %v", shown(r), got)
				}
				return
			}
			// builds its request from named args only
			if !proto.Equal(got, tt.want) {
				t.Errorf("ran %v, want %v", got, tt.want)
			}
		})
	}
}

// Faults come out as their text and reason.
func TestFaults(t *testing.T) {
	for _, tt := range []struct {
		err        error
		text, code string
	}{
		{sandbox.Unavailable(sandbox.ReadOnly, "bwrap: no"), sandbox.UnavailableText(sandbox.ReadOnly, "bwrap: no"), "SANDBOX_UNAVAILABLE"},
		{fault.New(codes.InvalidArgument, "INVALID_WORKDIR", `invalid workdir: "/x" does not exist`), `invalid workdir: "/x" does not exist`, "INVALID_WORKDIR"},
		{fault.New(codes.FailedPrecondition, "SPAWN_FAILED", "command could not be started: x"), "command could not be started: x", "SPAWN_FAILED"}, // surfaces spawn failures as isError
		{status.Error(codes.Unavailable, "connection lost"), "connection lost", ""},
	} {
		w := newWorld("read-only", "/")
		w.run = func(context.Context, *shellv1.RunRequest) (*shellv1.RunReply, error) { return nil, tt.err }
		r := call(t, start(t, w), inSession, `{"command":"true"}`)
		if !r.GetIsError() || shown(r) != tt.text || r.GetErrorCode() != tt.code {
			t.Errorf("%q (%s), want %q (%s)", shown(r), r.GetErrorCode(), tt.text, tt.code)
		}
	}
	w := newWorld("read-only", "/")
	w.resolve = func() (*policyv1.ResolveReply, error) {
		return nil, fault.New(codes.FailedPrecondition, "UNKNOWN_MODE", "sandbox/mode carries unknown mode")
	}
	r := call(t, start(t, w), inSession, `{"command":"true","workdir":"sub"}`)
	if steps, _ := did[*shellv1.RunRequest](w); steps != "resolve" || r.GetErrorCode() != "UNKNOWN_MODE" {
		t.Errorf("%v, did %s", r, steps)
	}
}

// surfaces foreground aborts: the command ends with its caller
func TestAbort(t *testing.T) {
	w := newWorld("read-only", "/")
	running, ended := make(chan struct{}), make(chan struct{})
	w.run = func(ctx context.Context, _ *shellv1.RunRequest) (*shellv1.RunReply, error) {
		close(running)
		<-ctx.Done()
		close(ended)
		return nil, ctx.Err()
	}
	p := start(t, w)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := p.CallTool(p.Stamp(ctx, inSession), "bash", `{"command":"sleep 1000"}`)
		done <- err
	}()
	<-running
	cancel()
	<-ended
	if err := <-done; status.Code(err) != codes.Canceled {
		t.Errorf("error %v", err)
	}
	if err := aborted(ctx, fmt.Errorf("whatever")); fault.Reason(err) != "ABORTED" || fault.Message(err) != "tool call aborted" {
		t.Errorf("error %v", err)
	}
}

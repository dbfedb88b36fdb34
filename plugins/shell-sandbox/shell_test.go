package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	policyv1 "github.com/cordon-host/cordon/api/policy/v1"
	sandboxv1 "github.com/cordon-host/cordon/api/sandbox/v1"
	shellv1 "github.com/cordon-host/cordon/api/shell/v1"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/sandbox"
	"github.com/cordon-host/cordon/capability/shell"
	"github.com/cordon-host/cordon/plugin"
	"github.com/cordon-host/cordon/plugin/plugintest"
)

// provider is a sandbox whose answer a test writes; it keeps what it was asked.
type provider struct {
	sandboxv1.UnimplementedSandboxServer
	answer func(*sandboxv1.ConfineRequest) (*sandboxv1.ConfineReply, error)

	mu    sync.Mutex
	asked []*sandboxv1.ConfineRequest
}

func (p *provider) Confine(_ context.Context, r *sandboxv1.ConfineRequest) (*sandboxv1.ConfineReply, error) {
	p.mu.Lock()
	p.asked = append(p.asked, proto.CloneOf(r))
	p.mu.Unlock()
	return p.answer(r)
}

func (p *provider) requests() []*sandboxv1.ConfineRequest {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.asked)
}

// bwrapDialect is how bubblewrap says no, and how it says that it failed itself.
func bwrapDialect(r *sandboxv1.ConfineReply) *sandboxv1.ConfineReply {
	r.Runner, r.Enforcement = "bwrap", &sandboxv1.Enforcement{Level: "full"}
	r.DenialSignatures = []string{"read-only file system"}
	r.RunnerFailureRules = []*sandboxv1.RunnerFailureRule{{FatalSignatures: []string{"bwrap: "}}}
	return r
}

// landlockDialect is the launcher's of the reference system.
func landlockDialect(r *sandboxv1.ConfineReply) *sandboxv1.ConfineReply {
	r.Runner, r.Enforcement = "landlock", &sandboxv1.Enforcement{Level: "partial"}
	r.DenialSignatures = []string{"permission denied"}
	r.RunnerFailureRules = []*sandboxv1.RunnerFailureRule{{
		AllowedExitCodes: []int32{125}, FatalSignatures: []string{"landlock-run: "},
		InformationalLines: []string{"landlock-run: partial enforcement (older Landlock ABI)"},
	}}
	return r
}

// plainly runs the argv as it is, behind whatever runner is given.
func plainly(dialect func(*sandboxv1.ConfineReply) *sandboxv1.ConfineReply, runner ...string) *provider {
	return &provider{answer: func(r *sandboxv1.ConfineRequest) (*sandboxv1.ConfineReply, error) {
		return dialect(&sandboxv1.ConfineReply{Launch: &sandboxv1.Launch{Argv: append(slices.Clone(runner), r.GetArgv()...), Cwd: r.GetCwd()}}), nil
	}}
}

// confining runs under the real bubblewrap.
func confining(t *testing.T) *provider {
	t.Helper()
	path, err := exec.LookPath("bwrap")
	if err != nil {
		t.Skip("bwrap is not installed")
	}
	base := []string{path, "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--unshare-pid", "--die-with-parent"}
	if out, err := exec.Command(path, append(slices.Clone(base[1:]), "--", "true")...).CombinedOutput(); err != nil {
		t.Skipf("bwrap does not work here: %v: %s", err, out)
	}
	return &provider{answer: func(r *sandboxv1.ConfineRequest) (*sandboxv1.ConfineReply, error) {
		argv := slices.Clone(base)
		if r.GetMode() == string(sandbox.WorkspaceWrite) {
			argv = append(argv, "--bind", r.GetWorkspaceRoot(), r.GetWorkspaceRoot())
		}
		argv = append(argv, "--chdir", r.GetCwd(), "--")
		return bwrapDialect(&sandboxv1.ConfineReply{Launch: &sandboxv1.Launch{Argv: append(argv, r.GetArgv()...), Cwd: "/"}}), nil
	}}
}

// standing is a policy that answers with one mode and root.
type standing struct {
	policyv1.UnimplementedPolicyServer
	mode, root string
}

func (s *standing) Resolve(context.Context, *policyv1.ResolveRequest) (*policyv1.ResolveReply, error) {
	if s.mode == "" {
		return nil, fault.New(codes.FailedPrecondition, "UNKNOWN_MODE", "no mode")
	}
	return &policyv1.ResolveReply{Mode: s.mode, WorkspaceRoot: s.root}, nil
}

type fixture struct {
	*plugintest.Plugin
	client   shellv1.ShellClient
	policy   *standing
	provider *provider
	state    string
}

func start(t *testing.T, mode sandbox.Mode, p *provider, opts ...plugintest.Option) *fixture {
	t.Helper()
	root, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	f := &fixture{policy: &standing{mode: string(mode), root: root}, provider: p, state: t.TempDir()}
	f.Plugin = plugintest.Start(t, Plugin, append([]plugintest.Option{
		plugintest.Fake("policy", &policyv1.Policy_ServiceDesc, f.policy),
		plugintest.FactsOf("policy", map[string]string{"defaultMode": string(mode)}),
		plugintest.Fake("sandbox", &sandboxv1.Sandbox_ServiceDesc, p),
		plugintest.Deployment(&kernelv1.Deployment{Root: root, OutputDir: filepath.Join(f.state, "output")}),
		plugintest.Config(`{"graceMs": 500}`),
	}, opts...)...)
	f.client = shellv1.NewShellClient(f.Conn())
	return f
}

func (f *fixture) run(ctx context.Context, r *shellv1.RunRequest) (*shellv1.RunReply, error) {
	return f.client.Run(f.Stamp(ctx, plugin.Call{Session: "s1", Turn: 1}), r)
}

func (f *fixture) must(t *testing.T, command string) *shellv1.RunReply {
	t.Helper()
	r, err := f.run(t.Context(), &shellv1.RunRequest{Command: command})
	if err != nil {
		t.Fatalf("%s: %v", command, err)
	}
	return r
}

func (f *fixture) path(name string) string { return filepath.Join(f.policy.root, name) }

func exists(t *testing.T, path string) bool {
	t.Helper()
	_, err := os.Lstat(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return err == nil
}

func script(t *testing.T, dir, name, text string, mode os.FileMode) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestLoad(t *testing.T) {
	for config, want := range map[string]string{
		`{"timeoutMs":-1}`:            "shell-sandbox: timeoutMs must be a positive finite number",
		`{"timeoutMs":0}`:             "shell-sandbox: timeoutMs must be a positive finite number",
		`{"maxTimeoutMs":-5}`:         "shell-sandbox: maxTimeoutMs must be a positive finite number",
		`{"maxOutputBytes":-1}`:       "shell-sandbox: maxOutputBytes must be a positive finite number",
		`{"maxOutputBytes":99999999}`: "shell-sandbox: maxOutputBytes must be no greater than 16777216",
		`{"maxSpillBytes":-1}`:        "shell-sandbox: maxSpillBytes must be a positive finite number",
		`{"graceMs":-1}`:              "shell-sandbox: graceMs must be a positive finite number",
		`{"graceMs":2147483648}`:      "shell-sandbox: graceMs must be no greater than 2147483647",
		`{"graceMs":"soon"}`:          "graceMs",
		`{"cwd":"/"}`:                 "cwd",
	} {
		_, err := plugintest.Load(t, Plugin, plugintest.Config(config),
			plugintest.Fake("policy", &policyv1.Policy_ServiceDesc, &standing{}),
			plugintest.Fake("sandbox", &sandboxv1.Sandbox_ServiceDesc, &provider{}))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s loads with %v, want %q", config, err, want)
		}
	}
}

func TestFacts(t *testing.T) { // exposes the configured default as the capability fact
	for _, mode := range sandbox.Modes() {
		var got shell.Facts
		if ok, err := start(t, mode, plainly(bwrapDialect)).Facts("shell", &got); !ok || err != nil || got != (shell.Facts{SandboxMode: mode, Confines: true}) {
			t.Errorf("%s: facts %+v, %v", mode, got, err)
		}
	}
	if !Plugin.Confines {
		t.Error("the manifest does not say that the shell confines")
	}
}

func TestHandOff(t *testing.T) {
	// hands the provider the exact bash argv and the per-call policy, and runs the returned argv
	f := start(t, sandbox.WorkspaceWrite, plainly(bwrapDialect, "env", "WRAPPED=yes"))
	sub := f.path("sub dir")
	if err := os.Mkdir(sub, 0o755); err != nil {
		t.Fatal(err)
	}
	command := `printf '%s|%s|%s' "$WRAPPED" "$PWD" "$0"`
	r, err := f.run(t.Context(), &shellv1.RunRequest{Command: command, Workdir: sub})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := string(r.GetStdout().GetData()), "yes|"+sub+"|bash"; got != want {
		t.Errorf("printed %q, want %q", got, want)
	}
	// the provider is consulted per wrap (no caching in the consumer)
	f.policy.mode = string(sandbox.ReadOnly)
	f.must(t, "true")
	want := []*sandboxv1.ConfineRequest{
		{Argv: []string{"bash", "-c", command}, Cwd: sub, Mode: "workspace-write", WorkspaceRoot: f.policy.root, Session: "s1"},
		{Argv: []string{"bash", "-c", "true"}, Cwd: f.policy.root, Mode: "read-only", WorkspaceRoot: f.policy.root, Session: "s1"},
	}
	if got := f.provider.requests(); !slices.EqualFunc(got, want, func(a, b *sandboxv1.ConfineRequest) bool { return proto.Equal(a, b) }) {
		t.Errorf("asked %v, want %v", got, want)
	}
}

// starts a non-Bash runner before the confined inner Bash evaluates BASH_ENV
func TestBashEnvInside(t *testing.T) {
	dir := t.TempDir()
	inside := script(t, dir, "bash_env", `echo "runner=$RUNNER"`, 0o644)
	runner := script(t, dir, "runner", "#!/bin/sh\nRUNNER=yes exec \"$@\"\n", 0o755)
	f := start(t, sandbox.ReadOnly, plainly(bwrapDialect, runner))
	r, err := f.run(t.Context(), &shellv1.RunRequest{Command: "true", Env: map[string]string{"BASH_ENV": inside}})
	if err != nil || string(r.GetStdout().GetData()) != "runner=yes\n" {
		t.Errorf("printed %q, %v", r.GetStdout().GetData(), err)
	}
}

// propagates the provider's structured SANDBOX_UNAVAILABLE; nothing runs
func TestFailsClosed(t *testing.T) {
	dir := t.TempDir()
	notExecutable := script(t, dir, "plain", "#!/bin/sh\n", 0o644)
	noInterpreter := script(t, dir, "orphan", "#!/nonexistent/interpreter\n", 0o755)
	malformed := script(t, dir, "malformed", "\x7fELF and no more", 0o755)
	failing := func(text string, code int) *provider {
		return plainly(bwrapDialect, script(t, dir, fmt.Sprintf("fails%d", len(text)), fmt.Sprintf("#!/bin/sh\necho '%s' >&2\nexit %d\n", text, code), 0o755))
	}
	for _, tt := range []struct {
		name     string
		provider *provider
		reason   string
		detail   string
	}{
		{"the provider has no runner", &provider{answer: func(*sandboxv1.ConfineRequest) (*sandboxv1.ConfineReply, error) {
			return nil, sandbox.Unavailable(sandbox.ReadOnly, "no runner")
		}}, "SANDBOX_UNAVAILABLE", "Runner failure: no runner"},
		{"the provider is dead", &provider{answer: func(*sandboxv1.ConfineRequest) (*sandboxv1.ConfineReply, error) {
			return nil, fault.New(codes.Unavailable, "PLUGIN_CRASHED", "gone")
		}}, "PLUGIN_CRASHED", "gone"},
		{"the provider answers without a launch", &provider{answer: func(*sandboxv1.ConfineRequest) (*sandboxv1.ConfineReply, error) {
			return &sandboxv1.ConfineReply{}, nil
		}}, "SANDBOX_UNAVAILABLE", "without a command"},
		{"the runner does not exist", plainly(bwrapDialect, filepath.Join(dir, "missing")), "SANDBOX_UNAVAILABLE", "no such file"},
		{"a bare name that is nowhere", plainly(bwrapDialect, "no-such-runner-anywhere"), "SANDBOX_UNAVAILABLE", "no-such-runner"},
		{"classifies a runner that may not be executed", plainly(bwrapDialect, notExecutable), "SANDBOX_UNAVAILABLE", "permission denied"},
		{"classifies a runner whose shebang interpreter is missing", plainly(bwrapDialect, noInterpreter), "SANDBOX_UNAVAILABLE", "no such file"},
		{"keeps a real malformed executable ordinary: it is there and may be executed", plainly(bwrapDialect, malformed), "SPAWN_FAILED", "exec format error"},
		{"a foreground runner failure throws the fail-closed error", failing("bwrap: setting up uid map: Permission denied", 1), "SANDBOX_UNAVAILABLE", "Runner failure: bwrap: setting up uid map: Permission denied"},
		{"a foreground runner failure outranks denial: runner error text may contain denial words", failing("bwrap: read-only file system", 1), "SANDBOX_UNAVAILABLE", "Runner failure: bwrap: read-only file system"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := start(t, sandbox.ReadOnly, tt.provider)
			r, err := f.run(t.Context(), &shellv1.RunRequest{Command: "touch ran"})
			if fault.Reason(err) != tt.reason || !strings.Contains(strings.ToLower(err.Error()), strings.ToLower(tt.detail)) {
				t.Errorf("reply %v, error %v; want %s with %q", r, err, tt.reason, tt.detail)
			}
			if exists(t, f.path("ran")) {
				t.Error("the command ran")
			}
		})
	}
	t.Run("positive control", func(t *testing.T) {
		f := start(t, sandbox.ReadOnly, plainly(bwrapDialect))
		f.must(t, "touch ran")
		if !exists(t, f.path("ran")) {
			t.Error("the command did not run")
		}
	})
}

func TestWorkdir(t *testing.T) {
	dir := t.TempDir()
	file := script(t, dir, "file", "", 0o644)
	for _, mode := range []sandbox.Mode{sandbox.ReadOnly, sandbox.DangerFullAccess} {
		for name, workdir := range map[string]string{
			"does not exist": filepath.Join(dir, "missing"), "not a directory": file,
			"expected an absolute path": "sub", "no NUL": "/a\x00b",
		} {
			// keeps an invalid workdir ordinary, also when danger-full-access bypasses the provider
			f := start(t, mode, plainly(bwrapDialect, "no-such-runner"))
			_, err := f.run(t.Context(), &shellv1.RunRequest{Command: "touch ran", Workdir: workdir})
			if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "invalid workdir") || !strings.Contains(err.Error(), name) {
				t.Errorf("%s, %s: %v", mode, name, err)
			}
			if len(f.provider.requests()) != 0 {
				t.Error("the provider was asked")
			}
		}
	}
	f := start(t, sandbox.ReadOnly, plainly(bwrapDialect))
	f.policy.root = filepath.Join(dir, "gone")
	if _, err := f.run(t.Context(), &shellv1.RunRequest{Command: "true"}); !strings.Contains(fmt.Sprint(err), "invalid workdir: the workspace root") {
		t.Errorf("a root that is gone: %v", err)
	}
	if os.Geteuid() != 0 {
		closed := filepath.Join(dir, "closed")
		if err := os.Mkdir(closed, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := f.run(t.Context(), &shellv1.RunRequest{Command: "true", Workdir: closed}); !strings.Contains(fmt.Sprint(err), "cannot be entered") {
			t.Errorf("a closed directory: %v", err)
		}
	}
}

func TestRequests(t *testing.T) {
	f := start(t, sandbox.ReadOnly, plainly(bwrapDialect))
	for name, r := range map[string]*shellv1.RunRequest{
		"invalid command: expected a non-empty string": {},
		"invalid command: a NUL":                       {Command: "a\x00b"},
		"exceed the kernel's limit":                    {Command: strings.Repeat("x", maxArgument+1)},
		"request.timeoutMs must be a positive":         {Command: "true", TimeoutMs: -1},
		"invalid env":                                  {Command: "true", Env: map[string]string{"A=B": "c"}},
		"the value of A":                               {Command: "true", Env: map[string]string{"A": "\x00"}},
	} {
		if _, err := f.run(t.Context(), r); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if n := len(f.provider.requests()); n != 0 {
		t.Errorf("the provider was asked %d times", n)
	}
	long := "true " + strings.Repeat("x", maxArgument-5)
	if r := f.must(t, long); r.GetExitCode() != 0 {
		t.Errorf("the longest command: %v", r)
	}
	f.policy.mode = "yolo"
	if _, err := f.run(t.Context(), &shellv1.RunRequest{Command: "touch ran"}); fault.Reason(err) != "UNKNOWN_MODE" || exists(t, f.path("ran")) {
		t.Errorf("a mode nobody knows: %v", err)
	}
	f.policy.mode = ""
	if _, err := f.run(t.Context(), &shellv1.RunRequest{Command: "touch ran"}); fault.Reason(err) != "UNKNOWN_MODE" || exists(t, f.path("ran")) {
		t.Errorf("no policy: %v", err)
	}
}

func TestDangerFullAccess(t *testing.T) {
	// runs unwrapped: the provider is never consulted, facts carry no enforcement
	f := start(t, sandbox.DangerFullAccess, &provider{answer: func(*sandboxv1.ConfineRequest) (*sandboxv1.ConfineReply, error) {
		return nil, sandbox.Unavailable(sandbox.ReadOnly, "")
	}})
	r := f.must(t, "pwd; touch ran; echo 'x: Read-only file system' >&2; exit 1")
	if d := cmp.Diff(&shellv1.SandboxFacts{Mode: "danger-full-access"}, r.GetSandbox(), cmp.Comparer(proto.Equal)); d != "" {
		t.Error(d)
	}
	if len(f.provider.requests()) != 0 || !exists(t, f.path("ran")) || string(r.GetStdout().GetData()) != f.policy.root+"\n" {
		t.Errorf("reply %v", r)
	}
}

func TestGrants(t *testing.T) {
	grants := map[string]*kernelv1.RedeemGrantReply{
		"ww":    {Scope: "sandbox-mode", Value: "workspace-write", Subject: "touch ran"},
		"full":  {Scope: "sandbox-mode", Value: "danger-full-access", Subject: "touch ran"},
		"ro":    {Scope: "sandbox-mode", Value: "read-only", Subject: "touch ran"},
		"bad":   {Scope: "sandbox-mode", Value: "yolo", Subject: "touch ran"},
		"other": {Scope: "network", Value: "workspace-write", Subject: "touch ran"},
		"what":  {Scope: "sandbox-mode", Value: "workspace-write", Subject: "true"},
		"where": {Scope: "sandbox-mode", Value: "workspace-write", Subject: "touch ran", Cwd: "/usr"},
	}
	for _, tt := range []struct {
		name   string
		from   sandbox.Mode
		grant  string
		mode   string // it ran under
		asked  int
		reason string
	}{
		{"an approved escalated retry runs under the approved mode", sandbox.ReadOnly, "ww", "workspace-write", 1, ""},
		{"escalating to danger-full-access bypasses the provider entirely", sandbox.ReadOnly, "full", "danger-full-access", 0, ""},
		{"from workspace-write", sandbox.WorkspaceWrite, "full", "danger-full-access", 0, ""},
		{"a grant that does not widen the standing mode", sandbox.WorkspaceWrite, "ww", "", 0, "GRANT_NOT_WIDER"},
		{"a grant can never narrow", sandbox.DangerFullAccess, "ww", "", 0, "GRANT_NOT_WIDER"},
		{"a grant for nothing", sandbox.ReadOnly, "ro", "", 0, "GRANT_NOT_WIDER"},
		{"a mode nobody knows", sandbox.ReadOnly, "bad", "", 0, "GRANT_FOREIGN"},
		{"a grant of another kind", sandbox.ReadOnly, "other", "", 0, "GRANT_FOREIGN"},
		{"a grant for another command", sandbox.ReadOnly, "what", "", 0, "GRANT_FOREIGN"},
		{"a grant for another directory", sandbox.ReadOnly, "where", "", 0, "GRANT_FOREIGN"},
		{"a grant the host refuses", sandbox.ReadOnly, "forged", "", 0, "GRANT_UNKNOWN"},
		{"no grant: the standing mode", sandbox.ReadOnly, "", "read-only", 1, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := start(t, tt.from, plainly(bwrapDialect), plugintest.Redeems(func(ctx context.Context, g string) (*kernelv1.RedeemGrantReply, error) {
				if call := plugin.Caller(ctx); call.Session != "s1" {
					return nil, fault.New(codes.PermissionDenied, "GRANT_FOREIGN", "redeemed outside the call")
				}
				if r, ok := grants[g]; ok {
					return r, nil
				}
				return nil, fault.New(codes.PermissionDenied, "GRANT_UNKNOWN", "grant is unknown")
			}))
			r, err := f.run(t.Context(), &shellv1.RunRequest{Command: "touch ran", Grant: tt.grant})
			if fault.Reason(err) != tt.reason || (err != nil) != (tt.reason != "") {
				t.Fatalf("error %v, want %q", err, tt.reason)
			}
			if exists(t, f.path("ran")) != (err == nil) {
				t.Error("what ran and what was reported differ")
			}
			asked := f.provider.requests()
			if r.GetSandbox().GetMode() != tt.mode || len(asked) != tt.asked {
				t.Errorf("ran under %q, provider asked %d times", r.GetSandbox().GetMode(), len(asked))
			}
			// the grant changes only the mode, never the root
			if len(asked) == 1 && (asked[0].GetMode() != tt.mode || asked[0].GetWorkspaceRoot() != f.policy.root) {
				t.Errorf("asked %v", asked[0])
			}
		})
	}
}

// overlapping calls settle with their OWN modes (an escalated one next to a default one)
func TestOverlapping(t *testing.T) {
	f := start(t, sandbox.ReadOnly, plainly(bwrapDialect), plugintest.Redeems(func(_ context.Context, g string) (*kernelv1.RedeemGrantReply, error) {
		mode, command, _ := strings.Cut(g, "|")
		return &kernelv1.RedeemGrantReply{Scope: "sandbox-mode", Value: mode, Subject: command}, nil
	}))
	var all sync.WaitGroup
	for i := range 24 {
		grant, mode := "", "read-only"
		if i%3 > 0 {
			mode = []string{"workspace-write", "danger-full-access"}[i%3-1]
			grant = fmt.Sprintf("%s|echo %d", mode, i)
		}
		all.Go(func() {
			r, err := f.run(t.Context(), &shellv1.RunRequest{Command: fmt.Sprintf("echo %d", i), Grant: grant})
			if err != nil || r.GetSandbox().GetMode() != mode || string(r.GetStdout().GetData()) != fmt.Sprintf("%d\n", i) {
				t.Errorf("call %d: %v, %v; want mode %s", i, r, err, mode)
			}
		})
	}
	all.Wait()
}

func TestClassification(t *testing.T) {
	const notice = "landlock-run: partial enforcement (older Landlock ABI)"
	for _, tt := range []struct {
		name    string
		dialect func(*sandboxv1.ConfineReply) *sandboxv1.ConfineReply
		command string
		exit    int32
		denied  bool
		fails   string
	}{
		{"never classifies a clean exit as a denial", bwrapDialect, "echo Read-only file system >&2", 0, false, ""},
		{"classifies failed runs by the wrap's own dialect", bwrapDialect, "echo touch: Read-only FILE system >&2; exit 1", 1, true, ""},
		{"EACCES does not classify under bwrap", bwrapDialect, "echo Permission denied >&2; exit 1", 1, false, ""},
		{"only stderr counts", bwrapDialect, "echo Read-only file system; exit 1", 1, false, ""},
		{"keeps a successfully launched wrapped child exit 126 as an ordinary outcome", bwrapDialect, "exit 126", 126, false, ""},
		{"keeps a successfully launched wrapped child exit 127 as an ordinary outcome", bwrapDialect, "no-such-command-at-all", 127, false, ""},
		{"keeps child exit 125 ordinary when the partial-enforcement notice is the only runner line", landlockDialect, "echo '" + notice + "' >&2; exit 125", 125, false, ""},
		{"keeps a Landlock fatal line at exit 1 as insufficient runner-failure evidence", landlockDialect, "echo 'landlock-run: exec failed: x' >&2; exit 1", 1, false, ""},
		{"reports the fatal line after the notice as SANDBOX_UNAVAILABLE detail", landlockDialect, "echo '" + notice + "' >&2; echo 'landlock-run: exec failed: x' >&2; exit 125", 0, false, "Runner failure: landlock-run: exec failed: x"},
		{"classifies a notice plus child Permission denied as a denial, not runner failure", landlockDialect, "echo '" + notice + "' >&2; echo 'sh: Permission denied' >&2; exit 125", 125, true, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := plainly(tt.dialect)
			f := start(t, sandbox.ReadOnly, p)
			r, err := f.run(t.Context(), &shellv1.RunRequest{Command: tt.command})
			if tt.fails != "" {
				if fault.Reason(err) != "SANDBOX_UNAVAILABLE" || !strings.HasSuffix(err.Error(), tt.fails) {
					t.Errorf("error %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if r.ExitCode == nil || r.GetExitCode() != tt.exit || r.GetSandbox().GetDenied() != tt.denied {
				t.Errorf("reply %v", r)
			}
			// carries the provider's enforcement fact through unchanged
			want := tt.dialect(&sandboxv1.ConfineReply{})
			if r.GetSandbox().GetRunner() != want.GetRunner() || r.GetSandbox().GetEnforcement() != want.GetEnforcement().GetLevel() || r.GetSandbox().GetMode() != "read-only" {
				t.Errorf("facts %v", r.GetSandbox())
			}
		})
	}
}

// never classifies a signal kill as a denial
func TestSignal(t *testing.T) {
	f := start(t, sandbox.ReadOnly, plainly(bwrapDialect))
	r := f.must(t, "echo Read-only file system >&2; kill -KILL $$")
	if r.ExitCode != nil || r.GetSignal() != "SIGKILL" || r.GetSandbox().GetDenied() || r.GetTimedOut() {
		t.Errorf("reply %v", r)
	}
}

func TestEnvironment(t *testing.T) {
	host := []string{
		"PATH=/bin", "HOME=/h", "API_KEY=1", "mypassword=2", "Client_Secret=3", "GH_TOKEN=4", "CORDON_X=5", "cordon_plugin=6",
		"TERM=xterm", "PAGER=less", "KEEP=a=b",
	}
	for _, tt := range []struct {
		name    string
		request map[string]string
		session string
		want    []string
	}{
		{"scrubbed, with the plain terminal's values", nil, "s1", []string{
			"CORDON_SESSION_ID=s1", "CORDON_SHELL=1", "GIT_PAGER=cat", "HOME=/h", "KEEP=a=b", "NO_COLOR=1", "PAGER=cat", "PATH=/bin", "TERM=dumb"}},
		{"the request may re-add, and not what is managed", map[string]string{"API_KEY": "mine", "TERM": "vt100", "CORDON_SHELL": "0", "CORDON_SESSION_ID": "forged"}, "s1", []string{
			"API_KEY=mine", "CORDON_SESSION_ID=s1", "CORDON_SHELL=1", "GIT_PAGER=cat", "HOME=/h", "KEEP=a=b", "NO_COLOR=1", "PAGER=cat", "PATH=/bin", "TERM=vt100"}},
		{"without a session there is no id", map[string]string{"CORDON_SESSION_ID": "forged"}, "", []string{
			"CORDON_SHELL=1", "GIT_PAGER=cat", "HOME=/h", "KEEP=a=b", "NO_COLOR=1", "PAGER=cat", "PATH=/bin", "TERM=dumb"}},
	} {
		last := map[string]string{} // as a process sees it
		for _, kv := range environment(host, tt.request, tt.session) {
			name, _, _ := strings.Cut(kv, "=")
			last[name] = kv
		}
		var got []string
		for _, kv := range last {
			got = append(got, kv)
		}
		slices.Sort(got)
		if d := cmp.Diff(tt.want, got); d != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, d)
		}
	}
	// And in a process.
	t.Setenv("CORDON_TEST_LEAK", "1")
	t.Setenv("SOME_TOKEN", "1")
	t.Setenv("HARMLESS", "1")
	f := start(t, sandbox.ReadOnly, plainly(bwrapDialect))
	r, err := f.run(t.Context(), &shellv1.RunRequest{Command: `echo "$CORDON_TEST_LEAK$SOME_TOKEN|$HARMLESS|$TERM|$CORDON_SHELL|$CORDON_SESSION_ID|$GIVEN"`, Env: map[string]string{"GIVEN": "x y"}})
	if err != nil || string(r.GetStdout().GetData()) != "|1|dumb|1|s1|x y\n" {
		t.Errorf("printed %q, %v", r.GetStdout().GetData(), err)
	}
}

func TestStdin(t *testing.T) {
	f := start(t, sandbox.ReadOnly, plainly(bwrapDialect))
	binary := []byte("a\x00\xff\xfe\nb")
	for _, in := range [][]byte{nil, {}, binary, make([]byte, 1<<20)} {
		r, err := f.run(t.Context(), &shellv1.RunRequest{Command: "cat | tail -c 1000", Stdin: in})
		if err != nil {
			t.Fatal(err)
		}
		if want := in[max(0, len(in)-1000):]; string(r.GetStdout().GetData()) != string(want) {
			t.Errorf("%d bytes in, %q out", len(in), r.GetStdout().GetData())
		}
	}
	// A command that does not read its input ends all the same.
	if r, err := f.run(t.Context(), &shellv1.RunRequest{Command: "exit 3", Stdin: make([]byte, 4<<20)}); err != nil || r.GetExitCode() != 3 {
		t.Errorf("%v, %v", r, err)
	}
}

func TestOutput(t *testing.T) {
	f := start(t, sandbox.ReadOnly, plainly(bwrapDialect), plugintest.Config(`{"maxOutputBytes":10,"maxSpillBytes":100}`))
	r := f.must(t, `printf '0123456789'; printf 'x\xff\x00y' >&2`)
	want := &shellv1.Output{Data: []byte("0123456789"), TotalBytes: 10}
	if !proto.Equal(r.GetStdout(), want) {
		t.Errorf("stdout %v, want %v", r.GetStdout(), want)
	}
	if got := string(r.GetStderr().GetData()); got != "x\xff\x00y" { // bytes are bytes
		t.Errorf("stderr %q", got)
	}
	r = f.must(t, `printf '0123456789\xffz'`)
	o := r.GetStdout()
	if string(o.GetData()) != "23456789\xffz" || !o.GetTruncated() || o.GetTotalBytes() != 12 {
		t.Errorf("stdout %v", o)
	}
	spilled, err := os.ReadFile(o.GetSpillPath())
	if err != nil || string(spilled) != "0123456789\xffz" || filepath.Dir(o.GetSpillPath()) != filepath.Join(f.state, "output") {
		t.Errorf("spill %s: %q, %v", o.GetSpillPath(), spilled, err)
	}
	if fi, err := os.Stat(o.GetSpillPath()); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("spill file: %v, %v", fi.Mode(), err)
	}
	r = f.must(t, "head -c 101 /dev/zero")
	if o := r.GetStdout(); !o.GetTruncated() || o.GetSpillPath() != "" || o.GetTotalBytes() != 101 || len(o.GetData()) != 10 {
		t.Errorf("beyond the spill limit: %v", o)
	}
	files, err := os.ReadDir(filepath.Join(f.state, "output"))
	if err != nil || len(files) != 1 {
		t.Errorf("%d spill files left, %v; want the one that was reported", len(files), err)
	}
}

// held is a named pipe that a command and everything it starts keep open: its end is the end of all of them.
type held struct {
	path string
	r    *bufio.Reader
}

func hold(t *testing.T) *held {
	t.Helper()
	h := &held{path: filepath.Join(t.TempDir(), "held")}
	if err := syscall.Mkfifo(h.path, 0o600); err != nil {
		t.Fatal(err)
	}
	return h
}

// started waits for the first line a command writes to it.
func (h *held) started(t *testing.T) {
	t.Helper()
	f, err := os.Open(h.path) // blocks until the command opens the other end
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	h.r = bufio.NewReader(f)
	if _, err := h.r.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
}

// gone waits until nobody holds it any more.
func (h *held) gone(t *testing.T) {
	t.Helper()
	if rest, err := io.ReadAll(h.r); err != nil || len(rest) != 0 {
		t.Errorf("held pipe: %q, %v", rest, err)
	}
}

func TestTimeout(t *testing.T) {
	for _, tt := range []struct {
		name, command string
		exit          bool
	}{
		{"ends the whole tree", `sleep 1000 & sleep 1000`, false},
		{"also what ignores SIGTERM", `trap '' TERM; (trap '' TERM; while :; do sleep 1000; done) & while :; do sleep 1000; done`, false},
		{"also what made a session of its own", `setsid sleep 1000 & sleep 1000`, false},
		{"a command that traps the signal and exits 0", `trap 'exit 0' TERM; sleep 1000 & wait`, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			h := hold(t)
			f := start(t, sandbox.ReadOnly, plainly(bwrapDialect))
			done := make(chan *shellv1.RunReply, 1)
			go func() {
				r, err := f.run(t.Context(), &shellv1.RunRequest{Command: "exec 9>" + h.path + "; echo up >&9; " + tt.command, TimeoutMs: 3000})
				if err != nil {
					t.Error(err)
				}
				done <- r
			}()
			h.started(t)
			r := <-done
			h.gone(t)
			if !r.GetTimedOut() || r.GetTimeoutMs() != 3000 {
				t.Errorf("reply %v", r)
			}
			// Without a trap it is up to bash whether its own SIGTERM or the death of what it waits for is noticed first.
			if clean := r.ExitCode != nil && r.GetExitCode() == 0; clean != tt.exit {
				t.Errorf("reply %v", r)
			}
		})
	}
	f := start(t, sandbox.ReadOnly, plainly(bwrapDialect), plugintest.Config(`{"timeoutMs":5000,"maxTimeoutMs":9000}`))
	for asked, want := range map[int64]int64{0: 5000, 1000: 1000, 60000: 9000, 1 << 62: 9000} {
		r, err := f.run(t.Context(), &shellv1.RunRequest{Command: "true", TimeoutMs: asked})
		if err != nil || r.GetTimeoutMs() != want || r.GetTimedOut() {
			t.Errorf("asked for %d: %v, %v", asked, r, err)
		}
	}
}

func TestCallerCancels(t *testing.T) {
	for _, mode := range []sandbox.Mode{sandbox.ReadOnly, sandbox.DangerFullAccess} {
		h := hold(t)
		f := start(t, mode, plainly(bwrapDialect))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			_, err := f.run(ctx, &shellv1.RunRequest{Command: "exec 9>" + h.path + "; echo up >&9; sleep 1000 & sleep 1000"})
			done <- err
		}()
		h.started(t)
		cancel()
		if err := <-done; status.Code(err) != codes.Canceled {
			t.Errorf("error %v", err)
		}
		h.gone(t)
	}
}

// Under the real bubblewrap, on the real disk.
func TestBubblewrap(t *testing.T) {
	t.Run("read-only denies a write — the file must NOT exist, and EROFS text classifies as a denial", func(t *testing.T) {
		f := start(t, sandbox.ReadOnly, confining(t))
		r := f.must(t, "echo hi > a.txt")
		if exists(t, f.path("a.txt")) || !r.GetSandbox().GetDenied() || r.GetExitCode() == 0 {
			t.Errorf("reply %v", r)
		}
	})
	t.Run("workspace-write lands a write inside the workspace root and still denies one beside it", func(t *testing.T) {
		f := start(t, sandbox.WorkspaceWrite, confining(t))
		beside := filepath.Join(filepath.Dir(f.policy.root), "beside")
		if r := f.must(t, "echo hi > a.txt"); !exists(t, f.path("a.txt")) || r.GetSandbox().GetDenied() {
			t.Errorf("inside: %v", r)
		}
		if r := f.must(t, "echo hi > "+beside); exists(t, beside) || !r.GetSandbox().GetDenied() {
			t.Errorf("beside: %v", r)
		}
	})
	t.Run("an approved escalated retry lands the exact write read-only denied", func(t *testing.T) {
		f := start(t, sandbox.ReadOnly, confining(t), plugintest.Redeems(func(context.Context, string) (*kernelv1.RedeemGrantReply, error) {
			return &kernelv1.RedeemGrantReply{Scope: "sandbox-mode", Value: "workspace-write", Subject: "echo hi > a.txt"}, nil
		}))
		request := &shellv1.RunRequest{Command: "echo hi > a.txt"}
		if r, err := f.run(t.Context(), request); err != nil || !r.GetSandbox().GetDenied() || exists(t, f.path("a.txt")) {
			t.Fatalf("%v, %v", r, err)
		}
		request.Grant = "g"
		if r, err := f.run(t.Context(), request); err != nil || r.GetSandbox().GetMode() != "workspace-write" || !exists(t, f.path("a.txt")) {
			t.Fatalf("%v, %v", r, err)
		}
		// The next one without a grant is denied again.
		if r := f.must(t, "echo hi > b.txt"); !r.GetSandbox().GetDenied() || exists(t, f.path("b.txt")) {
			t.Errorf("%v", r)
		}
	})
	t.Run("the time limit reaches into the sandbox", func(t *testing.T) {
		f := start(t, sandbox.WorkspaceWrite, confining(t))
		fifo := f.path("held")
		if err := syscall.Mkfifo(fifo, 0o600); err != nil {
			t.Fatal(err)
		}
		h := &held{path: fifo}
		done := make(chan *shellv1.RunReply, 1)
		go func() {
			r, err := f.run(t.Context(), &shellv1.RunRequest{Command: "exec 9>held; echo up >&9; setsid sleep 1000 & sleep 1000", TimeoutMs: 3000})
			if err != nil {
				t.Error(err)
			}
			done <- r
		}()
		h.started(t)
		if r := <-done; !r.GetTimedOut() {
			t.Errorf("reply %v", r)
		}
		h.gone(t)
	})
	t.Run("stdin and binary output pass unchanged", func(t *testing.T) {
		f := start(t, sandbox.ReadOnly, confining(t))
		in := []byte("\x00\x01\xff\xfe\r\n")
		r, err := f.run(t.Context(), &shellv1.RunRequest{Command: "cat; cat /dev/null >&2", Stdin: in})
		if err != nil || string(r.GetStdout().GetData()) != string(in) {
			t.Errorf("%v, %v", r, err)
		}
	})
}

func TestManifestNeedsNoConfig(t *testing.T) {
	m, err := Plugin.Manifest()
	if err != nil {
		t.Fatal(err)
	}
	var schema struct {
		Required []string `json:"required"`
	}
	if err := json.Unmarshal(m.GetConfigSchema(), &schema); err != nil || len(schema.Required) != 0 {
		t.Errorf("required %v, %v", schema.Required, err)
	}
}

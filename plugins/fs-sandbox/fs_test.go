package main

import (
	"context"
	"errors"
	iofs "io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"

	fsv1 "github.com/cordon-host/cordon/api/fs/v1"
	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	policyv1 "github.com/cordon-host/cordon/api/policy/v1"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/fs"
	"github.com/cordon-host/cordon/capability/sandbox"
	"github.com/cordon-host/cordon/plugin"
	"github.com/cordon-host/cordon/plugin/plugintest"
)

// standing is a policy: a default, and what sessions have instead.
type standing struct {
	policyv1.UnimplementedPolicyServer
	mu       sync.Mutex
	mode     string
	root     string
	sessions map[string]*policyv1.ResolveReply
}

func (s *standing) Resolve(ctx context.Context, _ *policyv1.ResolveRequest) (*policyv1.ResolveReply, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r := s.sessions[plugin.Caller(ctx).Session]; r != nil {
		return r, nil
	}
	if s.mode == "" {
		return nil, fault.New(codes.FailedPrecondition, "UNKNOWN_MODE", "no mode")
	}
	return &policyv1.ResolveReply{Mode: s.mode, WorkspaceRoot: s.root}, nil
}

type fixture struct {
	*plugintest.Plugin
	client  fsv1.FsClient
	policy  *standing
	base    string
	root    string
	temp    string
	granted map[string]*kernelv1.RedeemGrantReply
}

// place is a directory outside /tmp, which stands for something else in every confined mode.
func place(t *testing.T) string {
	t.Helper()
	parent := "/var/lib"
	if os.Geteuid() != 0 {
		cache, err := os.UserCacheDir()
		must(t, err)
		must(t, os.MkdirAll(cache, 0o700))
		parent = cache
	}
	base, err := os.MkdirTemp(parent, "cordon-fs-sandbox-test-")
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(base)) })
	return sandbox.CanonicalPath(base)
}

func start(t *testing.T, mode sandbox.Mode, opts ...plugintest.Option) *fixture {
	t.Helper()
	base := place(t)
	f := &fixture{base: base, root: base + "/ws", temp: base + "/state/tmp", granted: map[string]*kernelv1.RedeemGrantReply{}}
	for _, dir := range []string{f.root, base + "/outside", base + "/state/plugins/fs"} {
		must(t, os.MkdirAll(dir, 0o755))
	}
	f.policy = &standing{mode: string(mode), root: f.root, sessions: map[string]*policyv1.ResolveReply{}}
	f.Plugin = plugintest.Start(t, Plugin, append([]plugintest.Option{
		plugintest.Fake("policy", &policyv1.Policy_ServiceDesc, f.policy),
		plugintest.FactsOf("policy", map[string]string{"defaultMode": string(mode)}),
		plugintest.Deployment(&kernelv1.Deployment{
			Root: f.root, StateDir: base + "/state/plugins/fs", TempDir: f.temp,
			Hidden: []string{base + "/state"}, Protected: []string{f.root + "/compose.yml"},
		}),
		plugintest.Redeems(func(_ context.Context, grant string) (*kernelv1.RedeemGrantReply, error) {
			if g := f.granted[grant]; g != nil {
				delete(f.granted, grant)
				return g, nil
			}
			return nil, fault.New(codes.PermissionDenied, "GRANT_UNKNOWN", "grant is unknown")
		}),
	}, opts...)...)
	f.client = fsv1.NewFsClient(f.Conn())
	return f
}

func (f *fixture) in(ctx context.Context, session string) context.Context {
	return f.Stamp(ctx, plugin.Call{Session: session})
}

func (f *fixture) write(t *testing.T, session, path, content, grant string) (*fsv1.WriteReply, error) {
	t.Helper()
	return f.client.Write(f.in(t.Context(), session), &fsv1.WriteRequest{Path: path, Content: []byte(content), Grant: grant})
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

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestLoad(t *testing.T) {
	for config, want := range map[string]string{
		`{"maxEditBytes":0}`:          "fs-sandbox: maxEditBytes must be a positive number",
		`{"maxEditBytes":-1}`:         "fs-sandbox: maxEditBytes must be a positive number",
		`{"maxEditBytes":1073741825}`: "fs-sandbox: maxEditBytes must be a positive number",
		`{"maxEditBytes":"big"}`:      "maxEditBytes",
		`{"cwd":"/"}`:                 "cwd",
	} {
		_, err := plugintest.Load(t, Plugin, plugintest.Config(config), plugintest.Fake("policy", &policyv1.Policy_ServiceDesc, &standing{}))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s loads with %v, want %q", config, err, want)
		}
	}
}

func TestFacts(t *testing.T) { // reports the deployment default mode (what the tool layer advertises against)
	for _, mode := range sandbox.Modes() {
		var got fs.Facts
		if ok, err := start(t, mode).Facts("fs", &got); !ok || err != nil || got != (fs.Facts{SandboxMode: mode, Confines: true}) {
			t.Errorf("%s: facts %+v, %v", mode, got, err)
		}
	}
	if !Plugin.Confines {
		t.Error("the manifest does not say that it confines")
	}
}

func TestModes(t *testing.T) {
	for _, mode := range sandbox.Modes() {
		t.Run(string(mode), func(t *testing.T) {
			f := start(t, mode)
			must(t, os.WriteFile(f.root+"/have.txt", []byte("old\n"), 0o644))
			must(t, os.WriteFile(f.base+"/outside/have.txt", []byte("old\n"), 0o644))
			for _, c := range []struct {
				path string
				ok   bool
			}{
				{f.root + "/have.txt", mode != sandbox.ReadOnly},
				{f.base + "/outside/have.txt", mode == sandbox.DangerFullAccess},
			} {
				_, err := f.client.Edit(f.in(t.Context(), "s1"), &fsv1.EditRequest{Path: c.path, OldString: "old", NewString: "new"})
				want := "old\n"
				if c.ok {
					want = "new\n"
				}
				if (err == nil) != c.ok || !c.ok && fault.Reason(err) != fs.SandboxDenied || content(t, c.path) != want {
					t.Errorf("edit %s: %v, holds %q", c.path, err, content(t, c.path))
				}
				r, err := f.write(t, "s1", c.path+".new", "x", "")
				want = "(none)"
				if c.ok {
					want = "x"
				}
				if (err == nil) != c.ok || !c.ok && fault.Reason(err) != fs.SandboxDenied || content(t, c.path+".new") != want {
					t.Errorf("write %s: %v, holds %q", c.path, err, content(t, c.path+".new"))
				}
				if c.ok && (r.GetMode() != string(mode) || !r.GetCreated() || r.GetPath() != c.path+".new" || r.GetVersion() == "") {
					t.Errorf("reply %v", r)
				}
				// allows reads (every mode permits reading)
				got, err := f.client.Read(f.in(t.Context(), "s1"), &fsv1.ReadRequest{Path: c.path})
				if err != nil || len(got.GetLines()) != 1 || got.GetTotalLines() != 1 || got.GetPath() != c.path {
					t.Errorf("read %s: %v, %v", c.path, got, err)
				}
			}
		})
	}
}

func TestGrants(t *testing.T) {
	grant := func(scope, value string) *kernelv1.RedeemGrantReply {
		return &kernelv1.RedeemGrantReply{Scope: scope, Value: value}
	}
	for _, c := range []struct {
		name  string
		mode  sandbox.Mode
		grant *kernelv1.RedeemGrantReply
		path  string
		want  string // reason; empty for written
	}{
		{"a workspace-write grant lets a contained write land for that call only", sandbox.ReadOnly, grant(scopeMode, "workspace-write"), "$W/x", ""},
		{"and no other", sandbox.ReadOnly, grant(scopeMode, "workspace-write"), "$B/outside/x", fs.SandboxDenied},
		{"and nothing protected", sandbox.ReadOnly, grant(scopeMode, "workspace-write"), "$W/compose.yml", fs.SandboxDenied},
		{"a danger-full-access grant bypasses the fence for that call", sandbox.WorkspaceWrite, grant(scopeMode, "danger-full-access"), "$B/outside/x", ""},
		{"a grant that widens nothing", sandbox.WorkspaceWrite, grant(scopeMode, "workspace-write"), "$W/x", "GRANT_NOT_WIDER"},
		{"a grant that narrows", sandbox.DangerFullAccess, grant(scopeMode, "workspace-write"), "$W/x", "GRANT_NOT_WIDER"},
		{"a grant for something else", sandbox.ReadOnly, grant("network", "open"), "$W/x", "GRANT_FOREIGN"},
		{"a grant for no mode", sandbox.ReadOnly, grant(scopeMode, "root"), "$W/x", "GRANT_FOREIGN"},
		{"a made up grant", sandbox.ReadOnly, nil, "$W/x", "GRANT_UNKNOWN"},
		{"a made up grant where none is needed", sandbox.DangerFullAccess, nil, "$W/x", "GRANT_UNKNOWN"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := start(t, c.mode)
			path := strings.NewReplacer("$B", f.base, "$W", f.root).Replace(c.path)
			if c.grant != nil {
				f.granted["g1"] = c.grant
			}
			_, err := f.write(t, "s1", path, "x", "g1")
			if fault.Reason(err) != c.want || (err == nil) != (c.want == "") {
				t.Errorf("%v, want %q", err, c.want)
			}
			if written := content(t, path) == "x"; written != (c.want == "") {
				t.Errorf("written %v", written)
			}
			must(t, errors.Join(os.RemoveAll(path)))
			if _, err := f.write(t, "s1", path, "x", "g1"); fault.Reason(err) != "GRANT_UNKNOWN" || content(t, path) != "(none)" {
				t.Errorf("the second time: %v", err)
			}
			if c.mode == sandbox.ReadOnly {
				if _, err := f.write(t, "s1", path, "x", ""); fault.Reason(err) != fs.SandboxDenied || content(t, path) != "(none)" {
					t.Errorf("without a grant: %v", err)
				}
			}
		})
	}
}

// A direct call runs at the policy's answer: the session's, or outside any session the deployment's default.
func TestDirectCall(t *testing.T) {
	f := start(t, sandbox.ReadOnly)
	f.policy.sessions["writer"] = &policyv1.ResolveReply{Mode: "workspace-write", WorkspaceRoot: f.root}
	if _, err := f.write(t, "", f.root+"/x", "x", ""); fault.Reason(err) != fs.SandboxDenied || content(t, f.root+"/x") != "(none)" {
		t.Errorf("outside any session: %v", err)
	}
	if _, err := f.write(t, "writer", f.root+"/x", "x", ""); err != nil || content(t, f.root+"/x") != "x" {
		t.Errorf("in a session that may: %v", err)
	}
	f.policy.mode = ""
	if _, err := f.write(t, "", f.root+"/y", "y", ""); fault.Reason(err) != "UNKNOWN_MODE" || content(t, f.root+"/y") != "(none)" {
		t.Errorf("without a policy: %v", err)
	}
	f.policy.mode = "root"
	for name, call := range map[string]func() error{
		"write": func() error { _, err := f.write(t, "", f.root+"/y", "y", ""); return err },
		"read": func() error {
			_, err := f.client.Read(f.in(t.Context(), ""), &fsv1.ReadRequest{Path: f.root + "/x"})
			return err
		},
		"stat": func() error {
			_, err := f.client.Stat(f.in(t.Context(), ""), &fsv1.StatRequest{Path: f.root + "/x"})
			return err
		},
		"list": func() error {
			_, err := f.client.List(f.in(t.Context(), ""), &fsv1.ListRequest{Path: f.root})
			return err
		},
	} {
		if err := call(); fault.Reason(err) != "UNKNOWN_MODE" {
			t.Errorf("%s in an unknown mode: %v", name, err)
		}
	}
}

// Two sessions with different roots run side by side: own writes land, cross writes are denied; each has its own temp directory.
func TestTwoSessions(t *testing.T) {
	f := start(t, sandbox.ReadOnly)
	roots := map[string]string{"one": f.base + "/one", "two": f.base + "/two"}
	for s, root := range roots {
		must(t, os.Mkdir(root, 0o755))
		f.policy.sessions[s] = &policyv1.ResolveReply{Mode: "workspace-write", WorkspaceRoot: root}
	}
	var wg sync.WaitGroup
	for s, root := range roots {
		wg.Go(func() {
			other := roots["one"]
			if s == "one" {
				other = roots["two"]
			}
			for range 20 {
				if _, err := f.write(t, s, "own.txt", s, ""); err != nil || content(t, root+"/own.txt") != s {
					t.Errorf("%s: own write: %v", s, err)
				}
				if _, err := f.write(t, s, other+"/cross.txt", s, ""); fault.Reason(err) != fs.SandboxDenied || content(t, other+"/cross.txt") != "(none)" {
					t.Errorf("%s: cross write: %v", s, err)
				}
				if _, err := f.write(t, s, "/tmp/t.txt", s, ""); err != nil || content(t, filepath.Join(f.temp, s, "t.txt")) != s {
					t.Errorf("%s: temp: %v", s, err)
				}
				r, err := f.client.Read(f.in(t.Context(), s), &fsv1.ReadRequest{Path: "/tmp/t.txt"})
				if err != nil || len(r.GetLines()) != 1 || r.GetLines()[0].GetText() != s || r.GetPath() != "/tmp/t.txt" {
					t.Errorf("%s: temp reads %v, %v", s, r, err)
				}
			}
		})
	}
	wg.Wait()
	if fi, err := os.Stat(filepath.Join(f.temp, "one")); err != nil || fi.Mode().Perm() != 0o700 {
		t.Errorf("temp directory %v, %v", fi, err)
	}
	if _, err := f.client.Read(f.in(t.Context(), "one"), &fsv1.ReadRequest{Path: f.temp + "/two/t.txt"}); fault.Reason(err) != fs.SandboxDenied {
		t.Errorf("another session's temp directory: %v", err)
	}
}

func TestRequests(t *testing.T) {
	f := start(t, sandbox.WorkspaceWrite)
	must(t, os.WriteFile(f.root+"/a.txt", []byte("a\nb\nc\n"), 0o640))
	must(t, os.Symlink("a.txt", f.root+"/l"))
	ctx := f.in(t.Context(), "s1")
	st, err := f.client.Stat(ctx, &fsv1.StatRequest{Path: "l"})
	if err != nil || st.GetPath() != f.root+"/a.txt" || st.GetKind() != "file" || st.GetSize() != 6 || st.GetMode() != 0o640 {
		t.Errorf("stat: %v, %v", st, err)
	}
	list, err := f.client.List(ctx, &fsv1.ListRequest{Path: "."})
	if err != nil || len(list.GetEntries()) != 2 || list.GetEntries()[1].GetName() != "l" || list.GetEntries()[1].GetKind() != "file" {
		t.Errorf("list: %v, %v", list, err)
	}
	for _, c := range []struct {
		path, mode, want string
		exists           bool
	}{
		{"l", "", f.root + "/a.txt", true},
		{"none/x", "", f.root + "/none/x", false},
		{"/tmp/none-of-this", "danger-full-access", "/tmp/none-of-this", false},
		{f.base + "/state/plugins", "read-only", f.base + "/state/plugins", true}, // a person must see it
	} {
		r, err := f.client.Resolve(ctx, &fsv1.ResolveRequest{Path: c.path, Mode: c.mode})
		if err != nil || r.GetPath() != c.want || r.GetExists() != c.exists {
			t.Errorf("resolve %s: %v, %v", c.path, r, err)
		}
	}
	if _, err := f.client.Resolve(ctx, &fsv1.ResolveRequest{Path: "l", Mode: "root"}); fault.Reason(err) != "INVALID_REQUEST" {
		t.Error(err)
	}
	if _, err := f.client.Write(ctx, &fsv1.WriteRequest{Path: "l", Precondition: &fsv1.Precondition{LeadsTo: f.root + "/l"}}); fault.Reason(err) != fs.StaleVersion || content(t, f.root+"/a.txt") != "a\nb\nc\n" {
		t.Errorf("a write to what it does not lead to: %v", err)
	}
	for _, r := range []*fsv1.ReadRequest{{Path: "a.txt", Offset: -1}, {Path: "a.txt", Limit: -1}, {Path: "a.txt", MaxBytes: -1}, {Path: "a.txt", MaxLine: -1}} {
		if _, err := f.client.Read(ctx, r); fault.Reason(err) != "INVALID_REQUEST" {
			t.Errorf("%v: %v", r, err)
		}
	}
	both := &fsv1.Precondition{MustNotExist: true, Version: "1"}
	if _, err := f.client.Write(ctx, &fsv1.WriteRequest{Path: "a.txt", Precondition: both}); fault.Reason(err) != "INVALID_REQUEST" {
		t.Error(err)
	}
	if _, err := f.client.Edit(ctx, &fsv1.EditRequest{Path: "a.txt", OldString: "a", Precondition: &fsv1.Precondition{MustNotExist: true}}); fault.Reason(err) != "INVALID_REQUEST" {
		t.Error(err)
	}
	if _, err := f.client.Write(ctx, &fsv1.WriteRequest{Path: "a.txt", Precondition: &fsv1.Precondition{MustNotExist: true}}); fault.Reason(err) != fs.NotObserved {
		t.Error(err)
	}
	if _, err := f.client.Write(ctx, &fsv1.WriteRequest{Path: "a.txt", Content: []byte("x"), Precondition: &fsv1.Precondition{Version: "1"}}); fault.Reason(err) != fs.StaleVersion {
		t.Error(err)
	}
	if _, err := f.client.Write(ctx, &fsv1.WriteRequest{Path: "a.txt", Content: []byte("x"), Precondition: &fsv1.Precondition{Version: st.GetVersion()}}); err != nil || content(t, f.root+"/a.txt") != "x" {
		t.Error(err)
	}
}

package main

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	policyv1 "github.com/cordon-host/cordon/api/policy/v1"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/sandbox"
	"github.com/cordon-host/cordon/plugin"
	"github.com/cordon-host/cordon/plugin/plugintest"
)

func canonicalTemp(t *testing.T) string {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func start(t *testing.T, log *plugintest.Log, opts ...plugintest.Option) (*plugintest.Plugin, policyv1.PolicyClient) {
	t.Helper()
	p := plugintest.Start(t, Plugin, append(opts, log.Fake())...)
	return p, policyv1.NewPolicyClient(p.Conn())
}

func TestLoad(t *testing.T) {
	root := canonicalTemp(t)
	for _, dir := range []string{"ws", "other"} {
		if err := os.Mkdir(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(filepath.Join(root, "ws"), filepath.Join(root, "link")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "file"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name, config string
		noRoot       bool
		want         Facts
		err          string
	}{
		{name: "defaults to read-only under the deployment's directory", want: Facts{sandbox.ReadOnly, root}},
		{name: "carries a configured mode and resolves the workspace root absolute", config: `{"mode":"workspace-write","workspaceRoot":"ws"}`, want: Facts{sandbox.WorkspaceWrite, filepath.Join(root, "ws")}},
		{name: "an absolute root through a link", config: `{"workspaceRoot":"` + root + `/link"}`, want: Facts{sandbox.ReadOnly, filepath.Join(root, "ws")}},
		{name: "component semantics: link/.. is the parent of the target", config: `{"workspaceRoot":"link/../other"}`, want: Facts{sandbox.ReadOnly, filepath.Join(root, "other")}},
		{name: "danger-full-access can be a deployment's default", config: `{"mode":"danger-full-access"}`, want: Facts{sandbox.DangerFullAccess, root}},
		{name: "rejects a mode outside the closed vocabulary at load", config: `{"mode":"yolo"}`, err: "yolo|one of"},
		{name: "a missing root", config: `{"workspaceRoot":"nowhere"}`, err: "sandbox-policy: workspaceRoot: " + root + "/nowhere cannot be resolved"},
		{name: "a root that is a file", config: `{"workspaceRoot":"file"}`, err: "sandbox-policy: workspaceRoot: " + root + "/file is not a directory"},
		{name: "no root at all", noRoot: true, err: "sandbox-policy: workspaceRoot: not set"},
		{name: "an unknown key", config: `{"mod":"read-only"}`, err: "mod"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := &kernelv1.Deployment{Root: root}
			if tt.noRoot {
				d.Root = ""
			}
			p, err := plugintest.Load(t, Plugin, plugintest.NewLog().Fake(), plugintest.Config(tt.config), plugintest.Deployment(d))
			if tt.err != "" {
				for want := range strings.SplitSeq(tt.err, "|") {
					if err != nil && strings.Contains(err.Error(), want) {
						return
					}
				}
				t.Fatalf("loaded with %v, want an error with one of %q", err, tt.err)
			}
			if err != nil {
				t.Fatal(err)
			}
			var got Facts
			if ok, err := p.Facts("policy", &got); !ok || err != nil || got != tt.want {
				t.Errorf("facts %+v (%v, %v), want %+v", got, ok, err, tt.want)
			}
		})
	}
}

// A construction that bypasses the schema is refused by the plugin itself.
func TestParsesItsOwnMode(t *testing.T) {
	p := Plugin
	p.Default = func() Config { return Config{Mode: "yolo"} }
	if _, err := plugintest.Load(t, p, plugintest.NewLog().Fake()); err == nil || !strings.Contains(err.Error(), `sandbox-policy: mode: sandbox mode must be one of "read-only", "workspace-write" or "danger-full-access", got "yolo"`) {
		t.Errorf("loaded with %v", err)
	}
}

func TestResolve(t *testing.T) {
	root, a, b := canonicalTemp(t), canonicalTemp(t), canonicalTemp(t)
	link := filepath.Join(root, "link")
	if err := os.Symlink(a, link); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(filepath.Dir(a), "sibling"), 0o755); err != nil {
		t.Fatal(err)
	}
	log := plugintest.NewLog()
	for _, mode := range sandbox.Modes() {
		log.Session("mode-"+string(mode), a).Record(sandbox.EventMode, sandbox.ModeChange{Mode: mode})
	}
	log.Session("plain", b)
	log.Session("rootless", "")
	log.Session("linked", link+"/../sibling")
	last := log.Session("last", a)
	last.Record(sandbox.EventMode, sandbox.ModeChange{Mode: sandbox.DangerFullAccess})
	last.Record("other/event", map[string]any{"mode": "nonsense"})
	last.Record(sandbox.EventMode, sandbox.ModeChange{Mode: sandbox.ReadOnly, Source: sandbox.SourceDelegation})
	log.Session("unknown", a).Record(sandbox.EventMode, map[string]any{"mode": "yolo"})
	log.Session("nomode", a).Record(sandbox.EventMode, map[string]any{})
	log.Session("relative", "some/where")

	p, client := start(t, log, plugintest.Config(`{"mode":"workspace-write"}`), plugintest.Deployment(&kernelv1.Deployment{Root: root}))
	for _, tt := range []struct {
		name, session, mode, root, source, reason string
	}{
		{name: "resolves the deployment policy for an agentless call", mode: "workspace-write", root: root, source: "default"},
		{name: "resolves each session mode and cwd together", session: "mode-read-only", mode: "read-only", root: a, source: "session"},
		{name: "accepts the durable workspace-write mode", session: "mode-workspace-write", mode: "workspace-write", root: a, source: "session"},
		{name: "accepts the durable danger-full-access mode", session: "mode-danger-full-access", mode: "danger-full-access", root: a, source: "session"},
		{name: "without changing the fallback", session: "plain", mode: "workspace-write", root: b, source: "default"},
		// The reference resolves a symlink-sensitive session cwd with POSIX component semantics, at each call. Here the host does so once,
		// when the session begins; a link that is in the way later was put there by somebody.
		{name: "a session cwd that leads elsewhere by now", session: "linked", reason: "BAD_SESSION"},
		{name: "uses the configured root when a session has no cwd", session: "rootless", mode: "workspace-write", root: root, source: "default"},
		{name: "folds to the last switch; ignores unrelated event streams", session: "last", mode: "read-only", root: a, source: "session"},
		{name: "rejects and attributes an unknown durable sandbox mode", session: "unknown", reason: "UNKNOWN_MODE"},
		{name: "rejects an event without a mode", session: "nomode", reason: "UNKNOWN_MODE"},
		{name: "a relative cwd", session: "relative", reason: "BAD_SESSION"},
		{name: "a session that is gone", session: "gone", reason: "SESSION_NOT_FOUND"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, err := client.Resolve(p.Stamp(t.Context(), plugin.Call{Session: tt.session}), &policyv1.ResolveRequest{})
			if tt.reason != "" {
				if fault.Reason(err) != tt.reason {
					t.Fatalf("error %v, want reason %s", err, tt.reason)
				}
				if tt.reason == "UNKNOWN_MODE" && !strings.Contains(err.Error(), "sandbox/mode carries unknown mode") {
					t.Errorf("text %q", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if r.GetMode() != tt.mode || r.GetWorkspaceRoot() != tt.root || r.GetSource() != tt.source {
				t.Errorf("resolved %v, want %s %s %s", r, tt.mode, tt.root, tt.source)
			}
		})
	}
}

func TestSetMode(t *testing.T) {
	const none, client, human, owner = kernelv1.Level_NONE, kernelv1.Level_CLIENT, kernelv1.Level_HUMAN, kernelv1.Level_OWNER
	ro, ww, full := sandbox.ReadOnly, sandbox.WorkspaceWrite, sandbox.DangerFullAccess
	for _, tt := range []struct {
		name     string
		from, to sandbox.Mode // from empty: no event, the default is read-only
		level    kernelv1.Level
		changed  bool
		reason   string
	}{
		{"appends exactly one sandbox/mode event per switch", "", ww, human, true, ""},
		{"unchanged appends nothing", ww, ww, none, false, ""},
		{"the default is unchanged, too", "", ro, none, false, ""},
		{"widening needs a human: none", ro, ww, none, false, "AUTHORITY_REQUIRED"},
		{"widening needs a human: client", "", ww, client, false, "AUTHORITY_REQUIRED"},
		{"an owner may widen", ro, ww, owner, true, ""},
		{"full access needs an owner: human", ro, full, human, false, "AUTHORITY_REQUIRED"},
		{"full access needs an owner, from any mode", ww, full, human, false, "AUTHORITY_REQUIRED"},
		{"an owner may open everything", ww, full, owner, true, ""},
		{"narrowing is for anybody", full, ww, none, true, ""},
		{"narrowing to read-only", full, ro, none, true, ""},
		{"out of an unknown mode, narrow", "yolo", ro, none, true, ""},
		{"out of an unknown mode, wide", "yolo", ww, client, false, "AUTHORITY_REQUIRED"},
		{"out of an unknown mode, with authority", "yolo", ww, human, true, ""},
		{"bad mode", ro, "yolo", owner, false, "BAD_MODE"},
		{"empty mode", ro, "", owner, false, "BAD_MODE"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			log := plugintest.NewLog()
			s := log.Session("s", canonicalTemp(t))
			if tt.from != "" {
				s.Record(sandbox.EventMode, sandbox.ModeChange{Mode: tt.from})
			}
			before := len(s.Events())
			p, c := start(t, log)
			ctx := p.Stamp(t.Context(), plugin.Call{Session: "s", Authority: tt.level})
			r, err := c.SetMode(ctx, &policyv1.SetModeRequest{Mode: string(tt.to)})
			appended := s.Events()[before:]
			if tt.reason != "" {
				if fault.Reason(err) != tt.reason || len(appended) != 0 {
					t.Fatalf("error %v with %d events, want %s and none", err, len(appended), tt.reason)
				}
				want := map[string]codes.Code{"AUTHORITY_REQUIRED": codes.PermissionDenied, "BAD_MODE": codes.InvalidArgument}[tt.reason]
				if status.Code(err) != want {
					t.Errorf("code %v, want %v", status.Code(err), want)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if r.GetMode() != string(tt.to) || r.GetChanged() != tt.changed || (len(appended) == 1) != tt.changed || len(appended) > 1 {
				t.Fatalf("reply %v with %d events, want changed %v", r, len(appended), tt.changed)
			}
			if tt.changed {
				var got sandbox.ModeChange
				if err := json.Unmarshal(appended[0].GetData(), &got); err != nil || got != (sandbox.ModeChange{Mode: tt.to}) || appended[0].GetType() != sandbox.EventMode {
					t.Errorf("event %v", appended[0])
				}
			}
			again, err := c.Resolve(ctx, &policyv1.ResolveRequest{})
			if err != nil || again.GetMode() != string(tt.to) {
				t.Errorf("resolves to %v, %v", again, err)
			}
		})
	}
}

// Presets pin what a session does not say, without anybody's authority and the default included. Elsewhere they have the
// authority of whoever asked for the call tree, as anybody.
func TestPresetsPin(t *testing.T) {
	const none, human = kernelv1.Level_NONE, kernelv1.Level_HUMAN
	ro, ww, full := sandbox.ReadOnly, sandbox.WorkspaceWrite, sandbox.DangerFullAccess
	presets, other := []string{"tools", "permission"}, []string{"tools", "permissions"}
	for _, tt := range []struct {
		name     string
		from, to sandbox.Mode // from empty: no event, the default is read-only
		provides []string
		level    kernelv1.Level
		changed  bool
		reason   string
	}{
		{"pins a wider mode", "", full, presets, none, true, ""},
		{"pins the default itself", "", ro, presets, none, true, ""},
		{"nobody else does: wider", "", full, other, none, false, "AUTHORITY_REQUIRED"},
		{"nobody else does: the default", "", ro, other, none, false, ""},
		{"a mode that is there is no pin's business", ro, ww, presets, none, false, "AUTHORITY_REQUIRED"},
		{"a mode that is there takes an owner for everything", ww, full, presets, human, false, "AUTHORITY_REQUIRED"},
		{"a preset switch of a human", ro, ww, presets, human, true, ""},
		{"a preset switch that narrows", full, ro, presets, none, true, ""},
		{"a mode that is there is not appended again", ww, ww, presets, none, false, ""},
		{"an unknown mode is a fact, too", "yolo", ww, presets, none, false, "AUTHORITY_REQUIRED"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			log := plugintest.NewLog()
			s := log.Session("s", canonicalTemp(t))
			if tt.from != "" {
				s.Record(sandbox.EventMode, sandbox.ModeChange{Mode: tt.from})
			}
			before := len(s.Events())
			p, c := start(t, log)
			ctx := p.Stamp(t.Context(), plugin.Call{Caller: "row", Provides: tt.provides, Purpose: kernelv1.PurposePin, Session: "s", Authority: tt.level})
			r, err := c.SetMode(ctx, &policyv1.SetModeRequest{Mode: string(tt.to)})
			if fault.Reason(err) != tt.reason || (err != nil) != (tt.reason != "") {
				t.Fatalf("error %v, want %q", err, tt.reason)
			}
			if n := len(s.Events()) - before; (n == 1) != tt.changed || n > 1 || r.GetChanged() != tt.changed {
				t.Errorf("%d events, reply %v", n, r)
			}
		})
	}
}

// A provider of presets that was not asked by the host to pin has no authority of its own.
func TestNoPinOutsideThePin(t *testing.T) {
	log := plugintest.NewLog()
	s := log.Session("s", canonicalTemp(t))
	p, c := start(t, log)
	ctx := p.Stamp(t.Context(), plugin.Call{Caller: "row", Provides: []string{"permission"}, Session: "s"})
	_, err := c.SetMode(ctx, &policyv1.SetModeRequest{Mode: "danger-full-access"})
	if fault.Reason(err) != "AUTHORITY_REQUIRED" || len(s.Events()) != 0 {
		t.Errorf("%v, %d events", err, len(s.Events()))
	}
}

func TestContext(t *testing.T) {
	root, cwd := canonicalTemp(t), canonicalTemp(t)
	log := plugintest.NewLog()
	s := log.Session("s", cwd)
	p, c := start(t, log, plugintest.Deployment(&kernelv1.Deployment{Root: root}))
	ctx := p.Stamp(t.Context(), plugin.Call{Session: "s", Authority: kernelv1.Level_OWNER})
	// renders the exact policy without a capability inventory; reflects the latest durable switch on the next assembly and
	// stays byte-stable otherwise
	for _, mode := range append([]sandbox.Mode{sandbox.ReadOnly}, sandbox.Modes()...) {
		if _, err := c.SetMode(ctx, &policyv1.SetModeRequest{Mode: string(mode)}); err != nil {
			t.Fatal(err)
		}
		for _, tmp := range []string{"/tmp", "/elsewhere"} { // byte-stable across TMPDIR changes
			t.Setenv("TMPDIR", tmp)
			if got, err := p.Context(ctx, "sandbox:policy"); err != nil || got != sandbox.PolicyText(mode, cwd) {
				t.Errorf("%s: %q, %v", mode, got, err)
			}
		}
	}
	// omits diagnostics without an agent
	if got, err := p.Context(p.Stamp(t.Context(), plugin.Call{}), "sandbox:policy"); err != nil || got != "" {
		t.Errorf("without a session: %q, %v", got, err)
	}
	s.Record(sandbox.EventMode, map[string]string{"mode": "yolo"})
	if _, err := p.Context(ctx, "sandbox:policy"); fault.Reason(err) != "UNKNOWN_MODE" {
		t.Errorf("a mode nobody knows: %v", err)
	}
	if m := p.Manifest().GetContexts(); len(m) != 1 || m[0].GetName() != "sandbox:policy" || m[0].GetOrder() != 110 {
		t.Errorf("contributions %v", m)
	}
}

func TestSetModeWithoutSession(t *testing.T) {
	p, c := start(t, plugintest.NewLog())
	_, err := c.SetMode(p.Stamp(t.Context(), plugin.Call{Authority: kernelv1.Level_OWNER}), &policyv1.SetModeRequest{Mode: "read-only"})
	if fault.Reason(err) != "NO_SESSION" || status.Code(err) != codes.FailedPrecondition {
		t.Errorf("error %v", err)
	}
}

// A narrowing somebody may do and a narrowing of the owner race: whatever the order, the session never ends up wider than the
// owner left it.
func TestNarrowingNeverWidens(t *testing.T) {
	for range 20 {
		log := plugintest.NewLog()
		s := log.Session("s", canonicalTemp(t))
		s.Record(sandbox.EventMode, sandbox.ModeChange{Mode: sandbox.DangerFullAccess})
		p, c := start(t, log)
		var both sync.WaitGroup
		for _, mode := range []sandbox.Mode{sandbox.WorkspaceWrite, sandbox.ReadOnly} {
			both.Go(func() {
				_, err := c.SetMode(p.Stamp(context.Background(), plugin.Call{Session: "s"}), &policyv1.SetModeRequest{Mode: string(mode)})
				if err != nil && fault.Reason(err) != "AUTHORITY_REQUIRED" {
					t.Error(err)
				}
			})
		}
		both.Wait()
		r, err := c.Resolve(p.Stamp(t.Context(), plugin.Call{Session: "s"}), &policyv1.ResolveRequest{})
		if err != nil || r.GetMode() != "read-only" {
			t.Fatalf("ends in %v, %v", r, err)
		}
		if err := p.Stop(); err != nil {
			t.Fatal(err)
		}
	}
}

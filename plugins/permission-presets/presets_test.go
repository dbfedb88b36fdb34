package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	approvalv1 "github.com/cordon-host/cordon/api/approval/v1"
	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	permissionv1 "github.com/cordon-host/cordon/api/permission/v1"
	policyv1 "github.com/cordon-host/cordon/api/policy/v1"
	sessionv1 "github.com/cordon-host/cordon/api/session/v1"
	shellv1 "github.com/cordon-host/cordon/api/shell/v1"
	"github.com/cordon-host/cordon/capability/approval"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/permission"
	"github.com/cordon-host/cordon/capability/sandbox"
	"github.com/cordon-host/cordon/capability/session"
	"github.com/cordon-host/cordon/capability/shell"
	"github.com/cordon-host/cordon/plugin"
	"github.com/cordon-host/cordon/plugin/plugintest"
)

const (
	ro    = sandbox.ReadOnly
	ww    = sandbox.WorkspaceWrite
	full  = sandbox.DangerFullAccess
	ask   = approval.Ask
	never = approval.Never

	none   = kernelv1.Level_NONE
	client = kernelv1.Level_CLIENT
	human  = kernelv1.Level_HUMAN
	owner  = kernelv1.Level_OWNER
)

// A fact is an event as tests write it: type and value.
type fact struct{ typ, value string }

func preset(name string) fact          { return fact{permission.EventPreset, name} }
func mode(m sandbox.Mode) fact         { return fact{sandbox.EventMode, string(m)} }
func policy(p approval.Policy) fact    { return fact{approval.EventPolicy, string(p)} }
func endSeed() fact                    { return fact{session.TypeEndSeed, ""} }
func other() fact                      { return fact{"notes/note", "x"} }
func appends(facts ...fact) []fact     { return facts }
func (f fact) data() map[string]string { return map[string]string{keyOf(f.typ): f.value} }

// keyOf is the name of the value in an event's data: the last word of the type.
func keyOf(typ string) string {
	_, key, _ := strings.Cut(typ, "/")
	return key
}

// types are the facts as PinReply lists them.
func types(facts []fact) (out []string) {
	for _, f := range facts {
		out = append(out, f.typ)
	}
	return out
}

// knobs are the owners of the two knobs over the same log, with the rules the real ones have.
type knobs struct {
	policyv1.UnimplementedPolicyServer
	approvalv1.UnimplementedApprovalServer
	log      *plugintest.Log
	composed permission.Pair
}

// last is the newest value of a knob.
func (k *knobs) last(ctx context.Context, typ, composed string) (value, source string, err error) {
	if plugin.Caller(ctx).Session == "" {
		return composed, "default", nil
	}
	r, err := k.log.Last(ctx, &sessionv1.LastRequest{Type: typ})
	if err != nil || r.GetEvent() == nil {
		return composed, "default", err
	}
	var data map[string]string
	err = json.Unmarshal(r.GetEvent().GetData(), &data)
	return data[keyOf(typ)], "session", err
}

func (k *knobs) set(ctx context.Context, typ, value, composed string, level func(from string) kernelv1.Level) (bool, error) {
	from, source, err := k.last(ctx, typ, composed)
	if err != nil {
		return false, err
	}
	call := plugin.Caller(ctx)
	pin := source == "default" && slices.Contains(call.Provides, "permission")
	if from == value && !pin {
		return false, nil
	}
	if call.Authority < level(from) && !pin {
		return false, fault.New(codes.PermissionDenied, "AUTHORITY_REQUIRED", "not you")
	}
	data, err := json.Marshal(map[string]string{keyOf(typ): value})
	if err != nil {
		return false, err
	}
	_, err = k.log.Append(ctx, &sessionv1.AppendRequest{Type: typ, Data: data})
	return err == nil, err
}

func (k *knobs) Resolve(ctx context.Context, _ *policyv1.ResolveRequest) (*policyv1.ResolveReply, error) {
	m, source, err := k.last(ctx, sandbox.EventMode, string(k.composed.Mode))
	if m == "yolo" {
		return nil, fault.New(codes.FailedPrecondition, "UNKNOWN_MODE", "sandbox/mode carries unknown mode")
	}
	return &policyv1.ResolveReply{Mode: m, Source: source, WorkspaceRoot: "/w"}, err
}

func (k *knobs) SetMode(ctx context.Context, r *policyv1.SetModeRequest) (*policyv1.SetModeReply, error) {
	changed, err := k.set(ctx, sandbox.EventMode, r.GetMode(), string(k.composed.Mode), func(from string) kernelv1.Level {
		return permission.ModeLevel(sandbox.Mode(from), sandbox.Mode(r.GetMode()))
	})
	return &policyv1.SetModeReply{Mode: r.GetMode(), Changed: changed}, err
}

func (k *knobs) GetPolicy(ctx context.Context, _ *approvalv1.GetPolicyRequest) (*approvalv1.GetPolicyReply, error) {
	p, source, err := k.last(ctx, approval.EventPolicy, string(k.composed.Policy))
	if p == "maybe" {
		return nil, fault.New(codes.FailedPrecondition, "UNKNOWN_POLICY", "approval/policy carries unknown policy")
	}
	return &approvalv1.GetPolicyReply{Policy: p, Source: source}, err
}

func (k *knobs) SetPolicy(ctx context.Context, r *approvalv1.SetPolicyRequest) (*approvalv1.SetPolicyReply, error) {
	changed, err := k.set(ctx, approval.EventPolicy, r.GetPolicy(), string(k.composed.Policy), func(from string) kernelv1.Level {
		return permission.PolicyLevel(approval.Policy(from), approval.Policy(r.GetPolicy()))
	})
	return &approvalv1.SetPolicyReply{Policy: r.GetPolicy(), Changed: changed}, err
}

// fixture is the plugin in a composition, with sessions.
type fixture struct {
	*plugintest.Plugin
	client permissionv1.PermissionClient
	log    *plugintest.Log
}

var shipped = permission.Pair{Mode: ro, Policy: ask} // the defaults of the rows around

// around is everything the plugin needs, with composed as the defaults of the rows that provide it.
func around(log *plugintest.Log, composed permission.Pair, opts ...plugintest.Option) []plugintest.Option {
	k := &knobs{log: log, composed: composed}
	return append([]plugintest.Option{
		log.Fake(),
		plugintest.Fake("policy", &policyv1.Policy_ServiceDesc, k),
		plugintest.FactsOf("policy", map[string]any{"defaultMode": composed.Mode, "workspaceRoot": "/w"}),
		plugintest.Fake("approval", &approvalv1.Approval_ServiceDesc, k),
		plugintest.FactsOf("approval", map[string]any{"defaultPolicy": composed.Policy}),
		plugintest.Fake("shell", &shellv1.Shell_ServiceDesc, shellv1.UnimplementedShellServer{}),
		plugintest.FactsOf("shell", shell.Facts{SandboxMode: composed.Mode, Confines: true}),
	}, opts...)
}

func start(t *testing.T, log *plugintest.Log, composed permission.Pair, opts ...plugintest.Option) *fixture {
	t.Helper()
	p := plugintest.Start(t, Plugin, around(log, composed, opts...)...)
	return &fixture{Plugin: p, client: permissionv1.NewPermissionClient(p.Conn()), log: log}
}

// seeded makes a session with facts.
func seeded(log *plugintest.Log, id string, facts ...fact) *plugintest.Session {
	s := log.Session(id, "/w")
	for _, f := range facts {
		s.Record(f.typ, f.data())
	}
	return s
}

// factsFrom are the events of a session from one on.
func factsFrom(t *testing.T, s *plugintest.Session, from int) (out []fact) {
	t.Helper()
	for _, e := range s.Events()[from:] {
		var data map[string]string
		if err := json.Unmarshal(e.GetData(), &data); err != nil {
			t.Fatal(err)
		}
		out = append(out, fact{e.GetType(), data[keyOf(e.GetType())]})
	}
	return out
}

func equal(t *testing.T, what string, want, got any) {
	t.Helper()
	if d := cmp.Diff(want, got, cmp.AllowUnexported(fact{})); d != "" {
		t.Errorf("%s (-want +got):\n%s", what, d)
	}
}

// Three presets, two of them the same pair.
const tied = `{"presets":{
	"careful": {"sandbox":"read-only","approval":"ask","description":"one"},
	"audit":   {"sandbox":"read-only","approval":"ask"},
	"busy":    {"sandbox":"workspace-write","approval":"never"}}}`

func TestLoad(t *testing.T) {
	for _, tt := range []struct {
		name, config string
		composed     permission.Pair
		opts         []plugintest.Option
		want         string // default preset
		err          string
	}{
		{name: "the shipped default is read-only and ask", want: "read-only"},
		{name: "composition defaults hit workspace-write", composed: permission.Pair{Mode: ww, Policy: ask}, want: "workspace-write"},
		{name: "composition defaults hit danger-full-access", composed: permission.Pair{Mode: full, Policy: never}, want: "danger-full-access"},
		{name: "a default of the file's choice", config: `{"defaultPreset":"workspace-write"}`, want: "workspace-write"},
		{name: "requires an explicit default when composition defaults match no preset", composed: permission.Pair{Mode: ww, Policy: never},
			err: "permission: composed sandbox and approval defaults match no preset; configure defaultPreset explicitly"},
		{name: "composition defaults outside the table with an explicit default", composed: permission.Pair{Mode: ww, Policy: never}, config: `{"defaultPreset":"read-only"}`, want: "read-only"},
		{name: "rejects a stored default outside the configured preset table", config: `{"defaultPreset":"yolo"}`,
			err: `permission: unknown preset "yolo" (known: read-only, workspace-write, danger-full-access)`},
		{name: "custom cannot be the default", config: `{"defaultPreset":"custom"}`, err: `permission: unknown preset "custom" (known: `},
		{name: "rejects a table entry named custom (reserved for the derived state)", config: `{"presets":{"custom":{"sandbox":"read-only","approval":"ask"}}}`,
			err: `permission: "custom" is reserved for the derived not-a-preset state and cannot name a table entry`},
		{name: "rejects composition over a non-confining executor at load", opts: []plugintest.Option{plugintest.FactsOf("shell", shell.Facts{})},
			err: "permission: the mounted shell does not confine (no sandboxMode) — presets bundle a sandbox mode, so composing this plugin over an unconfined executor is a misconfiguration"},
		{name: "a shell that publishes nothing does not confine", opts: []plugintest.Option{plugintest.FactsOf("shell", map[string]any{})}, err: "permission: the mounted shell does not confine"},
		{name: "a mode alone does not confine", opts: []plugintest.Option{plugintest.FactsOf("shell", shell.Facts{SandboxMode: ro})}, err: "permission: the mounted shell does not confine"},
		{name: "reads a schema-less approval stand-in as the ask default", opts: []plugintest.Option{plugintest.FactsOf("approval", map[string]any{})}, want: "read-only"},
		{name: "reads a schema-less policy stand-in as the read-only default", opts: []plugintest.Option{plugintest.FactsOf("policy", map[string]any{})}, want: "read-only"},
		{name: "the first of two with the same pair is the default", config: tied, want: "careful"},
		{name: "a config's table replaces the shipped one", config: tied, composed: permission.Pair{Mode: full, Policy: never}, err: "match no preset"},
		{name: "an empty table", config: `{"presets":{}}`, err: "match no preset"},
		{name: "a mode outside the vocabulary", config: `{"presets":{"x":{"sandbox":"yolo","approval":"ask"}}}`, err: "sandbox"},
		{name: "a policy outside the vocabulary", config: `{"presets":{"x":{"sandbox":"read-only","approval":"maybe"}}}`, err: "approval"},
		{name: "half a pair", config: `{"presets":{"x":{"sandbox":"read-only"}}}`, err: "approval"},
		{name: "an unknown key", config: `{"presets":{"x":{"sandbox":"read-only","approval":"ask","network":"open"}}}`, err: "network"},
		{name: "no mapping", config: `{"presets":["read-only"]}`, err: "object"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.composed == (permission.Pair{}) {
				tt.composed = shipped
			}
			opts := append(around(plugintest.NewLog(), tt.composed, plugintest.Config(tt.config)), tt.opts...)
			p, err := plugintest.Load(t, Plugin, opts...)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Fatalf("loaded with %v, want %q", err, tt.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var got Facts
			if _, err := p.Facts("permission", &got); err != nil || got.DefaultPreset != tt.want {
				t.Errorf("facts %+v, %v", got, err)
			}
		})
	}
}

// A construction that bypasses the schema is refused by the plugin itself.
func TestChecksItsOwnTable(t *testing.T) {
	for want, table := range map[string]Presets{
		`permission: preset "x": sandbox mode must be one of`:    {{Name: "x", Pair: permission.Pair{Policy: ask}}},
		`permission: preset "x": approval policy must be one of`: {{Name: "x", Pair: permission.Pair{Mode: ro}}},
		`permission: preset "x" is in the table twice`:           {{Name: "x", Pair: shipped}, {Name: "x", Pair: shipped}},
		`permission: a preset must have a name`:                  {{Pair: shipped}},
	} {
		p := Plugin
		p.Default = func() Config { return Config{Presets: table} }
		if _, err := plugintest.Load(t, p, around(plugintest.NewLog(), shipped)...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("loaded with %v, want %q", err, want)
		}
	}
}

// advertises the preset table in declaration order and resolves bundles
func TestList(t *testing.T) {
	for _, tt := range []struct {
		config string
		want   []string
		first  string
	}{
		{"", []string{"read-only read-only ask", "workspace-write workspace-write ask", "danger-full-access danger-full-access never"}, "read-only"},
		{tied, []string{"careful read-only ask", "audit read-only ask", "busy workspace-write never"}, "careful"},
	} {
		f := start(t, plugintest.NewLog(), shipped, plugintest.Config(tt.config))
		r, err := f.client.List(f.Stamp(t.Context(), plugin.Call{}), &permissionv1.ListRequest{})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, p := range r.GetPresets() {
			got = append(got, fmt.Sprintf("%s %s %s", p.GetName(), p.GetSandbox(), p.GetApproval()))
		}
		equal(t, "presets", tt.want, got)
		if r.GetDefaultPreset() != tt.first {
			t.Errorf("default %q", r.GetDefaultPreset())
		}
		if tt.config == "" {
			for _, p := range r.GetPresets() {
				if p.GetDescription() == "" {
					t.Errorf("%s has no description", p.GetName())
				}
			}
		}
	}
}

func TestCurrent(t *testing.T) {
	for _, tt := range []struct {
		name, config string
		composed     permission.Pair
		facts        []fact
		want         string
		pair         permission.Pair
		reason       string
	}{
		{name: "derives from the effective knobs: the composition's defaults", want: "read-only", pair: shipped},
		{name: "derives from the effective knobs: a switch hits its preset", facts: appends(mode(full), policy(never)), want: "danger-full-access", pair: permission.Pair{Mode: full, Policy: never}},
		{name: "a knob state matching no table entry derives custom — a state, not an error", facts: appends(mode(full)), want: "custom", pair: permission.Pair{Mode: full, Policy: ask}},
		{name: "composition defaults outside the table still derive custom when an explicit new-session default is configured",
			config: `{"defaultPreset":"read-only"}`, composed: permission.Pair{Mode: ww, Policy: never}, want: "custom", pair: permission.Pair{Mode: ww, Policy: never}},
		{name: "the fold breaks bundle ties", config: tied, facts: appends(preset("audit")), want: "audit", pair: shipped},
		{name: "folds to the last event", config: tied, facts: appends(preset("audit"), preset("careful"), preset("audit"), other()), want: "audit", pair: shipped},
		{name: "without one, the table's order", config: tied, want: "careful", pair: shipped},
		{name: "a stale fold no longer matching falls back to table order", config: tied, facts: appends(preset("busy"), mode(ro), policy(ask)), want: "careful", pair: shipped},
		{name: "a stale fold no longer matching falls back to custom", facts: appends(preset("read-only"), mode(ww), policy(never)), want: "custom", pair: permission.Pair{Mode: ww, Policy: never}},
		{name: "a durable preset that the active table cannot resolve", facts: appends(preset("gone"), mode(ww)), want: "workspace-write", pair: permission.Pair{Mode: ww, Policy: ask}},
		{name: "custom is never the recorded one", facts: appends(preset("custom"), mode(ww)), want: "workspace-write", pair: permission.Pair{Mode: ww, Policy: ask}},
		{name: "an event without a preset", facts: appends(preset("")), want: "read-only", pair: shipped},
		{name: "ignores other session data", facts: appends(other()), want: "read-only", pair: shipped},
		{name: "a mode nobody knows", facts: appends(mode("yolo")), reason: "UNKNOWN_MODE"},
		{name: "a policy nobody knows", facts: appends(policy("maybe")), reason: "UNKNOWN_POLICY"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.composed == (permission.Pair{}) {
				tt.composed = shipped
			}
			log := plugintest.NewLog()
			s := seeded(log, "s", tt.facts...)
			f := start(t, log, tt.composed, plugintest.Config(tt.config))
			r, err := f.client.Current(f.Stamp(t.Context(), plugin.Call{Session: "s"}), &permissionv1.CurrentRequest{})
			if fault.Reason(err) != tt.reason || (err != nil) != (tt.reason != "") {
				t.Fatalf("error %v, want %q", err, tt.reason)
			}
			if got := factsFrom(t, s, len(tt.facts)); len(got) != 0 {
				t.Errorf("looking appended %v", got)
			}
			if err != nil {
				return
			}
			if r.GetPreset() != tt.want || r.GetSandbox() != string(tt.pair.Mode) || r.GetApproval() != string(tt.pair.Policy) {
				t.Errorf("current %v, want %s %v", r, tt.want, tt.pair)
			}
			if tt.want == "custom" && r.GetDescription() != "Current sandbox and approval settings do not match a preset." {
				t.Errorf("description %q", r.GetDescription())
			}
		})
	}
	f := start(t, plugintest.NewLog(), permission.Pair{Mode: ww, Policy: ask}, plugintest.Config(`{"defaultPreset":"read-only"}`))
	r, err := f.client.Current(f.Stamp(t.Context(), plugin.Call{}), &permissionv1.CurrentRequest{})
	if err != nil || r.GetPreset() != "workspace-write" {
		t.Errorf("a call without a session is on %v, %v: the defaults it is confined by", r, err)
	}
	_, err = f.client.Current(f.Stamp(t.Context(), plugin.Call{Session: "gone"}), &permissionv1.CurrentRequest{})
	if fault.Reason(err) != "SESSION_NOT_FOUND" {
		t.Errorf("a session that is gone: %v", err)
	}
}

func TestSet(t *testing.T) {
	for _, tt := range []struct {
		name, config string
		composed     permission.Pair
		facts        []fact
		to           string
		want         []fact
	}{
		{name: "writes through: one preset event plus both knob events", facts: appends(preset("read-only"), mode(ro), policy(ask)), to: "danger-full-access",
			want: appends(preset("danger-full-access"), mode(full), policy(never))},
		{name: "writes only the knob that differs", facts: appends(preset("read-only"), mode(ro), policy(ask)), to: "workspace-write",
			want: appends(preset("workspace-write"), mode(ww))},
		{name: "a session that says nothing: what differs from the composition", to: "workspace-write", want: appends(preset("workspace-write"), mode(ww))},
		{name: "to the current preset is a no-op when the knobs already match (clicks are not switches)", facts: appends(preset("workspace-write"), mode(ww), policy(ask)), to: "workspace-write"},
		{name: "to the derived preset is a no-op, too", to: "read-only"},
		{name: "re-asserting a preset from a drifted (custom) state re-records the choice and repairs the knob", facts: appends(preset("workspace-write"), mode(ww), policy(ask), mode(full)), to: "workspace-write",
			want: appends(preset("workspace-write"), mode(ww))},
		{name: "repairs the other knob", facts: appends(preset("workspace-write"), mode(ww), policy(ask), policy(never)), to: "workspace-write",
			want: appends(preset("workspace-write"), policy(ask))},
		{name: "between two with the same pair, only the choice", config: tied, facts: appends(preset("careful"), mode(ro), policy(ask)), to: "audit", want: appends(preset("audit"))},
		{name: "re-records a choice that a table change lost", facts: appends(preset("gone"), mode(ww), policy(ask)), to: "read-only", want: appends(preset("read-only"), mode(ro))},
		{name: "gets out of a mode nobody knows", facts: appends(preset("read-only"), mode("yolo"), policy(ask)), to: "read-only", want: appends(preset("read-only"), mode(ro))},
		{name: "gets out of a policy nobody knows", facts: appends(preset("read-only"), mode(ro), policy("maybe")), to: "danger-full-access",
			want: appends(preset("danger-full-access"), mode(full), policy(never))},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.composed == (permission.Pair{}) {
				tt.composed = shipped
			}
			log := plugintest.NewLog()
			s := seeded(log, "s", tt.facts...)
			bystander := seeded(log, "other", mode(ww))
			f := start(t, log, tt.composed, plugintest.Config(tt.config))
			ctx := f.Stamp(t.Context(), plugin.Call{Session: "s", Authority: owner})
			for i := range 2 { // the second time is net-zero
				r, err := f.client.Set(ctx, &permissionv1.SetRequest{Preset: tt.to})
				if err != nil {
					t.Fatal(err)
				}
				if r.GetPreset() != tt.to || r.GetChanged() != (i == 0 && len(tt.want) > 0) {
					t.Errorf("reply %v", r)
				}
				equal(t, "appended", tt.want, factsFrom(t, s, len(tt.facts)))
			}
			now, err := f.client.Current(ctx, &permissionv1.CurrentRequest{})
			if err != nil || now.GetPreset() != tt.to {
				t.Errorf("now on %v, %v", now, err)
			}
			equal(t, "another session", appends(mode(ww)), factsFrom(t, bystander, 0))
		})
	}
}

func TestSetRefuses(t *testing.T) {
	log := plugintest.NewLog()
	s := seeded(log, "s", mode(ro))
	f := start(t, log, shipped)
	ctx := f.Stamp(t.Context(), plugin.Call{Session: "s", Authority: owner})
	for _, name := range []string{"yolo", "custom", "", "Read-Only"} { // rejects an unknown preset without touching the log
		_, err := f.client.Set(ctx, &permissionv1.SetRequest{Preset: name})
		want := fmt.Sprintf(`unknown preset "%s" (available: read-only, workspace-write, danger-full-access)`, name)
		if status.Code(err) != codes.InvalidArgument || fault.Reason(err) != "UNKNOWN_PRESET" || fault.Message(err) != want {
			t.Errorf("%q: %v", name, err)
		}
	}
	_, err := f.client.Set(f.Stamp(t.Context(), plugin.Call{Authority: owner}), &permissionv1.SetRequest{Preset: "read-only"})
	if fault.Reason(err) != "NO_SESSION" {
		t.Errorf("without a session: %v", err)
	}
	equal(t, "log", appends(mode(ro)), factsFrom(t, s, 0))
}

// A widening is decided before anything is appended, by the stamped authority alone.
func TestSetAuthority(t *testing.T) {
	const wide = `{"presets":{
		"ro/ask":{"sandbox":"read-only","approval":"ask"},          "ro/never":{"sandbox":"read-only","approval":"never"},
		"ww/ask":{"sandbox":"workspace-write","approval":"ask"},    "ww/never":{"sandbox":"workspace-write","approval":"never"},
		"full/ask":{"sandbox":"danger-full-access","approval":"ask"},"full/never":{"sandbox":"danger-full-access","approval":"never"}}}`
	modes := map[string]sandbox.Mode{"ro": ro, "ww": ww, "full": full}
	need := func(from, to string) kernelv1.Level {
		order := []string{"ro", "ww", "full"}
		fromMode, fromPolicy, _ := strings.Cut(from, "/")
		toMode, toPolicy, _ := strings.Cut(to, "/")
		level := none
		if fromPolicy == "never" && toPolicy == "ask" {
			level = human
		}
		if slices.Index(order, toMode) > slices.Index(order, fromMode) {
			level = max(level, human)
			if toMode == "full" {
				level = owner
			}
		}
		return level
	}
	names := []string{"ro/ask", "ro/never", "ww/ask", "ww/never", "full/ask", "full/never"}
	log := plugintest.NewLog()
	f := start(t, log, shipped, plugintest.Config(wide))
	for _, from := range names {
		for _, to := range names {
			for _, level := range []kernelv1.Level{none, client, human, owner} {
				m, p, _ := strings.Cut(from, "/")
				s := seeded(log, "s", preset(from), mode(modes[m]), policy(approval.Policy(p)))
				// Providing a capability is no authority.
				ctx := f.Stamp(t.Context(), plugin.Call{Caller: "some-row", Provides: []string{"permission", "policy"}, Session: "s", Authority: level})
				_, err := f.client.Set(ctx, &permissionv1.SetRequest{Preset: to})
				got := factsFrom(t, s, 3)
				if level < need(from, to) {
					if status.Code(err) != codes.PermissionDenied || fault.Reason(err) != "AUTHORITY_REQUIRED" || len(got) != 0 {
						t.Errorf("%s to %s as %v: %v, appended %v", from, to, level, err, got)
					}
					continue
				}
				if err != nil {
					t.Errorf("%s to %s as %v: %v", from, to, level, err)
				}
				now, err := f.client.Current(ctx, &permissionv1.CurrentRequest{})
				if err != nil || now.GetPreset() != to {
					t.Errorf("%s to %s as %v: on %v, %v", from, to, level, now, err)
				}
			}
		}
	}
	seeded(log, "s", mode(full), policy(never))
	_, err := f.client.Set(f.Stamp(t.Context(), plugin.Call{Session: "s"}), &permissionv1.SetRequest{Preset: "ro/ask"})
	want := `preset "ro/ask" is wider than the session's settings: switching needs the authority level "human", the call has "none"; its mode alone needs none`
	if fault.Message(err) != want {
		t.Errorf("%v", err)
	}
}

func TestKnobFails(t *testing.T) {
	down := fault.New(codes.Unavailable, "LOG_FAILED", "disk full")
	for _, tt := range []struct {
		fails, reason, message string
		want                   []fact
	}{
		{permission.EventPreset, "LOG_FAILED", "disk full", nil},
		{sandbox.EventMode, "PRESET_INCOMPLETE", "permission/preset appended, but sandbox/mode was not: disk full; set the preset again", appends(preset("danger-full-access"))},
		{approval.EventPolicy, "PRESET_INCOMPLETE", "permission/preset and sandbox/mode appended, but approval/policy was not: disk full; set the preset again", appends(preset("danger-full-access"), mode(full))},
	} {
		t.Run(tt.fails, func(t *testing.T) {
			log := plugintest.NewLog()
			s := seeded(log, "s")
			broken := true
			log.Refuse(func(_ context.Context, r *sessionv1.AppendRequest) error {
				if broken && r.GetType() == tt.fails {
					return down
				}
				return nil
			})
			f := start(t, log, shipped)
			ctx := f.Stamp(t.Context(), plugin.Call{Session: "s", Authority: owner})
			_, err := f.client.Set(ctx, &permissionv1.SetRequest{Preset: "danger-full-access"})
			if status.Code(err) != codes.Unavailable || fault.Reason(err) != tt.reason || fault.Message(err) != tt.message {
				t.Errorf("error %v", err)
			}
			equal(t, "appended", tt.want, factsFrom(t, s, 0))
			// Setting it again finishes it.
			broken = false
			if r, err := f.client.Set(ctx, &permissionv1.SetRequest{Preset: "danger-full-access"}); err != nil || !r.GetChanged() {
				t.Errorf("again: %v, %v", r, err)
			}
			if now, err := f.client.Current(ctx, &permissionv1.CurrentRequest{}); err != nil || now.GetPreset() != "danger-full-access" {
				t.Errorf("now on %v, %v", now, err)
			}
		})
	}
}

// A caller that leaves after the intent is in the log does not leave the knobs behind.
func TestCallerLeaves(t *testing.T) {
	log := plugintest.NewLog()
	s := seeded(log, "s")
	f := start(t, log, shipped)
	ctx, cancel := context.WithCancel(t.Context())
	log.Refuse(func(_ context.Context, r *sessionv1.AppendRequest) error {
		if r.GetType() == permission.EventPreset {
			cancel()
		}
		return nil
	})
	if _, err := f.client.Set(f.Stamp(ctx, plugin.Call{Session: "s", Authority: owner}), &permissionv1.SetRequest{Preset: "danger-full-access"}); status.Code(err) != codes.Canceled {
		t.Errorf("error %v", err)
	}
	if err := f.Stop(); err != nil { // waits for the switch
		t.Fatal(err)
	}
	equal(t, "appended", appends(preset("danger-full-access"), mode(full), policy(never)), factsFrom(t, s, 0))
}

// Switches of one session do not mix: what it ends on is one of the presets, and the log is one switch after the other.
func TestConcurrentSets(t *testing.T) {
	log := plugintest.NewLog()
	s := seeded(log, "s", preset("read-only"), mode(ro), policy(ask))
	f := start(t, log, shipped)
	var all sync.WaitGroup
	for i := range 24 {
		all.Go(func() {
			name := defaults().Presets[i%3].Name
			if _, err := f.client.Set(f.Stamp(t.Context(), plugin.Call{Session: "s", Authority: owner}), &permissionv1.SetRequest{Preset: name}); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	var on permission.Preset
	now := map[string]string{}
	check := func() {
		if on.Name != "" && (now[sandbox.EventMode] != string(on.Mode) || now[approval.EventPolicy] != string(on.Policy)) {
			t.Errorf("%s was left on %v", on.Name, now)
		}
	}
	for _, e := range factsFrom(t, s, 0) {
		if e.typ == permission.EventPreset {
			check()
			on, _ = permission.Table(defaults().Presets).Find(e.value)
		}
		now[e.typ] = e.value
	}
	check()
}

func TestPin(t *testing.T) {
	danger := `{"defaultPreset":"danger-full-access"}`
	for _, tt := range []struct {
		name, config string
		composed     permission.Pair
		facts        []fact
		want         []fact
	}{
		{name: "a fresh session gets the composed default's three facts", want: appends(preset("read-only"), mode(ro), policy(ask))},
		{name: "a fresh session gets the configured default's three facts, whatever the composition says", config: danger, want: appends(preset("danger-full-access"), mode(full), policy(never))},
		{name: "a wider policy than the composition's is the file owner's choice, too", config: `{"defaultPreset":"read-only"}`, composed: permission.Pair{Mode: full, Policy: never}, want: appends(preset("read-only"), mode(ro), policy(ask))},
		{name: "other events do not make a session old", config: danger, facts: appends(other()), want: appends(preset("danger-full-access"), mode(full), policy(never))},
		{name: "preserves composition defaults when an empty stored session resumes", config: danger, facts: appends(endSeed()), want: appends(preset("read-only"), mode(ro), policy(ask))},
		{name: "preserves a seeded legacy session instead of applying the latest user default", config: danger, facts: appends(mode(ww), endSeed()), want: appends(preset("workspace-write"), policy(ask))},
		{name: "fills only missing legacy facts: the preset", config: danger, facts: appends(mode(ww), policy(ask)), want: appends(preset("workspace-write"))},
		{name: "fills only missing legacy facts: the policy and the preset", config: danger, facts: appends(mode(ro)), want: appends(preset("read-only"), policy(ask))},
		{name: "fills only missing legacy facts: the mode and the preset", config: danger, facts: appends(policy(ask)), want: appends(preset("read-only"), mode(ro))},
		{name: "preserves an unmatched seeded combination", facts: appends(mode(full), endSeed()), want: appends(policy(ask))},
		{name: "preserves an unmatched combination of facts", facts: appends(mode(full), policy(ask))},
		{name: "a whole set of facts stays", config: danger, facts: appends(preset("workspace-write"), mode(ww), policy(ask))},
		{name: "a whole set of facts stays, though the preset is stale", config: danger, facts: appends(preset("workspace-write"), mode(ro), policy(ask))},
		{name: "a whole set of facts stays, though the table lost the preset", config: danger, facts: appends(preset("gone"), mode(ro), policy(ask))},
		{name: "a fork keeps the parent's permissions", config: danger, facts: appends(preset("workspace-write"), mode(ww), policy(ask), endSeed())},
		{name: "a pin that was cut short after the intent is finished", config: danger, facts: appends(preset("danger-full-access")), want: appends(mode(full), policy(never))},
		{name: "a pin that was cut short after the mode is finished", config: danger, facts: appends(preset("danger-full-access"), mode(full)), want: appends(policy(never))},
		{name: "finishing narrows, too", composed: permission.Pair{Mode: full, Policy: never}, facts: appends(preset("read-only")), want: appends(mode(ro), policy(ask))},
		{name: "what was moved since is not finished", facts: appends(preset("danger-full-access"), mode(ww)), want: appends(policy(ask))},
		{name: "a seeded log is not finished", config: danger, facts: appends(preset("danger-full-access"), endSeed()), want: appends(mode(ro), policy(ask))},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.composed == (permission.Pair{}) {
				tt.composed = shipped
			}
			log := plugintest.NewLog()
			s := seeded(log, "s", tt.facts...)
			f := start(t, log, tt.composed, plugintest.Config(tt.config))
			ctx := f.Stamp(t.Context(), plugin.Call{Session: "s"}) // nobody's authority
			r, err := f.client.Pin(ctx, &permissionv1.PinRequest{})
			if err != nil {
				t.Fatal(err)
			}
			equal(t, "appended", tt.want, factsFrom(t, s, len(tt.facts)))
			equal(t, "reply", types(tt.want), r.GetAppended())
			again, err := f.client.Pin(ctx, &permissionv1.PinRequest{})
			if err != nil || len(again.GetAppended()) != 0 {
				t.Errorf("again: %v, %v", again, err)
			}
			equal(t, "after the second one", tt.want, factsFrom(t, s, len(tt.facts)))
		})
	}
}

// pins the current setting into each new session without changing earlier sessions; pins sessions that already exist when the
// service remounts
func TestPinOutlivesDefaults(t *testing.T) {
	log := plugintest.NewLog()
	before, away := seeded(log, "before"), seeded(log, "away")
	pin := func(f *fixture, id string) {
		t.Helper()
		if _, err := f.client.Pin(f.Stamp(t.Context(), plugin.Call{Session: id}), &permissionv1.PinRequest{}); err != nil {
			t.Fatal(err)
		}
	}
	first := start(t, log, shipped)
	pin(first, "before")
	if err := first.Stop(); err != nil {
		t.Fatal(err)
	}
	second := start(t, log, permission.Pair{Mode: ww, Policy: never}, plugintest.Config(`{"defaultPreset":"workspace-write"}`))
	for _, id := range []string{"before", "away"} { // the sweep
		pin(second, id)
	}
	after := seeded(log, "after")
	pin(second, "after")
	equal(t, "an earlier session", appends(preset("read-only"), mode(ro), policy(ask)), factsFrom(t, before, 0))
	equal(t, "a session made while presets were away", appends(preset("workspace-write"), mode(ww), policy(ask)), factsFrom(t, away, 0))
	equal(t, "a later session", appends(preset("workspace-write"), mode(ww), policy(ask)), factsFrom(t, after, 0))
}

func TestPinIsForTheHost(t *testing.T) {
	log := plugintest.NewLog()
	s := seeded(log, "s")
	f := start(t, log, shipped, plugintest.Config(`{"defaultPreset":"danger-full-access"}`))
	for _, call := range []plugin.Call{
		{Caller: "some-row", Session: "s"},
		{Caller: "some-row", Session: "s", Authority: owner, Provides: []string{"permission"}},
		{Caller: "Host", Session: "s", Authority: owner},
	} {
		_, err := f.client.Pin(f.Stamp(t.Context(), call), &permissionv1.PinRequest{})
		if status.Code(err) != codes.PermissionDenied || fault.Reason(err) != "HOST_ONLY" {
			t.Errorf("%s: %v", call.Caller, err)
		}
	}
	equal(t, "log", []fact(nil), factsFrom(t, s, 0))
	if _, err := f.client.Pin(f.Stamp(t.Context(), plugin.Call{}), &permissionv1.PinRequest{}); fault.Reason(err) != "NO_SESSION" {
		t.Errorf("without a session: %v", err)
	}
}

func TestPinFails(t *testing.T) {
	log := plugintest.NewLog()
	s := seeded(log, "s", mode("yolo"))
	f := start(t, log, shipped)
	if _, err := f.client.Pin(f.Stamp(t.Context(), plugin.Call{Session: "s"}), &permissionv1.PinRequest{}); fault.Reason(err) != "UNKNOWN_MODE" {
		t.Errorf("a mode nobody knows: %v", err)
	}
	equal(t, "log", appends(mode("yolo")), factsFrom(t, s, 0))

	// The host tells a provider that is away by the code.
	s = seeded(log, "t")
	log.Refuse(func(_ context.Context, r *sessionv1.AppendRequest) error {
		if r.GetType() == sandbox.EventMode {
			return fault.New(codes.Unavailable, "PLUGIN_CRASHED", "policy is gone")
		}
		return nil
	})
	_, err := f.client.Pin(f.Stamp(t.Context(), plugin.Call{Session: "t"}), &permissionv1.PinRequest{})
	if status.Code(err) != codes.Unavailable || fault.Reason(err) != "PRESET_INCOMPLETE" {
		t.Errorf("cut short: %v", err)
	}
	log.Refuse(nil)
	r, err := f.client.Pin(f.Stamp(t.Context(), plugin.Call{Session: "t"}), &permissionv1.PinRequest{})
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "finished", []string{sandbox.EventMode, approval.EventPolicy}, r.GetAppended())
	equal(t, "log", appends(preset("read-only"), mode(ro), policy(ask)), factsFrom(t, s, 0))
}

// silent is an approval provider that says nothing about its policy.
type silent struct{ *knobs }

func (s silent) GetPolicy(ctx context.Context, r *approvalv1.GetPolicyRequest) (*approvalv1.GetPolicyReply, error) {
	reply, err := s.knobs.GetPolicy(ctx, r)
	if reply.GetSource() == "default" {
		reply = &approvalv1.GetPolicyReply{}
	}
	return reply, err
}

// odd is a policy provider with a mode of its own invention.
type odd struct{ *knobs }

func (odd) Resolve(context.Context, *policyv1.ResolveRequest) (*policyv1.ResolveReply, error) {
	return &policyv1.ResolveReply{Mode: "sudo", Source: "session"}, nil
}

func TestStandIns(t *testing.T) {
	// materializes ask when a legacy seed and approval stand-in omit the policy
	log := plugintest.NewLog()
	s := seeded(log, "s", mode(ww), endSeed())
	k := &knobs{log: log, composed: shipped}
	shells := []plugintest.Option{
		log.Fake(),
		plugintest.Fake("shell", &shellv1.Shell_ServiceDesc, shellv1.UnimplementedShellServer{}),
		plugintest.FactsOf("shell", shell.Facts{SandboxMode: ro, Confines: true}),
	}
	p := plugintest.Start(t, Plugin, append(shells,
		plugintest.Fake("policy", &policyv1.Policy_ServiceDesc, k), plugintest.Fake("approval", &approvalv1.Approval_ServiceDesc, silent{k}))...)
	if _, err := permissionv1.NewPermissionClient(p.Conn()).Pin(p.Stamp(t.Context(), plugin.Call{Session: "s"}), &permissionv1.PinRequest{}); err != nil {
		t.Fatal(err)
	}
	equal(t, "appended", appends(preset("workspace-write"), policy(ask)), factsFrom(t, s, 2))

	// A mode outside the vocabulary is never folded into a preset.
	p = plugintest.Start(t, Plugin, append(shells,
		plugintest.Fake("policy", &policyv1.Policy_ServiceDesc, odd{k}), plugintest.Fake("approval", &approvalv1.Approval_ServiceDesc, k))...)
	client := permissionv1.NewPermissionClient(p.Conn())
	ctx := p.Stamp(t.Context(), plugin.Call{Session: "s", Authority: owner})
	if _, err := client.Current(ctx, &permissionv1.CurrentRequest{}); fault.Reason(err) != "BAD_MODE" {
		t.Errorf("current: %v", err)
	}
	if _, err := client.Set(ctx, &permissionv1.SetRequest{Preset: "read-only"}); fault.Reason(err) != "BAD_MODE" {
		t.Errorf("set: %v", err)
	}
}

func FuzzPresets(f *testing.F) {
	for _, s := range []string{"{}", `{"a":{"sandbox":"read-only","approval":"ask","description":"x"},"b":{}}`, `{"a":{},"a":{}}`, `{"a":null}`, `null`, `[]`, `{"a":{"x":1}}`, `{"":{}}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var p Presets
		if err := json.Unmarshal(text, &p); err != nil || string(text) == "null" {
			return
		}
		// What was read is the mapping, in its order and with nothing lost.
		var m map[string]pair
		if err := json.Unmarshal(text, &m); err != nil {
			t.Fatalf("read as %v, but it is no mapping: %v", p, err)
		}
		if permission.Table(p).Validate() != nil {
			return
		}
		if len(m) != len(p) {
			t.Errorf("%d entries of %d", len(p), len(m))
		}
		for _, e := range p {
			if want := (pair{e.Mode, e.Policy, e.Description}); m[e.Name] != want {
				t.Errorf("%q: %+v, want %+v", e.Name, m[e.Name], want)
			}
		}
	})
}

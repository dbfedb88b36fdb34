package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

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
)

// switchTimeout bounds one switch, because switches wait for each other.
const switchTimeout = 10 * time.Second

// Facts are what the plugin publishes about the permission capability.
type Facts struct {
	DefaultPreset string `json:"defaultPreset"` // of new sessions
}

// Plugin is the plugin.
var Plugin = plugin.Plugin[Config]{
	Name: "permission-presets", Version: "0.1.0",
	Needs: []plugin.Need{
		{Capability: "session", Desc: &sessionv1.Session_ServiceDesc},
		{Capability: "policy", Desc: &policyv1.Policy_ServiceDesc},
		{Capability: "approval", Desc: &approvalv1.Approval_ServiceDesc},
		{Capability: "shell", Desc: &shellv1.Shell_ServiceDesc}, // never called: its facts say whether a mode means anything
	},
	Offers:  []plugin.Offer{{Capability: permission.Capability, Desc: &permissionv1.Permission_ServiceDesc}},
	Appends: []string{permission.EventPreset},
	Default: defaults,
	Apply:   apply,
}

func apply(ctx *plugin.Context, cfg Config) error {
	s := &presetServer{plugin: ctx, table: permission.Table(cfg.Presets)}
	if err := s.table.Validate(); err != nil {
		return fmt.Errorf("permission: %w", err)
	}
	composed, err := composition(ctx)
	if err != nil {
		return fmt.Errorf("permission: %w", err)
	}
	if s.initial, err = initial(s.table, cfg.DefaultPreset, composed); err != nil {
		return fmt.Errorf("permission: %w", err)
	}
	sessionConn, _ := ctx.Conn("session")
	policyConn, _ := ctx.Conn("policy")
	approvalConn, _ := ctx.Conn("approval")
	s.session = sessionv1.NewSessionClient(sessionConn)
	s.policy = policyv1.NewPolicyClient(policyConn)
	s.approval = approvalv1.NewApprovalClient(approvalConn)
	return ctx.Provide(permission.Capability, s, Facts{DefaultPreset: s.initial.Name})
}

// composition is what the rows around say a session is on that says nothing itself.
func composition(ctx *plugin.Context) (permission.Pair, error) {
	var commands shell.Facts
	var policy struct {
		DefaultMode sandbox.Mode `json:"defaultMode"`
	}
	var asks struct {
		DefaultPolicy approval.Policy `json:"defaultPolicy"`
	}
	_, shellErr := ctx.Facts("shell", &commands)
	_, policyErr := ctx.Facts("policy", &policy)
	_, approvalErr := ctx.Facts("approval", &asks)
	if err := errors.Join(shellErr, policyErr, approvalErr); err != nil {
		return permission.Pair{}, err
	}
	if commands.SandboxMode == "" || !commands.Confines {
		return permission.Pair{}, errors.New("the mounted shell does not confine (no sandboxMode) — presets bundle a sandbox mode, so composing this plugin over an unconfined executor is a misconfiguration")
	}
	// A provider that publishes no default has the capability's own.
	if policy.DefaultMode == "" {
		policy.DefaultMode = sandbox.ReadOnly
	}
	if asks.DefaultPolicy == "" {
		asks.DefaultPolicy = approval.Ask
	}
	return permission.Pair{Mode: policy.DefaultMode, Policy: asks.DefaultPolicy}, nil
}

// initial is the preset of new sessions.
func initial(table permission.Table, configured string, composed permission.Pair) (permission.Preset, error) {
	if configured != "" {
		p, ok := table.Find(configured)
		if !ok {
			return p, fmt.Errorf(`unknown preset "%s" (known: %s)`, configured, table.Names())
		}
		return p, nil
	}
	p, ok := table.Match(composed)
	if !ok {
		return p, errors.New("composed sandbox and approval defaults match no preset; configure defaultPreset explicitly")
	}
	return p, nil
}

type presetServer struct {
	permissionv1.UnimplementedPermissionServer
	plugin   *plugin.Context
	session  sessionv1.SessionClient
	policy   policyv1.PolicyClient
	approval approvalv1.ApprovalClient
	table    permission.Table
	initial  permission.Preset // of new sessions

	// switching keeps what Set and Pin read true until they have written: without it, two switches could leave a session on the mode
	// of the one and the policy of the other.
	switching sync.Mutex
}

// state is what a session's log says, and what holds for the session.
type state struct {
	recorded string          // the last permission/preset; empty for none
	pair     permission.Pair // effective; a knob is empty when the log has a value that nobody knows
	unknown  error           // the first such value
	mode     bool            // the log has a mode
	policy   bool            // the log has a policy
}

// read is the state of the call's session. A call without one is on the deployment's defaults and has recorded nothing.
func (s *presetServer) read(ctx context.Context) (st state, err error) {
	mode, err := s.policy.Resolve(ctx, &policyv1.ResolveRequest{})
	switch {
	case fault.Reason(err) == "UNKNOWN_MODE":
		st.mode, st.unknown = true, err
	case err != nil:
		return st, err
	default:
		if st.pair.Mode, err = sandbox.ParseMode(mode.GetMode()); err != nil {
			return st, fault.New(codes.Internal, "BAD_MODE", "policy: %v", err)
		}
		st.mode = mode.GetSource() == "session"
	}
	policy, err := s.approval.GetPolicy(ctx, &approvalv1.GetPolicyRequest{})
	switch {
	case fault.Reason(err) == "UNKNOWN_POLICY":
		st.policy = true
		if st.unknown == nil {
			st.unknown = err
		}
	case err != nil:
		return st, err
	case policy.GetPolicy() == "":
		st.pair.Policy = approval.Ask // a provider without a policy asks
	default:
		if st.pair.Policy, err = approval.ParsePolicy(policy.GetPolicy()); err != nil {
			return st, fault.New(codes.Internal, "BAD_POLICY", "approval: %v", err)
		}
		st.policy = policy.GetSource() == "session"
	}
	if plugin.Caller(ctx).Session == "" {
		return st, nil
	}
	last, err := s.session.Last(ctx, &sessionv1.LastRequest{Type: permission.EventPreset})
	if err != nil || last.GetEvent() == nil {
		return st, err
	}
	change, err := permission.ParseChange(last.GetEvent().GetData())
	if _, known := s.table.Find(change.Preset); err == nil && !known {
		err = fmt.Errorf(`permission/preset names unknown preset "%s"`, change.Preset)
	}
	if err != nil {
		// Files change and logs do not: what such a session may do is in its knobs, so only the name is lost.
		s.plugin.Logger().Warn("recorded preset does not count", "session", plugin.Caller(ctx).Session, "event", last.GetEvent().GetSeq(), "error", err)
	}
	st.recorded = change.Preset
	return st, nil
}

// readKnown is read where a value that nobody knows is a failure.
func (s *presetServer) readKnown(ctx context.Context) (state, error) {
	st, err := s.read(ctx)
	if err == nil {
		err = st.unknown
	}
	return st, err
}

func (s *presetServer) List(context.Context, *permissionv1.ListRequest) (*permissionv1.ListReply, error) {
	out := &permissionv1.ListReply{DefaultPreset: s.initial.Name}
	for _, p := range s.table {
		out.Presets = append(out.Presets, &permissionv1.Preset{
			Name: p.Name, Sandbox: string(p.Mode), Approval: string(p.Policy), Description: p.Description,
		})
	}
	return out, nil
}

func (s *presetServer) Current(ctx context.Context, _ *permissionv1.CurrentRequest) (*permissionv1.CurrentReply, error) {
	now, err := s.readKnown(ctx)
	if err != nil {
		return nil, err
	}
	p := s.table.Current(now.recorded, now.pair)
	return &permissionv1.CurrentReply{
		Preset: p.Name, Sandbox: string(p.Mode), Approval: string(p.Policy), Description: p.Description,
	}, nil
}

// Set switches a session, in three steps: it finds out what would change, decides whether the caller may, before anything is
// appended, and writes. That the owners of the knobs decide again, each for its own, does not make this one superfluous: a
// switch that would be refused half-way must not begin.
func (s *presetServer) Set(ctx context.Context, r *permissionv1.SetRequest) (*permissionv1.SetReply, error) {
	call := plugin.Caller(ctx)
	if call.Session == "" {
		return nil, fault.New(codes.FailedPrecondition, "NO_SESSION", "preset belongs to a session, and the call has none")
	}
	want, ok := s.table.Find(r.GetPreset())
	if !ok {
		return nil, fault.New(codes.InvalidArgument, "UNKNOWN_PRESET", `unknown preset "%s" (available: %s)`, r.GetPreset(), s.table.Names())
	}
	ctx, cancel := context.WithTimeout(ctx, switchTimeout)
	defer cancel()
	s.switching.Lock()
	defer s.switching.Unlock()

	now, err := s.read(ctx)
	if err != nil {
		return nil, err
	}
	if need := permission.Level(now.pair, want.Pair); call.Authority < need {
		hint := ""
		if permission.ModeLevel(now.pair.Mode, want.Mode) == kernelv1.Level_NONE {
			hint = "; its mode alone needs none"
		}
		return nil, fault.New(codes.PermissionDenied, "AUTHORITY_REQUIRED",
			`preset "%s" is wider than the session's settings: switching needs the authority level "%s", the call has "%s"%s`,
			want.Name, approval.LevelName(need), approval.LevelName(call.Authority), hint)
	}

	var next facts
	if s.table.Current(now.recorded, now.pair).Name != want.Name {
		next.preset = want.Name
	}
	if now.pair.Mode != want.Mode {
		next.mode = want.Mode
	}
	if now.pair.Policy != want.Policy {
		next.policy = want.Policy
	}
	appended, err := s.write(ctx, next)
	if err != nil {
		return nil, err
	}
	return &permissionv1.SetReply{Preset: want.Name, Changed: len(appended) > 0}, nil
}

// Pin fills in what a session does not say, and touches nothing that it does. A new session gets the deployment's preset. Any other
// keeps what holds for it: seeded with another's log, or older than this plugin's place in the composition, it must not be
// moved by a default that came later. No person's authority stands behind a pin but that of whoever wrote the file, so
// only the host can ask for it.
func (s *presetServer) Pin(ctx context.Context, _ *permissionv1.PinRequest) (*permissionv1.PinReply, error) {
	call := plugin.Caller(ctx)
	if call.Caller != "host" {
		return nil, fault.New(codes.PermissionDenied, "HOST_ONLY", "pin: only the host fixes what sessions do not say, and the caller is %s", call.Caller)
	}
	if call.Session == "" {
		return nil, fault.New(codes.FailedPrecondition, "NO_SESSION", "pin: the call belongs to no session")
	}
	ctx, cancel := context.WithTimeout(ctx, switchTimeout)
	defer cancel()
	s.switching.Lock()
	defer s.switching.Unlock()

	now, err := s.readKnown(ctx)
	if err != nil {
		return nil, err
	}
	if now.recorded != "" && now.mode && now.policy {
		return &permissionv1.PinReply{}, nil
	}
	target, err := s.target(ctx, now)
	if err != nil {
		return nil, err
	}
	var next facts
	if now.recorded == "" && target.Name != permission.Custom {
		next.preset = target.Name
	}
	if !now.mode {
		next.mode = target.Mode
	}
	if !now.policy {
		next.policy = target.Policy
	}
	appended, err := s.write(ctx, next)
	if err != nil {
		return nil, err
	}
	return &permissionv1.PinReply{Appended: appended}, nil
}

// target is where a session's missing facts come from: the deployment's preset for a log that says nothing at all, the recorded
// preset for one whose pin was cut short, else what holds for the session.
func (s *presetServer) target(ctx context.Context, now state) (permission.Preset, error) {
	effective := s.table.Current(now.recorded, now.pair)
	seed, err := s.session.Last(ctx, &sessionv1.LastRequest{Type: session.TypeEndSeed})
	if err != nil || seed.GetEvent() != nil {
		return effective, err
	}
	if now.recorded == "" && !now.mode && !now.policy {
		return s.initial, nil
	}
	begun, ok := s.table.Find(now.recorded)
	if ok && (!now.mode || now.pair.Mode == begun.Mode) && (!now.policy || now.pair.Policy == begun.Policy) {
		return begun, nil
	}
	return effective, nil
}

// facts are what one switch or pin appends; empty ones it does not.
type facts struct {
	preset string
	mode   sandbox.Mode
	policy approval.Policy
}

// write appends facts, the intent first and then each knob through the capability that owns it. It returns the types of what
// was appended. That the caller leaves is no reason to stop: a log with one knob of two turned is on no preset.
func (s *presetServer) write(ctx context.Context, f facts) (appended []string, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), switchTimeout)
	defer cancel()
	for _, step := range []struct {
		event  string
		wanted bool
		append func() (changed bool, err error)
	}{
		{permission.EventPreset, f.preset != "", func() (bool, error) {
			data, err := json.Marshal(permission.Change{Preset: f.preset})
			if err != nil {
				return false, err
			}
			_, err = s.session.Append(ctx, &sessionv1.AppendRequest{Type: permission.EventPreset, Data: data})
			return true, err
		}},
		{sandbox.EventMode, f.mode != "", func() (bool, error) {
			r, err := s.policy.SetMode(ctx, &policyv1.SetModeRequest{Mode: string(f.mode)})
			return r.GetChanged(), err
		}},
		{approval.EventPolicy, f.policy != "", func() (bool, error) {
			r, err := s.approval.SetPolicy(ctx, &approvalv1.SetPolicyRequest{Policy: string(f.policy)})
			return r.GetChanged(), err
		}},
	} {
		if !step.wanted {
			continue
		}
		changed, err := step.append()
		switch {
		case err != nil && len(appended) == 0:
			return nil, err
		case err != nil:
			return appended, fault.New(status.Code(err), "PRESET_INCOMPLETE", "%s appended, but %s was not: %s; set the preset again",
				strings.Join(appended, " and "), step.event, fault.Message(err))
		case changed:
			appended = append(appended, step.event)
		}
	}
	return appended, nil
}

// Interface guard.
var _ permissionv1.PermissionServer = (*presetServer)(nil)

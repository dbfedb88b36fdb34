package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	policyv1 "github.com/cordon-host/cordon/api/policy/v1"
	sessionv1 "github.com/cordon-host/cordon/api/session/v1"
	"github.com/cordon-host/cordon/capability/approval"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/permission"
	"github.com/cordon-host/cordon/capability/sandbox"
	"github.com/cordon-host/cordon/plugin"
)

// switchTimeout bounds reading and appending one switch, because switches wait for each other.
const switchTimeout = 10 * time.Second

// Config is the row's config.
type Config struct {
	Mode          string `json:"mode,omitempty" jsonschema:"enum=read-only,enum=workspace-write,enum=danger-full-access,default=read-only" jsonschema_description:"The mode of a session that has not switched."`
	WorkspaceRoot string `json:"workspaceRoot,omitempty" jsonschema_description:"The root of calls whose session names no directory. Relative to the compose file's directory, which it is when left out."`
}

// Facts are what the plugin publishes about the policy capability.
type Facts struct {
	DefaultMode   sandbox.Mode `json:"defaultMode"`
	WorkspaceRoot string       `json:"workspaceRoot"` // canonical, absolute
}

// Plugin is the plugin.
var Plugin = plugin.Plugin[Config]{
	Name: "sandbox-policy", Version: "0.1.0",
	Needs:    []plugin.Need{{Capability: "session", Desc: &sessionv1.Session_ServiceDesc}},
	Offers:   []plugin.Offer{{Capability: "policy", Desc: &policyv1.Policy_ServiceDesc}},
	Appends:  []string{sandbox.EventMode},
	Contexts: []plugin.Contribution{{Name: sandbox.PolicySection, Order: sandbox.PolicyOrder}},
	Default:  func() Config { return Config{Mode: string(sandbox.ReadOnly)} },
	Apply:    apply,
}

func apply(ctx *plugin.Context, cfg Config) error {
	mode, err := sandbox.ParseMode(cfg.Mode)
	if err != nil {
		return fmt.Errorf("sandbox-policy: mode: %w", err)
	}
	root, err := workspaceRoot(cfg.WorkspaceRoot, ctx.Deployment().GetRoot())
	if err != nil {
		return fmt.Errorf("sandbox-policy: workspaceRoot: %w", err)
	}
	conn, _ := ctx.Conn("session")
	p := &policyServer{session: sessionv1.NewSessionClient(conn), mode: mode, root: root}
	if err := ctx.Contribute(sandbox.PolicySection, p.text); err != nil {
		return err
	}
	return ctx.Provide("policy", p, Facts{DefaultMode: mode, WorkspaceRoot: root})
}

// workspaceRoot is the canonical form of the configured root.
func workspaceRoot(configured, deployment string) (string, error) {
	root := configured
	switch {
	case root == "" && deployment == "":
		return "", errors.New("not set, and the deployment has no directory to fall back to")
	case root == "":
		root = deployment
	case !filepath.IsAbs(root):
		// Not filepath.Join: it would collapse `..` before the links are known.
		root = deployment + string(filepath.Separator) + root
	}
	canonical, err := filepath.EvalSymlinks(root)
	if err != nil {
		return "", fmt.Errorf("%s cannot be resolved: %w; name an existing directory", root, err)
	}
	fi, err := os.Stat(canonical)
	if err != nil {
		return "", err
	}
	if !fi.IsDir() {
		return "", fmt.Errorf("%s is not a directory", canonical)
	}
	if !filepath.IsAbs(canonical) {
		return "", fmt.Errorf("%s is not absolute", canonical)
	}
	return canonical, nil
}

type policyServer struct {
	policyv1.UnimplementedPolicyServer
	session sessionv1.SessionClient
	mode    sandbox.Mode
	root    string

	// switching keeps what SetMode checks true until it is appended: without it, a narrowing that was checked against a wider
	// mode could land after somebody else's and widen it again.
	switching sync.Mutex
}

func (p *policyServer) Resolve(ctx context.Context, _ *policyv1.ResolveRequest) (*policyv1.ResolveReply, error) {
	if plugin.Caller(ctx).Session == "" {
		return &policyv1.ResolveReply{Mode: string(p.mode), WorkspaceRoot: p.root, Source: "default"}, nil
	}
	header, err := p.session.Header(ctx, &sessionv1.HeaderRequest{})
	if err != nil {
		return nil, err
	}
	root := p.root
	if cwd := header.GetCwd(); cwd != "" {
		if !filepath.IsAbs(cwd) {
			return nil, fault.New(codes.FailedPrecondition, "BAD_SESSION", "session %s: cwd %q is not absolute", header.GetId(), cwd)
		}
		// The header holds the canonical path of a directory. If it leads elsewhere by now, somebody who may write beside it has put a
		// link in its place, and the session's workspace would be theirs to choose.
		if root = sandbox.CanonicalPath(cwd); root != cwd {
			return nil, fault.New(codes.FailedPrecondition, "BAD_SESSION", "session %s: its directory %q was replaced and leads to %q now; start a session in the one you mean", header.GetId(), cwd, root)
		}
	}
	mode, source, err := p.effective(ctx)
	if err != nil {
		return nil, err
	}
	return &policyv1.ResolveReply{Mode: string(mode), WorkspaceRoot: root, Source: source}, nil
}

// text is what a model is told about the mode of its session; without a session there is nobody to tell.
func (p *policyServer) text(ctx context.Context) (string, error) {
	if plugin.Caller(ctx).Session == "" {
		return "", nil
	}
	r, err := p.Resolve(ctx, &policyv1.ResolveRequest{})
	if err != nil {
		return "", err
	}
	return sandbox.PolicyText(sandbox.Mode(r.GetMode()), r.GetWorkspaceRoot()), nil
}

// effective is the mode of the call's session and where it comes from. A log with a mode that nobody knows is a fault with the
// reason UNKNOWN_MODE: guessing one could be guessing wide.
func (p *policyServer) effective(ctx context.Context) (sandbox.Mode, string, error) {
	last, err := p.session.Last(ctx, &sessionv1.LastRequest{Type: sandbox.EventMode})
	if err != nil {
		return "", "", err
	}
	if last.GetEvent() == nil {
		return p.mode, "default", nil
	}
	change, err := sandbox.ParseModeChange(last.GetEvent().GetData())
	if err != nil {
		return "", "", fault.New(codes.FailedPrecondition, "UNKNOWN_MODE", "event %d of session %s: %v; set the session's mode again",
			last.GetEvent().GetSeq(), plugin.Caller(ctx).Session, err)
	}
	return change.Mode, "session", nil
}

func (p *policyServer) SetMode(ctx context.Context, r *policyv1.SetModeRequest) (*policyv1.SetModeReply, error) {
	mode, err := sandbox.ParseMode(r.GetMode())
	if err != nil {
		return nil, fault.New(codes.InvalidArgument, "BAD_MODE", "%v", err)
	}
	call := plugin.Caller(ctx)
	if call.Session == "" {
		return nil, fault.New(codes.FailedPrecondition, "NO_SESSION", "sandbox mode belongs to a session, and the call has none")
	}
	ctx, cancel := context.WithTimeout(ctx, switchTimeout)
	defer cancel()
	p.switching.Lock()
	defer p.switching.Unlock()

	from, source, err := p.effective(ctx)
	// Presets pin sessions that have no mode of their own, to the default if need be. What they pin comes from the deployment's
	// file, whose owner is not there to be asked, so no authority is looked for: that was decided in their own path. A session
	// that has a mode can be widened by presets as by anybody, with the authority of whoever asked for the call tree.
	pin := source == "default" && call.Purpose == kernelv1.PurposePin && slices.Contains(call.Provides, permission.Capability)
	switch {
	case fault.Reason(err) == "UNKNOWN_MODE":
		from = "" // nothing is narrower than a mode nobody knows, so only authority gets out of it
	case err != nil:
		return nil, err
	case from == mode && !pin:
		return &policyv1.SetModeReply{Mode: string(mode)}, nil
	}
	if need := permission.ModeLevel(from, mode); call.Authority < need && !pin {
		return nil, fault.New(codes.PermissionDenied, "AUTHORITY_REQUIRED",
			`sandbox mode "%s" is wider than the session's: switching needs the authority level "%s", the call has "%s"`,
			mode, approval.LevelName(need), approval.LevelName(call.Authority))
	}
	data, err := json.Marshal(sandbox.ModeChange{Mode: mode})
	if err != nil {
		return nil, err
	}
	if _, err := p.session.Append(ctx, &sessionv1.AppendRequest{Type: sandbox.EventMode, Data: data}); err != nil {
		return nil, err
	}
	return &policyv1.SetModeReply{Mode: string(mode), Changed: true}, nil
}

// Interface guard.
var _ policyv1.PolicyServer = (*policyServer)(nil)

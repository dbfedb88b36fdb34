package main

import (
	"context"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"

	fsv1 "github.com/cordon-host/cordon/api/fs/v1"
	policyv1 "github.com/cordon-host/cordon/api/policy/v1"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/sandbox"
	"github.com/cordon-host/cordon/plugin"
	"github.com/cordon-host/cordon/plugin/fskit"
)

// scopeMode is the scope of the grants that widen a mode.
const scopeMode = "sandbox-mode"

type fsServer struct {
	fsv1.UnimplementedFsServer
	plugin *plugin.Context
	policy policyv1.PolicyClient
	files  *fskit.FS
}

// standing is the policy of the call's session, or the deployment's default outside any, widened by what the grant is worth and
// nothing else.
func (s *fsServer) standing(ctx context.Context, grant string) (fskit.Policy, error) {
	resolved, err := s.policy.Resolve(ctx, &policyv1.ResolveRequest{})
	if err != nil {
		return fskit.Policy{}, err
	}
	mode, err := sandbox.ParseMode(resolved.GetMode())
	if err != nil {
		return fskit.Policy{}, fault.New(codes.FailedPrecondition, "UNKNOWN_MODE", "policy resolved to no known mode, so nothing was done: %v", err)
	}
	if grant != "" {
		if mode, err = s.widen(ctx, mode, grant); err != nil {
			return fskit.Policy{}, err
		}
	}
	return s.world(ctx, mode, resolved.GetWorkspaceRoot())
}

// world is what a call finds in a mode.
func (s *fsServer) world(ctx context.Context, mode sandbox.Mode, root string) (p fskit.Policy, err error) {
	d := s.plugin.Deployment()
	p = fskit.Policy{
		Mode: mode, Root: root, Protected: d.GetProtected(),
		Hidden: append(slices.Clone(d.GetHidden()), d.GetTempDir(), d.GetStateDir()),
	}
	if session := plugin.Caller(ctx).Session; mode == sandbox.WorkspaceWrite && session != "" && d.GetTempDir() != "" {
		if p.Temp, err = fskit.MakeTemp(d.GetTempDir(), session); err != nil {
			return fskit.Policy{}, fault.New(codes.FailedPrecondition, "NO_TEMP", "%v", err)
		}
	}
	return p, nil
}

// widen is the standing mode, widened by what the grant is worth. The host says what that is; a grant that widens nothing was
// approved for a mode the session has left since, and is refused rather than guessed about.
func (s *fsServer) widen(ctx context.Context, standing sandbox.Mode, grant string) (sandbox.Mode, error) {
	g, err := plugin.Redeem(ctx, s.plugin, grant)
	if err != nil {
		return "", err
	}
	granted := sandbox.Mode(g.GetValue())
	switch {
	case g.GetScope() != scopeMode || !granted.Valid():
		return "", fault.New(codes.PermissionDenied, "GRANT_FOREIGN", "grant is for %s %q, not for a sandbox mode", g.GetScope(), g.GetValue())
	case !sandbox.Wider(granted, standing):
		return "", fault.New(codes.FailedPrecondition, "GRANT_NOT_WIDER",
			`grant is for mode "%s", and the session is in "%s" by now; ask again if that does not suffice`, granted, standing)
	}
	return granted, nil
}

func (s *fsServer) Resolve(ctx context.Context, r *fsv1.ResolveRequest) (*fsv1.ResolveReply, error) {
	p, err := s.standing(ctx, "")
	if err == nil && r.GetMode() != "" {
		mode, wrong := sandbox.ParseMode(r.GetMode())
		if wrong != nil {
			return nil, fault.New(codes.InvalidArgument, "INVALID_REQUEST", "fs-sandbox: request.mode: %v", wrong)
		}
		p, err = s.world(ctx, mode, p.Root)
	}
	if err != nil {
		return nil, err
	}
	path, exists, err := s.files.Resolve(ctx, p, r.GetPath())
	if err != nil {
		return nil, err
	}
	return &fsv1.ResolveReply{Path: text(path), Exists: exists}, nil
}

func (s *fsServer) Stat(ctx context.Context, r *fsv1.StatRequest) (*fsv1.StatReply, error) {
	p, err := s.standing(ctx, "")
	if err != nil {
		return nil, err
	}
	i, err := s.files.Stat(ctx, p, r.GetPath())
	if err != nil {
		return nil, err
	}
	return &fsv1.StatReply{Path: text(i.Path), Kind: i.Kind, Size: i.Size, Version: i.Version, Mode: i.Mode}, nil
}

func (s *fsServer) Read(ctx context.Context, r *fsv1.ReadRequest) (*fsv1.ReadReply, error) {
	for _, f := range []struct {
		name  string
		value int64
	}{{"offset", r.GetOffset()}, {"limit", r.GetLimit()}, {"max_bytes", r.GetMaxBytes()}, {"max_line", r.GetMaxLine()}} {
		if f.value < 0 {
			return nil, fault.New(codes.InvalidArgument, "INVALID_REQUEST", "fs-sandbox: request.%s must not be negative", f.name)
		}
	}
	p, err := s.standing(ctx, "")
	if err != nil {
		return nil, err
	}
	t, err := s.files.Read(ctx, p, r.GetPath(), fskit.Window{
		Offset: or(r.GetOffset(), 1), Limit: min(or(r.GetLimit(), defaultLines), maxReadLines),
		MaxBytes: min(or(r.GetMaxBytes(), defaultReadBytes), maxReadBytes), MaxLine: r.GetMaxLine(),
	})
	if err != nil {
		return nil, err
	}
	out := &fsv1.ReadReply{Path: text(t.Path), Version: t.Version, TotalLines: t.Total, Capped: t.Capped}
	for _, l := range t.Lines {
		out.Lines = append(out.Lines, &fsv1.Line{Number: l.Number, Text: l.Text, Cut: l.Cut})
	}
	return out, nil
}

func (s *fsServer) List(ctx context.Context, r *fsv1.ListRequest) (*fsv1.ListReply, error) {
	p, err := s.standing(ctx, "")
	if err != nil {
		return nil, err
	}
	entries, err := s.files.List(ctx, p, r.GetPath())
	if err != nil {
		return nil, err
	}
	out := &fsv1.ListReply{}
	for _, e := range entries {
		out.Entries = append(out.Entries, &fsv1.DirEntry{Name: text(e.Name), Kind: e.Kind})
	}
	return out, nil
}

func (s *fsServer) Write(ctx context.Context, r *fsv1.WriteRequest) (*fsv1.WriteReply, error) {
	pre, err := precondition(r.GetPrecondition())
	if err != nil {
		return nil, err
	}
	p, err := s.standing(ctx, r.GetGrant())
	if err != nil {
		return nil, err
	}
	w, err := s.files.Write(ctx, p, r.GetPath(), r.GetContent(), pre)
	if err != nil {
		return nil, err
	}
	return &fsv1.WriteReply{Path: text(w.Path), Created: w.Created, Version: w.Version, Mode: string(p.Mode)}, nil
}

func (s *fsServer) Edit(ctx context.Context, r *fsv1.EditRequest) (*fsv1.EditReply, error) {
	pre, err := precondition(r.GetPrecondition())
	if err != nil {
		return nil, err
	}
	if pre.MustNotExist {
		return nil, fault.New(codes.InvalidArgument, "INVALID_REQUEST", "fs-sandbox: an edit of a file that must not exist can never succeed")
	}
	p, err := s.standing(ctx, r.GetGrant())
	if err != nil {
		return nil, err
	}
	w, err := s.files.Edit(ctx, p, r.GetPath(), r.GetOldString(), r.GetNewString(), r.GetReplaceAll(), pre)
	if err != nil {
		return nil, err
	}
	return &fsv1.EditReply{Path: text(w.Path), Replacements: w.Replacements, Version: w.Version, Mode: string(p.Mode)}, nil
}

func precondition(p *fsv1.Precondition) (fskit.Precondition, error) {
	if p.GetMustNotExist() && p.GetVersion() != "" {
		return fskit.Precondition{}, fault.New(codes.InvalidArgument, "INVALID_REQUEST", "fs-sandbox: a file that must not exist has no version")
	}
	return fskit.Precondition{MustNotExist: p.GetMustNotExist(), Version: p.GetVersion(), LeadsTo: p.GetLeadsTo()}, nil
}

// text is a name as a message can carry it: names of files are bytes.
func text(name string) string { return strings.ToValidUTF8(name, "\uFFFD") }

func or(value, otherwise int64) int64 {
	if value == 0 {
		return otherwise
	}
	return value
}

// Interface guard.
var _ fsv1.FsServer = (*fsServer)(nil)

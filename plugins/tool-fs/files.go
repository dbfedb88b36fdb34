package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	approvalv1 "github.com/cordon-host/cordon/api/approval/v1"
	fsv1 "github.com/cordon-host/cordon/api/fs/v1"
	policyv1 "github.com/cordon-host/cordon/api/policy/v1"
	toolsv1 "github.com/cordon-host/cordon/api/tools/v1"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/fs"
	"github.com/cordon-host/cordon/capability/sandbox"
	"github.com/cordon-host/cordon/plugin"
)

// files are the tools.
type files struct {
	fs       fsv1.FsClient
	policy   policyv1.PolicyClient     // nil without the capability
	approval approvalv1.ApprovalClient // nil without the capability
	confines bool
	cfg      Config
}

// read shows a window of a file's lines.
func (f *files) read(ctx context.Context, raw json.RawMessage) (*toolsv1.CallReply, error) {
	var in struct {
		Path   *string         `json:"file_path"`
		Offset json.RawMessage `json:"offset"`
		Limit  json.RawMessage `json:"limit"`
	}
	err := decode(raw, &in)
	if err == nil {
		err = checkPath(in.Path)
	}
	offset, limit := int64(1), f.cfg.ReadLimit
	if err == nil && in.Offset != nil {
		offset, err = positive("offset", in.Offset)
	}
	if err == nil && in.Limit != nil {
		limit, err = positive("limit", in.Limit)
	}
	if err == nil && limit > f.cfg.ReadLimit {
		err = fmt.Errorf("limit must be less than or equal to %d", f.cfg.ReadLimit)
	}
	if err != nil {
		return nil, invalid(err)
	}
	standing, err := f.resolve(ctx)
	if err != nil {
		return nil, aborted(ctx, err)
	}
	path, shown, err := absolute(*in.Path, standing)
	if err != nil {
		return nil, invalid(err)
	}
	r, err := f.fs.Read(ctx, &fsv1.ReadRequest{
		Path: path, Offset: offset, Limit: limit, MaxBytes: f.cfg.ReadMaxBytes, MaxLine: f.cfg.ReadMaxLineLength,
	})
	mode := sandbox.Mode(standing.GetMode())
	if err != nil {
		return f.failed(ctx, err, mode, false)
	}
	return result(renderRead(shown, offset, f.cfg.ReadMaxLineLength, r), metadata{
		Path: r.GetPath(), Version: r.GetVersion(), Mode: standing.GetMode(), TotalLines: r.GetTotalLines(), Capped: r.GetCapped(),
	})
}

// write creates or replaces a file.
func (f *files) write(ctx context.Context, raw json.RawMessage) (*toolsv1.CallReply, error) {
	var in struct {
		Path          *string `json:"file_path"`
		Content       *string `json:"content"`
		Permissions   *string `json:"sandbox_permissions"`
		Justification *string `json:"justification"`
	}
	err := decode(raw, &in)
	if err == nil {
		err = checkPath(in.Path)
	}
	if err == nil && in.Content == nil {
		err = errors.New("content must be a string")
	}
	if err != nil {
		return nil, invalid(err)
	}
	return f.mutate(ctx, mutation{
		tool: toolWrite, path: *in.Path, permissions: in.Permissions, justification: in.Justification,
		shown: []string{*in.Content},
		do: func(path string, a approved) (metadata, error) {
			r, err := f.fs.Write(ctx, &fsv1.WriteRequest{Path: path, Content: []byte(*in.Content), Precondition: a.precondition(), Grant: a.grant})
			return metadata{Path: r.GetPath(), Version: r.GetVersion(), Mode: r.GetMode(), Created: r.GetCreated()}, err
		},
		render: func(shown string, m metadata) string { return renderWrite(shown, m.Created) },
	})
}

// edit replaces text in a file.
func (f *files) edit(ctx context.Context, raw json.RawMessage) (*toolsv1.CallReply, error) {
	var in struct {
		Path          *string `json:"file_path"`
		Old           *string `json:"old_string"`
		New           *string `json:"new_string"`
		All           bool    `json:"replace_all"`
		Permissions   *string `json:"sandbox_permissions"`
		Justification *string `json:"justification"`
	}
	err := decode(raw, &in)
	if err == nil {
		err = checkPath(in.Path)
	}
	switch {
	case err != nil:
	case in.Old == nil || *in.Old == "":
		err = errors.New("old_string must be a non-empty string")
	case in.New == nil:
		err = errors.New("new_string must be a string")
	case *in.Old == *in.New:
		err = errors.New("old_string and new_string must differ")
	}
	if err != nil {
		return nil, invalid(err)
	}
	return f.mutate(ctx, mutation{
		tool: toolEdit, path: *in.Path, permissions: in.Permissions, justification: in.Justification,
		shown: []string{*in.Old, *in.New},
		do: func(path string, a approved) (metadata, error) {
			r, err := f.fs.Edit(ctx, &fsv1.EditRequest{
				Path: path, OldString: *in.Old, NewString: *in.New, ReplaceAll: in.All, Precondition: a.precondition(), Grant: a.grant,
			})
			return metadata{Path: r.GetPath(), Version: r.GetVersion(), Mode: r.GetMode(), Replacements: r.GetReplacements()}, err
		},
		render: func(shown string, _ metadata) string { return renderEdit(shown, in.All) },
	})
}

// mutation is a call of write or edit with its own arguments checked.
type mutation struct {
	tool, path                 string
	permissions, justification *string
	shown                      []string // what a person who approves is shown beside the path
	do                         func(path string, a approved) (metadata, error)
	render                     func(shown string, m metadata) string
}

// approved is what a person allowed: a wider mode for one operation, on what the path led to when they were asked.
type approved struct{ grant, leadsTo string }

func (a approved) precondition() *fsv1.Precondition {
	if a.leadsTo == "" {
		return nil
	}
	return &fsv1.Precondition{LeadsTo: a.leadsTo}
}

// mutate runs a mutation in the order that matters: what is wrong with the escalation is said before anything else; the
// standing policy is resolved; a wider mode is asked for, which can only widen that; the file is changed.
func (f *files) mutate(ctx context.Context, m mutation) (*toolsv1.CallReply, error) {
	escalate, err := f.escalation(m)
	if err != nil {
		return nil, invalid(err)
	}
	standing, err := f.resolve(ctx)
	if err != nil {
		return nil, aborted(ctx, err)
	}
	path, shown, pathErr := absolute(m.path, standing)
	if pathErr != nil {
		return nil, invalid(pathErr)
	}
	mode, allowed := sandbox.Mode(standing.GetMode()), approved{}
	if escalate != "" {
		if allowed, err = f.approve(ctx, m, mode, escalate, path, shown, standing.GetWorkspaceRoot()); err != nil {
			return nil, aborted(ctx, refusal(err))
		}
		mode = escalate
	}
	meta, err := m.do(path, allowed)
	if err != nil {
		return f.failed(ctx, err, mode, true)
	}
	return result(m.render(shown, meta), meta)
}

// resolve is the standing policy; nil without the capability.
func (f *files) resolve(ctx context.Context) (*policyv1.ResolveReply, error) {
	if f.policy == nil {
		return nil, nil
	}
	return f.policy.Resolve(ctx, &policyv1.ResolveRequest{})
}

// absolute is a path from the root on, otherwise as it was spelled, and as the texts show it.
func absolute(path string, standing *policyv1.ResolveReply) (full, shown string, err error) {
	root := standing.GetWorkspaceRoot()
	if !strings.HasPrefix(path, "/") {
		if root == "" {
			return "", "", fmt.Errorf("file_path %q is relative, and without the policy capability there is no root it could be relative to; give an absolute path", path)
		}
		full = strings.TrimSuffix(root, "/") + "/"
	}
	return full + path, fs.Display(root, path), nil
}

// escalation is the mode a call asks for; empty when it asks for none.
func (f *files) escalation(m mutation) (sandbox.Mode, error) {
	if err := sandbox.ValidateEscalation(m.permissions, m.justification); err != nil {
		return "", err
	}
	if m.permissions == nil {
		return "", nil
	}
	if !f.confines {
		return "", errors.New("sandbox_permissions is not available in this composition (no sandboxing filesystem to escalate)")
	}
	mode, err := sandbox.ParseMode(*m.permissions)
	if err != nil {
		return "", fmt.Errorf("invalid sandbox_permissions: %w", err)
	}
	return mode, nil
}

func (f *files) approve(ctx context.Context, m mutation, effective, requested sandbox.Mode, path, shown, root string) (approved, error) {
	call := plugin.Caller(ctx)
	e := sandbox.Escalation{
		Effective: effective, Requested: requested, Subject: sandbox.Operation, Justification: *m.justification,
		// Where a front end names no agent, the session itself is what carries the question.
		HasAgent: call.Agent != "" || call.Session != "",
	}
	if f.approval == nil {
		_, err := sandbox.Approve(ctx, e, nil)
		return approved{}, err
	}
	a := &approver{fs: f.fs, approval: f.approval, m: m, path: path, shown: shown, root: root}
	grant, err := sandbox.Approve(ctx, e, a)
	return approved{grant, a.leadsTo}, err
}

// approver asks through the approval capability. A person decides about what a path leads to and not about how it is spelled,
// so that is found out first.
type approver struct {
	fs                fsv1.FsClient
	approval          approvalv1.ApprovalClient
	m                 mutation
	path, shown, root string
	leadsTo           string
}

func (a *approver) ApproveEscalation(ctx context.Context, e sandbox.Escalation, reason string) (sandbox.Answer, error) {
	where, err := a.fs.Resolve(ctx, &fsv1.ResolveRequest{Path: a.path, Mode: string(e.Requested)})
	if err != nil {
		return sandbox.Answer{}, err
	}
	a.leadsTo = where.GetPath()
	reply, err := a.approval.Request(ctx, &approvalv1.ApprovalRequest{
		Tool: a.m.tool, Reason: reason,
		Widening: &approvalv1.Widening{From: string(e.Effective), To: string(e.Requested), Capability: "fs"},
		Subject: &approvalv1.Subject{
			Kind: string(e.Subject), Text: renderQuestion(a.m.tool, a.shown, a.leadsTo, a.m.shown...), Cwd: a.root,
		},
	})
	if err != nil {
		return sandbox.Answer{}, err
	}
	return sandbox.Answer{Outcome: reply.GetOutcome(), Grant: reply.GetGrant()}, nil
}

// failed is the result of an operation that did not happen. A denial reads as one of a command does; with a hint where the
// tool can ask for more. A fault that a model can do something about says what.
func (f *files) failed(ctx context.Context, err error, mode sandbox.Mode, escalates bool) (*toolsv1.CallReply, error) {
	if ctx.Err() != nil {
		return nil, aborted(ctx, err)
	}
	reason := fault.Reason(err)
	if reason == fs.SandboxDenied {
		text := sandbox.DenialMarker(mode)
		if escalates && f.confines {
			text += "\n" + sandbox.EscalationHint(sandbox.Operation)
		}
		reply, err := result(text, metadata{Mode: string(mode), Denied: true})
		if err != nil {
			return nil, err
		}
		reply.IsError, reply.ErrorCode = true, reason
		return reply, nil
	}
	if remedy := fs.Remedy(reason); remedy != "" {
		return nil, fault.New(status.Code(err), reason, "%s — %s", fault.Message(err), remedy)
	}
	return nil, err
}

// metadata is what a front end may know besides the text.
type metadata struct {
	Mode         string `json:"mode,omitempty"`
	Denied       bool   `json:"denied"`
	Path         string `json:"path,omitempty"` // canonical
	Version      string `json:"version,omitempty"`
	Created      bool   `json:"created,omitempty"`
	Replacements int64  `json:"replacements,omitempty"`
	TotalLines   int64  `json:"totalLines,omitempty"`
	Capped       bool   `json:"capped,omitempty"`
}

func result(text string, m metadata) (*toolsv1.CallReply, error) {
	meta, err := json.Marshal(m)
	if err != nil {
		return nil, err
	}
	out := plugin.Text(text)
	out.Meta = meta
	return out, nil
}

// aborted is the error of a call that its caller gave up.
func aborted(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return fault.New(codes.Canceled, "ABORTED", "tool call aborted")
	}
	return err
}

// refusal gives a refused escalation a reason for programs, and keeps its text.
func refusal(err error) error {
	var r *sandbox.Refusal
	if errors.As(err, &r) {
		reason := "ESCALATION_" + strings.ToUpper(strings.ReplaceAll(string(r.Kind), "-", "_"))
		return fault.New(codes.PermissionDenied, reason, "%s", r.Error())
	}
	return err
}

func invalid(err error) error {
	return fault.New(codes.InvalidArgument, "INVALID_ARGUMENTS", "%v", err)
}

// decode checks what the schema cannot say, and what it can again: a call need not have come through a host that checks.
func decode(raw []byte, into any) error {
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		var typ *json.UnmarshalTypeError
		if errors.As(err, &typ) && typ.Field != "" {
			return fmt.Errorf("invalid %s: expected a %s, got a %s", typ.Field, typ.Type, typ.Value)
		}
		return fmt.Errorf("invalid arguments: %w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return errors.New("invalid arguments: expected one JSON object")
	}
	return nil
}

func checkPath(path *string) error {
	if path == nil || strings.TrimSpace(*path) == "" {
		return errors.New("file_path must be a non-empty string")
	}
	return nil
}

// positive reads a whole number from 1. JSON has no integers: 2.0 is one.
func positive(name string, raw json.RawMessage) (int64, error) {
	var n float64
	if err := json.Unmarshal(raw, &n); err != nil || string(raw) == "null" || n < 1 || n != math.Trunc(n) || n > math.MaxInt32 {
		return 0, fmt.Errorf("%s must be a positive integer", name)
	}
	return int64(n), nil
}

// Interface guard.
var _ sandbox.Approver = (*approver)(nil)

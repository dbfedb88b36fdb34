package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"strings"

	"google.golang.org/grpc/codes"

	approvalv1 "github.com/cordon-host/cordon/api/approval/v1"
	policyv1 "github.com/cordon-host/cordon/api/policy/v1"
	shellv1 "github.com/cordon-host/cordon/api/shell/v1"
	toolsv1 "github.com/cordon-host/cordon/api/tools/v1"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/sandbox"
	"github.com/cordon-host/cordon/capability/shell"
	"github.com/cordon-host/cordon/plugin"
)

// toolName is the tool, and what an approver is told asks.
const toolName = "bash"

// What a model is told beside the tool's description: the name of the contribution, its place and the text are the reference
// system's.
const (
	section      = "tool:bash"
	sectionOrder = 105
	sectionText  = "Check the [exit code: N] marker on every bash result; investigate failures before moving on."
)

// maxTimeoutMs is the longest limit passed on, a week; the shell provider has its own, lower one.
const maxTimeoutMs = 7 * 24 * 60 * 60 * 1000

// Plugin is the plugin.
var Plugin = plugin.Plugin[struct{}]{
	Name: "tool-bash", Version: "0.1.0",
	Needs: []plugin.Need{
		{Capability: "shell", Desc: &shellv1.Shell_ServiceDesc},
		{Capability: "policy", Desc: &policyv1.Policy_ServiceDesc, Optional: true},
		{Capability: "approval", Desc: &approvalv1.Approval_ServiceDesc, Optional: true},
	},
	Tools:    []string{toolName},
	Contexts: []plugin.Contribution{{Name: section, Order: sectionOrder}},
	Apply:    apply,
}

func apply(ctx *plugin.Context, _ struct{}) error {
	var facts shell.Facts
	if _, err := ctx.Facts("shell", &facts); err != nil {
		return err
	}
	conn, _ := ctx.Conn("shell")
	b := &bash{shell: shellv1.NewShellClient(conn), confines: facts.Confines}
	if conn, ok := ctx.Conn("policy"); ok {
		b.policy = policyv1.NewPolicyClient(conn)
	}
	if conn, ok := ctx.Conn("approval"); ok {
		b.approval = approvalv1.NewApprovalClient(conn)
	}
	if b.confines && b.policy == nil {
		return errors.New("tool-bash: the mounted shell confines but the policy capability is missing")
	}
	schema, err := inputSchema(b.confines)
	if err != nil {
		return err
	}
	if err := ctx.Contribute(section, func(context.Context) (string, error) { return sectionText, nil }); err != nil {
		return err
	}
	return ctx.Tool(plugin.Tool{
		Name: toolName, Description: description(b.confines), InputSchema: schema, Call: b.call,
	})
}

// bash is the tool.
type bash struct {
	shell    shellv1.ShellClient
	policy   policyv1.PolicyClient     // nil without the capability
	approval approvalv1.ApprovalClient // nil without the capability
	confines bool
}

// arguments are a call's, checked.
type arguments struct {
	command       string
	timeoutMs     int64 // 0 for the provider's default
	workdir       string
	escalate      sandbox.Mode // empty without an escalation
	justification string
}

// call runs one call, in the order that matters: what is wrong with the arguments is said before anything else; the standing
// policy is resolved, where it matters; a wider mode is asked for, which can only widen that; the working directory is settled; the
// command runs.
func (b *bash) call(ctx context.Context, raw json.RawMessage) (*toolsv1.CallReply, error) {
	args, err := b.parse(raw)
	if err != nil {
		return nil, fault.New(codes.InvalidArgument, "INVALID_ARGUMENTS", "%v", err)
	}
	// Only for what is checked and asked here: the shell resolves the policy for itself and takes no mode from anybody.
	var standing *policyv1.ResolveReply
	if b.policy != nil && args.needsPolicy() {
		if standing, err = b.policy.Resolve(ctx, &policyv1.ResolveRequest{}); err != nil {
			return nil, aborted(ctx, err)
		}
	}
	workdir, workdirErr := resolveWorkdir(args.workdir, standing.GetWorkspaceRoot())
	var grant string
	if args.escalate != "" {
		if grant, err = b.approve(ctx, args, sandbox.Mode(standing.GetMode()), workdir); err != nil {
			return nil, aborted(ctx, refusal(err))
		}
	}
	if workdirErr != nil {
		return nil, fault.New(codes.InvalidArgument, "INVALID_ARGUMENTS", "%v", workdirErr)
	}
	// Built from the checked arguments alone: nothing else a model writes reaches the shell.
	reply, err := b.shell.Run(ctx, &shellv1.RunRequest{
		Command: args.command, Workdir: workdir, TimeoutMs: args.timeoutMs, Grant: grant,
	})
	if err != nil {
		return nil, aborted(ctx, err)
	}
	meta, err := metadata(reply)
	if err != nil {
		return nil, err
	}
	out := plugin.Text(render(reply, b.confines))
	out.Meta = meta
	return out, nil
}

// needsPolicy: a widening is measured against the standing mode, and a relative directory starts at the root.
func (a arguments) needsPolicy() bool {
	return a.escalate != "" || a.workdir != "" && !filepath.IsAbs(a.workdir)
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

// parse checks what the schema cannot say, and what it can again: a call need not have come through a host that checks.
func (b *bash) parse(raw []byte) (arguments, error) {
	var in struct {
		Command       *string         `json:"command"`
		Description   *string         `json:"description"`
		TimeoutMs     json.RawMessage `json:"timeoutMs"`
		Workdir       *string         `json:"workdir"`
		Permissions   *string         `json:"sandbox_permissions"`
		Justification *string         `json:"justification"`
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&in); err != nil {
		var typ *json.UnmarshalTypeError
		if errors.As(err, &typ) && typ.Field != "" {
			return arguments{}, fmt.Errorf("invalid %s: expected a %s, got a %s", typ.Field, typ.Type, typ.Value)
		}
		return arguments{}, fmt.Errorf("invalid arguments: %w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return arguments{}, errors.New("invalid arguments: expected one JSON object")
	}
	if in.Command == nil || strings.TrimSpace(*in.Command) == "" {
		return arguments{}, errors.New("invalid command: expected a non-empty string")
	}
	if in.Description != nil && strings.TrimSpace(*in.Description) == "" {
		return arguments{}, errors.New("invalid description: expected a non-empty string")
	}
	out := arguments{command: *in.Command}
	if in.TimeoutMs != nil {
		var ms float64
		if err := json.Unmarshal(in.TimeoutMs, &ms); err != nil || ms <= 0 || string(in.TimeoutMs) == "null" {
			return arguments{}, fmt.Errorf("invalid timeoutMs: expected a positive number, got %s", in.TimeoutMs)
		}
		out.timeoutMs = int64(math.Ceil(min(ms, maxTimeoutMs)))
	}
	if in.Workdir != nil {
		if *in.Workdir == "" || strings.ContainsRune(*in.Workdir, 0) {
			return arguments{}, fmt.Errorf("invalid workdir: expected a path, got %q", *in.Workdir)
		}
		out.workdir = *in.Workdir
	}
	if err := sandbox.ValidateEscalation(in.Permissions, in.Justification); err != nil {
		return arguments{}, err
	}
	if in.Permissions != nil {
		if !b.confines {
			return arguments{}, errors.New("sandbox_permissions is not available in this composition (no sandboxing executor to escalate)")
		}
		mode, err := sandbox.ParseMode(*in.Permissions)
		if err != nil {
			return arguments{}, fmt.Errorf("invalid sandbox_permissions: %w", err)
		}
		out.escalate, out.justification = mode, *in.Justification
	}
	return out, nil
}

// resolveWorkdir is where the command starts: root, which is the session's or left to the shell when it is empty, unless the
// call names another directory, which may be relative to it. Whether it is there is for the shell to say, in the world the command sees.
func resolveWorkdir(workdir, root string) (string, error) {
	switch {
	case workdir == "":
		return root, nil
	case filepath.IsAbs(workdir):
		return workdir, nil
	case root == "":
		return "", fmt.Errorf("invalid workdir: %q is relative, and without the policy capability there is no root it could be relative to; give an absolute path", workdir)
	}
	// Not filepath.Join: it would collapse `..` before the links are known.
	return strings.TrimSuffix(root, "/") + "/" + workdir, nil
}

func (b *bash) approve(ctx context.Context, args arguments, effective sandbox.Mode, workdir string) (grant string, err error) {
	call := plugin.Caller(ctx)
	e := sandbox.Escalation{
		Effective: effective, Requested: args.escalate, Subject: sandbox.Command, Justification: args.justification,
		// Where a front end names no agent, the session itself is what carries the question.
		HasAgent: call.Agent != "" || call.Session != "",
	}
	if b.approval == nil {
		return sandbox.Approve(ctx, e, nil)
	}
	return sandbox.Approve(ctx, e, approver{b.approval, args.command, workdir})
}

// approver asks through the approval capability.
type approver struct {
	client       approvalv1.ApprovalClient
	command, cwd string
}

func (a approver) ApproveEscalation(ctx context.Context, e sandbox.Escalation, reason string) (sandbox.Answer, error) {
	reply, err := a.client.Request(ctx, &approvalv1.ApprovalRequest{
		Tool: toolName, Reason: reason,
		Widening: &approvalv1.Widening{From: string(e.Effective), To: string(e.Requested), Capability: "shell"},
		Subject:  &approvalv1.Subject{Kind: string(e.Subject), Text: a.command, Cwd: a.cwd},
	})
	if err != nil {
		return sandbox.Answer{}, err
	}
	return sandbox.Answer{Outcome: reply.GetOutcome(), Grant: reply.GetGrant()}, nil
}

// Interface guard.
var _ sandbox.Approver = approver{}

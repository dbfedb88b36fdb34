package tools

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	toolsv1 "github.com/cordon-host/cordon/api/tools/v1"
	"github.com/cordon-host/cordon/capability/fault"
	rules "github.com/cordon-host/cordon/capability/session"
	"github.com/cordon-host/cordon/host/route"
	"github.com/cordon-host/cordon/host/session"
)

// Request is one tool call.
type Request struct {
	Tool      string
	Arguments []byte
	Session   *session.Session
	Agent     string
	Authority kernelv1.Level
	Tag       string
	// Begun is told the call tree before anything of it runs; what it returns runs when the call has ended.
	Begun func(*route.Tree) (ended func())
}

// Result is what a model gets to see, and what a front end may know besides.
type Result struct {
	Call      string
	IsError   bool
	ErrorCode string
	Texts     []string
	Meta      json.RawMessage // a JSON object, or nil
}

// Caller runs tool calls.
type Caller struct {
	Registry *Registry
	Router   *route.Router
	// EndTree ends a call tree and forgets what the host kept for it: grants, answers.
	EndTree func(*route.Tree)
	// Before are events that go into the log in front of a call, logged is called when they are there. After tells what the model must
	// hear in front of its result. Nil for neither.
	Before func(context.Context, *session.Session) (events []session.Draft, logged func())
	After  func(context.Context, *session.Session) (text string, record []session.Draft)
}

// logTimeout bounds writing the end of a call whose caller is gone.
const logTimeout = 10 * time.Second

// Call runs one tool call in a turn of its own: check the arguments, record the call, run it, record the result. What is
// wrong with the call itself is a result with IsError. An error means that the host could not do its part, and says whether the
// tool ran.
func (c *Caller) Call(ctx context.Context, r Request) (Result, error) {
	t, ok := c.Registry.lookup(r.Tool)
	if !ok {
		return failed("", "TOOL_NOT_FOUND", fmt.Sprintf("tool %q is not registered", r.Tool)), nil
	}
	arguments, err := t.checkArguments(r.Arguments)
	if err != nil {
		return failed("", "INVALID_ARGUMENTS", err.Error()), nil
	}

	// The call is on disk before anything runs.
	turn, err := r.Session.BeginTurn(ctx)
	if err != nil {
		return Result{}, unrecorded(err)
	}
	tree := route.NewTree(route.Call{
		Session: r.Session.Header().ID, Agent: r.Agent, Turn: turn, Authority: r.Authority, Tag: r.Tag,
	})
	defer c.EndTree(tree)
	var first []session.Draft
	logged := func() {}
	if c.Before != nil {
		first, logged = c.Before(ctx, r.Session)
	}
	_, err = r.Session.AppendAll(ctx, append(inTurn(turn, first), session.Draft{Type: rules.TypeToolCall, Turn: turn, Data: rules.ToolCall{
		Turn: turn, CallID: tree.ID, Name: r.Tool, Arguments: string(r.Arguments),
	}})...)
	if err != nil {
		// Best effort: what stays open is closed when the session is loaded again.
		_ = c.endTurn(ctx, r.Session, turn, rules.Reason{Kind: rules.EndError, Error: &rules.Detail{Message: err.Error(), Code: "LOG_FAILED"}})
		return Result{}, unrecorded(err)
	}
	logged()

	result := c.run(ctx, t, tree, r, arguments)
	result.Call = tree.ID

	// The end is recorded whether or not anybody still waits for it.
	wctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), logTimeout)
	defer cancel()
	var last []session.Draft
	if c.After != nil {
		var text string
		if text, last = c.After(wctx, r.Session); text != "" {
			result.Texts = append([]string{text}, result.Texts...)
		}
	}
	if _, err := r.Session.AppendAll(wctx, append(inTurn(turn, last), session.Draft{Type: rules.TypeToolResult, Turn: turn, Data: record(turn, result)})...); err != nil {
		// Ending the turn also closes the call, as one whose outcome the log does not know.
		err = errors.Join(err, c.endTurn(wctx, r.Session, turn, rules.Reason{Kind: rules.EndError, Error: &rules.Detail{Message: err.Error(), Code: "LOG_FAILED"}}))
		return Result{}, fault.New(codes.Internal, "LOG_FAILED", "tool %s ran, but its result could not be recorded: %v", r.Tool, err)
	}
	reason := rules.Reason{Kind: rules.EndCompleted}
	if ctx.Err() != nil {
		reason = rules.Reason{Kind: rules.EndAborted, Reason: context.Cause(ctx).Error()}
	}
	if err := c.endTurn(wctx, r.Session, turn, reason); err != nil {
		return Result{}, fault.New(codes.Internal, "LOG_FAILED", "tool %s ran, but its turn could not be closed: %v", r.Tool, err)
	}
	return result, nil
}

// inTurn puts events of the host's own into a turn.
func inTurn(turn int64, drafts []session.Draft) []session.Draft {
	for i := range drafts {
		drafts[i].Turn = turn
	}
	return drafts
}

// run hands the call to the plugin and makes a result of whatever comes back.
func (c *Caller) run(ctx context.Context, t *tool, tree *route.Tree, r Request, arguments []byte) Result {
	if r.Begun != nil {
		defer r.Begun(tree)()
	}
	p, err := route.Pin(tree, t.provider)
	if err != nil {
		return failed(tree.ID, fault.Reason(err), fault.Message(err))
	}
	leg, end, err := c.Router.Begin(tree, nil, nil, p)
	if err != nil {
		return failed(tree.ID, fault.Reason(err), fault.Message(err))
	}
	defer end()
	if d := time.Duration(t.GetTimeoutMs()) * time.Millisecond; d > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, d)
		defer cancel()
	}
	reply, err := toolsv1.NewToolsClient(p.Conn).Call(leg.Outgoing(ctx), &toolsv1.CallRequest{Name: r.Tool, Arguments: arguments})
	switch {
	case err == nil:
	case ctx.Err() != nil:
		return failed(tree.ID, "ABORTED", "tool call aborted")
	default:
		err = leg.CallError(err)
		return failed(tree.ID, fault.Reason(err), fault.Message(err))
	}
	out := Result{IsError: reply.GetIsError(), ErrorCode: reply.GetErrorCode(), Meta: reply.GetMeta()}
	for _, part := range reply.GetContent() {
		out.Texts = append(out.Texts, part.GetText())
	}
	if out.IsError {
		out.Texts = errorTexts(out.Texts)
	}
	return out
}

// failed is an error result.
func failed(call, code, text string) Result {
	return Result{Call: call, IsError: true, ErrorCode: code, Texts: errorTexts([]string{text})}
}

// errorTexts marks a result as an error for a model, which sees only text.
func errorTexts(texts []string) []string {
	if len(texts) == 0 {
		texts = []string{"tool failed without saying why"}
	}
	texts[0] = "Error: " + texts[0]
	return texts
}

func record(turn int64, r Result) rules.ToolResult {
	out := rules.ToolResult{Turn: turn, CallID: r.Call, IsError: r.IsError, Content: []rules.Content{}, Meta: r.Meta}
	for _, t := range r.Texts {
		out.Content = append(out.Content, rules.Content{Type: "text", Text: t})
	}
	if r.IsError {
		code := r.ErrorCode
		if code == rules.CodeNotStarted || code == rules.CodeOutcomeUnknown {
			code = "TOOL_FAILED" // those two are the repair's to say
		}
		out.Error = &rules.ToolError{Name: "ToolError", Code: code}
	}
	return out
}

func (c *Caller) endTurn(ctx context.Context, s *session.Session, turn int64, reason rules.Reason) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), logTimeout)
	defer cancel()
	return s.EndTurn(ctx, turn, reason)
}

func unrecorded(err error) error {
	return fault.New(codes.Unavailable, "LOG_FAILED", "tool call could not be recorded, so it did not run: %v", err)
}

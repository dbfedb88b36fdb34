// Package builtin holds the plugins that the host mounts in its own process: the session log as a capability, and the inbox as
// the last listener of a question. They use the same API as everybody's plugins.
package builtin

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	approvalv1 "github.com/cordon-host/cordon/api/approval/v1"
	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	sessionv1 "github.com/cordon-host/cordon/api/session/v1"
	"github.com/cordon-host/cordon/capability/approval"
	"github.com/cordon-host/cordon/capability/fault"
	rules "github.com/cordon-host/cordon/capability/session"
	"github.com/cordon-host/cordon/host/bus"
	"github.com/cordon-host/cordon/host/grant"
	"github.com/cordon-host/cordon/host/session"
	"github.com/cordon-host/cordon/plugin"
)

// SessionEntry is the id of the entry that provides the session capability.
const SessionEntry = "session"

// SessionDeps is what the session capability stands on.
type SessionDeps struct {
	Log    *session.Log
	Grants *grant.Store
	Bus    *bus.Bus
	// Manifest is the manifest of an active entry.
	Manifest func(entry string) (*kernelv1.Manifest, bool)
	// Owns reports whether an entry provides a capability to the deployment at large. Sessions belong to no realm, so what is provided
	// in a realm of its own owns nothing in them.
	Owns func(entry, capability string) bool
}

// Session provides the log of the calling session.
func Session(d SessionDeps) plugin.Plugin[struct{}] {
	return plugin.Plugin[struct{}]{
		Name: SessionEntry, Version: "builtin",
		Offers: []plugin.Offer{{Capability: "session", Desc: &sessionv1.Session_ServiceDesc}},
		Apply: func(ctx *plugin.Context, _ struct{}) error {
			return ctx.Provide("session", &sessionServer{deps: d}, nil)
		},
	}
}

type sessionServer struct {
	sessionv1.UnimplementedSessionServer
	deps SessionDeps
}

// open is the session of the call.
func (s *sessionServer) open(ctx context.Context) (*session.Session, plugin.Call, error) {
	call := plugin.Caller(ctx)
	if call.Session == "" {
		return nil, call, fault.New(codes.FailedPrecondition, "NO_SESSION", "the call of %s belongs to no session", call.Caller)
	}
	log, err := s.deps.Log.Get(ctx, call.Session)
	if err != nil {
		return nil, call, logFault(err)
	}
	return log, call, nil
}

func (s *sessionServer) Header(ctx context.Context, _ *sessionv1.HeaderRequest) (*sessionv1.HeaderReply, error) {
	log, _, err := s.open(ctx)
	if err != nil {
		return nil, err
	}
	h := log.Header()
	return &sessionv1.HeaderReply{
		Id: h.ID, Cwd: h.Cwd, Parent: h.Parent, CreatedMs: h.CreatedAt.UnixMilli(), OpenTurns: log.OpenTurns(),
	}, nil
}

func (s *sessionServer) Last(ctx context.Context, r *sessionv1.LastRequest) (*sessionv1.LastReply, error) {
	log, _, err := s.open(ctx)
	if err != nil {
		return nil, err
	}
	e, ok := log.Last(r.GetType())
	if !ok {
		return &sessionv1.LastReply{}, nil
	}
	return &sessionv1.LastReply{Event: &sessionv1.Event{
		Seq: e.Seq, TimeMs: e.Time.UnixMilli(), Type: e.Type, Turn: e.Turn, Data: e.Data,
	}}, nil
}

// Append commits an event of the caller's own types. A decision that allows something is more than an event: it must cite the
// answer that allows it, and the grant is minted when it is in the log.
func (s *sessionServer) Append(ctx context.Context, r *sessionv1.AppendRequest) (*sessionv1.AppendReply, error) {
	log, call, err := s.open(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.mayAppend(call.Caller, r.GetType()); err != nil {
		return nil, err
	}
	data := json.RawMessage(r.GetData())
	var g *grant.Grant
	if r.GetType() == approval.EventDecided {
		if data, g, err = s.decision(log, call, r); err != nil {
			return nil, err
		}
	}
	e, err := log.Append(ctx, session.Draft{Type: r.GetType(), Turn: call.Turn, Data: data})
	if err != nil {
		return nil, logFault(err)
	}
	reply := &sessionv1.AppendReply{Seq: e.Seq}
	if g != nil {
		reply.Grant = s.deps.Grants.Mint(*g)
	}
	return reply, nil
}

// mayAppend holds the ownership of event types: a plugin appends what its manifest declares, and a reserved type only as
// the provider of the capability it belongs to.
func (s *sessionServer) mayAppend(entry, typ string) error {
	m, ok := s.deps.Manifest(entry)
	declared := ok && slices.ContainsFunc(m.GetAppends(), func(a string) bool {
		return a == typ || strings.HasSuffix(a, "/") && strings.HasPrefix(typ, a)
	})
	if !declared {
		return fault.New(codes.PermissionDenied, "NOT_DECLARED", "%s appends %s, which its manifest does not declare; add it to Appends", entry, typ)
	}
	capability, host := rules.Owner(typ)
	if host {
		return fault.New(codes.PermissionDenied, "RESERVED_EVENT", "%s appends %s, which only the host does", entry, typ)
	}
	if capability != "" && !s.deps.Owns(entry, capability) {
		return fault.New(codes.PermissionDenied, "RESERVED_EVENT", "%s appends %s, which belongs to the provider of %s", entry, typ, capability)
	}
	return nil
}

// decision checks an approval/decided event against the question in the log and the host's own record of the answer. It returns
// the event as it goes into the log, with the host's word on whose decision it was, and the grant it is worth.
func (s *sessionServer) decision(log *session.Session, call plugin.Call, r *sessionv1.AppendRequest) (json.RawMessage, *grant.Grant, error) {
	var d approval.Decided
	if err := json.Unmarshal(r.GetData(), &d); err != nil {
		return nil, nil, fault.New(codes.InvalidArgument, "BAD_EVENT", "approval/decided: %v", err)
	}
	var stamped *bus.Stamped
	if id := r.GetAnswer(); id != "" {
		var ok bool
		if stamped, ok = s.deps.Bus.Take(id, call.ID); !ok || stamped.Event != approval.Request.Name {
			return nil, nil, fault.New(codes.PermissionDenied, "ANSWER_UNKNOWN", "approval/decided cites an answer that this call did not get, or that was cited before")
		}
		d.DecidedBy = &approval.DecidedBy{
			Entry: stamped.Answer.GetEntry(), Channel: stamped.Answer.GetChannel(), Level: approval.LevelName(stamped.Answer.GetLevel()),
		}
	} else if d.DecidedBy != nil && d.DecidedBy.Policy == "" {
		return nil, nil, fault.New(codes.PermissionDenied, "ANSWER_UNKNOWN", "approval/decided names who decided without citing an answer")
	} else if d.DecidedBy != nil {
		d.DecidedBy = &approval.DecidedBy{Policy: d.DecidedBy.Policy}
	}
	var g *grant.Grant
	if d.Outcome == approval.AllowedOnce {
		var err error
		if g, err = s.allow(log, call, d.ID, stamped); err != nil {
			return nil, nil, err
		}
	}
	data, err := json.Marshal(d)
	if err != nil {
		return nil, nil, fault.New(codes.Internal, "BAD_EVENT", "approval/decided: %v", err)
	}
	return data, g, nil
}

// allow holds that an allowance is one: a listener or a person said so, to exactly the question that is in the log, with
// enough authority.
func (s *sessionServer) allow(log *session.Session, call plugin.Call, id string, stamped *bus.Stamped) (*grant.Grant, error) {
	refuse := func(why string) error {
		return fault.New(codes.PermissionDenied, "NOT_ALLOWED", "approval/decided says allowed-once, but %s", why)
	}
	if stamped == nil {
		return nil, refuse("cites no answer")
	}
	var verdict approvalv1.Verdict
	var question approvalv1.Question
	if err := errors.Join(proto.Unmarshal(stamped.Reply, &verdict), proto.Unmarshal(stamped.Request, &question)); err != nil {
		return nil, refuse("the answer cannot be read: " + err.Error())
	}
	asked, ok := lastAsked(log, call.Turn, id)
	w := question.GetWidening()
	switch {
	case verdict.GetOutcome() != string(approval.AllowedOnce):
		return nil, refuse("the answer was " + verdict.GetOutcome())
	case question.GetId() != id || !ok:
		return nil, refuse("the answer is to another question")
	case asked.Subject != nil && (question.GetSubject().GetText() != asked.Subject.Text || question.GetSubject().GetCwd() != asked.Subject.Cwd):
		return nil, refuse("what was shown is not what the log says was asked")
	case (w == nil) != (asked.Widening == nil) || w != nil && (w.GetTo() != asked.Widening.To || w.GetCapability() != asked.Widening.Capability):
		return nil, refuse("what was asked is not what the log says was asked")
	case stamped.Answer.GetLevel() < approval.Required(w):
		return nil, refuse("the answer has level " + approval.LevelName(stamped.Answer.GetLevel()) + " and needs " + approval.LevelName(approval.Required(w)))
	case w == nil:
		return nil, nil
	}
	return &grant.Grant{Call: call.ID, Capability: w.GetCapability(), Scope: grant.ScopeMode, Value: w.GetTo(), Approval: id,
		Subject: question.GetSubject().GetText(), Cwd: question.GetSubject().GetCwd()}, nil
}

// lastAsked finds the question with an id in an open turn. Questions are near the end of a log.
func lastAsked(log *session.Session, turn int64, id string) (approval.Asked, bool) {
	for _, e := range slices.Backward(log.Events(0)) {
		var a approval.Asked
		if e.Type == approval.EventAsked && e.Turn == turn && json.Unmarshal(e.Data, &a) == nil && a.ID == id {
			return a, true
		}
		if e.Type == rules.TypeTurnStart && e.Turn == turn {
			break
		}
	}
	return approval.Asked{}, false
}

// logFault keeps the kinds of log errors apart for callers in other processes.
func logFault(err error) error {
	var notFound *session.NotFoundError
	switch {
	case errors.As(err, &notFound):
		return fault.New(codes.NotFound, "SESSION_NOT_FOUND", "%v", err)
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	}
	var (
		store    *session.StoreError
		corrupt  *session.CorruptError
		conflict *session.ConflictError
	)
	if errors.As(err, &store) || errors.As(err, &corrupt) || errors.As(err, &conflict) ||
		errors.Is(err, session.ErrClosed) || errors.Is(err, session.ErrUnsettled) {
		return fault.New(codes.Unavailable, "LOG_FAILED", "%v", err)
	}
	return fault.New(codes.FailedPrecondition, "APPEND_REFUSED", "%v", err)
}

// Interface guard.
var _ sessionv1.SessionServer = (*sessionServer)(nil)

package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	approvalv1 "github.com/cordon-host/cordon/api/approval/v1"
	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	sessionv1 "github.com/cordon-host/cordon/api/session/v1"
	"github.com/cordon-host/cordon/capability/approval"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/permission"
	"github.com/cordon-host/cordon/capability/sandbox"
	"github.com/cordon-host/cordon/plugin"
)

// appendTimeout bounds one append of the audit pair. It runs detached from the caller, who may be gone: a question that is
// in the log needs its decision there whatever happened meanwhile.
const appendTimeout = 10 * time.Second

// notInTurn is the refusal of a question outside a turn; its text is an interface fact.
const notInTurn = "approval.request() outside an open turn: the approval/asked + approval/decided audit pair must be turn-enclosed (a bare event between turns is crash-tail garbage on reload). Ask from inside the turn that needs the decision."

// What a model is told about the approval policy: the name of the contribution, its place and the texts are the reference
// system's.
const (
	section      = "approval:policy"
	sectionOrder = 115
	askText      = "Approval policy: ask. Operations that require approval may ask through the configured answerers; without an available answerer, the request fails closed."
	neverText    = "Approval prompts are disabled in this session: actions that require approval are rejected automatically — do not request sandbox escalation (do not set `sandbox_permissions`)."
)

// Ends of a wait for an answer other than the answer.
var (
	errNever    = errors.New("approval policy switched to never")
	errStopping = errors.New("approval service is stopping")
)

// Config is the row's config.
type Config struct {
	Policy string `json:"policy,omitempty" jsonschema:"enum=ask,enum=never,default=ask" jsonschema_description:"The policy of a session that has not switched."`
}

// Facts are what the plugin publishes about the approval capability.
type Facts struct {
	DefaultPolicy approval.Policy `json:"defaultPolicy"`
}

// Plugin is the plugin.
var Plugin = plugin.Plugin[Config]{
	Name: "user-approval", Version: "0.1.0",
	Needs:    []plugin.Need{{Capability: "session", Desc: &sessionv1.Session_ServiceDesc}},
	Offers:   []plugin.Offer{{Capability: "approval", Desc: &approvalv1.Approval_ServiceDesc}},
	Emits:    []plugin.Emit{plugin.Emits(approval.Request)},
	Appends:  []string{approval.EventAsked, approval.EventDecided, approval.EventPolicy},
	Contexts: []plugin.Contribution{{Name: section, Order: sectionOrder}},
	Default:  func() Config { return Config{Policy: string(approval.Ask)} },
	Apply:    apply,
}

func apply(ctx *plugin.Context, cfg Config) error {
	policy, err := approval.ParsePolicy(cfg.Policy)
	if err != nil {
		return fmt.Errorf("user-approval: policy: %w", err)
	}
	conn, _ := ctx.Conn("session")
	s := &approvalServer{
		plugin: ctx, session: sessionv1.NewSessionClient(conn), policy: policy, open: map[string]*question{},
	}
	if err := ctx.Effect("open questions", s.stop); err != nil {
		return err
	}
	if err := ctx.Contribute(section, s.text); err != nil {
		return err
	}
	return ctx.Provide("approval", s, Facts{DefaultPolicy: policy})
}

type approvalServer struct {
	approvalv1.UnimplementedApprovalServer
	plugin  *plugin.Context
	session sessionv1.SessionClient
	policy  approval.Policy

	// switching keeps what SetPolicy checks true until it is appended.
	switching sync.Mutex

	mu       sync.Mutex
	stopping bool
	open     map[string]*question // by id
	settled  sync.WaitGroup       // counts open
}

// question is one that waits for an answer.
type question struct {
	session string
	cancel  context.CancelCauseFunc
}

// decision is how a question ended.
type decision struct {
	approval.Decided
	answer *kernelv1.Answer // whose; nil when nobody's answer decided
}

// Request asks, in five steps: it checks the question and its turn, before anything is appended; logs the question; decides;
// logs the decision; and only then tells the caller. What is not in the log was not decided.
func (s *approvalServer) Request(ctx context.Context, r *approvalv1.ApprovalRequest) (*approvalv1.ApprovalReply, error) {
	if err := check(r); err != nil {
		return nil, err
	}
	if err := s.inTurn(ctx); err != nil {
		return nil, err
	}
	q := &approvalv1.Question{
		Id: "q-" + rand.Text(), Tool: r.GetTool(), Reason: r.GetReason(), Widening: r.GetWidening(), Subject: r.GetSubject(),
	}
	// The question counts as open before the policy is read, so that a switch to never either is read or ends it.
	wait, done, err := s.begin(ctx, q.GetId())
	if err != nil {
		return nil, err
	}
	defer done()
	policy, _, err := s.effective(context.WithoutCancel(wait))
	if err != nil {
		return nil, err
	}
	if _, err := s.append(ctx, approval.EventAsked, asked(ctx, q), ""); err != nil {
		return nil, err
	}

	d := s.decide(ctx, wait, policy, q)

	grant, d, err := s.settle(ctx, wait, d)
	if err != nil {
		return nil, err
	}
	return &approvalv1.ApprovalReply{Outcome: string(d.Outcome), Grant: grant, DecidedBy: decidedBy(d)}, nil
}

// check refuses questions that could not be asked of a person or be granted.
func check(r *approvalv1.ApprovalRequest) error {
	bad := func(format string, args ...any) error {
		return fault.New(codes.InvalidArgument, "BAD_QUESTION", "approval request: "+format, args...)
	}
	if r.GetTool() == "" {
		return bad("tool must be non-empty")
	}
	w := r.GetWidening()
	if w == nil {
		return nil
	}
	from, to := sandbox.Mode(w.GetFrom()), sandbox.Mode(w.GetTo())
	switch {
	case !from.Valid():
		return bad("widening.from %q is not a sandbox mode", w.GetFrom())
	case !to.Valid():
		return bad("widening.to %q is not a sandbox mode", w.GetTo())
	case !sandbox.Wider(to, from):
		return bad(`widening to "%s" is not strictly wider than "%s"`, to, from)
	case w.GetCapability() == "":
		return bad("widening.capability must name the capability whose provider redeems the grant")
	}
	return nil
}

// inTurn holds that the stamped turn of the call is open in its session.
func (s *approvalServer) inTurn(ctx context.Context) error {
	call := plugin.Caller(ctx)
	if call.Session == "" {
		return fault.New(codes.FailedPrecondition, "NO_SESSION", "approval request: the call belongs to no session, so there is no log to audit it in")
	}
	header, err := s.session.Header(ctx, &sessionv1.HeaderRequest{})
	if err != nil {
		return err
	}
	if call.Turn == 0 || !slices.Contains(header.GetOpenTurns(), call.Turn) {
		return fault.New(codes.FailedPrecondition, "NO_OPEN_TURN", "%s", notInTurn)
	}
	return nil
}

// begin counts a question as open until done. The context ends with the caller's, with a switch to never and with the plugin.
func (s *approvalServer) begin(ctx context.Context, id string) (wait context.Context, done func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopping {
		return nil, nil, fault.New(codes.Unavailable, "STOPPING", "%v; ask again", errStopping)
	}
	wait, cancel := context.WithCancelCause(ctx)
	s.open[id] = &question{session: plugin.Caller(ctx).Session, cancel: cancel}
	s.settled.Add(1)
	return wait, func() {
		cancel(nil)
		s.mu.Lock()
		delete(s.open, id)
		s.mu.Unlock()
		s.settled.Done()
	}, nil
}

// decide is the decision itself. A caller that is gone gets none; policy never is decided here, before anybody is asked, so
// that no listener can answer first; then whoever listens is asked, and what does not come back as a well-formed answer of
// somebody who may give it is no answer.
func (s *approvalServer) decide(ctx, wait context.Context, policy approval.Policy, q *approvalv1.Question) decision {
	is := func(o approval.Outcome) decision {
		return decision{Decided: approval.Decided{ID: q.GetId(), Outcome: o}}
	}
	never := is(approval.Rejected)
	never.DecidedBy = &approval.DecidedBy{Policy: string(approval.Never)}

	if ctx.Err() != nil {
		return is(approval.Cancelled)
	}
	if policy == approval.Never {
		return never
	}
	verdict, answer, err := plugin.Waterfall(wait, s.plugin, approval.Request, q, &approvalv1.Verdict{Outcome: string(approval.Unavailable)})
	switch {
	case ctx.Err() != nil, errors.Is(context.Cause(wait), errStopping):
		return is(approval.Cancelled) // whatever came back came too late
	case errors.Is(context.Cause(wait), errNever):
		return never
	case err != nil:
		s.plugin.Logger().Warn("nobody could be asked", "question", q.GetId(), "error", err)
		return is(approval.Unavailable)
	}
	d := is(approval.Outcome(verdict.GetOutcome()))
	d.answer, d.Note = answer, verdict.GetNote()
	if !d.Outcome.Valid() {
		s.plugin.Logger().Warn("answer outside the vocabulary", "question", q.GetId(), "entry", answer.GetEntry(), "outcome", verdict.GetOutcome())
		d.Outcome = approval.Unavailable
	}
	need := approval.Required(q.GetWidening())
	if d.Outcome == approval.AllowedOnce && (answer.GetId() == "" || answer.GetLevel() < need) {
		s.plugin.Logger().Warn("answer is not worth enough to allow", "question", q.GetId(), "entry", answer.GetEntry(),
			"level", approval.LevelName(answer.GetLevel()), "needed", approval.LevelName(need))
		d.Outcome = approval.Unavailable
	}
	return d
}

// settle logs a decision. An allowance must still be one when it gets into the log: no switch of this process can come in
// between, and one of another generation of this row is read again.
func (s *approvalServer) settle(ctx, wait context.Context, d decision) (string, decision, error) {
	if d.Outcome != approval.AllowedOnce {
		return s.record(ctx, d)
	}
	s.switching.Lock()
	defer s.switching.Unlock()
	policy, _, err := s.effective(context.WithoutCancel(ctx))
	no := approval.Decided{ID: d.ID, Outcome: approval.Unavailable}
	switch {
	case ctx.Err() != nil, errors.Is(context.Cause(wait), errStopping):
		no.Outcome = approval.Cancelled
	case err != nil:
		s.plugin.Logger().Warn("policy could not be read again", "question", d.ID, "error", err)
	case policy == approval.Never:
		no.Outcome, no.DecidedBy = approval.Rejected, &approval.DecidedBy{Policy: string(approval.Never)}
	default:
		return s.record(ctx, d)
	}
	return s.record(ctx, decision{Decided: no})
}

// record logs a decision and returns the grant it is worth. When the host does not take it with the answer it cites, the
// decision is logged without: an allowance is then one more no. That fails, too, when the log itself does, and then there is no
// decision.
func (s *approvalServer) record(ctx context.Context, d decision) (string, decision, error) {
	reply, err := s.append(ctx, approval.EventDecided, d.Decided, d.answer.GetId())
	if err == nil {
		return reply.GetGrant(), d, nil
	}
	if d.answer.GetId() == "" {
		return "", d, err
	}
	s.plugin.Logger().Warn("decision not recorded with its answer", "question", d.ID, "outcome", d.Outcome, "error", err)
	d.answer = nil
	if d.Outcome == approval.AllowedOnce {
		d.Outcome = approval.Unavailable
	}
	if _, again := s.append(ctx, approval.EventDecided, d.Decided, ""); again != nil {
		return "", d, err
	}
	return "", d, nil
}

// append commits one event within appendTimeout, whether or not the caller is still there.
func (s *approvalServer) append(ctx context.Context, typ string, data any, answer string) (*sessionv1.AppendReply, error) {
	raw, err := json.Marshal(data)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), appendTimeout)
	defer cancel()
	return s.session.Append(ctx, &sessionv1.AppendRequest{Type: typ, Data: raw, Answer: answer})
}

func asked(ctx context.Context, q *approvalv1.Question) approval.Asked {
	a := approval.Asked{ID: q.GetId(), ToolName: q.GetTool(), CallID: plugin.Caller(ctx).ID, Reason: q.GetReason()}
	if w := q.GetWidening(); w != nil {
		a.Widening = &approval.Widening{From: w.GetFrom(), To: w.GetTo(), Capability: w.GetCapability()}
	}
	if t := q.GetSubject(); t != nil {
		a.Subject = &approval.Subject{Kind: t.GetKind(), Text: t.GetText(), Cwd: t.GetCwd()}
	}
	return a
}

// decidedBy says whose decision it was: policy, or channel (else entry) and level of the answer; empty for nobody's.
func decidedBy(d decision) string {
	switch {
	case d.DecidedBy != nil:
		return "policy"
	case d.answer == nil:
		return ""
	case d.answer.GetChannel() != "":
		return d.answer.GetChannel() + " " + approval.LevelName(d.answer.GetLevel())
	}
	return d.answer.GetEntry() + " " + approval.LevelName(d.answer.GetLevel())
}

// effective is the policy of the call's session and where it comes from. A policy that nobody knows is a fault with the
// reason UNKNOWN_POLICY.
func (s *approvalServer) effective(ctx context.Context) (approval.Policy, string, error) {
	ctx, cancel := context.WithTimeout(ctx, appendTimeout)
	defer cancel()
	last, err := s.session.Last(ctx, &sessionv1.LastRequest{Type: approval.EventPolicy})
	if err != nil {
		return "", "", err
	}
	e := last.GetEvent()
	if e == nil {
		return s.policy, "default", nil
	}
	var change approval.PolicyChange
	err = json.Unmarshal(e.GetData(), &change)
	if err == nil {
		_, err = approval.ParsePolicy(string(change.Policy))
	}
	if err != nil {
		return "", "", fault.New(codes.FailedPrecondition, "UNKNOWN_POLICY", "event %d of session %s: %v; set the session's approval policy again", e.GetSeq(), plugin.Caller(ctx).Session, err)
	}
	return change.Policy, "session", nil
}

// text is what a model is told about the policy of its session; without a session there is nobody to tell.
func (s *approvalServer) text(ctx context.Context) (string, error) {
	if plugin.Caller(ctx).Session == "" {
		return "", nil
	}
	policy, _, err := s.effective(ctx)
	switch {
	case err != nil:
		return "", err
	case policy == approval.Never:
		return neverText, nil
	}
	return askText, nil
}

func (s *approvalServer) GetPolicy(ctx context.Context, _ *approvalv1.GetPolicyRequest) (*approvalv1.GetPolicyReply, error) {
	if plugin.Caller(ctx).Session == "" {
		return &approvalv1.GetPolicyReply{Policy: string(s.policy), Source: "default"}, nil
	}
	policy, source, err := s.effective(ctx)
	if err != nil {
		return nil, err
	}
	return &approvalv1.GetPolicyReply{Policy: string(policy), Source: source}, nil
}

func (s *approvalServer) SetPolicy(ctx context.Context, r *approvalv1.SetPolicyRequest) (*approvalv1.SetPolicyReply, error) {
	policy, err := approval.ParsePolicy(r.GetPolicy())
	if err != nil {
		return nil, fault.New(codes.InvalidArgument, "BAD_POLICY", "%v", err)
	}
	call := plugin.Caller(ctx)
	if call.Session == "" {
		return nil, fault.New(codes.FailedPrecondition, "NO_SESSION", "approval policy belongs to a session, and the call has none")
	}
	s.switching.Lock()
	defer s.switching.Unlock()
	from, source, err := s.effective(ctx)
	// Presets pin sessions that have no policy of their own, to the default if need be. What they pin comes from the deployment's
	// file, whose owner is not there to be asked, so no authority is looked for: that was decided in their own path. A session
	// that has a policy can be widened by presets as by anybody, with the authority of whoever asked for the call tree.
	pin := source == "default" && call.Purpose == kernelv1.PurposePin && slices.Contains(call.Provides, permission.Capability)
	switch {
	case fault.Reason(err) == "UNKNOWN_POLICY":
		from = approval.Never
	case err != nil:
		return nil, err
	case from == policy && !pin:
		return &approvalv1.SetPolicyReply{Policy: string(policy)}, nil
	}
	if need := permission.PolicyLevel(from, policy); call.Authority < need && !pin {
		return nil, fault.New(codes.PermissionDenied, "AUTHORITY_REQUIRED",
			`approval policy "%s" lets questions be asked that "%s" rejects: switching needs the authority level "%s", the call has "%s"`,
			policy, from, approval.LevelName(need), approval.LevelName(call.Authority))
	}
	if _, err := s.append(ctx, approval.EventPolicy, approval.PolicyChange{Policy: policy}, ""); err != nil {
		return nil, err
	}
	if policy == approval.Never {
		s.end(call.Session, errNever)
	}
	return &approvalv1.SetPolicyReply{Policy: string(policy), Changed: true}, nil
}

// end withdraws the open questions of a session; of all sessions when it is empty.
func (s *approvalServer) end(session string, cause error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, q := range s.open {
		if session == "" || q.session == session {
			q.cancel(cause)
		}
	}
}

// stop withdraws every open question and waits until each has its decision in the log.
func (s *approvalServer) stop(ctx context.Context) error {
	s.mu.Lock()
	s.stopping = true
	s.mu.Unlock()
	s.end("", errStopping)
	done := make(chan struct{})
	go func() { s.settled.Wait(); close(done) }() // ends with the last question, whose appends are bounded
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Interface guard.
var _ approvalv1.ApprovalServer = (*approvalServer)(nil)

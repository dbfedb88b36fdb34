package host

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	approvalv1 "github.com/cordon-host/cordon/api/approval/v1"
	controlv1 "github.com/cordon-host/cordon/api/control/v1"
	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	permissionv1 "github.com/cordon-host/cordon/api/permission/v1"
	policyv1 "github.com/cordon-host/cordon/api/policy/v1"
	sandboxv1 "github.com/cordon-host/cordon/api/sandbox/v1"
	"github.com/cordon-host/cordon/capability/approval"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/sandbox"
	"github.com/cordon-host/cordon/host/inbox"
	"github.com/cordon-host/cordon/host/prompt"
	"github.com/cordon-host/cordon/host/route"
	"github.com/cordon-host/cordon/host/session"
	"github.com/cordon-host/cordon/host/tools"
)

// terminalChannel is how answers from the command line are named in the log.
const terminalChannel = "terminal"

// keyLogin is the metadata key of a login token; see api/control/v1.
const keyLogin = "cordon-login"

// logins keeps who has shown that they are a person: the process that started this host, and whoever typed a code that only a
// person can see. A terminal by itself proves nothing: an agent can have one.
type logins struct {
	file string // where the current code is written, for its owner alone

	mu     sync.Mutex
	code   string
	tokens []string
	onCode []func(string)
}

// newLogins makes the first code.
func newLogins(stateDir string) (*logins, error) {
	l := &logins{file: filepath.Join(stateDir, "login-code")}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l, l.renew()
}

// renew replaces the code. Callers hold mu.
func (l *logins) renew() error {
	text := strings.ToLower(rand.Text())
	l.code = text[:4] + "-" + text[4:8] + "-" + text[8:12]
	if err := os.WriteFile(l.file, []byte(l.code+"\n"), 0o600); err != nil {
		return fmt.Errorf("login code: %w", err)
	}
	for _, fn := range l.onCode {
		fn(l.code)
	}
	return nil
}

// token makes a credential that is good until the host ends.
func (l *logins) token() string {
	t := rand.Text()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tokens = append(l.tokens, t)
	return t
}

// redeem exchanges the current code, once, for a token.
func (l *logins) redeem(code string) (string, error) {
	l.mu.Lock()
	good := subtle.ConstantTimeCompare([]byte(code), []byte(l.code)) == 1
	var err error
	// A wrong guess leaves the code alone: it has 60 random bits, and a program that guesses must not lock its person out.
	if good {
		err = l.renew()
	}
	l.mu.Unlock()
	switch {
	case err != nil:
		return "", fault.New(codes.Internal, "LOGIN_FAILED", "%v", err)
	case !good:
		return "", fault.New(codes.Unauthenticated, "BAD_CODE", "login code is wrong or was used; the host shows the current one")
	}
	return l.token(), nil
}

// level is what the caller of ctx has shown.
func (l *logins) level(ctx context.Context) kernelv1.Level {
	md, _ := metadata.FromIncomingContext(ctx)
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, shown := range md.Get(keyLogin) {
		for _, t := range l.tokens {
			if subtle.ConstantTimeCompare([]byte(shown), []byte(t)) == 1 {
				return kernelv1.Level_HUMAN
			}
		}
	}
	return kernelv1.Level_NONE
}

// confirmed raises a person who typed the confirmation to the owner of the deployment.
func confirmed(level kernelv1.Level, confirm string) kernelv1.Level {
	if level == kernelv1.Level_HUMAN && confirm == string(sandbox.DangerFullAccess) {
		return kernelv1.Level_OWNER
	}
	return level
}

// Code is the current one-use login code.
func (h *Host) Code() string {
	h.logins.mu.Lock()
	defer h.logins.mu.Unlock()
	return h.logins.code
}

// OnCode calls fn with every new login code. Fn must not call back into the host.
func (h *Host) OnCode(fn func(code string)) {
	h.logins.mu.Lock()
	defer h.logins.mu.Unlock()
	h.logins.onCode = append(h.logins.onCode, fn)
}

// controlServer is the host's side of the command line.
type controlServer struct {
	controlv1.UnimplementedControlServer
	h *Host
}

func (s controlServer) Login(_ context.Context, r *controlv1.LoginRequest) (*controlv1.LoginReply, error) {
	token, err := s.h.logins.redeem(r.GetCode())
	if err != nil {
		return nil, err
	}
	return &controlv1.LoginReply{Token: token}, nil
}

// person refuses callers that have not shown to be one.
func (s controlServer) person(ctx context.Context, what string) (kernelv1.Level, error) {
	level := s.h.logins.level(ctx)
	if level < kernelv1.Level_HUMAN {
		return level, fault.New(codes.PermissionDenied, "LOGIN_REQUIRED", "%s needs a person: log in with the one-use code that the host shows", what)
	}
	return level, nil
}

func (s controlServer) Status(context.Context, *controlv1.StatusRequest) (*controlv1.StatusReply, error) {
	out := &controlv1.StatusReply{
		Deployment: s.h.layout.ID, Compose: s.h.composed().plan.Path, Pid: int64(os.Getpid()), Version: s.h.options.Version,
		ReadyMs: s.h.ready.Milliseconds(), Locked: s.h.options.Locked,
	}
	for _, e := range s.h.mounted() {
		out.Entries = append(out.Entries, e.status())
	}
	s.h.mu.RLock()
	out.Rejected = s.h.rejected
	s.h.mu.RUnlock()
	return out, nil
}

func (s controlServer) ListTools(context.Context, *controlv1.ListToolsRequest) (*controlv1.ListToolsReply, error) {
	out := &controlv1.ListToolsReply{}
	for _, t := range s.h.tools.List() {
		out.Tools = append(out.Tools, &controlv1.Tool{Name: t.GetName(), Description: t.GetDescription(), InputSchema: t.GetInputSchema(), Entry: t.Entry})
	}
	return out, nil
}

// Call runs one tool call in a session, for whoever asks. What the call may do is decided on its way, by the layers; the caller's
// own authority counts only for the answer it brings along.
func (s controlServer) Call(ctx context.Context, r *controlv1.CallRequest) (*controlv1.CallReply, error) {
	verdict, watch, err := s.answer(ctx, r)
	if err != nil {
		return nil, err
	}
	log, err := s.session(ctx, r.GetSession(), r.GetCwd())
	if err != nil {
		return nil, err
	}
	id := log.Header().ID
	result, err := s.h.caller.Call(ctx, tools.Request{
		Tool: r.GetTool(), Arguments: r.GetArguments(), Session: log, Agent: "cli/" + id, Tag: r.GetTag(),
		Begun: func(tree *route.Tree) func() {
			if verdict == nil || watch {
				return func() {}
			}
			return s.h.inbox.Bind(tree.ID, *verdict)
		},
	})
	if err != nil {
		return nil, err
	}
	return &controlv1.CallReply{
		IsError: result.IsError, ErrorCode: result.ErrorCode, Texts: result.Texts, Meta: result.Meta, Session: id, Call: result.Call,
	}, nil
}

// answer reads the answer that a call brings along.
func (s controlServer) answer(ctx context.Context, r *controlv1.CallRequest) (v *inbox.Verdict, watch bool, err error) {
	outcome := approval.AllowedOnce
	switch r.GetAnswer() {
	case "":
		return nil, false, nil
	case "ask":
		watch = true
	case "allow-once":
	case "reject":
		outcome = approval.Rejected
	default:
		return nil, false, fault.New(codes.InvalidArgument, "BAD_ANSWER", "answer must be allow-once, reject or ask, got %q", r.GetAnswer())
	}
	level, err := s.person(ctx, "answering")
	if err != nil {
		return nil, false, err
	}
	return &inbox.Verdict{Outcome: outcome, Channel: terminalChannel, Level: confirmed(level, r.GetConfirm())}, watch, nil
}

// session is the one with an id, or a new one.
func (s controlServer) session(ctx context.Context, id, cwd string) (*session.Session, error) {
	if id != "" {
		log, err := s.h.sessions.Get(ctx, id)
		var notFound *session.NotFoundError
		if errors.As(err, &notFound) {
			return nil, fault.New(codes.NotFound, "SESSION_NOT_FOUND", "%v; see `cordon sessions`", err)
		}
		return log, err
	}
	if cwd == "" {
		cwd = s.h.composed().plan.Dir
	}
	log, err := s.h.sessions.Create(ctx, session.Spec{Cwd: cwd})
	if err != nil {
		return nil, fault.New(codes.InvalidArgument, "BAD_SESSION", "%v", err)
	}
	s.h.pins.begin(log.ID())
	// What the session does not say is fixed now. While the presets are away it stays open, and they fill it in when they are back.
	if err := s.h.pinPermissions(ctx, log.ID()); err != nil && status.Code(err) != codes.Unavailable {
		return nil, err
	}
	return log, nil
}

func (s controlServer) ListSessions(ctx context.Context, _ *controlv1.ListSessionsRequest) (*controlv1.ListSessionsReply, error) {
	all, err := s.h.sessions.List(ctx)
	if err != nil {
		return nil, err
	}
	live := map[string]bool{}
	for _, l := range s.h.sessions.Live() {
		live[l.Header().ID] = true
	}
	out := &controlv1.ListSessionsReply{}
	for _, x := range all {
		out.Sessions = append(out.Sessions, &controlv1.SessionInfo{
			Id: x.Header.ID, Cwd: x.Header.Cwd, CreatedMs: x.Header.CreatedAt.UnixMilli(), Events: x.Events, Live: live[x.Header.ID],
		})
	}
	return out, nil
}

func (s controlServer) ReadLog(r *controlv1.ReadLogRequest, stream grpc.ServerStreamingServer[controlv1.LogEvent]) error {
	ctx := stream.Context()
	if r.GetSession() == "" {
		return fault.New(codes.InvalidArgument, "BAD_SESSION", "session is missing; see `cordon sessions`")
	}
	log, err := s.session(ctx, r.GetSession(), "")
	if err != nil {
		return err
	}
	send := func(e session.Event) error {
		return stream.Send(&controlv1.LogEvent{
			Seq: e.Seq, TimeMs: e.Time.UnixMilli(), Type: e.Type, Turn: e.Turn, Data: e.Data, Hash: e.Hash.String(),
		})
	}
	if !r.GetFollow() {
		for _, e := range log.Events(r.GetFromSeq()) {
			if err := send(e); err != nil {
				return err
			}
		}
		return nil
	}
	ctx, end := s.watching(ctx)
	defer end()
	for e := range log.Subscribe(ctx, r.GetFromSeq()) {
		if err := send(e); err != nil {
			return err
		}
	}
	return nil
}

// Knob shows or switches one of a session's two knobs. The provider of the capability decides whether the caller may.
func (s controlServer) Knob(ctx context.Context, r *controlv1.KnobRequest) (*controlv1.KnobReply, error) {
	log, err := s.h.sessions.Get(ctx, r.GetSession())
	if err != nil {
		return nil, fault.New(codes.NotFound, "SESSION_NOT_FOUND", "%v; see `cordon sessions`", err)
	}
	tree := route.NewTree(route.Call{
		Session: log.Header().ID, Authority: confirmed(s.h.logins.level(ctx), r.GetConfirm()),
	})
	defer s.h.endTree(tree)
	switch r.GetKnob() {
	case "mode":
		policy := policyv1.NewPolicyClient(s.h.router.Conn(tree, "policy"))
		if r.GetValue() == "" {
			p, err := policy.Resolve(ctx, &policyv1.ResolveRequest{})
			return &controlv1.KnobReply{Value: p.GetMode(), Source: p.GetSource()}, err
		}
		p, err := policy.SetMode(ctx, &policyv1.SetModeRequest{Mode: r.GetValue()})
		return &controlv1.KnobReply{Value: p.GetMode(), Source: "session", Changed: p.GetChanged()}, err
	case "preset":
		presets := permissionv1.NewPermissionClient(s.h.router.Conn(tree, "permission"))
		if r.GetValue() == "" {
			p, err := presets.Current(ctx, &permissionv1.CurrentRequest{})
			return &controlv1.KnobReply{Value: p.GetPreset(), Source: "session"}, err
		}
		p, err := presets.Set(ctx, &permissionv1.SetRequest{Preset: r.GetValue()})
		return &controlv1.KnobReply{Value: p.GetPreset(), Source: "session", Changed: p.GetChanged()}, err
	case "approval":
		asks := approvalv1.NewApprovalClient(s.h.router.Conn(tree, "approval"))
		if r.GetValue() == "" {
			p, err := asks.GetPolicy(ctx, &approvalv1.GetPolicyRequest{})
			return &controlv1.KnobReply{Value: p.GetPolicy(), Source: p.GetSource()}, err
		}
		p, err := asks.SetPolicy(ctx, &approvalv1.SetPolicyRequest{Policy: r.GetValue()})
		return &controlv1.KnobReply{Value: p.GetPolicy(), Source: "session", Changed: p.GetChanged()}, err
	}
	return nil, fault.New(codes.InvalidArgument, "BAD_KNOB", "knob must be mode, approval or preset, got %q", r.GetKnob())
}

// Presets lists what a session can be switched to.
func (s controlServer) Presets(ctx context.Context, _ *controlv1.PresetsRequest) (*controlv1.PresetsReply, error) {
	tree := route.NewTree(route.Call{})
	defer s.h.endTree(tree)
	all, err := permissionv1.NewPermissionClient(s.h.router.Conn(tree, "permission")).List(ctx, &permissionv1.ListRequest{})
	if err != nil {
		return nil, err
	}
	out := &controlv1.PresetsReply{DefaultPreset: all.GetDefaultPreset()}
	for _, p := range all.GetPresets() {
		out.Presets = append(out.Presets, &controlv1.Preset{
			Name: p.GetName(), Sandbox: p.GetSandbox(), Approval: p.GetApproval(), Description: p.GetDescription(),
		})
	}
	return out, nil
}

// Prompt is what a model would be told; without a session, what does not depend on one.
func (s controlServer) Prompt(ctx context.Context, r *controlv1.PromptRequest) (*controlv1.PromptReply, error) {
	if r.GetSession() != "" {
		if _, err := s.session(ctx, r.GetSession(), ""); err != nil {
			return nil, err
		}
	}
	sections := s.h.prompt.Sections(ctx, r.GetSession())
	out := &controlv1.PromptReply{Text: prompt.Join(sections)}
	for _, x := range sections {
		out.Sections = append(out.Sections, &controlv1.PromptSection{Name: x.Name, Order: x.Order, Entry: x.Entry, Text: x.Text})
	}
	return out, nil
}

// Reload looks at an entry on disk now, as a file event would make the host do.
func (s controlServer) Reload(ctx context.Context, r *controlv1.ReloadRequest) (*controlv1.ReloadReply, error) {
	return s.h.reloadEntry(ctx, r.GetEntry())
}

// Confine is for `cordon run`: the person's own command, confined as the deployment's sandbox does it, with the directory it starts in
// as its workspace.
func (s controlServer) Confine(ctx context.Context, r *controlv1.ConfineRequest) (*sandboxv1.ConfineReply, error) {
	tree := route.NewTree(route.Call{})
	defer s.h.endTree(tree)
	mode := r.GetMode()
	if mode == "" {
		p, err := policyv1.NewPolicyClient(s.h.router.Conn(tree, "policy")).Resolve(ctx, &policyv1.ResolveRequest{})
		if err != nil {
			return nil, err
		}
		mode = p.GetMode()
	}
	if m, err := sandbox.ParseMode(mode); err != nil || !m.Confined() {
		return nil, fault.New(codes.InvalidArgument, "BAD_MODE", "mode must be read-only or workspace-write, got %q; an unconfined command needs no sandbox", mode)
	}
	cwd := sandbox.CanonicalPath(r.GetCwd())
	if mode != string(sandbox.ReadOnly) {
		s.h.handedOut(cwd)
	}
	return sandboxv1.NewSandboxClient(s.h.router.Conn(tree, "sandbox")).Confine(ctx, &sandboxv1.ConfineRequest{
		Argv: r.GetArgv(), Cwd: cwd, Mode: mode, WorkspaceRoot: cwd,
	})
}

func (s controlServer) Doctor(ctx context.Context, _ *controlv1.DoctorRequest) (*sandboxv1.InspectReply, error) {
	tree := route.NewTree(route.Call{})
	defer s.h.endTree(tree)
	return sandboxv1.NewSandboxClient(s.h.router.Conn(tree, "sandbox")).Inspect(ctx, &sandboxv1.InspectRequest{ProbeAgain: true})
}

// Inbox streams questions to a person who may answer them. Somebody who is not one may look at none: a question shows what the
// model wants to do, and watching it is what makes it wait.
func (s controlServer) Inbox(r *controlv1.InboxRequest, stream grpc.ServerStreamingServer[controlv1.InboxEvent]) error {
	if _, err := s.person(stream.Context(), "the inbox"); err != nil {
		return err
	}
	ctx, end := s.watching(stream.Context())
	defer end()
	w := s.h.inbox.Watch(r.GetTag(), r.GetFollow())
	defer w.Close()
	// The header tells the client that it is being waited for.
	if err := stream.SendHeader(nil); err != nil {
		return err
	}
	for {
		e, ok := w.TryNext()
		if !ok {
			if !r.GetFollow() {
				return nil
			}
			var err error
			if e, err = w.Next(ctx); err != nil {
				return nil // the person left
			}
		}
		if err := stream.Send(inboxEvent(e)); err != nil {
			return err
		}
	}
}

func inboxEvent(e inbox.Event) *controlv1.InboxEvent {
	if e.Settled != nil {
		return &controlv1.InboxEvent{Settled: &controlv1.Settled{
			Id: e.Settled.ID, Outcome: string(e.Settled.Outcome), Channel: e.Settled.Channel,
		}}
	}
	q := e.Asked
	return &controlv1.InboxEvent{Asked: &controlv1.Question{
		Id: q.ID, Session: q.Session, Agent: q.Agent, Call: q.Call, Tag: q.Tag, Tool: q.GetTool(), Reason: q.GetReason(),
		From: q.GetWidening().GetFrom(), To: q.GetWidening().GetTo(),
		Kind: q.GetSubject().GetKind(), Text: q.GetSubject().GetText(), Cwd: q.GetSubject().GetCwd(), AskedMs: q.AskedAt.UnixMilli(),
	}}
}

func (s controlServer) Answer(ctx context.Context, r *controlv1.AnswerRequest) (*controlv1.AnswerReply, error) {
	level, err := s.person(ctx, "answering")
	if err != nil {
		return nil, err
	}
	outcome := approval.Outcome(r.GetOutcome())
	if outcome != approval.AllowedOnce && outcome != approval.Rejected {
		return nil, fault.New(codes.InvalidArgument, "BAD_ANSWER", "outcome must be allowed-once or rejected, got %q", r.GetOutcome())
	}
	err = s.h.inbox.Answer(r.GetId(), inbox.Verdict{
		Outcome: outcome, Note: r.GetNote(), Channel: terminalChannel, Level: confirmed(level, r.GetConfirm()),
	})
	var tooLow *inbox.LevelError
	var notOpen *inbox.NotOpenError
	switch {
	case errors.As(err, &tooLow):
		return nil, fault.New(codes.PermissionDenied, "CONFIRM_REQUIRED", "%v", err)
	case errors.As(err, &notOpen):
		return nil, fault.New(codes.NotFound, "NOT_OPEN", "%v", err)
	case err != nil:
		return nil, err
	}
	return &controlv1.AnswerReply{}, nil
}

// status is an entry for people.
func (e *entry) status() *controlv1.EntryStatus {
	what := e.now()
	out := &controlv1.EntryStatus{
		Id: e.id, Plugin: what.manifest.GetName(), Version: what.manifest.GetVersion(), Digest: what.digest, Place: what.place(),
		State: "pending", Tier: string(what.tier()),
	}
	var waiting []string
	if f := e.mount(); f != nil { // a row that is being added has none yet
		out.State, waiting = strings.ToLower(f.State().String()), f.Waiting()
	}
	for _, o := range what.manifest.GetOffers() {
		out.Provides = append(out.Provides, o.GetCapability())
	}
	for _, n := range what.manifest.GetNeeds() {
		out.Needs = append(out.Needs, n.GetCapability())
	}
	for _, l := range what.manifest.GetListeners() {
		out.Listens = append(out.Listens, l.GetEvent())
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	out.Problem, out.Draining = e.problem, int64(len(e.draining))
	e.supervised(out)
	if g := e.current; g != nil {
		out.Generation, out.Pid = g.provider.Generation, int64(g.process.PID())
		for _, t := range g.reply.GetTools() {
			out.Tools = append(out.Tools, t.GetName())
		}
		out.StartedMs = g.started.UnixMilli()
	} else if out.Problem == "" && len(waiting) > 0 {
		out.Problem = "waits for " + strings.Join(slices.Sorted(slices.Values(waiting)), ", ")
	}
	return out
}

// drainTimeout is how long a stopping host waits for the calls that others are making, if it is given that time: as long as the
// longest command may run.
const drainTimeout = 10 * time.Minute

// watching is the context of a stream that somebody watches: it ends with the stream, or when the host begins to stop.
func (s controlServer) watching(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	unhook := context.AfterFunc(s.h.stopping, cancel)
	return ctx, func() { unhook(); cancel() }
}

// Interface guard.
var _ controlv1.ControlServer = controlServer{}

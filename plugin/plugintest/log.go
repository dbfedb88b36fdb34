package plugintest

import (
	"context"
	"encoding/json"
	"slices"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	sessionv1 "github.com/cordon-host/cordon/api/session/v1"
	"github.com/cordon-host/cordon/capability/approval"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/plugin"
)

// Log is the session capability in memory: what a plugin that reads or appends events needs. Use [Log.Fake].
type Log struct {
	sessionv1.UnimplementedSessionServer

	mu       sync.Mutex
	sessions map[string]*Session
	refuse   func(ctx context.Context, r *sessionv1.AppendRequest) error
}

// Session is one session of a Log.
type Session struct {
	log    *Log
	id     string
	cwd    string
	turns  int64
	open   []int64
	events []*sessionv1.Event
}

// NewLog makes a log without sessions.
func NewLog() *Log { return &Log{sessions: map[string]*Session{}} }

// Fake answers the session capability from the log.
func (l *Log) Fake() Option { return Fake("session", &sessionv1.Session_ServiceDesc, l) }

// Session makes the session with an id, in cwd.
func (l *Log) Session(id, cwd string) *Session {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := &Session{log: l, id: id, cwd: cwd}
	l.sessions[id] = s
	return s
}

// Refuse makes fn look at every append before it is committed; nil for none. Its error is the caller's.
func (l *Log) Refuse(fn func(ctx context.Context, r *sessionv1.AppendRequest) error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.refuse = fn
}

// OpenTurn begins a turn and returns its number.
func (s *Session) OpenTurn() int64 {
	s.log.mu.Lock()
	defer s.log.mu.Unlock()
	s.turns++
	s.open = append(s.open, s.turns)
	return s.turns
}

// CloseTurn ends a turn.
func (s *Session) CloseTurn(turn int64) {
	s.log.mu.Lock()
	defer s.log.mu.Unlock()
	s.open = slices.DeleteFunc(s.open, func(n int64) bool { return n == turn })
}

// Record puts an event into the log that nobody is asked about; data marshals to a JSON object.
func (s *Session) Record(typ string, data any) {
	raw, err := json.Marshal(data)
	if err != nil {
		panic("plugintest: event data: " + err.Error()) // a mistake in the test
	}
	s.log.mu.Lock()
	defer s.log.mu.Unlock()
	s.append(typ, 0, raw)
}

// Events are copies of the events of the given types, oldest first; all of them without a type.
func (s *Session) Events(types ...string) []*sessionv1.Event {
	s.log.mu.Lock()
	defer s.log.mu.Unlock()
	var out []*sessionv1.Event
	for _, e := range s.events {
		if len(types) == 0 || slices.Contains(types, e.GetType()) {
			out = append(out, proto.CloneOf(e))
		}
	}
	return out
}

func (s *Session) append(typ string, turn int64, data []byte) int64 {
	seq := int64(len(s.events))
	s.events = append(s.events, &sessionv1.Event{Seq: seq, TimeMs: seq, Type: typ, Turn: turn, Data: data})
	return seq
}

// find is the session of the call; the log's lock is held.
func (l *Log) find(ctx context.Context) (*Session, error) {
	call := plugin.Caller(ctx)
	if call.Session == "" {
		return nil, fault.New(codes.FailedPrecondition, "NO_SESSION", "the call belongs to no session")
	}
	s, ok := l.sessions[call.Session]
	if !ok {
		return nil, fault.New(codes.NotFound, "SESSION_NOT_FOUND", "session %s does not exist", call.Session)
	}
	return s, nil
}

func (l *Log) Header(ctx context.Context, _ *sessionv1.HeaderRequest) (*sessionv1.HeaderReply, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s, err := l.find(ctx)
	if err != nil {
		return nil, err
	}
	return &sessionv1.HeaderReply{Id: s.id, Cwd: s.cwd, OpenTurns: slices.Clone(s.open)}, nil
}

func (l *Log) Last(ctx context.Context, r *sessionv1.LastRequest) (*sessionv1.LastReply, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s, err := l.find(ctx)
	if err != nil {
		return nil, err
	}
	for _, e := range slices.Backward(s.events) {
		if e.GetType() == r.GetType() {
			return &sessionv1.LastReply{Event: proto.CloneOf(e)}, nil
		}
	}
	return &sessionv1.LastReply{}, nil
}

// Append commits an event. As the host does, it mints a grant for an allowance of a widening, and takes an allowance only
// with an answer that it cites.
func (l *Log) Append(ctx context.Context, r *sessionv1.AppendRequest) (*sessionv1.AppendReply, error) {
	l.mu.Lock()
	refuse := l.refuse
	l.mu.Unlock()
	if refuse != nil {
		if err := refuse(ctx, r); err != nil {
			return nil, err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	s, err := l.find(ctx)
	if err != nil {
		return nil, err
	}
	var object map[string]json.RawMessage
	if err := json.Unmarshal(r.GetData(), &object); err != nil || object == nil {
		return nil, fault.New(codes.InvalidArgument, "BAD_EVENT", "%s: data is not a JSON object", r.GetType())
	}
	turn := plugin.Caller(ctx).Turn
	if (r.GetType() == approval.EventAsked || r.GetType() == approval.EventDecided) && !slices.Contains(s.open, turn) {
		return nil, fault.New(codes.FailedPrecondition, "APPEND_REFUSED", "%s appended outside any open turn", r.GetType())
	}
	grant, err := s.grant(r)
	if err != nil {
		return nil, err
	}
	return &sessionv1.AppendReply{Seq: s.append(r.GetType(), turn, r.GetData()), Grant: grant}, nil
}

func (s *Session) grant(r *sessionv1.AppendRequest) (string, error) {
	if r.GetType() != approval.EventDecided {
		return "", nil
	}
	var decided approval.Decided
	if err := json.Unmarshal(r.GetData(), &decided); err != nil {
		return "", fault.New(codes.InvalidArgument, "BAD_EVENT", "%s: %v", r.GetType(), err)
	}
	if decided.Outcome != approval.AllowedOnce {
		return "", nil
	}
	if r.GetAnswer() == "" {
		return "", fault.New(codes.PermissionDenied, "NOT_ALLOWED", "approval/decided says allowed-once, but cites no answer")
	}
	for _, e := range s.events {
		var asked approval.Asked
		if e.GetType() == approval.EventAsked && json.Unmarshal(e.GetData(), &asked) == nil && asked.ID == decided.ID && asked.Widening != nil {
			return "grant-" + decided.ID, nil
		}
	}
	return "", nil
}

// Interface guard.
var _ sessionv1.SessionServer = (*Log)(nil)

package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"math"
	"runtime/debug"
	"slices"
	"sync"

	rules "github.com/cordon-host/cordon/capability/session"
)

// Draft is an event that a caller wants in the log. Data is a json.RawMessage or []byte with a JSON object, or anything that
// encoding/json makes one of; nil stands for the empty object.
type Draft struct {
	Type string
	Turn int64 // 0 outside any turn
	Data any
}

// Candidate is a draft whose data are in canonical form, as vetoes see it.
type Candidate = rules.Draft

// Reason is why a turn ended.
type Reason = rules.Reason

// Session is one log in use. There is one Session per id and Log. Methods may be called from several goroutines.
type Session struct {
	log    *Log
	header Header

	// turnstile is held while an append is checked and committed, by one goroutine at a time, never while a veto or an observer
	// runs. It guards state and stale.
	turnstile chan struct{}
	state     *rules.State
	stale     bool // the store may hold events that are not in state

	mu         sync.Mutex
	events     []Event
	last       map[string]int // index in events of the newest event of a type
	open       []int64
	changed    chan struct{} // closed and replaced when events grow; closed for good at the end
	ended      bool
	pending    []delivery // events that observers have not seen
	delivering bool       // somebody is showing the event before pending[0] to the observers
}

// delivery is an event on its way to the observers, and whose observers were running when it was appended.
type delivery struct {
	event Event
	chain *link
}

func newSession(l *Log, header Header) *Session {
	return &Session{
		log: l, header: header,
		turnstile: make(chan struct{}, 1),
		state:     rules.NewState(header),
		last:      map[string]int{},
		changed:   make(chan struct{}),
	}
}

// Header is the immutable part.
func (s *Session) Header() Header { return s.header }

// ID is the header's id.
func (s *Session) ID() string { return s.header.ID }

// Last is the newest event of a type, in constant time. Its Data must not be changed.
func (s *Session) Last(typ string) (Event, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i, ok := s.last[typ]
	if !ok {
		return Event{}, false
	}
	return s.events[i], true
}

// Len is the number of events.
func (s *Session) Len() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return int64(len(s.events))
}

// Events are the events from a sequence number on. The log is not copied: their Data must not be changed.
func (s *Session) Events(from int64) []Event {
	s.mu.Lock()
	defer s.mu.Unlock()
	from = max(from, 0)
	if from >= int64(len(s.events)) {
		return nil
	}
	return s.events[from:len(s.events):len(s.events)]
}

// OpenTurns are the numbers of the open turns, oldest first.
func (s *Session) OpenTurns() []int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.open)
}

// Subscribe walks the events from a sequence number on and goes on with new ones as they are committed. It ends when ctx ends
// or the Log is closed. It reads the log at its own pace: a slow reader misses nothing and holds nobody up.
func (s *Session) Subscribe(ctx context.Context, from int64) iter.Seq[Event] {
	return func(yield func(Event) bool) {
		at := max(from, 0)
		for {
			s.mu.Lock()
			changed, ended := s.changed, s.ended
			s.mu.Unlock()
			for _, e := range s.Events(at) {
				if ctx.Err() != nil || !yield(e) {
					return
				}
				at = e.Seq + 1
			}
			if ended {
				return
			}
			select {
			case <-changed:
			case <-ctx.Done():
				return
			}
		}
	}
}

// Append commits one event. See the package comment for what an error means: the event is not in the log, with one exception,
// an error that wraps ErrUnsettled.
func (s *Session) Append(ctx context.Context, d Draft) (Event, error) {
	events, err := s.AppendAll(ctx, d)
	if err != nil {
		return Event{}, err
	}
	return events[0], nil
}

// AppendAll commits several events, all or none, next to each other.
func (s *Session) AppendAll(ctx context.Context, drafts ...Draft) ([]Event, error) {
	if len(drafts) == 0 {
		return nil, errors.New("session append: no event was given")
	}
	all := make([]Candidate, len(drafts))
	for i, d := range drafts {
		data, err := canonical(d)
		if err != nil {
			return nil, err
		}
		all[i] = Candidate{Type: d.Type, Turn: d.Turn, Data: data}
	}
	return s.commit(ctx, drafts[0].Type, func(*rules.State) (plan, error) { return plan{ask: all}, nil })
}

// BeginTurn appends turn/start and returns the number of the new turn. Several turns may be open.
func (s *Session) BeginTurn(ctx context.Context) (int64, error) {
	events, err := s.commit(ctx, rules.TypeTurnStart, func(state *rules.State) (plan, error) {
		n := state.NextTurn()
		data, err := canonical(Draft{Type: rules.TypeTurnStart, Data: rules.TurnStart{Turn: n}})
		return plan{ask: []Candidate{{Type: rules.TypeTurnStart, Turn: n, Data: data}}}, err
	})
	if err != nil {
		return 0, err
	}
	return events[0].Turn, nil
}

// EndTurn appends turn/end. What is still open in the turn is closed in the same step and by the same events as after a crash:
// questions are decided as cancelled, calls without a result get TOOL_OUTCOME_UNKNOWN.
func (s *Session) EndTurn(ctx context.Context, turn int64, reason Reason) error {
	data, err := canonical(Draft{Type: rules.TypeTurnEnd, Data: rules.TurnEnd{Turn: turn, Reason: reason}})
	if err != nil {
		return err
	}
	_, err = s.commit(ctx, rules.TypeTurnEnd, func(state *rules.State) (plan, error) {
		return plan{closers: state.Closers(turn), ask: []Candidate{{Type: rules.TypeTurnEnd, Turn: turn, Data: data}}}, nil
	})
	return err
}

// canonical is the data of a draft in the form that is stored.
func canonical(d Draft) (json.RawMessage, error) {
	var raw []byte
	switch data := d.Data.(type) {
	case nil:
		raw = []byte("{}")
	case json.RawMessage:
		raw = data
	case []byte:
		raw = data
	default:
		var err error
		if raw, err = json.Marshal(data); err != nil {
			return nil, fmt.Errorf("session event %q carries non-JSON-serializable data: %w", d.Type, err)
		}
	}
	// White space is no reason to read on: nobody needs that much of it.
	if len(raw) > rules.MaxData {
		return nil, &rules.SizeError{Type: d.Type, Size: len(raw), Max: rules.MaxData}
	}
	data, err := rules.Canonical(raw)
	if err != nil {
		return nil, fmt.Errorf("session event %q carries non-JSON-serializable data: %w", d.Type, err)
	}
	return data, nil
}

// plan is what a commit appends: closers, which are appended without asking, then what vetoes are asked about.
type plan struct{ closers, ask []Candidate }

// ErrUnsettled marks the error of an append whose outcome the store could not tell, also when it was asked again. The session
// appends nothing more until the store can be read; whatever is found then becomes part of the log.
var ErrUnsettled = errors.New("the outcome of the append is unknown")

// commit owns the way of events into the log. typ names them in errors.
func (s *Session) commit(ctx context.Context, typ string, build func(*rules.State) (plan, error)) ([]Event, error) {
	if err := s.reentered(ctx, typ); err != nil {
		return nil, err
	}
	vetted := int64(-1) // the length of the log the vetoes agreed to
	for {
		// One at a time from here.
		if err := s.enter(ctx); err != nil {
			return nil, err
		}
		// The store may know more than we do, after an append that ended in doubt.
		if s.stale {
			if _, err := s.reread(nil); err != nil {
				s.leave()
				return nil, fmt.Errorf("session %q: an earlier append is in doubt and the store cannot be read: %w", s.header.ID, err)
			}
		}
		// Rules first: vetoes see only what could be appended.
		p, err := build(s.state)
		if err != nil {
			s.leave()
			return nil, err
		}
		events, err := s.seal(slices.Concat(p.closers, p.ask))
		if err != nil {
			s.leave()
			return nil, err
		}
		// Vetoes run without the turnstile. If somebody else appended meanwhile they are asked again.
		if vetoes := s.log.vetoing(); len(vetoes) > 0 && vetted != s.state.Next() {
			vetted = s.state.Next()
			s.leave()
			for _, d := range p.ask {
				if err := s.veto(ctx, vetoes, d); err != nil {
					return nil, err
				}
			}
			continue
		}
		err = s.store(ctx, events)
		s.leave()
		s.deliver(events[len(events)-1].Seq)
		if err != nil {
			return nil, err
		}
		return events, nil
	}
}

func (s *Session) enter(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	select {
	case s.turnstile <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *Session) leave() { <-s.turnstile }

// seal holds drafts against the rules, each in the state the ones before it leave, and makes events of them.
func (s *Session) seal(drafts []Candidate) ([]Event, error) {
	state := s.state
	now := s.log.opts.Now()
	events := make([]Event, len(drafts))
	for i, d := range drafts {
		if err := state.Check(d); err != nil {
			return nil, err
		}
		events[i] = state.Seal(d, now)
		if len(drafts) > 1 {
			if i == 0 {
				state = state.Clone() // nothing is committed yet
			}
			state.Apply(events[i])
		}
	}
	return events, nil
}

// store commits events and publishes them. After an error that leaves the outcome open it reads the store: what is found there
// is published, and if it is these events there was no error.
func (s *Session) store(ctx context.Context, events []Event) error {
	err := s.log.store.Append(ctx, s.header.ID, s.state.Next(), events)
	if err == nil {
		s.publish(events, len(s.log.observing()) > 0, chainOf(ctx))
		return nil
	}
	if ctx.Err() != nil && errors.Is(err, ctx.Err()) || errors.Is(err, ErrClosed) {
		return err // certainly not committed
	}
	committed, rerr := s.reread(events)
	switch {
	case rerr != nil:
		return fmt.Errorf("session %q: %w: %w (reading it again: %w)", s.header.ID, ErrUnsettled, err, rerr)
	case committed:
		s.log.opts.Logger.Warn("session store reported an error for an append that it had committed", "session", s.header.ID, "error", err)
		return nil
	}
	return err
}

// reread publishes what the store has beyond the log as it is known here, and says whether that begins with mine.
func (s *Session) reread(mine []Event) (committed bool, err error) {
	s.stale = true
	_, found, err := s.log.store.Load(s.log.base, s.header.ID, s.state.Next())
	if err != nil {
		return false, err
	}
	if err := rules.VerifyFrom(s.state.Next(), s.state.Head(), s.state.Time(), found); err != nil {
		return false, s.log.corrupt(s.header.ID, err)
	}
	s.stale = false
	s.publish(found, len(s.log.observing()) > 0, nil)
	committed = len(mine) > 0 && len(found) >= len(mine) && found[len(mine)-1].Hash == mine[len(mine)-1].Hash
	return committed, nil
}

// publish makes events that the store has visible, and with observed puts them on the way to the observers.
func (s *Session) publish(events []Event, observed bool, chain *link) {
	if len(events) == 0 {
		return
	}
	for _, e := range events {
		s.state.Apply(e)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range events {
		s.last[e.Type] = len(s.events)
		s.events = append(s.events, e)
		if observed {
			s.pending = append(s.pending, delivery{e, chain})
		}
	}
	s.open = s.state.OpenTurns()
	if !s.ended {
		close(s.changed)
		s.changed = make(chan struct{})
	}
}

// end lets subscriptions run out.
func (s *Session) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ended {
		s.ended = true
		close(s.changed)
	}
}

// deliver shows events to the observers in the order of the log, until the one numbered upto has been shown or somebody else
// is at it. What came meanwhile goes to a goroutine of the Log: an append is not held up by the observers of other appends.
func (s *Session) deliver(upto int64) {
	for {
		s.mu.Lock()
		if s.delivering || len(s.pending) == 0 {
			s.mu.Unlock()
			return
		}
		if s.pending[0].event.Seq > upto {
			s.mu.Unlock()
			s.log.background(func() { s.deliver(math.MaxInt64) })
			return
		}
		next := s.pending[0]
		if s.pending = s.pending[1:]; len(s.pending) == 0 {
			s.pending = nil // or the array would keep what was shown
		}
		s.delivering = true
		s.mu.Unlock()
		s.observe(next)
	}
}

func (s *Session) observe(d delivery) {
	defer func() {
		s.mu.Lock()
		s.delivering = false
		s.mu.Unlock()
	}()
	ctx := context.WithValue(s.log.base, chainKey{}, &link{s, d.chain})
	for _, h := range s.log.observing() {
		func() {
			defer func() {
				if p := recover(); p != nil {
					s.log.opts.Logger.Error("session observer panicked", "session", s.header.ID, "seq", d.event.Seq, "type", d.event.Type,
						"panic", p, "stack", string(debug.Stack()))
				}
			}()
			h.fn(ctx, s, d.event)
		}()
	}
}

func (s *Session) veto(ctx context.Context, vetoes []hook[func(context.Context, *Session, Candidate) error], d Candidate) error {
	ctx = context.WithValue(ctx, chainKey{}, &link{s, chainOf(ctx)})
	for _, h := range vetoes {
		err := func() (err error) {
			defer func() {
				if p := recover(); p != nil {
					s.log.opts.Logger.Error("session veto panicked", "session", s.header.ID, "type", d.Type, "panic", p, "stack", string(debug.Stack()))
					err = fmt.Errorf("a veto panicked: %v", p)
				}
			}()
			return h.fn(ctx, s, d)
		}()
		if err != nil {
			return &VetoError{Type: d.Type, Err: err}
		}
	}
	return nil
}

func (l *Log) vetoing() []hook[func(context.Context, *Session, Candidate) error] {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.vetoes.list
}

func (l *Log) observing() []hook[func(context.Context, *Session, Event)] {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.observers.list
}

// link is in the context of a veto or observer: the session it runs for, and up the chain those whose observers caused it.
type link struct {
	s  *Session
	up *link
}

type chainKey struct{}

func chainOf(ctx context.Context) *link {
	l, _ := ctx.Value(chainKey{}).(*link)
	return l
}

// reentered refuses an append that comes from a veto or an observer of the same session.
func (s *Session) reentered(ctx context.Context, typ string) error {
	for l := chainOf(ctx); l != nil; l = l.up {
		if l.s == s {
			return &ReentryError{ID: s.header.ID, Type: typ}
		}
	}
	return nil
}

package session

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Draft is an event before it has a place in a log.
type Draft struct {
	Type string
	Turn int64 // 0 outside any turn
	Data json.RawMessage
}

// A RuleError says that an event may not follow the log as it is.
type RuleError struct {
	Type   string
	Turn   int64
	Reason string
}

func (e *RuleError) Error() string { return e.Reason }

// State is what decides which events may come next: the end of the log, which turns are open, and which calls and questions
// are open in them. The zero value is of no use; NewState makes the state of an empty log.
type State struct {
	next  int64
	head  Hash
	time  time.Time
	turn  int64 // number of the newest turn
	turns map[int64]*turn
}

// turn is an open turn.
type turn struct {
	calls     []call // in the order they were first mentioned
	questions []string
}

type call struct {
	id      string
	seq     int64 // of tool/call, or of the question that mentioned the call
	started bool  // tool/call is recorded
	done    bool  // tool/result is recorded
}

func (t *turn) call(id string) *call {
	for i := range t.calls {
		if t.calls[i].id == id {
			return &t.calls[i]
		}
	}
	return nil
}

// NewState is the state of the empty log of header.
func NewState(header Header) *State {
	return &State{head: header.Link(), turns: map[int64]*turn{}}
}

// Clone is a copy that shares nothing.
func (s *State) Clone() *State {
	c := *s
	c.turns = make(map[int64]*turn, len(s.turns))
	for n, t := range s.turns {
		c.turns[n] = &turn{slices.Clone(t.calls), slices.Clone(t.questions)}
	}
	return &c
}

// Next is the sequence number of the next event.
func (s *State) Next() int64 { return s.next }

// Head is the hash the next event follows: the last event's, or the header's link.
func (s *State) Head() Hash { return s.head }

// Time is the time of the last event; zero when there is none.
func (s *State) Time() time.Time { return s.time }

// OpenTurns are the numbers of the open turns, oldest first.
func (s *State) OpenTurns() []int64 { return slices.Sorted(maps.Keys(s.turns)) }

// NextTurn is the number the next turn must have.
func (s *State) NextTurn() int64 { return s.turn + 1 }

// Enclosed says whether events of a type stand inside an open turn only. Of the approval events it is the pair that must:
// approval/policy is a switch that a person may flip between turns.
func Enclosed(typ string) bool {
	switch typ {
	case TypeTurnStart, TypeTurnEnd, TypeToolCall, TypeToolResult:
		return true
	case "approval/policy":
		return false
	}
	return strings.HasPrefix(typ, "approval/")
}

// Check says whether d, whose data are in canonical form, may be the next event. The error is a *RuleError, or a *SizeError.
func (s *State) Check(d Draft) error {
	refuse := func(format string, args ...any) error {
		return &RuleError{d.Type, d.Turn, fmt.Sprintf(format, args...)}
	}
	if !ValidType(d.Type) {
		return refuse("%q is no event type: lower-case words of letters, digits and dashes, joined by slashes, were expected", d.Type)
	}
	if len(d.Data) > MaxData {
		return &SizeError{Type: d.Type, Size: len(d.Data), Max: MaxData}
	}
	p, err := check(d.Type, d.Data)
	if err != nil {
		return refuse("%v", err)
	}
	if p.hasTurn && p.turn != d.Turn {
		return refuse("%s names turn %d in its data and turn %d outside", d.Type, p.turn, d.Turn)
	}
	if d.Type == TypeTurnStart {
		if d.Turn != s.turn+1 {
			return refuse("turn/start must number the next turn %d, got %d", s.turn+1, d.Turn)
		}
		return nil
	}
	t := s.turns[d.Turn]
	switch {
	case d.Turn == 0 && Enclosed(d.Type):
		return refuse("%s appended outside any open turn", d.Type)
	case d.Turn != 0 && t == nil:
		return refuse("%s appended in turn %d, which is not open", d.Type, d.Turn)
	}
	switch d.Type {
	case TypeTurnEnd:
		if len(t.questions) > 0 {
			return refuse("turn/end of turn %d leaves approval %q without a decision", d.Turn, t.questions[0])
		}
		for _, c := range t.calls {
			if c.started && !c.done {
				return refuse("turn/end of turn %d leaves tool call %q without a result", d.Turn, c.id)
			}
		}
	case TypeToolCall:
		if c := t.call(p.id); c != nil && (c.started || c.done) {
			return refuse("tool/call repeats call id %q in turn %d", p.id, d.Turn)
		}
	case TypeToolResult:
		c := t.call(p.id)
		switch {
		case c != nil && c.done:
			return refuse("tool/result repeats the result of call %q in turn %d", p.id, d.Turn)
		case (c == nil || !c.started) && !p.notStarted:
			return refuse("tool/result has no matching tool/call for call %q in turn %d", p.id, d.Turn)
		case c != nil && c.started && p.notStarted:
			return refuse("tool/result says %s of call %q, which is recorded as started", CodeNotStarted, p.id)
		}
	case TypeAsked:
		for _, open := range s.turns {
			if slices.Contains(open.questions, p.id) {
				return refuse("approval/asked repeated open id %q", p.id)
			}
		}
	case TypeDecided:
		if !slices.Contains(t.questions, p.id) {
			return refuse("approval/decided has no matching approval/asked for id %q", p.id)
		}
	}
	return nil
}

// Apply adds an event to the state. It accepts any event, also one that Check would have refused: a log on disk is what
// happened. Of an event that makes no sense it takes the number, the time and the hash.
func (s *State) Apply(e Event) {
	s.next, s.head, s.time = e.Seq+1, e.Hash, e.Time
	switch e.Type {
	case TypeTurnStart:
		if e.Turn > 0 && s.turns[e.Turn] == nil {
			s.turns[e.Turn] = &turn{}
		}
		s.turn = max(s.turn, e.Turn)
		return
	case TypeTurnEnd:
		delete(s.turns, e.Turn)
		return
	}
	t := s.turns[e.Turn]
	if t == nil {
		return
	}
	switch e.Type {
	case TypeToolCall:
		id := member(e.Data, "callId")
		if c := t.call(id); c != nil {
			c.seq, c.started, c.done = e.Seq, true, false
		} else if id != "" {
			t.calls = append(t.calls, call{id: id, seq: e.Seq, started: true})
		}
	case TypeToolResult:
		id := member(e.Data, "callId")
		if c := t.call(id); c != nil {
			c.done = true
		} else if id != "" {
			t.calls = append(t.calls, call{id: id, seq: e.Seq, done: true})
		}
	case TypeAsked:
		if id := member(e.Data, "id"); id != "" && !slices.Contains(t.questions, id) {
			t.questions = append(t.questions, id)
		}
		// A question may be asked about a call that is not recorded as started yet.
		if id := member(e.Data, "callId"); id != "" && t.call(id) == nil {
			t.calls = append(t.calls, call{id: id, seq: e.Seq})
		}
	case TypeDecided:
		id := member(e.Data, "id")
		t.questions = slices.DeleteFunc(t.questions, func(q string) bool { return q == id })
	}
}

// Seal gives a draft its place after s: the event that follows, with its hash. The time is cut to milliseconds and never lies
// before that of the last event, whatever the clock did. Seal does not check and does not change s.
func (s *State) Seal(d Draft, now time.Time) Event {
	at := time.UnixMilli(max(now.UnixMilli(), 0)).UTC()
	if at.Before(s.time) {
		at = s.time
	}
	e := Event{Seq: s.next, Time: at, Type: d.Type, Turn: d.Turn, Data: d.Data, Prev: s.head}
	e.Hash = e.Link()
	return e
}

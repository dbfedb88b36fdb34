package session

import (
	"encoding/json"
	"fmt"
)

// Codes of the results that close a tool call whose own result is missing. They are different facts: the first says that
// nothing ran, the second that nobody knows.
const (
	CodeNotStarted     = "TOOL_NOT_STARTED"
	CodeOutcomeUnknown = "TOOL_OUTCOME_UNKNOWN"
)

// What the model is told of such a call. The texts are those of DeepSeek Harness, whose word for itself is replaced.
const (
	TextNotStarted     = "The tool call was interrupted before the host recorded it as started. Retry it if it is still needed."
	TextOutcomeUnknown = "The tool call was interrupted after it was recorded, but no result was durably recorded. Its outcome is unknown. " +
		"Decide whether to retry from the tool semantics: retry only if the operation is read-only or idempotent; if it may have side effects, " +
		"first verify external state or ask the user. Do not retry blindly."
)

// Closers are the events that close what is open in a turn, except its end: approval/decided with outcome cancelled for each
// open question, then a tool/result for each call without one, both in the order of the log. A call that a question mentions
// and no tool/call records gets TOOL_NOT_STARTED, a recorded one TOOL_OUTCOME_UNKNOWN. There are none for a turn that is not
// open.
func (s *State) Closers(number int64) []Draft {
	t := s.turns[number]
	if t == nil {
		return nil
	}
	var drafts []Draft
	for _, id := range t.questions {
		drafts = append(drafts, draft(TypeDecided, number, struct {
			ID      string `json:"id"`
			Outcome string `json:"outcome"`
		}{id, "cancelled"}))
	}
	for _, c := range t.calls {
		if c.done {
			continue
		}
		result := ToolResult{
			Turn: number, CallID: c.id, IsError: true,
			Content: []Content{{Type: "text", Text: TextNotStarted}},
			Error:   &ToolError{Name: "ToolNotStartedError", Code: CodeNotStarted},
		}
		// The id has the number the result itself will have, so that it is the same however often a log is repaired.
		meta := closerMeta{ID: fmt.Sprintf("interrupted-tool-result-%s-%d", c.id, s.next+int64(len(drafts)))}
		if c.started {
			result.Content[0].Text = TextOutcomeUnknown
			result.Error = &ToolError{Name: "ToolOutcomeUnknownError", Code: CodeOutcomeUnknown}
			meta.SourceEventSeqs = []int64{c.seq}
		}
		result.Meta = encode(meta)
		drafts = append(drafts, draft(TypeToolResult, number, result))
	}
	return drafts
}

type closerMeta struct {
	ID              string  `json:"id"`
	SourceEventSeqs []int64 `json:"sourceEventSeqs,omitempty"`
}

// Repair is what has to be appended to a log that a crash cut off: for each open turn, oldest first, its Closers and then
// turn/end with kind interrupted. All carry the time of the last event, so that repairing the same log gives the same events,
// and a repaired log needs none. A log that is being written must not be repaired.
func Repair(header Header, events []Event) []Event {
	s := NewState(header)
	for _, e := range events {
		s.Apply(e)
	}
	return s.Repair()
}

// Repair is the repair of the log s is the state of; s is not changed.
func (s *State) Repair() []Event {
	s = s.Clone()
	var closers []Event
	add := func(d Draft) {
		e := s.Seal(d, s.time)
		s.Apply(e)
		closers = append(closers, e)
	}
	for _, number := range s.OpenTurns() {
		for _, d := range s.Closers(number) {
			add(d)
		}
		add(draft(TypeTurnEnd, number, TurnEnd{Turn: number, Reason: Reason{Kind: EndInterrupted}}))
	}
	return closers
}

func draft(typ string, turn int64, data any) Draft {
	return Draft{Type: typ, Turn: turn, Data: encode(data)}
}

// encode is the canonical form of a payload of this package, which always has one: its strings came out of canonical JSON.
func encode(v any) json.RawMessage {
	b, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("session: encode %T: %v", v, err))
	}
	return b
}

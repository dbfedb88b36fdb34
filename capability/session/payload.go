package session

import (
	"encoding/json"
	"fmt"
	"slices"
)

// Types of the core events: those the host itself writes.
const (
	TypeTurnStart  = "turn/start"
	TypeTurnEnd    = "turn/end"
	TypeToolCall   = "tool/call"
	TypeToolResult = "tool/result"
	TypeEndSeed    = "session/end-seed"
	TypePin        = "plugin/pin"
)

// Types of the approval pair. Their payloads belong to the approval capability; the log knows of them that a question and its
// decision stand in one turn and name the same id.
const (
	TypeAsked   = "approval/asked"
	TypeDecided = "approval/decided"
)

// TurnStart is the payload of turn/start. Turns count from 1.
type TurnStart struct {
	Turn int64 `json:"turn"`
}

// Kinds of the end of a turn.
const (
	EndCompleted   = "completed"
	EndAborted     = "aborted"
	EndBlocked     = "blocked"
	EndError       = "error"
	EndMaxTokens   = "max-tokens"
	EndInterrupted = "interrupted" // by a crash; written by the repair
)

// Reason is why a turn ended.
type Reason struct {
	Kind   string  `json:"kind"`
	Reason string  `json:"reason,omitempty"` // of aborted and blocked
	Error  *Detail `json:"error,omitempty"`  // of error
}

// Detail is an error as a log keeps it.
type Detail struct {
	Message string `json:"message"`
	Code    string `json:"code"`
}

// TurnEnd is the payload of turn/end.
type TurnEnd struct {
	Turn   int64  `json:"turn"`
	Reason Reason `json:"reason"`
}

// ToolCall is the payload of tool/call, which is on disk before anything runs. Arguments is the text as it came, valid or not.
type ToolCall struct {
	Turn      int64  `json:"turn"`
	CallID    string `json:"callId"`
	Name      string `json:"name"`
	Arguments string `json:"arguments"`
}

// Content is one part of a tool result.
type Content struct {
	Type string `json:"type"`
	Text string `json:"text"`
}

// ToolError says what kind of failure a result is.
type ToolError struct {
	Name string `json:"name"`
	Code string `json:"code,omitempty"`
}

// ToolResult is the payload of tool/result.
type ToolResult struct {
	Turn    int64           `json:"turn"`
	CallID  string          `json:"callId"`
	IsError bool            `json:"isError"`
	Content []Content       `json:"content"`
	Error   *ToolError      `json:"error,omitempty"`
	Meta    json.RawMessage `json:"meta,omitempty"` // an object
}

// EndSeed is the payload of session/end-seed: what comes before it was copied from another session.
type EndSeed struct{}

// Pin is the payload of plugin/pin: which generation of an entry the session uses from here on.
type Pin struct {
	Entry      string `json:"entry"`
	Version    string `json:"version"`
	Digest     string `json:"digest"`
	Generation int64  `json:"generation"`
	Reason     string `json:"reason"`
}

// fields is a payload by exact key, with the first thing found wrong.
type fields struct {
	typ string
	m   map[string]json.RawMessage
	err error
}

func read(typ string, data json.RawMessage) *fields {
	m, err := object(data)
	if err != nil {
		err = fmt.Errorf("%s: data must be an object: %w", typ, err)
	}
	return &fields{typ, m, err}
}

func (f *fields) get(key string, into any, what string) {
	if f.err != nil {
		return
	}
	raw, ok := f.m[key]
	if !ok || string(raw) == "null" || json.Unmarshal(raw, into) != nil {
		f.err = fmt.Errorf("%s: data.%s must be %s", f.typ, key, what)
	}
}

func (f *fields) text(key string) (s string) {
	f.get(key, &s, "a string")
	return s
}

func (f *fields) name(key string) string {
	s := f.text(key)
	if f.err == nil && s == "" {
		f.err = fmt.Errorf("%s %s must be non-empty", f.typ, key)
	}
	return s
}

func (f *fields) number(key string) (n int64) {
	f.get(key, &n, "an integer")
	return n
}

func (f *fields) bool(key string) (b bool) {
	f.get(key, &b, "true or false")
	return b
}

func (f *fields) object(key string) *fields {
	sub := &fields{typ: f.typ + ": " + key, err: f.err}
	f.get(key, &sub.m, "an object")
	sub.err = f.err
	return sub
}

func (f *fields) has(key string) bool { return f.m[key] != nil }

// payload checks the data of a core event or of the approval pair by itself, and returns the turn the data name (0 when the
// type names none), the call or question id, and whether the event says TOOL_NOT_STARTED. Other types pass.
type payload struct {
	turn       int64
	hasTurn    bool
	id         string
	notStarted bool
}

func check(typ string, data json.RawMessage) (payload, error) {
	var p payload
	f := read(typ, data)
	switch typ {
	case TypeTurnStart:
		p.turn, p.hasTurn = f.number("turn"), true
	case TypeTurnEnd:
		p.turn, p.hasTurn = f.number("turn"), true
		reason := f.object("reason")
		kind := reason.name("kind")
		f.err = reason.err
		kinds := []string{EndCompleted, EndAborted, EndBlocked, EndError, EndMaxTokens, EndInterrupted}
		if f.err == nil && !slices.Contains(kinds, kind) {
			f.err = fmt.Errorf("turn/end carries unknown reason kind %q", kind)
		}
	case TypeToolCall:
		p.turn, p.hasTurn = f.number("turn"), true
		p.id = f.name("callId")
		f.name("name")
		f.text("arguments")
	case TypeToolResult:
		p.turn, p.hasTurn = f.number("turn"), true
		p.id = f.name("callId")
		failed := f.bool("isError")
		var content []map[string]json.RawMessage
		f.get("content", &content, "an array of objects")
		for i, part := range content {
			c := &fields{typ: fmt.Sprintf("%s: content[%d]", typ, i), m: part, err: f.err}
			c.name("type")
			f.err = c.err
		}
		if f.has("error") {
			e := f.object("error")
			e.name("name")
			if e.has("code") {
				p.notStarted = failed && e.text("code") == CodeNotStarted
			}
			f.err = e.err
		}
		if f.has("meta") {
			f.object("meta")
		}
	case TypePin:
		for _, key := range []string{"entry", "digest", "reason"} {
			f.name(key)
		}
		f.text("version")
		if n := f.number("generation"); f.err == nil && n < 1 {
			f.err = fmt.Errorf("plugin/pin generation must be at least 1, got %d", n)
		}
	case TypeAsked:
		p.id = f.name("id")
		f.name("toolName")
	case TypeDecided:
		p.id = f.name("id")
		outcome := f.text("outcome")
		if f.err == nil && !slices.Contains([]string{"allowed-once", "rejected", "cancelled", "unavailable"}, outcome) {
			f.err = fmt.Errorf("approval/decided carries unknown outcome %q", outcome)
		}
	}
	return p, f.err
}

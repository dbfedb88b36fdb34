package session

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
)

// d is a draft from text.
func d(typ string, turn int64, data string) Draft { return Draft{typ, turn, json.RawMessage(data)} }

var (
	start  = d("turn/start", 1, `{"turn":1}`)
	called = d("tool/call", 1, `{"turn":1,"callId":"c1","name":"bash","arguments":"{"}`)
	result = d("tool/result", 1, `{"turn":1,"callId":"c1","isError":false,"content":[]}`)
	asked  = d("approval/asked", 1, `{"id":"q1","toolName":"bash","callId":"c1"}`)
	ended  = d("turn/end", 1, `{"turn":1,"reason":{"kind":"completed"}}`)
)

func TestCheck(t *testing.T) {
	before := func(drafts ...Draft) []Draft { return drafts }
	for _, c := range []struct {
		name   string
		before []Draft
		next   Draft
		want   string // part of the error; empty when the event may come
	}{
		{"first turn", nil, start, ""},
		{"a turn left out", nil, d("turn/start", 2, `{"turn":2}`), "must number the next turn 1, got 2"},
		{"a turn twice", before(start), start, "must number the next turn 2, got 1"},
		{"a second turn beside the first", before(start), d("turn/start", 2, `{"turn":2}`), ""},
		{"a turn says two numbers", nil, d("turn/start", 1, `{"turn":2}`), "names turn 2 in its data and turn 1 outside"},
		{"a turn without a number", nil, d("turn/start", 1, `{}`), "turn/start: data.turn must be an integer"},
		{"turn as text", nil, d("turn/start", 1, `{"turn":"1"}`), "data.turn must be an integer"},
		{"key in another case", nil, d("turn/start", 1, `{"Turn":1}`), "data.turn must be an integer"},
		{"end of a turn", before(start), ended, ""},
		{"end of none", nil, ended, "turn 1, which is not open"},
		{"end twice", before(start, ended), ended, "turn 1, which is not open"},
		{"end for no reason", before(start), d("turn/end", 1, `{"turn":1,"reason":{"kind":"bored"}}`), `unknown reason kind "bored"`},
		{"end without a reason", before(start), d("turn/end", 1, `{"turn":1}`), "data.reason must be an object"},
		{"end with a call open", before(start, called), ended, `leaves tool call "c1" without a result`},
		{"end with a question open", before(start, asked), ended, `leaves approval "q1" without a decision`},
		{"end with all closed", before(start, called, result), ended, ""},
		{"call outside a turn", nil, d("tool/call", 0, `{"turn":0,"callId":"c","name":"n","arguments":""}`), "tool/call appended outside any open turn"},
		{"call", before(start), called, ""},
		{"call with an empty id", before(start), d("tool/call", 1, `{"turn":1,"callId":"","name":"n","arguments":""}`), "tool/call callId must be non-empty"},
		{"call without arguments", before(start), d("tool/call", 1, `{"turn":1,"callId":"c","name":"n"}`), "data.arguments must be a string"},
		{"call with parsed arguments", before(start), d("tool/call", 1, `{"turn":1,"callId":"c","name":"n","arguments":{}}`), "data.arguments must be a string"},
		{"call id twice", before(start, called), called, `repeats call id "c1"`},
		{"call id again after its result", before(start, called, result), called, `repeats call id "c1"`},
		{"call id in another turn", before(start, called, d("turn/start", 2, `{"turn":2}`)), d("tool/call", 2, `{"turn":2,"callId":"c1","name":"n","arguments":""}`), ""},
		{"call after its question", before(start, asked), called, ""},
		{"result", before(start, called), result, ""},
		{"result of nothing", before(start), result, `no matching tool/call for call "c1"`},
		{"result twice", before(start, called, result), result, `repeats the result of call "c1"`},
		{"result of a question's call", before(start, asked), result, `no matching tool/call for call "c1"`},
		{"not started", before(start), d("tool/result", 1, `{"turn":1,"callId":"c1","isError":true,"content":[],"error":{"name":"x","code":"TOOL_NOT_STARTED"}}`), ""},
		{"not started and yet no error", before(start), d("tool/result", 1, `{"turn":1,"callId":"c1","isError":false,"content":[],"error":{"name":"x","code":"TOOL_NOT_STARTED"}}`), "no matching tool/call"},
		{"not started and yet recorded", before(start, called), d("tool/result", 1, `{"turn":1,"callId":"c1","isError":true,"content":[],"error":{"name":"x","code":"TOOL_NOT_STARTED"}}`), "is recorded as started"},
		{"result without content", before(start, called), d("tool/result", 1, `{"turn":1,"callId":"c1","isError":false}`), "data.content must be an array"},
		{"content without a type", before(start, called), d("tool/result", 1, `{"turn":1,"callId":"c1","isError":false,"content":[{"text":"x"}]}`), "content[0]: data.type must be a string"},
		{"meta is a list", before(start, called), d("tool/result", 1, `{"turn":1,"callId":"c1","isError":false,"content":[],"meta":[]}`), "data.meta must be an object"},
		{"question", before(start), asked, ""},
		{"question outside a turn", nil, d("approval/asked", 0, string(asked.Data)), "approval/asked appended outside any open turn"},
		{"question about no tool", before(start), d("approval/asked", 1, `{"id":"q","toolName":""}`), "approval/asked toolName must be non-empty"},
		{"question twice", before(start, asked), asked, `approval/asked repeated open id "q1"`},
		{"question twice, in two turns", before(start, asked, d("turn/start", 2, `{"turn":2}`)), d("approval/asked", 2, string(asked.Data)), `approval/asked repeated open id "q1"`},
		{"decision", before(start, asked), d("approval/decided", 1, `{"id":"q1","outcome":"allowed-once","by":"x"}`), ""},
		{"decision of nothing", before(start), d("approval/decided", 1, `{"id":"q1","outcome":"rejected"}`), `approval/decided has no matching approval/asked for id "q1"`},
		{"decision in another turn", before(start, asked, d("turn/start", 2, `{"turn":2}`)), d("approval/decided", 2, `{"id":"q1","outcome":"rejected"}`), "has no matching approval/asked"},
		{"decision for ever", before(start, asked), d("approval/decided", 1, `{"id":"q1","outcome":"allowed-always"}`), `approval/decided carries unknown outcome "allowed-always"`},
		{"policy between turns", nil, d("approval/policy", 0, `{"policy":"never"}`), ""},
		{"other approval event between turns", nil, d("approval/other", 0, `{}`), "outside any open turn"},
		{"pin", nil, d("plugin/pin", 0, `{"entry":"e","version":"","digest":"sha256:1","generation":1,"reason":"reload"}`), ""},
		{"pin of no generation", nil, d("plugin/pin", 0, `{"entry":"e","version":"","digest":"sha256:1","generation":0,"reason":"reload"}`), "generation must be at least 1"},
		{"pin without an entry", nil, d("plugin/pin", 0, `{"entry":"","version":"1","digest":"d","generation":1,"reason":"r"}`), "plugin/pin entry must be non-empty"},
		{"end of the seed", nil, d("session/end-seed", 0, `{}`), ""},
		{"any type", nil, d("my/event", 0, `{"a":1}`), ""},
		{"any type in a turn that is not open", nil, d("my/event", 1, `{}`), "turn 1, which is not open"},
		{"no type", nil, d("Mine", 0, `{}`), `"Mine" is no event type`},
	} {
		s := NewState(header)
		for _, b := range c.before {
			if err := s.Check(b); err != nil {
				t.Fatalf("%s: before: %v", c.name, err)
			}
			s.Apply(s.Seal(b, header.CreatedAt))
		}
		err := s.Check(c.next)
		if c.want == "" {
			if err != nil {
				t.Errorf("%s: %v", c.name, err)
			}
			continue
		}
		if rule, ok := errors.AsType[*RuleError](err); !ok || !strings.Contains(rule.Error(), c.want) || rule.Type != c.next.Type {
			t.Errorf("%s: got %v, want %q", c.name, err, c.want)
		}
	}
}

func TestCheckSize(t *testing.T) {
	s := NewState(header)
	fits := d("my/event", 0, `{"a":"`+strings.Repeat("x", MaxData-8)+`"}`)
	if err := s.Check(fits); err != nil {
		t.Error(err)
	}
	fits.Data = append(fits.Data, ' ')
	if e, ok := errors.AsType[*SizeError](s.Check(fits)); !ok || e.Size != MaxData+1 || e.Max != MaxData {
		t.Error("one byte too many was accepted")
	}
}

func TestCloneSharesNothing(t *testing.T) {
	s := NewState(header)
	for _, d := range []Draft{start, called} {
		s.Apply(s.Seal(d, header.CreatedAt))
	}
	c := s.Clone()
	for _, d := range []Draft{result, ended} {
		c.Apply(c.Seal(d, header.CreatedAt))
	}
	if fmt.Sprint(s.OpenTurns(), c.OpenTurns()) != "[1] []" || s.Next() != 2 || c.Next() != 4 {
		t.Errorf("open turns %v and %v", s.OpenTurns(), c.OpenTurns())
	}
	if err := s.Check(ended); err == nil {
		t.Error("the result in the copy closed the call in the original")
	}
}

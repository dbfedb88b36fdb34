package session

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

var header = Header{Version: 1, ID: "s-1", CreatedAt: time.UnixMilli(1700000000000).UTC(), Cwd: "/home/a/p", Parent: "s-0"}

// logOf chains drafts into a log, one millisecond apart, without holding them against the rules.
func logOf(drafts ...Draft) []Event {
	s := NewState(header)
	var events []Event
	for i, d := range drafts {
		if d.Data == nil {
			d.Data = json.RawMessage(`{}`)
		}
		e := s.Seal(d, header.CreatedAt.Add(time.Duration(i+1)*time.Millisecond))
		s.Apply(e)
		events = append(events, e)
	}
	return events
}

// TestLinkIsWhatIsDocumented computes the hashes from the words of the documentation.
func TestLinkIsWhatIsDocumented(t *testing.T) {
	events := logOf(Draft{Type: "a/b", Turn: 3, Data: json.RawMessage(`{"x":1}`)})
	of := func(s string) Hash { return sha256.Sum256([]byte(s)) }
	const ms = "\x00\x00\x01\x8b\xcf\xe5\x68" // 1700000000000 = 0x18bcfe56800, without its last byte
	wantHeader := of("cordon session 1\n" + "\x00\x00\x00\x00\x00\x00\x00\x01" + ms + "\x00" +
		"\x00\x00\x00\x00\x00\x00\x00\x03s-1" + "\x00\x00\x00\x00\x00\x00\x00\x09/home/a/p" + "\x00\x00\x00\x00\x00\x00\x00\x03s-0")
	if header.Link() != wantHeader {
		t.Errorf("header: got %v, want %v", header.Link(), wantHeader)
	}
	wantEvent := of("cordon event 1\n" + "\x00\x00\x00\x00\x00\x00\x00\x00" + ms + "\x01" + "\x00\x00\x00\x00\x00\x00\x00\x03" +
		"\x00\x00\x00\x00\x00\x00\x00\x03a/b" + "\x00\x00\x00\x00\x00\x00\x00\x07{\"x\":1}" + string(wantHeader[:]))
	if events[0].Hash != wantEvent || events[0].Prev != wantHeader {
		t.Errorf("event: got %v, want %v", events[0].Hash, wantEvent)
	}
}

func TestVerifyNamesTheFirstBadEvent(t *testing.T) {
	log := func() []Event {
		return logOf(Draft{Type: "a/b"}, Draft{Type: "a/b", Turn: 1}, Draft{Type: "a/c"}, Draft{Type: "a/b"})
	}
	if err := Verify(header, log()); err != nil {
		t.Fatalf("a good log: %v", err)
	}
	if err := Verify(header, nil); err != nil {
		t.Fatalf("an empty log: %v", err)
	}
	for _, c := range []struct {
		name   string
		change func([]Event) []Event
		seq    int64
	}{
		{"data", func(e []Event) []Event { e[1].Data = json.RawMessage(`{"a":1}`); return e }, 1},
		{"type", func(e []Event) []Event { e[2].Type = "a/d"; return e }, 2},
		{"turn", func(e []Event) []Event { e[1].Turn = 2; return e }, 1},
		{"time", func(e []Event) []Event { e[3].Time = e[3].Time.Add(time.Millisecond); return e }, 3},
		{"time below a millisecond", func(e []Event) []Event { e[3].Time = e[3].Time.Add(time.Microsecond); return e }, 3},
		{"hash", func(e []Event) []Event { e[0].Hash[5] ^= 1; return e }, 0},
		{"a new hash for a changed event", func(e []Event) []Event { e[1].Type = "x/y"; e[1].Hash = e[1].Link(); return e }, 2},
		{"one left out", func(e []Event) []Event { return slices.Delete(e, 1, 2) }, 1},
		{"one left out, renumbered", func(e []Event) []Event { e = slices.Delete(e, 1, 2); e[1].Seq = 1; e[2].Seq = 2; return e }, 1},
		{"the first left out", func(e []Event) []Event { return e[1:] }, 0},
		{"two exchanged", func(e []Event) []Event { e[1], e[2] = e[2], e[1]; return e }, 1},
		{"one twice", func(e []Event) []Event { return slices.Insert(e, 2, e[1]) }, 2},
		{"time going back", func(e []Event) []Event {
			e[3].Time = header.CreatedAt
			e[3].Hash = e[3].Link()
			return e
		}, 3},
	} {
		err := Verify(header, c.change(log()))
		if chain, ok := errors.AsType[*ChainError](err); !ok || chain.Seq != c.seq {
			t.Errorf("%s: got %v, want event %d", c.name, err, c.seq)
		}
	}
	// The log of another session, and of the same one elsewhere.
	for name, change := range map[string]func(*Header){
		"id":      func(h *Header) { h.ID = "s-2" },
		"cwd":     func(h *Header) { h.Cwd = "/" },
		"parent":  func(h *Header) { h.Parent = "" },
		"created": func(h *Header) { h.CreatedAt = h.CreatedAt.Add(time.Millisecond) },
		"version": func(h *Header) { h.Version = 2 },
	} {
		h := header
		change(&h)
		if chain, ok := errors.AsType[*ChainError](Verify(h, log())); !ok || chain.Seq != 0 {
			t.Errorf("header with another %s verifies", name)
		}
	}
	// A cut end verifies: that is what a head kept elsewhere is for.
	if err := Verify(header, log()[:2]); err != nil {
		t.Error(err)
	}
	whole := log()
	if err := VerifyFrom(2, whole[1].Hash, whole[1].Time, whole[2:]); err != nil {
		t.Error(err)
	}
}

func TestHeaderValidate(t *testing.T) {
	if err := header.Validate(); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		change func(*Header)
		want   string
	}{
		{"old", func(h *Header) { h.Version = 0 }, "has format version 0"},
		{"new", func(h *Header) { h.Version = 2 }, "has format version 2, this cordon reads up to 1"},
		{"no id", func(h *Header) { h.ID = "" }, `id ""`},
		{"path", func(h *Header) { h.ID = "../../etc" }, `id "../../etc"`},
		{"dot", func(h *Header) { h.ID = ".." }, `id ".."`},
		{"option", func(h *Header) { h.ID = "-rf" }, `id "-rf"`},
		{"long id", func(h *Header) { h.ID = strings.Repeat("a", 129) }, "up to 128"},
		{"own parent", func(h *Header) { h.Parent = h.ID }, "is the session itself"},
		{"bad parent", func(h *Header) { h.Parent = "a b" }, "is no session id"},
		{"relative", func(h *Header) { h.Cwd = "a" }, `session header cwd must be an absolute path, got "a"`},
		{"unclean", func(h *Header) { h.Cwd = "/a/../b" }, `must be canonical`},
		{"bytes", func(h *Header) { h.Cwd = "/\xff" }, "session header is not losslessly JSON-serializable"},
		{"microseconds", func(h *Header) { h.CreatedAt = h.CreatedAt.Add(time.Microsecond) }, "whole milliseconds"},
	} {
		h := header
		c.change(&h)
		if err := h.Validate(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %q", c.name, err, c.want)
		}
	}
}

func TestValidType(t *testing.T) {
	for name, want := range map[string]bool{
		"turn/start": true, "a/b": true, "tool/code-dispatch/x1": true, "9/9": true,
		"": false, "turn": false, "/a": false, "a/": false, "a//b": false, "A/b": false, "a/b c": false, "a/-b": false, "a/ü": false,
		"a/b\n": false, "a/" + strings.Repeat("b", 127): false,
	} {
		if ValidType(name) != want {
			t.Errorf("ValidType(%q) is %v", name, !want)
		}
	}
}

func TestEventJSON(t *testing.T) {
	e := logOf(Draft{Type: "a/b", Turn: 2, Data: json.RawMessage(`{"x":"\u003c"}`)})[0]
	line, err := json.Marshal(e)
	if err != nil {
		t.Fatal(err)
	}
	want := `{"seq":0,"time":1700000000001,"type":"a/b","turn":2,"data":{"x":"\u003c"},"prev":"` + e.Prev.String() + `","hash":"` + e.Hash.String() + `"}`
	if string(line) != want {
		t.Errorf("got  %s\nwant %s", line, want)
	}
	var back Event
	if err := json.Unmarshal(line, &back); err != nil || !reflect.DeepEqual(back, e) {
		t.Errorf("read back %+v, %v", back, err)
	}
	for name, change := range map[string][2]string{
		"unknown key":  {`"turn":2`, `"turn":2,"more":1`},
		"another case": {`"turn":2`, `"Turn":2`},
		"key twice":    {`"turn":2`, `"turn":2,"turn":3`},
		"no turn":      {`"turn":2,`, ``},
		"null":         {`"seq":0`, `"seq":null`},
		"negative seq": {`"seq":0`, `"seq":-1`},
		"half a turn":  {`"turn":2`, `"turn":2.5`},
		"time":         {`"time":1700000000001`, `"time":-1`},
		"type":         {`"a/b"`, `"a"`},
		"data":         {`{"x":"\u003c"}`, `[]`},
		"hash":         {e.Hash.String(), strings.ToUpper(e.Hash.String())},
		"short hash":   {e.Hash.String(), e.Hash.String()[2:]},
	} {
		bad := strings.Replace(string(line), change[0], change[1], 1)
		if bad == string(line) {
			t.Fatalf("%s: nothing was changed", name)
		}
		if err := json.Unmarshal([]byte(bad), &back); err == nil {
			t.Errorf("%s: %s was accepted", name, bad)
		}
	}
}

func FuzzEventJSON(f *testing.F) {
	for _, e := range logOf(Draft{Type: "a/b"}, Draft{Type: "turn/start", Turn: 1, Data: json.RawMessage(`{"turn":1}`)}) {
		line, err := json.Marshal(e)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(line)
	}
	f.Fuzz(func(t *testing.T, line []byte) {
		var e Event
		if json.Unmarshal(line, &e) != nil {
			return
		}
		out, err := json.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		var back Event
		if err := json.Unmarshal(out, &back); err != nil || !reflect.DeepEqual(e, back) {
			t.Fatalf("%q became %q: %v", line, out, err)
		}
		again, err := json.Marshal(back)
		if err != nil || !bytes.Equal(out, again) {
			t.Fatalf("%q then %q: %v", out, again, err)
		}
		// None of these may panic, whatever is in the log.
		s := NewState(header)
		s.Apply(e)
		s.Check(Draft{e.Type, e.Turn, e.Data})
		s.Repair()
		Verify(header, []Event{e})
	})
}

func TestOwner(t *testing.T) {
	for typ, want := range map[string]struct {
		capability string
		host       bool
	}{
		"sandbox/mode":      {"policy", false},
		"sandbox/":          {"policy", false},
		"sandbox":           {"policy", false},
		"approval/asked":    {"approval", false},
		"permission/preset": {"permission", false},
		"network/policy":    {"network", false},
		"turn/start":        {"", true},
		"tool/call":         {"", true},
		"plugin/pin":        {"", true},
		"session/end-seed":  {"", true},
		"sandboxes/mode":    {"", false},
		"my/sandbox/mode":   {"", false},
		"audit/mirrored":    {"", false},
	} {
		if c, host := Owner(typ); c != want.capability || host != want.host {
			t.Errorf("Owner(%q) is %q, %v", typ, c, host)
		}
	}
}

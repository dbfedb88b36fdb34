package session_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	rules "github.com/cordon-host/cordon/capability/session"
	"github.com/cordon-host/cordon/host/session"
	"github.com/cordon-host/cordon/host/session/store/memory"
)

var epoch = time.UnixMilli(1700000000000).UTC()

// clock counts milliseconds.
func clock() func() time.Time {
	var n atomic.Int64
	return func() time.Time { return epoch.Add(time.Duration(n.Add(1)) * time.Millisecond) }
}

func newLog(t *testing.T, store session.Store) *session.Log {
	t.Helper()
	l, err := session.Open(t.Context(), store, session.Options{Now: clock(), Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func newSession(t *testing.T, l *session.Log) *session.Session {
	t.Helper()
	s, err := l.Create(t.Context(), session.Spec{Cwd: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func mustAppend(t *testing.T, s *session.Session, d session.Draft) session.Event {
	t.Helper()
	e, err := s.Append(t.Context(), d)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func begin(t *testing.T, s *session.Session) int64 {
	t.Helper()
	n, err := s.BeginTurn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func note(n int) session.Draft { return session.Draft{Type: "test/note", Data: map[string]int{"n": n}} }

func types(events []session.Event) (list []string) {
	for _, e := range events {
		list = append(list, e.Type)
	}
	return list
}

func verify(t *testing.T, s *session.Session) {
	t.Helper()
	if err := rules.Verify(s.Header(), s.Events(0)); err != nil {
		t.Error(err)
	}
}

func TestAppendAndRead(t *testing.T) {
	l := newLog(t, memory.New())
	s := newSession(t, l)
	turn := begin(t, s)
	mustAppend(t, s, note(1))
	call := mustAppend(t, s, session.Draft{Type: rules.TypeToolCall, Turn: turn,
		Data: rules.ToolCall{Turn: turn, CallID: "c1", Name: "bash", Arguments: `{"command":"a < b"}`}})
	mustAppend(t, s, note(2))
	mustAppend(t, s, session.Draft{Type: rules.TypeToolResult, Turn: turn,
		Data: rules.ToolResult{Turn: turn, CallID: "c1", Content: []rules.Content{{Type: "text", Text: "ok"}}}})
	if err := s.EndTurn(t.Context(), turn, session.Reason{Kind: rules.EndCompleted}); err != nil {
		t.Fatal(err)
	}
	want := []string{"turn/start", "test/note", "tool/call", "test/note", "tool/result", "turn/end"}
	if d := cmp.Diff(want, types(s.Events(0))); d != "" {
		t.Error(d)
	}
	if e, ok := s.Last("test/note"); !ok || string(e.Data) != `{"n":2}` || e.Seq != 3 {
		t.Errorf("last note is %+v, %v", e, ok)
	}
	if _, ok := s.Last("test/other"); ok {
		t.Error("there is a last of a type that was never appended")
	}
	if e, _ := s.Last("tool/call"); e.Hash != call.Hash || e.Turn != turn {
		t.Errorf("last call is %+v, append returned %+v", e, call)
	}
	if got := s.OpenTurns(); len(got) != 0 {
		t.Errorf("open turns: %v", got)
	}
	verify(t, s)
}

func TestCreate(t *testing.T) {
	dir := t.TempDir()
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		t.Fatal(err)
	}
	link, file := filepath.Join(dir, "link"), filepath.Join(dir, "file")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	l := newLog(t, memory.New())
	first, err := l.Create(t.Context(), session.Spec{Cwd: link + "/.", ID: "mine"})
	if err != nil {
		t.Fatal(err)
	}
	want := session.Header{Version: 1, ID: "mine", CreatedAt: epoch.Add(time.Millisecond), Cwd: real}
	if d := cmp.Diff(want, first.Header()); d != "" {
		t.Error(d)
	}
	child, err := l.Create(t.Context(), session.Spec{Cwd: dir, Parent: "mine"})
	if err != nil {
		t.Fatal(err)
	}
	if h := child.Header(); h.Parent != "mine" || len(h.ID) != 28 || !strings.HasPrefix(h.ID, "s-") {
		t.Errorf("header of the child: %+v", h)
	}
	for _, c := range []struct {
		name string
		spec session.Spec
		want string
	}{
		{"relative", session.Spec{Cwd: "x"}, `session header cwd must be an absolute path, got "x"`},
		{"empty", session.Spec{}, `session header cwd must be an absolute path, got ""`},
		{"missing", session.Spec{Cwd: dir + "/none"}, "no such file"},
		{"a file", session.Spec{Cwd: file}, "is not a directory"},
		{"id is a path", session.Spec{Cwd: dir, ID: "../x"}, "session header id"},
		{"id taken", session.Spec{Cwd: dir, ID: "mine"}, `session "mine" exists already`},
		{"no such parent", session.Spec{Cwd: dir, Parent: "none"}, `session "none" not found`},
	} {
		if _, err := l.Create(t.Context(), c.spec); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %q", c.name, err, c.want)
		}
	}
	all, err := l.List(t.Context())
	if err != nil || len(all) != 2 || len(l.Live()) != 2 {
		t.Errorf("list: %v, %v, live: %v", all, err, l.Live())
	}
}

func TestIDsSortByTimeAndDiffer(t *testing.T) {
	l := newLog(t, memory.New())
	dir := t.TempDir()
	var ids []string
	for range 50 {
		s, err := l.Create(t.Context(), session.Spec{Cwd: dir})
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, s.ID())
	}
	if !slices.IsSorted(ids) || len(slices.Compact(slices.Clone(ids))) != len(ids) {
		t.Errorf("ids are not sorted or not unique: %v", ids)
	}
	// The random part of neighbours has nothing in common: 16 digits of 32.
	for i := range len(ids) - 1 {
		if ids[i][12:] == ids[i+1][12:] {
			t.Errorf("%s and %s have the same random part", ids[i], ids[i+1])
		}
	}
}

func TestGetUnknown(t *testing.T) {
	l := newLog(t, memory.New())
	_, err := l.Get(t.Context(), "s-none")
	if nf, ok := errors.AsType[*session.NotFoundError](err); !ok || nf.ID != "s-none" {
		t.Errorf("got %v", err)
	}
}

func TestGetIsOneSession(t *testing.T) {
	store := memory.New()
	id := newSession(t, newLog(t, store)).ID()
	l := newLog(t, store)
	got := make([]*session.Session, 16)
	var wg sync.WaitGroup
	for i := range got {
		wg.Go(func() {
			s, err := l.Get(t.Context(), id)
			if err != nil {
				t.Error(err)
			}
			got[i] = s
		})
	}
	wg.Wait()
	for _, s := range got {
		if s != got[0] {
			t.Fatal("two sessions of one id")
		}
	}
}

func TestTurns(t *testing.T) {
	l := newLog(t, memory.New())
	s := newSession(t, l)
	a, b := begin(t, s), begin(t, s)
	if a != 1 || b != 2 || !slices.Equal(s.OpenTurns(), []int64{1, 2}) {
		t.Fatalf("turns %d and %d, open %v", a, b, s.OpenTurns())
	}
	if err := s.EndTurn(t.Context(), a, session.Reason{Kind: rules.EndAborted, Reason: "client"}); err != nil {
		t.Fatal(err)
	}
	refused := func(d session.Draft, want string) {
		t.Helper()
		n := s.Len()
		_, err := s.Append(t.Context(), d)
		if rule, ok := errors.AsType[*rules.RuleError](err); !ok || !strings.Contains(rule.Error(), want) {
			t.Errorf("%s: got %v, want %q", d.Type, err, want)
		}
		if s.Len() != n {
			t.Errorf("%s was refused and is in the log", d.Type)
		}
	}
	asked := map[string]string{"id": "q1", "toolName": "bash"}
	refused(session.Draft{Type: "approval/asked", Data: asked}, "approval/asked appended outside any open turn")
	refused(session.Draft{Type: "approval/asked", Turn: a, Data: asked}, "turn 1, which is not open")
	refused(session.Draft{Type: "tool/call", Turn: 7, Data: rules.ToolCall{Turn: 7, CallID: "c", Name: "n"}}, "turn 7, which is not open")
	refused(session.Draft{Type: "tool/call", Turn: b, Data: rules.ToolCall{Turn: a, CallID: "c", Name: "n"}}, "names turn 1 in its data")
	refused(session.Draft{Type: "test/note", Turn: 9}, "turn 9, which is not open")
	refused(session.Draft{Type: "approval/decided", Turn: b, Data: map[string]string{"id": "q1", "outcome": "rejected"}}, "has no matching approval/asked")
	mustAppend(t, s, session.Draft{Type: "approval/asked", Turn: b, Data: asked})
	refused(session.Draft{Type: "approval/decided", Turn: b, Data: map[string]string{"id": "q1", "outcome": "always"}}, "unknown outcome")
	refused(session.Draft{Type: "turn/end", Turn: b, Data: rules.TurnEnd{Turn: b, Reason: rules.Reason{Kind: "completed"}}}, "without a decision")
	refused(session.Draft{Type: "Bad", Data: nil}, "is no event type")
	// A policy is switched between turns.
	mustAppend(t, s, session.Draft{Type: "approval/policy", Data: map[string]string{"policy": "never"}})
	verify(t, s)
}

func TestEndTurnClosesWhatIsOpen(t *testing.T) {
	l := newLog(t, memory.New())
	s := newSession(t, l)
	turn := begin(t, s)
	mustAppend(t, s, session.Draft{Type: "tool/call", Turn: turn, Data: rules.ToolCall{Turn: turn, CallID: "c1", Name: "bash"}})
	mustAppend(t, s, session.Draft{Type: "approval/asked", Turn: turn, Data: map[string]string{"id": "q1", "toolName": "bash", "callId": "c1"}})
	if err := s.EndTurn(t.Context(), turn, session.Reason{Kind: rules.EndError, Error: &rules.Detail{Message: "provider died", Code: "X"}}); err != nil {
		t.Fatal(err)
	}
	want := []string{"turn/start", "tool/call", "approval/asked", "approval/decided", "tool/result", "turn/end"}
	if d := cmp.Diff(want, types(s.Events(0))); d != "" {
		t.Error(d)
	}
	if e, _ := s.Last("approval/decided"); string(e.Data) != `{"id":"q1","outcome":"cancelled"}` || e.Turn != turn {
		t.Errorf("decided: %+v", e)
	}
	if err := s.EndTurn(t.Context(), turn, session.Reason{Kind: rules.EndCompleted}); err == nil {
		t.Error("a turn ended twice")
	}
}

func TestData(t *testing.T) {
	l := newLog(t, memory.New())
	s := newSession(t, l)
	for _, c := range []struct {
		name string
		data any
		want string
	}{
		{"nothing", nil, `{}`},
		{"white space", json.RawMessage(" { \"a\" : [ 1 , 2 ] } "), `{"a":[1,2]}`},
		{"bytes", []byte(`{"a":"<b>"}`), `{"a":"\u003cb\u003e"}`},
		{"big number", json.RawMessage(`{"a":12345678901234567890}`), `{"a":12345678901234567890}`},
	} {
		e, err := s.Append(t.Context(), session.Draft{Type: "test/data", Data: c.data})
		if err != nil || string(e.Data) != c.want {
			t.Errorf("%s: got %s, %v", c.name, e.Data, err)
		}
	}
	n := s.Len()
	for name, data := range map[string]any{
		"channel":   make(chan int),
		"string":    "x",
		"array":     []int{1},
		"cut off":   json.RawMessage(`{"a":1`),
		"twice":     json.RawMessage(`{"a":1,"a":2}`),
		"not UTF-8": json.RawMessage("{\"a\":\"\xff\"}"),
		"surrogate": json.RawMessage(`{"a":"\ud800"}`),
		"minus 0":   json.RawMessage(`{"a":-0}`),
		"overflow":  json.RawMessage(`{"a":1e999}`),
		"two":       json.RawMessage(`{}{}`),
	} {
		if _, err := s.Append(t.Context(), session.Draft{Type: "test/data", Data: data}); err == nil || !strings.Contains(err.Error(), `session event "test/data" carries non-JSON-serializable data`) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	big := map[string]string{"a": strings.Repeat("x", rules.MaxData)}
	if _, err := s.Append(t.Context(), session.Draft{Type: "test/data", Data: big}); err == nil {
		t.Error("an event beyond the limit was accepted")
	} else if size, ok := errors.AsType[*rules.SizeError](err); !ok || size.Max != rules.MaxData {
		t.Errorf("got %v, want a SizeError", err)
	}
	// Small as it comes, too large once escaped.
	escaped := append(append([]byte(`{"a":"`), bytes.Repeat([]byte("<"), rules.MaxData/4)...), `"}`...)
	if _, err := s.Append(t.Context(), session.Draft{Type: "test/data", Data: escaped}); err == nil {
		t.Error("an event beyond the limit was accepted")
	} else if _, ok := errors.AsType[*rules.SizeError](err); !ok {
		t.Errorf("got %v, want a SizeError", err)
	}
	if s.Len() != n {
		t.Errorf("%d refused events are in the log", s.Len()-n)
	}
	mustAppend(t, s, note(1))
	verify(t, s)
}

func TestAppendAllIsAtomic(t *testing.T) {
	l := newLog(t, memory.New())
	s := newSession(t, l)
	turn := begin(t, s)
	call := session.Draft{Type: "tool/call", Turn: turn, Data: rules.ToolCall{Turn: turn, CallID: "c1", Name: "bash"}}
	result := session.Draft{Type: "tool/result", Turn: turn, Data: rules.ToolResult{Turn: turn, CallID: "c1", Content: []rules.Content{}}}
	if _, err := s.AppendAll(t.Context(), call, result, result); err == nil {
		t.Error("a result was accepted twice")
	}
	if s.Len() != 1 {
		t.Fatalf("a refused batch left %v", types(s.Events(0)))
	}
	// What the refused batch said is forgotten: the same call id is free.
	events, err := s.AppendAll(t.Context(), call, result)
	if err != nil || len(events) != 2 || events[0].Seq != 1 || events[1].Seq != 2 {
		t.Fatalf("got %v, %v", events, err)
	}
	verify(t, s)
}

func TestClockGoingBackwards(t *testing.T) {
	now := epoch
	l, err := session.Open(t.Context(), memory.New(), session.Options{Now: func() time.Time { return now }})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	s := newSession(t, l)
	mustAppend(t, s, note(1))
	now = now.Add(-time.Hour)
	if e := mustAppend(t, s, note(2)); !e.Time.Equal(epoch) {
		t.Errorf("time went back to %v", e.Time)
	}
	verify(t, s)
}

func TestVeto(t *testing.T) {
	l := newLog(t, memory.New())
	s := newSession(t, l)
	cause := errors.New("not while a terminal is open")
	var seen []string
	remove := l.Veto(func(_ context.Context, got *session.Session, d session.Candidate) error {
		seen = append(seen, fmt.Sprintf("%s %s %v", d.Type, d.Data, got == s))
		if d.Type == "sandbox/mode" {
			return cause
		}
		return nil
	})
	mode := session.Draft{Type: "sandbox/mode", Data: map[string]string{"mode": "read-only"}}
	_, err := s.Append(t.Context(), mode)
	if v, ok := errors.AsType[*session.VetoError](err); !ok || v.Type != "sandbox/mode" || !errors.Is(err, cause) {
		t.Errorf("got %v, want a VetoError", err)
	}
	if _, err := s.AppendAll(t.Context(), note(1), mode); !errors.Is(err, cause) {
		t.Errorf("got %v", err)
	}
	if s.Len() != 0 {
		t.Errorf("vetoed and yet in the log: %v", types(s.Events(0)))
	}
	mustAppend(t, s, note(2))
	// Vetoes are not asked about what the rules refuse anyway.
	s.Append(t.Context(), session.Draft{Type: "tool/call", Data: rules.ToolCall{CallID: "c", Name: "n"}})
	want := []string{`sandbox/mode {"mode":"read-only"} true`, `test/note {"n":1} true`, `sandbox/mode {"mode":"read-only"} true`, `test/note {"n":2} true`}
	if d := cmp.Diff(want, seen); d != "" {
		t.Error(d)
	}
	remove()
	remove()
	mustAppend(t, s, mode)
	defer l.Veto(func(context.Context, *session.Session, session.Candidate) error { panic("oops") })()
	if _, err := s.Append(t.Context(), note(3)); err == nil || !strings.Contains(err.Error(), "a veto panicked: oops") {
		t.Errorf("got %v", err)
	}
	verify(t, s)
}

// TestVetoHoldsForTheLogTheEventJoins lets many appends race under a veto that allows one event of a type.
func TestVetoHoldsForTheLogTheEventJoins(t *testing.T) {
	l := newLog(t, memory.New())
	s := newSession(t, l)
	l.Veto(func(_ context.Context, s *session.Session, d session.Candidate) error {
		if _, ok := s.Last("test/once"); ok && d.Type == "test/once" {
			return errors.New("once")
		}
		return nil
	})
	var wg sync.WaitGroup
	var won atomic.Int64
	for range 16 {
		wg.Go(func() {
			if _, err := s.Append(t.Context(), session.Draft{Type: "test/once"}); err == nil {
				won.Add(1)
			}
			mustAppend(t, s, note(0))
		})
	}
	wg.Wait()
	if won.Load() != 1 || s.Len() != 17 {
		t.Errorf("%d appends won, %d events", won.Load(), s.Len())
	}
	verify(t, s)
}

func TestVetoMayUseTheSession(t *testing.T) {
	l := newLog(t, memory.New())
	s, other := newSession(t, l), newSession(t, l)
	l.Veto(func(ctx context.Context, got *session.Session, d session.Candidate) error {
		if got == s && d.Type == "test/outer" {
			got.OpenTurns()
			got.Events(0)
			if _, err := got.Append(ctx, note(1)); err == nil {
				t.Error("a veto appended to its session")
			} else if _, ok := errors.AsType[*session.ReentryError](err); !ok {
				t.Errorf("got %v, want a ReentryError", err)
			}
			_, err := other.Append(ctx, note(2))
			return err
		}
		return nil
	})
	mustAppend(t, s, session.Draft{Type: "test/outer"})
	if s.Len() != 1 || other.Len() != 1 {
		t.Errorf("%d and %d events", s.Len(), other.Len())
	}
}

func TestObserve(t *testing.T) {
	var logged bytes.Buffer
	l, err := session.Open(t.Context(), memory.New(), session.Options{Logger: slog.New(slog.NewTextHandler(&logged, nil))})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	s, other := newSession(t, l), newSession(t, l)
	l.Observe(func(context.Context, *session.Session, session.Event) { panic("oops") })
	var seen []string
	remove := l.Observe(func(ctx context.Context, got *session.Session, e session.Event) {
		if last, ok := got.Last(e.Type); !ok || last.Hash != e.Hash {
			t.Errorf("an observer was told of %s before it was in the log", e.Type)
		}
		seen = append(seen, fmt.Sprint(e.Type, e.Seq))
		// Neither directly nor by way of another session.
		if got == s {
			_, err := s.Append(ctx, note(1))
			if re, ok := errors.AsType[*session.ReentryError](err); !ok || re.Type != "test/note" || re.ID != s.ID() {
				t.Errorf("got %v, want a ReentryError", err)
			}
			if _, err := s.BeginTurn(ctx); err == nil {
				t.Error("an observer began a turn")
			}
			if err := s.EndTurn(ctx, 1, session.Reason{Kind: rules.EndCompleted}); err == nil {
				t.Error("an observer ended a turn")
			}
			if _, err := other.Append(ctx, session.Draft{Type: "test/other"}); err != nil {
				t.Error(err)
			}
		} else if _, err := s.Append(ctx, note(1)); err == nil {
			t.Error("an observer appended to its session by way of another")
		}
	})
	mustAppend(t, s, session.Draft{Type: "test/a"})
	begin(t, s)
	want := []string{"test/a0", "test/other0", "turn/start1", "test/other1"}
	if d := cmp.Diff(want, seen); d != "" {
		t.Error(d)
	}
	if n := strings.Count(logged.String(), "session observer panicked"); n != 4 {
		t.Errorf("%d panics were logged:\n%s", n, &logged)
	}
	remove()
	mustAppend(t, s, session.Draft{Type: "test/b"})
	if len(seen) != 4 {
		t.Error("a removed observer was called")
	}
	verify(t, s)
}

// TestObserverWithAForeignContext appends where re-entry cannot be seen: it must not hang, and the order must hold.
func TestObserverWithAForeignContext(t *testing.T) {
	l := newLog(t, memory.New())
	s := newSession(t, l)
	var order []int64
	done := make(chan struct{})
	l.Observe(func(_ context.Context, _ *session.Session, e session.Event) {
		order = append(order, e.Seq)
		if len(order) < 5 {
			mustAppend(t, s, note(len(order)))
		} else {
			close(done)
		}
	})
	mustAppend(t, s, note(0))
	<-done
	if !slices.Equal(order, []int64{0, 1, 2, 3, 4}) {
		t.Errorf("observed in the order %v", order)
	}
}

func TestObserversSeeTheOrderOfTheLog(t *testing.T) {
	l := newLog(t, memory.New())
	s := newSession(t, l)
	const writers, each = 8, 50
	var order []int64
	all := make(chan struct{})
	l.Observe(func(_ context.Context, _ *session.Session, e session.Event) {
		if order = append(order, e.Seq); len(order) == writers*each {
			close(all)
		}
	})
	var wg sync.WaitGroup
	for range writers {
		wg.Go(func() {
			for n := range each {
				mustAppend(t, s, note(n))
			}
		})
	}
	wg.Wait()
	<-all
	for i, seq := range order {
		if int64(i) != seq {
			t.Fatalf("event %d was shown as number %d", seq, i)
		}
	}
	verify(t, s)
}

func TestSubscribe(t *testing.T) {
	l := newLog(t, memory.New())
	s := newSession(t, l)
	mustAppend(t, s, note(0))
	mustAppend(t, s, note(1))
	const total = 200
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var wg sync.WaitGroup
	for from := range int64(4) {
		wg.Go(func() {
			want := from
			for e := range s.Subscribe(ctx, from) {
				if e.Seq != want {
					t.Errorf("from %d: got event %d, want %d", from, e.Seq, want)
				}
				if want++; want == total {
					return
				}
			}
			t.Errorf("from %d: ended at %d", from, want)
		})
	}
	for n := 2; n < total; n++ {
		mustAppend(t, s, note(n))
	}
	wg.Wait()
	// Ends of a subscription: its context, and the log.
	ended := make(chan struct{}, 2)
	go func() {
		for range s.Subscribe(ctx, total) {
		}
		ended <- struct{}{}
	}()
	cancel()
	<-ended
	go func() {
		for range s.Subscribe(context.Background(), total) {
		}
		ended <- struct{}{}
	}()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	<-ended
	for range s.Subscribe(context.Background(), total) {
		t.Error("an event after the end")
	}
}

func TestContext(t *testing.T) {
	l := newLog(t, memory.New())
	s := newSession(t, l)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Append(ctx, note(1)); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if s.Len() != 0 {
		t.Error("a cancelled append is in the log")
	}
	// A veto during which the context ends.
	ctx, cancel = context.WithCancel(t.Context())
	defer l.Veto(func(context.Context, *session.Session, session.Candidate) error { cancel(); return nil })()
	if _, err := s.Append(ctx, note(1)); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if s.Len() != 0 {
		t.Error("a cancelled append is in the log")
	}
}

func TestClosed(t *testing.T) {
	l := newLog(t, memory.New())
	s := newSession(t, l)
	mustAppend(t, s, note(1))
	for range 2 {
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	_, appendErr := s.Append(t.Context(), note(2))
	_, getErr := l.Get(t.Context(), s.ID())
	_, listErr := l.List(t.Context())
	_, _, readErr := l.Read(t.Context(), s.ID())
	_, createErr := l.Create(t.Context(), session.Spec{Cwd: t.TempDir()})
	for _, err := range []error{appendErr, getErr, listErr, readErr, createErr} {
		if !errors.Is(err, session.ErrClosed) {
			t.Errorf("got %v", err)
		}
	}
	if e, ok := s.Last("test/note"); !ok || e.Seq != 0 {
		t.Error("a closed session cannot be read")
	}
}

// broken is a store that fails on demand.
type broken struct {
	session.Store
	before, after, load error // of the next Append before or after it commits, and of every Load
	foreign             bool  // somebody else appends first
}

func (b *broken) Append(ctx context.Context, id string, at int64, events []session.Event) error {
	if err := b.before; err != nil {
		b.before = nil
		return err
	}
	if b.foreign {
		b.foreign = false
		other := events[0]
		other.Type, other.Data = "test/foreign", json.RawMessage(`{}`)
		other.Hash = other.Link()
		if err := b.Store.Append(ctx, id, at, []session.Event{other}); err != nil {
			return err
		}
	}
	err := b.Store.Append(ctx, id, at, events)
	if err == nil && b.after != nil {
		err, b.after = b.after, nil
	}
	return err
}

func (b *broken) Load(ctx context.Context, id string, from int64) (session.Header, []session.Event, error) {
	if b.load != nil {
		return session.Header{}, nil, b.load
	}
	return b.Store.Load(ctx, id, from)
}

func TestFailingStore(t *testing.T) {
	io := &session.StoreError{Store: "x", Op: "append", Kind: session.ErrIO}
	store := &broken{Store: memory.New()}
	l := newLog(t, store)
	s := newSession(t, l)
	var observed []string
	l.Observe(func(_ context.Context, _ *session.Session, e session.Event) { observed = append(observed, e.Type) })

	store.before = io
	if _, err := s.Append(t.Context(), note(1)); !errors.Is(err, session.ErrIO) || errors.Is(err, session.ErrUnsettled) {
		t.Errorf("not committed: got %v", err)
	}
	if s.Len() != 0 || len(observed) != 0 {
		t.Error("an append that failed is visible")
	}
	mustAppend(t, s, note(2))

	// Committed, although the store says otherwise: the store is asked, and its content counts.
	store.after = io
	if e := mustAppend(t, s, note(3)); e.Seq != 1 || s.Len() != 2 {
		t.Errorf("committed: got %+v, %d events", e, s.Len())
	}

	// In doubt until the store can be read again.
	store.after, store.load = io, io
	if _, err := s.Append(t.Context(), note(4)); !errors.Is(err, session.ErrUnsettled) || !errors.Is(err, session.ErrIO) {
		t.Errorf("in doubt: got %v", err)
	}
	if s.Len() != 2 {
		t.Error("an append in doubt is visible")
	}
	if _, err := s.Append(t.Context(), note(5)); !errors.Is(err, session.ErrIO) {
		t.Errorf("still in doubt: got %v", err)
	}
	store.load = nil
	if e := mustAppend(t, s, note(6)); e.Seq != 3 || s.Len() != 4 {
		t.Errorf("after the doubt: got %+v, %d events", e, s.Len())
	}

	// Somebody else appended.
	store.foreign = true
	_, err := s.Append(t.Context(), note(7))
	if c, ok := errors.AsType[*session.ConflictError](err); !ok || c.Expected != 4 || c.Actual != 5 {
		t.Errorf("conflict: got %v", err)
	}
	if e, ok := s.Last("test/foreign"); !ok || e.Seq != 4 {
		t.Error("what somebody else appended is not seen")
	}
	mustAppend(t, s, note(8))
	if d := cmp.Diff(types(s.Events(0)), observed); d != "" {
		t.Errorf("observed (+) is not the log (-):\n%s", d)
	}
	verify(t, s)
}

func TestRepairAtLoad(t *testing.T) {
	store := memory.New()
	s := newSession(t, newLog(t, store))
	a, b := begin(t, s), begin(t, s)
	mustAppend(t, s, session.Draft{Type: "tool/call", Turn: b, Data: rules.ToolCall{Turn: b, CallID: "c1", Name: "bash"}})
	mustAppend(t, s, session.Draft{Type: "approval/asked", Turn: a, Data: map[string]string{"id": "q1", "toolName": "bash", "callId": "c2"}})
	before := len(s.Events(0))

	// Another host finds this log: it does not know that the first one still runs, which the store of a real one prevents.
	l := newLog(t, store)
	l.Observe(func(context.Context, *session.Session, session.Event) { t.Error("a loaded event was observed") })
	l.Veto(func(context.Context, *session.Session, session.Candidate) error { return errors.New("no") })
	again, err := l.Get(t.Context(), s.ID())
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"approval/decided", "tool/result", "turn/end", "tool/result", "turn/end"}
	if d := cmp.Diff(want, types(again.Events(int64(before)))); d != "" {
		t.Error(d)
	}
	if len(again.OpenTurns()) != 0 {
		t.Errorf("open turns: %v", again.OpenTurns())
	}
	verify(t, again)
	stored, events, err := l.Read(t.Context(), s.ID())
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(again.Events(0), events) + cmp.Diff(s.Header(), stored); d != "" {
		t.Errorf("the repair is not on record:\n%s", d)
	}
	third, err := newLog(t, store).Get(t.Context(), s.ID())
	if err != nil || third.Len() != again.Len() {
		t.Errorf("a repaired log was repaired again: %v", err)
	}
	if n, err := third.BeginTurn(t.Context()); err != nil || n != 3 {
		t.Errorf("the next turn is %d, %v", n, err)
	}
}

func TestDamagedLog(t *testing.T) {
	store := memory.New()
	s := newSession(t, newLog(t, store))
	good := mustAppend(t, s, note(1))
	bad := good
	bad.Seq, bad.Prev, bad.Data = 1, good.Hash, json.RawMessage(`{"n":2}`)
	if err := store.Append(t.Context(), s.ID(), 1, []session.Event{bad}); err != nil {
		t.Fatal(err)
	}
	_, err := newLog(t, store).Get(t.Context(), s.ID())
	corrupt, ok := errors.AsType[*session.CorruptError](err)
	chain, ok2 := errors.AsType[*rules.ChainError](err)
	if !ok || !ok2 || corrupt.ID != s.ID() || chain.Seq != 1 {
		t.Errorf("got %v", err)
	}
}

func TestManySessionsAndWriters(t *testing.T) {
	l := newLog(t, memory.New())
	l.Veto(func(_ context.Context, s *session.Session, _ session.Candidate) error { s.Len(); return nil })
	var observed atomic.Int64
	l.Observe(func(context.Context, *session.Session, session.Event) { observed.Add(1) })
	const sessions, writers, turns = 4, 4, 10
	var wg sync.WaitGroup
	for range sessions {
		s := newSession(t, l)
		for w := range writers {
			wg.Go(func() {
				for i := range turns {
					turn, err := s.BeginTurn(t.Context())
					if err != nil {
						t.Error(err)
						return
					}
					id := fmt.Sprint("c", w, i)
					mustAppend(t, s, session.Draft{Type: "tool/call", Turn: turn, Data: rules.ToolCall{Turn: turn, CallID: id, Name: "bash"}})
					mustAppend(t, s, session.Draft{Type: "tool/result", Turn: turn, Data: rules.ToolResult{Turn: turn, CallID: id, Content: []rules.Content{}}})
					if err := s.EndTurn(t.Context(), turn, session.Reason{Kind: rules.EndCompleted}); err != nil {
						t.Error(err)
					}
				}
			})
		}
	}
	wg.Wait()
	for _, s := range l.Live() {
		if n := s.Len(); n != writers*turns*4 || len(s.OpenTurns()) != 0 {
			t.Errorf("%d events, open turns %v", n, s.OpenTurns())
		}
		verify(t, s)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if n := observed.Load(); n != sessions*writers*turns*4 {
		t.Errorf("%d events were observed", n)
	}
}

// TestNobodyWaitsForUserCode has a veto and an observer that do not return until somebody else has appended.
func TestNobodyWaitsForUserCode(t *testing.T) {
	l := newLog(t, memory.New())
	s := newSession(t, l)
	vetoing, observing, release := make(chan struct{}, 2), make(chan struct{}), make(chan struct{})
	l.Veto(func(_ context.Context, _ *session.Session, d session.Candidate) error {
		if d.Type == "test/slow-veto" {
			vetoing <- struct{}{}
			<-release
		}
		return nil
	})
	l.Observe(func(_ context.Context, _ *session.Session, e session.Event) {
		if e.Type == "test/slow-observer" {
			close(observing)
			<-release
		}
	})
	var wg sync.WaitGroup
	wg.Go(func() { mustAppend(t, s, session.Draft{Type: "test/slow-veto"}) })
	<-vetoing
	wg.Go(func() { mustAppend(t, s, session.Draft{Type: "test/slow-observer"}) })
	<-observing
	for n := range 3 {
		mustAppend(t, s, note(n))
	}
	if got := types(s.Events(0)); !slices.Equal(got, []string{"test/slow-observer", "test/note", "test/note", "test/note"}) {
		t.Errorf("the log is %v", got)
	}
	close(release)
	wg.Wait()
	if e, ok := s.Last("test/slow-veto"); !ok || e.Seq != 4 {
		t.Errorf("the vetted event is %+v, %v", e, ok)
	}
	if len(vetoing) != 1 {
		t.Error("the veto was not asked again, although the log had grown")
	}
	verify(t, s)
}

// TestWaitingEndsWithTheContext gives up while another append is being committed.
func TestWaitingEndsWithTheContext(t *testing.T) {
	store := &slow{Store: memory.New(), entered: make(chan struct{}), release: make(chan struct{})}
	l := newLog(t, store)
	s := newSession(t, l)
	var wg sync.WaitGroup
	wg.Go(func() { mustAppend(t, s, note(0)) })
	<-store.entered
	ctx, cancel := context.WithCancel(t.Context())
	gaveUp := make(chan error)
	go func() {
		_, err := s.Append(ctx, note(1))
		gaveUp <- err
	}()
	cancel()
	if err := <-gaveUp; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if s.Len() != 0 {
		t.Error("an event is visible before it is committed")
	}
	close(store.release)
	wg.Wait()
	if s.Len() != 1 {
		t.Errorf("%d events", s.Len())
	}
}

// slow is a store whose first append waits.
type slow struct {
	session.Store
	once             sync.Once
	entered, release chan struct{}
}

func (s *slow) Append(ctx context.Context, id string, at int64, events []session.Event) error {
	s.once.Do(func() { close(s.entered); <-s.release })
	return s.Store.Append(ctx, id, at, events)
}

// Package storetest is what every session store must do, as one test suite.
package storetest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	rules "github.com/cordon-host/cordon/capability/session"
	"github.com/cordon-host/cordon/host/session"
)

// A Maker makes an empty store. reopen closes it and opens the same content again; it is nil for a store that forgets.
type Maker func(t *testing.T) (store session.Store, reopen func() session.Store)

// Run runs the suite.
func Run(t *testing.T, mk Maker) {
	for _, c := range []struct {
		name string
		fn   func(*testing.T, Maker)
	}{
		{"what was created and appended is loaded", roundTrip},
		{"load from a sequence number", loadFrom},
		{"list", list},
		{"unknown session", unknown},
		{"an id is taken once", taken},
		{"append where the log does not end", conflict},
		{"of concurrent appends at one place one wins", race},
		{"concurrent sessions each get their own result", manySessions},
		{"a context that has ended", cancelled},
		{"closed", closed},
		{"content survives reopening", reopened},
		{"any string is kept", anyString},
	} {
		t.Run(c.name, func(t *testing.T) { c.fn(t, mk) })
	}
}

// Header is a valid header.
func Header(id string) session.Header {
	return session.Header{Version: rules.FormatVersion, ID: id, CreatedAt: time.UnixMilli(1700000000123).UTC(), Cwd: "/home/ann/space", Parent: ""}
}

// Events makes n chained events that continue events (or the empty log).
func Events(header session.Header, log []session.Event, n int) []session.Event {
	state := rules.NewState(header)
	for _, e := range log {
		state.Apply(e)
	}
	var out []session.Event
	for range n {
		data := json.RawMessage(fmt.Sprintf(`{"n":%d}`, state.Next()))
		e := state.Seal(rules.Draft{Type: "test/event", Data: data}, time.UnixMilli(1700000000200+state.Next()))
		state.Apply(e)
		out = append(out, e)
	}
	return out
}

func roundTrip(t *testing.T, mk Maker) {
	s, _ := mk(t)
	ctx := t.Context()
	h := Header("s-1")
	h.Parent = "s-0"
	must(t, s.Create(ctx, h))
	first := Events(h, nil, 1)
	must(t, s.Append(ctx, h.ID, 0, first))
	rest := Events(h, first, 5)
	must(t, s.Append(ctx, h.ID, 1, rest))
	same(t, s, h, append(first, rest...))
}

func loadFrom(t *testing.T, mk Maker) {
	s, _ := mk(t)
	ctx := t.Context()
	h := Header("s-1")
	must(t, s.Create(ctx, h))
	events := Events(h, nil, 5)
	must(t, s.Append(ctx, h.ID, 0, events))
	for _, c := range []struct {
		from int64
		want []session.Event
	}{{-1, events}, {0, events}, {3, events[3:]}, {4, events[4:]}, {5, nil}, {6, nil}, {1<<63 - 1, nil}} {
		got, loaded, err := s.Load(ctx, h.ID, c.from)
		if err != nil {
			t.Fatalf("from %d: %v", c.from, err)
		}
		if d := cmp.Diff(h, got) + cmp.Diff(c.want, loaded); d != "" {
			t.Errorf("from %d:\n%s", c.from, d)
		}
	}
}

func list(t *testing.T, mk Maker) {
	s, _ := mk(t)
	ctx := t.Context()
	if all, err := s.List(ctx); err != nil || len(all) != 0 {
		t.Fatalf("an empty store lists %v, %v", all, err)
	}
	a, b := Header("s-b"), Header("s-a")
	must(t, s.Create(ctx, a))
	must(t, s.Create(ctx, b))
	events := Events(a, nil, 3)
	must(t, s.Append(ctx, a.ID, 0, events))
	last := events[2]
	last.Data, last.Prev = nil, session.Hash{}
	all, err := s.List(ctx)
	must(t, err)
	want := []session.Summary{{Header: a, Events: 3, Last: last}, {Header: b}}
	if d := cmp.Diff(want, all); d != "" {
		t.Error(d)
	}
}

func unknown(t *testing.T, mk Maker) {
	s, _ := mk(t)
	ctx := t.Context()
	_, _, err := s.Load(ctx, "s-none", 0)
	notFound(t, err)
	notFound(t, s.Append(ctx, "s-none", 0, Events(Header("s-none"), nil, 1)))
}

func notFound(t *testing.T, err error) {
	t.Helper()
	if nf, ok := errors.AsType[*session.NotFoundError](err); !ok || nf.ID != "s-none" {
		t.Errorf("got %v, want a NotFoundError", err)
	}
}

func taken(t *testing.T, mk Maker) {
	s, _ := mk(t)
	ctx := t.Context()
	h := Header("s-1")
	must(t, s.Create(ctx, h))
	must(t, s.Append(ctx, h.ID, 0, Events(h, nil, 2)))
	other := h
	other.Cwd = "/elsewhere"
	if e, ok := errors.AsType[*session.ExistsError](s.Create(ctx, other)); !ok || e.ID != h.ID {
		t.Errorf("a second session with the id of the first was made")
	}
	same(t, s, h, Events(h, nil, 2))
}

func conflict(t *testing.T, mk Maker) {
	s, _ := mk(t)
	ctx := t.Context()
	h := Header("s-1")
	must(t, s.Create(ctx, h))
	events := Events(h, nil, 2)
	must(t, s.Append(ctx, h.ID, 0, events))
	for _, at := range []int64{0, 1, 3} {
		err := s.Append(ctx, h.ID, at, Events(h, events, 1))
		if c, ok := errors.AsType[*session.ConflictError](err); !ok || c.ID != h.ID || c.Expected != at || c.Actual != 2 {
			t.Errorf("append at %d: got %v, want a ConflictError", at, err)
		}
	}
	same(t, s, h, events)
}

func race(t *testing.T, mk Maker) {
	s, _ := mk(t)
	ctx := t.Context()
	h := Header("s-1")
	must(t, s.Create(ctx, h))
	const callers, rounds = 8, 20
	var log []session.Event
	for round := range rounds {
		next := Events(h, log, 1)
		errs := make([]error, callers)
		var wg sync.WaitGroup
		for i := range callers {
			wg.Go(func() { errs[i] = s.Append(ctx, h.ID, int64(round), next) })
		}
		wg.Wait()
		won := 0
		for _, err := range errs {
			if err == nil {
				won++
			} else if _, ok := errors.AsType[*session.ConflictError](err); !ok {
				t.Fatalf("got %v, want a ConflictError", err)
			}
		}
		if won != 1 {
			t.Fatalf("round %d: %d appends won", round, won)
		}
		log = append(log, next...)
	}
	same(t, s, h, log)
}

func manySessions(t *testing.T, mk Maker) {
	s, _ := mk(t)
	ctx := t.Context()
	const sessions, events = 16, 25
	var wg sync.WaitGroup
	for i := range sessions {
		wg.Go(func() {
			h := Header(fmt.Sprintf("s-%d", i))
			if err := s.Create(ctx, h); err != nil {
				t.Error(err)
				return
			}
			all := Events(h, nil, events)
			for seq := range int64(events) {
				// Every other session also does something wrong, in the same transactions as the good appends of the others.
				if i%2 == 0 {
					if err := s.Append(ctx, h.ID, seq+7, all[seq:seq+1]); err == nil {
						t.Error("an append beyond the end was accepted")
					}
				}
				if err := s.Append(ctx, h.ID, seq, all[seq:seq+1]); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	for i := range sessions {
		h := Header(fmt.Sprintf("s-%d", i))
		same(t, s, h, Events(h, nil, events))
	}
}

func cancelled(t *testing.T, mk Maker) {
	s, _ := mk(t)
	h := Header("s-1")
	must(t, s.Create(t.Context(), h))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Append(ctx, h.ID, 0, Events(h, nil, 1)); !errors.Is(err, context.Canceled) {
		t.Errorf("append: got %v", err)
	}
	if err := s.Create(ctx, Header("s-2")); !errors.Is(err, context.Canceled) {
		t.Errorf("create: got %v", err)
	}
	if _, _, err := s.Load(ctx, h.ID, 0); !errors.Is(err, context.Canceled) {
		t.Errorf("load: got %v", err)
	}
	if _, err := s.List(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("list: got %v", err)
	}
	same(t, s, h, nil)
	all, err := s.List(t.Context())
	if err != nil || len(all) != 1 {
		t.Errorf("list: %v, %v", all, err)
	}
}

func closed(t *testing.T, mk Maker) {
	s, _ := mk(t)
	ctx := t.Context()
	h := Header("s-1")
	must(t, s.Create(ctx, h))
	// Appends that race with the end either are committed or say that the store is closed.
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			if err := s.Create(ctx, Header(fmt.Sprintf("s-r%d", i))); err != nil && !errors.Is(err, session.ErrClosed) {
				t.Errorf("create: got %v, want ErrClosed", err)
			}
		})
	}
	must(t, s.Close())
	wg.Wait()
	must(t, s.Close())
	if err := s.Append(ctx, h.ID, 0, Events(h, nil, 1)); !errors.Is(err, session.ErrClosed) {
		t.Errorf("append: got %v", err)
	}
	if err := s.Create(ctx, Header("s-2")); !errors.Is(err, session.ErrClosed) {
		t.Errorf("create: got %v", err)
	}
	if _, _, err := s.Load(ctx, h.ID, 0); !errors.Is(err, session.ErrClosed) {
		t.Errorf("load: got %v", err)
	}
	if _, err := s.List(ctx); !errors.Is(err, session.ErrClosed) {
		t.Errorf("list: got %v", err)
	}
}

func reopened(t *testing.T, mk Maker) {
	s, reopen := mk(t)
	if reopen == nil {
		t.Skip("this store is not meant to keep anything")
	}
	ctx := t.Context()
	h := Header("s-1")
	must(t, s.Create(ctx, h))
	events := Events(h, nil, 3)
	must(t, s.Append(ctx, h.ID, 0, events))
	s = reopen()
	same(t, s, h, events)
	more := Events(h, events, 2)
	must(t, s.Append(ctx, h.ID, 3, more))
	s = reopen()
	same(t, s, h, append(events, more...))
}

func anyString(t *testing.T, mk Maker) {
	s, _ := mk(t)
	ctx := t.Context()
	h := Header("s-1")
	h.Cwd = "/tmp/a'b\"c;--\u2028\x01\\n%20?x=1#y/ünï"
	must(t, s.Create(ctx, h))
	state := rules.NewState(h)
	var events []session.Event
	for _, text := range []string{"", "\x00", "'; DROP TABLE event; --", "\u2028", "😀", strings.Repeat("x", 1<<20)} {
		data, err := json.Marshal(map[string]string{"text": text})
		must(t, err)
		e := state.Seal(rules.Draft{Type: "test/event", Turn: 1<<62 + 1, Data: data}, time.UnixMilli(1<<50))
		state.Apply(e)
		events = append(events, e)
	}
	must(t, s.Append(ctx, h.ID, 0, events))
	same(t, s, h, events)
}

// same checks that a session is on record exactly as it was written and that its chain holds.
func same(t *testing.T, s session.Store, header session.Header, events []session.Event) {
	t.Helper()
	h, got, err := s.Load(t.Context(), header.ID, 0)
	if err != nil {
		t.Fatal(err)
	}
	// DeepEqual first: cmp takes seconds for a long string, also for equal ones.
	if !reflect.DeepEqual(header, h) || len(events) != len(got) || len(events) > 0 && !reflect.DeepEqual(events, got) {
		t.Errorf("loaded (+) is not what was written (-):\n%s", cmp.Diff(header, h)+cmp.Diff(events, got))
	}
	if err := rules.Verify(h, got); err != nil {
		t.Error(err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

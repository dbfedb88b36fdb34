package ctxsvc

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

var (
	ping  = Event[int, string]{Name: "ping"}
	guard = Event[int, string]{Name: "guard", FailClosed: true}
)

type nextPing = func(context.Context, int) (string, error)

func base(_ context.Context, q int) (string, error) { return fmt.Sprint("base", q), nil }

// wrap registers an around listener that puts its name around the answer.
func (h *house) wrap(x *Context, name string, opts ...ListenOption) {
	h.t.Helper()
	h.ok(On(x, ping, func(ctx context.Context, q int, next func(context.Context, int) (string, error)) (string, error) {
		a, err := next(ctx, q)
		return name + "(" + a + ")", err
	}, append(opts, Label(name))...))
}

func (h *house) ping(want string, opts ...DispatchOption) {
	h.t.Helper()
	got, err := Waterfall(h.ctx, h.Context, ping, 1, base, opts...)
	if err != nil || got != want {
		h.t.Errorf("waterfall = %q, %v, want %q", got, err, want)
	}
}

func TestListenerIsAnEffect(t *testing.T) {
	h := open(t)
	e, err := h.Group("g", func(x *Context) error { h.wrap(x, "a"); h.wrap(x, "a"); return nil })
	h.ok(err)
	h.ping("a(a(base1))") // registering twice is two registrations
	h.ok(e.Dispose(h.ctx))
	h.ping("base1")
}

func TestOnceRunsOnce(t *testing.T) {
	h := open(t)
	var count atomic.Int32
	h.ok(Tap(h.Context, ping, func(ctx context.Context, q int) error {
		count.Add(1)
		Emit(ctx, h.Context, ping, q) // re-entrant
		return nil
	}, Once()))
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() { Emit(h.ctx, h.Context, ping, 1) })
	}
	wg.Wait()
	if count.Load() != 1 {
		t.Errorf("ran %d times", count.Load())
	}
	if s := h.Snapshot(); len(s.Events) != 0 || len(s.Root.Effects) != 0 {
		t.Errorf("left: %+v", s)
	}
}

func TestOnceDisposedBeforeItsTurn(t *testing.T) {
	h := open(t)
	e, err := h.Group("g", func(x *Context) error { h.wrap(x, "a", Once()); return nil })
	h.ok(err)
	h.ok(e.Dispose(h.ctx))
	h.ping("base1")
}

func TestOrder(t *testing.T) {
	h := open(t)
	h.wrap(h.Context, "terminal", Terminal())
	h.wrap(h.Context, "a")
	h.wrap(h.Context, "p1", Prepend())
	h.wrap(h.Context, "b")
	h.wrap(h.Context, "p2", Prepend())
	h.ping("p2(p1(a(b(terminal(base1)))))")
	var got []string
	for _, l := range h.Snapshot().Events[0].Listeners {
		got = append(got, l.Label)
	}
	if fmt.Sprint(got) != "[p2 p1 a b terminal]" {
		t.Errorf("snapshot order: %v", got)
	}
}

func TestTerminalIsUnique(t *testing.T) {
	h := open(t)
	e, err := h.Group("g", func(x *Context) error { h.wrap(x, "first", Terminal()); return nil })
	h.ok(err)
	second := func() error {
		return Answer(h.Context, ping, func(context.Context, int) (string, bool, error) { return "second", true, nil }, Terminal())
	}
	var te *TerminalTakenError
	if err := second(); !errors.As(err, &te) || te.Owner != "root" {
		t.Errorf("second terminal = %v", err)
	}
	h.ok(e.Dispose(h.ctx))
	h.ok(second()) // the place is free again
	h.ping("second")
}

func TestSubjects(t *testing.T) {
	for _, tt := range []struct {
		scope, subject string
		want           bool
	}{
		{"", "", true},
		{"", "mcp/a", true},
		{"mcp/a", "mcp/a", true},
		{"mcp", "mcp/a/b", true},
		{"mcp/a", "mcp/a/b", true},
		{"mcp/a", "mcp", false},
		{"mcp/a", "mcp/ab", false},
		{"mcp/a", "mcp/b", false},
		{"mcp/a", "", false},
	} {
		h := open(t)
		var j journal
		h.ok(Tap(h.Context, ping, func(context.Context, int) error { j.add("scoped"); return nil }, Subject(tt.scope)))
		h.ok(Tap(h.Context, ping, func(context.Context, int) error { j.add("global"); return nil }, Subject(tt.scope), Global()))
		h.ok(Tap(h.WithSubject(tt.scope), ping, func(context.Context, int) error { j.add("inherited"); return nil }))
		all, global := "scoped global inherited", "global"
		want := global
		if tt.want {
			want = all
		}
		if tt.subject == "" {
			Emit(h.ctx, h.Context, ping, 1)
		} else {
			Emit(h.ctx, h.Context, ping, 1, ForSubject(tt.subject))
		}
		j.want(t, want)
		// The same through a context that has the subject, in the other modes.
		x := h.WithSubject(tt.subject)
		_ = Parallel(h.ctx, x, ping, 1)
		_, _, err := Serial(h.ctx, x, ping, 1)
		h.ok(err)
		_, _, err = Bail(x, ping, 1)
		h.ok(err)
		_, err = Waterfall(h.ctx, x, ping, 1, base)
		h.ok(err)
		n := 5
		if got := strings.Count(j.String(), "global"); got != n {
			t.Errorf("%+v: global heard %d of %d", tt, got, n)
		}
		if got := strings.Count(j.String(), "scoped") == n; got != tt.want {
			t.Errorf("%+v: scoped: %s", tt, j.String())
		}
	}
}

// A plugin's subject is that of the place it was plugged in.
func TestSubjectOfAPlace(t *testing.T) {
	h := open(t)
	h.plug(h.WithSubject("mcp/a"), Plugin{Name: "p", Apply: func(x *Context, _ any) error { h.wrap(x, "a"); return nil }}, nil)
	h.quiet()
	h.ping("base1")
	h.ping("a(base1)", ForSubject("mcp/a/sub"))
}

func TestEmitContainsFailures(t *testing.T) {
	h := open(t)
	var j journal
	h.ok(Tap(h.Context, ping, func(context.Context, int) error { return errors.New("one") }, Label("one")))
	h.ok(Tap(h.Context, ping, func(context.Context, int) error { panic("two") }, Label("two")))
	h.ok(Map(h.Context, ping, func(_ context.Context, q int) (int, error) { return q + 1, nil }))
	h.ok(Tap(h.Context, ping, func(_ context.Context, q int) error { j.add("tap%d", q); return nil }))
	h.ok(Answer(h.Context, ping, func(_ context.Context, q int) (string, bool, error) { j.add("answer%d", q); return "x", true, nil }))
	h.wrap(h.Context, "around")
	h.ok(Tap(h.Context, ping, func(_ context.Context, q int) error { j.add("last%d", q); return nil }))
	Emit(h.ctx, h.Context, ping, 1)
	j.want(t, "tap2 answer2 last2")
	got := h.log.errors()
	if len(got) != 2 || !strings.Contains(got[0], "listener=one") || !strings.Contains(got[1], "listener=two") {
		t.Errorf("log: %q", got)
	}
}

func TestParallelStartsAllAndJoinsErrors(t *testing.T) {
	h := open(t)
	one, two := errors.New("one"), errors.New("two")
	var together sync.WaitGroup
	together.Add(3)
	meet := func() { together.Done(); together.Wait() } // ends only if all were started
	h.ok(Tap(h.Context, ping, func(context.Context, int) error { meet(); return one }, Label("a")))
	h.ok(Tap(h.Context, ping, func(context.Context, int) error { meet(); panic("three") }, Label("b")))
	h.ok(Tap(h.Context, ping, func(context.Context, int) error { meet(); return two }, Label("c")))
	err := Parallel(h.ctx, h.Context, ping, 1)
	var le *ListenerError
	var pe *PanicError
	if !errors.Is(err, one) || !errors.Is(err, two) || !errors.As(err, &pe) || !errors.As(err, &le) || le.Listener != "a" {
		t.Errorf("Parallel = %v", err)
	}
	if err := Parallel(h.ctx, h.Context, Event[int, int]{Name: "nobody"}, 1); err != nil {
		t.Errorf("nobody listens: %v", err)
	}
}

func TestSerialStopsAtTheFirstAnswerOrError(t *testing.T) {
	h := open(t)
	var j journal
	no := errors.New("no")
	h.ok(Answer(h.Context, ping, func(_ context.Context, q int) (string, bool, error) {
		j.add("a")
		done := make(chan struct{})
		go func() { j.add("a-done"); close(done) }()
		<-done
		return "dropped", false, nil
	}))
	h.ok(Tap(h.Context, ping, func(context.Context, int) error { j.add("tap"); return errors.New("a tap cannot stop it") }))
	h.ok(Answer(h.Context, ping, func(_ context.Context, q int) (string, bool, error) {
		j.add("b")
		switch q {
		case 1:
			return "b", true, nil
		case 2:
			return "", false, no
		}
		return "", false, nil
	}))
	h.ok(Answer(h.Context, ping, func(context.Context, int) (string, bool, error) { j.add("c"); return "", false, nil }))
	a, handled, err := Serial(h.ctx, h.Context, ping, 1)
	if a != "b" || !handled || err != nil {
		t.Errorf("Serial = %q, %v, %v", a, handled, err)
	}
	j.want(t, "a a-done tap b")
	if _, handled, err := Serial(h.ctx, h.Context, ping, 2); handled || !errors.Is(err, no) {
		t.Errorf("Serial = %v, %v", handled, err)
	}
	if a, handled, err := Serial(h.ctx, h.Context, ping, 3); a != "" || handled || err != nil {
		t.Errorf("Serial = %q, %v, %v", a, handled, err)
	}
	over, cancel := context.WithCancel(h.ctx)
	cancel()
	if _, _, err := Serial(over, h.Context, ping, 1); !errors.Is(err, context.Canceled) {
		t.Errorf("Serial with an ended context = %v", err)
	}
}

func TestBailHasAnExplicitHandled(t *testing.T) {
	h := open(t)
	score := Event[string, float64]{Name: "score"}
	h.ok(Answer(h.Context, score, func(_ context.Context, q string) (float64, bool, error) {
		switch q {
		case "zero":
			return 0, true, nil
		case "nan":
			return math.NaN(), true, nil
		}
		return 99, false, nil
	}))
	h.ok(On(h.Context, score, func(ctx context.Context, q string, next func(context.Context, string) (float64, error)) (float64, error) {
		if q == "veto" {
			return 7, nil
		}
		return next(ctx, q)
	}))
	for _, tt := range []struct {
		q       string
		want    float64
		handled bool
	}{{"zero", 0, true}, {"veto", 7, true}, {"other", 0, false}} {
		if a, handled, err := Bail(h.Context, score, tt.q); a != tt.want || handled != tt.handled || err != nil {
			t.Errorf("%s: %v, %v, %v", tt.q, a, handled, err)
		}
	}
	if a, handled, _ := Bail(h.Context, score, "nan"); !math.IsNaN(a) || !handled {
		t.Errorf("nan: %v, %v", a, handled)
	}
	empty := Event[string, string]{Name: "empty"}
	h.ok(Answer(h.Context, empty, func(context.Context, string) (string, bool, error) { return "", true, nil }))
	if a, handled, err := Bail(h.Context, empty, ""); a != "" || !handled || err != nil {
		t.Errorf("empty: %q, %v, %v", a, handled, err)
	}
}

func TestWaterfallNestsAndVetoes(t *testing.T) {
	h := open(t)
	h.wrap(h.Context, "a")
	e, err := h.Group("veto", func(x *Context) error {
		return On(x, ping, func(_ context.Context, q int, _ func(context.Context, int) (string, error)) (string, error) {
			return "veto", nil
		})
	})
	h.ok(err)
	h.wrap(h.Context, "b")
	got, err := Waterfall(h.ctx, h.Context, ping, 1, func(context.Context, int) (string, error) {
		t.Error("the base ran behind a veto")
		return "", nil
	})
	if got != "a(veto)" || err != nil {
		t.Errorf("waterfall = %q, %v", got, err)
	}
	h.ok(e.Dispose(h.ctx))
	h.ping("a(b(base1))")
}

func TestNextIsPerListenerOnceAndCarriesTheRequest(t *testing.T) {
	h := open(t)
	var j journal
	var kept nextPing
	h.ok(On(h.Context, ping, func(ctx context.Context, q int, next func(context.Context, int) (string, error)) (string, error) {
		kept = next
		a, err := next(ctx, q*10)
		for range 2 {
			if _, err := next(ctx, q); !errors.Is(err, ErrNextTwice) {
				t.Errorf("second next = %v", err)
			}
		}
		return a, err
	}))
	h.ok(Map(h.Context, ping, func(_ context.Context, q int) (int, error) { return q + 1, nil }))
	h.ok(Tap(h.Context, ping, func(_ context.Context, q int) error { j.add("tap%d", q); return nil }))
	h.wrap(h.Context, "b")
	h.ping("b(base11)")
	j.want(t, "tap11")
	if _, err := kept(h.ctx, 1); !errors.Is(err, ErrNextTwice) && !errors.Is(err, ErrNextLate) {
		t.Errorf("kept next = %v", err)
	}
	var unused nextPing
	e, err := h.Group("g", func(x *Context) error {
		return On(x, ping, func(_ context.Context, _ int, next func(context.Context, int) (string, error)) (string, error) {
			unused = next
			return "answered", nil
		}, Prepend())
	})
	h.ok(err)
	h.ping("answered")
	if _, err := unused(h.ctx, 1); !errors.Is(err, ErrNextLate) {
		t.Errorf("late next = %v", err)
	}
	h.ok(e.Dispose(h.ctx))
	j.want(t, "tap11") // nothing ran again
}

func TestConcurrentNextRunsOnce(t *testing.T) {
	h := open(t)
	h.ok(On(h.Context, ping, func(ctx context.Context, q int, next func(context.Context, int) (string, error)) (string, error) {
		answers := make(chan string, 4)
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				if a, err := next(ctx, q); err == nil {
					answers <- a
				}
			})
		}
		wg.Wait()
		return fmt.Sprint(len(answers), <-answers), nil
	}))
	h.ping("1base1")
}

func TestErrorsTravelOutwards(t *testing.T) {
	h := open(t)
	boom := errors.New("boom")
	h.ping("base1") // no listeners: the base's answer
	h.ok(On(h.Context, ping, func(ctx context.Context, q int, next func(context.Context, int) (string, error)) (string, error) {
		a, err := next(ctx, q)
		if q == 1 && err != nil {
			return "handled", nil
		}
		return a, err
	}))
	h.wrap(h.Context, "b")
	failing := func(context.Context, int) (string, error) { return "", boom }
	if a, err := Waterfall(h.ctx, h.Context, ping, 1, failing); a != "handled" || err != nil {
		t.Errorf("waterfall = %q, %v", a, err)
	}
	if _, err := Waterfall(h.ctx, h.Context, ping, 2, failing); !errors.Is(err, boom) {
		t.Errorf("waterfall = %v", err)
	}
	if _, err := Waterfall(h.ctx, h.Context, ping, 2, nil); err == nil {
		t.Error("waterfall without a base")
	}
	var pe *PanicError
	if _, err := Waterfall(h.ctx, h.Context, ping, 2, func(context.Context, int) (string, error) { panic("base") }); !errors.As(err, &pe) || pe.Fiber != "dispatcher" {
		t.Errorf("panic in the base = %v", err)
	}
}

func TestListenerPanicIsAttributed(t *testing.T) {
	for kind, register := range map[string]func(x *Context) error{
		"around": func(x *Context) error {
			return On(x, ping, func(context.Context, int, func(context.Context, int) (string, error)) (string, error) { panic("x") }, Label("bad"))
		},
		"answer": func(x *Context) error {
			return Answer(x, ping, func(context.Context, int) (string, bool, error) { panic("x") }, Label("bad"))
		},
		"map": func(x *Context) error {
			return Map(x, ping, func(context.Context, int) (int, error) { panic("x") }, Label("bad"))
		},
	} {
		h := open(t)
		h.plug(h.Context, Plugin{Name: "culprit", Apply: func(x *Context, _ any) error { return register(x) }}, nil)
		h.quiet()
		_, err := Waterfall(h.ctx, h.Context, ping, 1, base)
		var pe *PanicError
		if !errors.As(err, &pe) || pe.Fiber != "culprit" || !strings.Contains(pe.Where, "bad") || !strings.Contains(string(pe.Stack), "event_test.go") {
			t.Errorf("%s: %v", kind, err)
		}
	}
	h := open(t)
	h.ok(Tap(h.Context, ping, func(context.Context, int) error { panic("x") }, Label("bad")))
	h.ping("base1") // a tap cannot veto, not even this way
	if got := h.log.errors(); len(got) != 1 {
		t.Errorf("log: %q", got)
	}
}

func TestDispatchRunsOnASnapshot(t *testing.T) {
	h := open(t)
	var victim *Effect
	var late sync.Once
	h.ok(On(h.Context, ping, func(ctx context.Context, q int, next func(context.Context, int) (string, error)) (string, error) {
		h.ok(victim.Dispose(ctx))
		late.Do(func() { h.wrap(h.Context, "late") })
		return next(ctx, q)
	}))
	var err error
	victim, err = h.Group("victim", func(x *Context) error { h.wrap(x, "victim"); return nil })
	h.ok(err)
	h.wrap(h.Context, "b")
	h.ping("b(base1)")       // the removed one is skipped, the new one not called
	h.ping("b(late(base1))") // it is the next time
}

func TestDeadListenerFailsClosed(t *testing.T) {
	pass := func(ctx context.Context, q int, next func(context.Context, int) (string, error)) (string, error) {
		return next(ctx, q)
	}
	for _, tt := range []struct {
		name string
		kill int // which listener dies while the first runs: itself (0), one further in (1)
	}{{"parked in next", 0}, {"before its turn", 1}} {
		t.Run(tt.name, func(t *testing.T) {
			h := open(t)
			var fibers [2]*Fiber
			for i := range fibers {
				fibers[i] = h.plug(h.Context, Plugin{Name: fmt.Sprint("f", i), Apply: func(x *Context, _ any) error {
					return On(x, guard, func(ctx context.Context, q int, next func(context.Context, int) (string, error)) (string, error) {
						if i == 0 && q > 0 {
							h.ok(fibers[tt.kill].Dispose(ctx))
						}
						return pass(ctx, q, next)
					}, Label(fmt.Sprint("l", i)))
				}}, nil)
				h.quiet()
			}
			if a, err := Waterfall(h.ctx, h.Context, guard, 0, base); a != "base0" || err != nil {
				t.Fatalf("control: %q, %v", a, err)
			}
			_, err := Waterfall(h.ctx, h.Context, guard, 1, base)
			var ge *ListenerGoneError
			if !errors.As(err, &ge) || ge.Listener != fmt.Sprint("l", tt.kill) || ge.Fiber != fmt.Sprint("f", tt.kill) {
				t.Errorf("waterfall = %v", err)
			}
			if a, err := Waterfall(h.ctx, h.Context, guard, 0, base); a != "base0" || err != nil {
				t.Errorf("the next dispatch goes on without it: %q, %v", a, err)
			}
		})
	}
	t.Run("answer and map", func(t *testing.T) {
		h := open(t)
		var e *Effect
		h.ok(Map(h.Context, guard, func(ctx context.Context, q int) (int, error) { return q, e.Dispose(ctx) }))
		var err error
		e, err = h.Group("g", func(x *Context) error {
			return Answer(x, guard, func(context.Context, int) (string, bool, error) { return "allow", true, nil }, Label("gone"))
		})
		h.ok(err)
		var ge *ListenerGoneError
		if _, _, err := Serial(h.ctx, h.Context, guard, 1); !errors.As(err, &ge) {
			t.Errorf("serial = %v", err)
		}
		if err := Parallel(h.ctx, h.Context, guard, 1); err != nil { // taken from the list by now
			t.Errorf("parallel = %v", err)
		}
	})
}

// An unloading fiber's listeners leave before its first disposer runs.
func TestListenersLeaveBeforeEffectsAreUndone(t *testing.T) {
	h := open(t)
	f := h.plug(h.Context, Plugin{Name: "p", Apply: func(x *Context, _ any) error {
		h.wrap(x, "a")
		return x.Defer("resource", func(context.Context) error { h.ping("base1"); return nil })
	}}, nil)
	h.quiet()
	h.ping("a(base1)")
	h.ok(f.Dispose(h.ctx))
}

func TestCancelledDispatchEnds(t *testing.T) {
	h := open(t)
	ctx, cancel := context.WithCancel(h.ctx)
	h.ok(On(h.Context, ping, func(ctx context.Context, q int, next func(context.Context, int) (string, error)) (string, error) {
		cancel()
		return next(ctx, q)
	}))
	_, err := Waterfall(ctx, h.Context, ping, 1, func(context.Context, int) (string, error) {
		t.Error("the base ran")
		return "", nil
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("waterfall = %v", err)
	}
}

func TestDispatchObserver(t *testing.T) {
	h := open(t)
	var j journal
	h.ok(Tap(h.Context, DispatchEvent, func(_ context.Context, d Dispatch) error {
		j.add("%s-%s-%v-%s", d.Mode, d.Event, d.Request, d.Subject)
		return nil
	}))
	Emit(h.ctx, h.Context, ping, 1)
	h.ok(Parallel(h.ctx, h.Context, ping, 2))
	_, _, _ = Serial(h.ctx, h.Context, ping, 3)
	_, _, _ = Bail(h.Context, ping, 4)
	_, _ = Waterfall(h.ctx, h.Context, ping, 5, base, ForSubject("mcp/a"))
	f := h.plug(h.Context, Plugin{Name: "p", Apply: nop}, nil) // internal events are not dispatched to it
	h.ok(f.Wait(h.ctx))
	j.want(t, "emit-ping-1- parallel-ping-2- serial-ping-3- bail-ping-4- waterfall-ping-5-mcp/a")
}

func TestOneNameOneContract(t *testing.T) {
	h := open(t)
	e, err := h.Group("first", func(x *Context) error { h.wrap(x, "a"); return nil })
	h.ok(err)
	var ee *EventTypeError
	other := Event[string, string]{Name: "ping"}
	if err := Tap(h.Context, other, func(context.Context, string) error { return nil }); !errors.As(err, &ee) {
		t.Errorf("Tap = %v", err)
	}
	if _, err := Waterfall(h.ctx, h.Context, other, "x", func(_ context.Context, q string) (string, error) { return q, nil }); !errors.As(err, &ee) {
		t.Errorf("Waterfall = %v", err)
	}
	lax := Event[int, string]{Name: "ping", FailClosed: true}
	if err := Tap(h.Context, lax, func(context.Context, int) error { return nil }); !errors.As(err, &ee) {
		t.Errorf("another FailClosed: %v", err)
	}
	if err := Parallel(h.ctx, h.Context, other, "x"); !errors.As(err, &ee) {
		t.Errorf("Parallel = %v", err)
	}
	if _, _, err := Bail(h.Context, other, "x"); !errors.As(err, &ee) {
		t.Errorf("Bail = %v", err)
	}
	Emit(h.ctx, h.Context, other, "x")
	if got := h.log.errors(); len(got) != 1 || !strings.Contains(got[0], "share one Event value") {
		t.Errorf("log: %q", got)
	}
	// Without listeners the name is free: a reload may declare it anew.
	h.ok(e.Dispose(h.ctx))
	h.ok(Tap(h.Context, lax, func(context.Context, int) error { return nil }))
	if _, err := Waterfall(h.ctx, h.Context, lax, 1, base); err != nil {
		t.Errorf("Waterfall = %v", err)
	}
}

// More listeners than a dispatch has room for without allocating.
func TestManyListeners(t *testing.T) {
	h := open(t)
	want := "base1"
	for i := range 20 {
		h.wrap(h.Context, fmt.Sprint("l", i), Prepend())
		want = fmt.Sprintf("l%d(%s)", i, want)
	}
	h.ping(want)
}

// Registration, removal and dispatch at once: every dispatch sees a list that
// existed.
func TestConcurrentRegistrationAndDispatch(t *testing.T) {
	h := open(t)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 200 {
				e, err := h.Group("g", func(x *Context) error { h.wrap(x, "a"); return nil })
				h.ok(err)
				h.ok(e.Dispose(h.ctx))
			}
		})
		wg.Go(func() {
			for range 200 {
				a, err := Waterfall(h.ctx, h.Context, ping, 1, base)
				if err != nil || strings.Trim(a, "a()") != "base1" && !strings.Contains(a, "base1") {
					t.Errorf("waterfall = %q, %v", a, err)
				}
			}
		})
	}
	wg.Wait()
	h.ping("base1")
}

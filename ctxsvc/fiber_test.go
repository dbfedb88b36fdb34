package ctxsvc

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// watchStates notes the states f goes through from now on.
func (h *house) watchStates(f *Fiber, j *journal) {
	h.t.Helper()
	h.ok(Tap(h.Context, StatusEvent, func(_ context.Context, s StatusChange) error {
		if s.Fiber == f {
			j.add("%s", s.To)
		}
		return nil
	}))
}

// sw is a provider whose availability can be switched.
type sw struct {
	on  atomic.Bool
	ctx *Context
}

func (h *house) switchable(name string) *sw {
	h.t.Helper()
	s := &sw{}
	s.on.Store(true)
	f := h.plug(h.Context, Plugin{Name: "switch", Apply: func(x *Context, _ any) error {
		s.ctx = x
		return x.Provide(name, s, WithCheck(func(*Context) bool { return s.on.Load() }))
	}}, nil)
	h.ok(f.Wait(h.ctx))
	return s
}

func (s *sw) flip(h *house, on bool) {
	h.t.Helper()
	s.on.Store(on)
	h.ok(s.ctx.Recheck("db"))
}

func TestProviderLostWhileLoading(t *testing.T) {
	h := open(t)
	var j journal
	p := h.plug(h.Context, provider("db", 1), nil)
	entered, release := make(chan struct{}), make(chan struct{})
	undoing, undone := make(chan struct{}), make(chan struct{})
	var loads atomic.Int32
	f := h.plug(h.Context, Plugin{Name: "c", Inject: inject("db"), Apply: func(x *Context, _ any) error {
		if loads.Add(1) == 1 {
			h.ok(x.Defer("slow", func(context.Context) error { close(undoing); <-undone; return nil }))
			close(entered)
			<-release
			if x.Context().Err() != nil {
				t.Error("a lost provider cancelled the load")
			}
		}
		return nil
	}}, nil)
	recv(h, entered)
	h.watchStates(f, &j)
	disposed := make(chan error, 1)
	go func() { disposed <- p.Dispose(h.ctx) }()
	h.until(p, Unloading)
	h.state(f, Loading)
	close(release)
	recv(h, undoing)
	h.state(f, Unloading)
	close(undone)
	h.ok(recv(h, disposed))
	h.quiet()
	h.state(f, Pending)
	h.plug(h.Context, provider("db", 2), nil)
	h.quiet()
	h.state(f, Active)
	j.want(t, "UNLOADING PENDING LOADING ACTIVE")
}

func TestProviderReturnsWhileUnloading(t *testing.T) {
	h := open(t)
	var j journal
	s := h.switchable("db")
	undoing, undone := make(chan struct{}), make(chan struct{})
	var once sync.Once
	f := h.plug(h.Context, Plugin{Name: "c", Inject: inject("db"), Apply: func(x *Context, _ any) error {
		return x.Defer("slow", func(context.Context) error {
			once.Do(func() { close(undoing); <-undone })
			return nil
		})
	}}, nil)
	h.ok(f.Wait(h.ctx))
	h.watchStates(f, &j)
	s.flip(h, false)
	recv(h, undoing)
	s.flip(h, true)
	close(undone)
	h.quiet()
	h.state(f, Active)
	j.want(t, "UNLOADING LOADING ACTIVE")
}

func TestSameProviderLostAndBackWhileLoading(t *testing.T) {
	h := open(t)
	s := h.switchable("db")
	entered, release := make(chan struct{}), make(chan struct{})
	var loads atomic.Int32
	f := h.plug(h.Context, Plugin{Name: "c", Inject: inject("db"), Apply: func(*Context, any) error {
		if loads.Add(1) == 1 {
			close(entered)
			<-release
		}
		return nil
	}}, nil)
	recv(h, entered)
	s.flip(h, false)
	s.flip(h, true)
	close(release)
	h.quiet()
	h.state(f, Active)
	if n := loads.Load(); n != 1 {
		t.Errorf("%d loads, want 1", n)
	}
	// Control: lost and not back does end the load.
	s.flip(h, false)
	h.quiet()
	h.state(f, Pending)
}

func TestDifferentProviderWhileLoading(t *testing.T) {
	h := open(t)
	var j journal
	red, blue := h.Isolate("db", "red"), h.Isolate("db", "blue")
	h.plug(red, provider("db", "red"), nil)
	h.plug(blue, provider("db", "blue"), nil)
	h.quiet()
	place := h.Realms(map[string]string{"db": "red"})
	entered, release := make(chan struct{}, 2), make(chan struct{})
	f := h.plug(place, Plugin{Name: "c", Inject: inject("db"), Apply: func(x *Context, _ any) error {
		v, err := Get[string](x, "db")
		h.ok(err)
		j.add("start-%s", v)
		h.ok(x.Defer("stop", j.undo("stop-"+v)))
		entered <- struct{}{}
		<-release
		return nil
	}}, nil)
	recv(h, entered)
	h.ok(place.Remap(map[string]string{"db": "blue"}))
	h.state(f, Loading)
	close(release)
	h.quiet()
	h.state(f, Active)
	j.want(t, "start-red stop-red start-blue")
}

func TestProviderDisposalWaitsForDependents(t *testing.T) {
	h := open(t)
	var j journal
	p := h.plug(h.Context, Plugin{Name: "p", Apply: func(x *Context, _ any) error {
		h.ok(x.Defer("connection", j.undo("closed")))
		return x.Provide("db", 1)
	}}, nil)
	undoing, undone := make(chan struct{}), make(chan struct{})
	c := h.plug(h.Context, Plugin{Name: "c", Inject: inject("db"), Apply: func(x *Context, _ any) error {
		return x.Defer("slow", func(context.Context) error {
			close(undoing)
			<-undone
			if _, err := Get[int](x, "db"); err != nil {
				t.Errorf("the service is gone while its consumer cleans up: %v", err)
			}
			j.add("consumer")
			return nil
		})
	}}, nil)
	h.quiet()
	disposed := make(chan error, 1)
	go func() { disposed <- p.Dispose(h.ctx); j.add("returned") }()
	recv(h, undoing)
	select {
	case <-disposed:
		t.Error("disposed before its consumer was done")
	default:
	}
	close(undone)
	h.ok(recv(h, disposed))
	h.quiet()
	h.state(p, Disposed)
	h.state(c, Pending)
	if got := j.String(); !strings.HasPrefix(got, "consumer closed") {
		t.Errorf("order: %s", got)
	}
}

func TestBodyErrorIsUndoneAndLoggedOnce(t *testing.T) {
	h := open(t)
	ev := Event[int, int]{Name: "ping"}
	boom := errors.New("boom")
	p := Plugin{Name: "p", Apply: func(x *Context, config any) error {
		h.ok(Tap(x, ev, func(context.Context, int) error { return nil }))
		if config == "bad" {
			return boom
		}
		return nil
	}}
	bad, good := h.plug(h.Context, p, "bad"), h.plug(h.Context, p, "good")
	err := bad.Wait(h.ctx)
	var ae *ApplyError
	if !errors.Is(err, boom) || !errors.As(err, &ae) || ae.Fiber != "p" {
		t.Fatalf("Wait = %v", err)
	}
	h.ok(good.Wait(h.ctx))
	h.state(bad, Failed)
	h.state(good, Active)
	s := h.Snapshot()
	if n := len(s.Events[0].Listeners); n != 1 {
		t.Errorf("%d listeners, want the good one's", n)
	}
	if got := h.log.errors(); len(got) != 1 {
		t.Errorf("log: %q", got)
	}
}

func TestBodyPanicAndGoexitAreErrors(t *testing.T) {
	h := open(t)
	var pe *PanicError
	f := h.plug(h.Context, Plugin{Name: "p", Apply: func(*Context, any) error { panic("ouch") }}, nil)
	if err := f.Wait(h.ctx); !errors.As(err, &pe) || pe.Fiber != "p" || pe.Where != "apply" || len(pe.Stack) == 0 {
		t.Errorf("panic: %v", err)
	}
	h.state(f, Failed)
	g := h.plug(h.Context, Plugin{Name: "g", Apply: func(*Context, any) error { goexit(); return nil }}, nil)
	if err := g.Wait(h.ctx); !errors.Is(err, errGoexit) {
		t.Errorf("goexit: %v", err)
	}
	k := h.plug(h.Context, Plugin{Name: "k", Check: func(any) (any, error) { panic("check") }, Apply: nop}, nil)
	if err := k.Wait(h.ctx); !errors.As(err, &pe) || pe.Where != "check" {
		t.Errorf("check: %v", err)
	}
}

func TestDisposeErrorIsReportedAndDisposeSucceeds(t *testing.T) {
	h := open(t)
	boom := errors.New("boom")
	f := h.plug(h.Context, Plugin{Name: "p", Apply: func(x *Context, _ any) error {
		return x.Defer("bad", func(context.Context) error { return boom })
	}}, nil)
	h.ok(f.Wait(h.ctx))
	err := f.Dispose(h.ctx)
	var ee *EffectError
	if !errors.Is(err, boom) || !errors.As(err, &ee) || ee.Label != "bad" || ee.Fiber != "p" {
		t.Errorf("Dispose = %v", err)
	}
	h.state(f, Disposed)
	if got := h.log.errors(); len(got) != 1 {
		t.Errorf("log: %q", got)
	}
}

func TestBodyRunsOnItsOwnGoroutine(t *testing.T) {
	h := open(t)
	ids := make(chan uint64, 1)
	h.plug(h.Context, Plugin{Name: "p", Apply: func(*Context, any) error { ids <- goid(); return nil }}, nil)
	if got := recv(h, ids); got == goid() {
		t.Error("Apply ran inside Plugin")
	}
}

func TestDisposedBeforeFirstLoad(t *testing.T) {
	h := open(t)
	h.ok(On(h.Context, FiberEvent, func(ctx context.Context, ch FiberChange, next func(context.Context, FiberChange) (struct{}, error)) (struct{}, error) {
		if !ch.Disposed {
			if err := ch.Fiber.Dispose(h.ctx); !errors.Is(err, ErrWouldDeadlock) {
				t.Errorf("Dispose while being created = %v", err)
			}
		}
		return next(ctx, ch)
	}))
	f := h.plug(h.Context, Plugin{Name: "p", Apply: func(*Context, any) error { t.Error("body ran"); return nil }}, nil)
	h.quiet()
	h.state(f, Disposed)
}

func TestDisposeWhileLoading(t *testing.T) {
	h := open(t)
	var j journal
	entered := make(chan struct{})
	f := h.plug(h.Context, Plugin{Name: "p", Apply: func(x *Context, _ any) error {
		j.add("l1")
		h.ok(x.Defer("u", j.undo("u")))
		close(entered)
		<-x.Context().Done() // a dispose, unlike a lost provider, is final
		var ie *InactiveError
		if err := x.Defer("late", nil); err != nil && !errors.As(err, &ie) {
			t.Errorf("Defer = %v", err)
		}
		j.add("l2")
		return x.Context().Err()
	}}, nil)
	recv(h, entered)
	h.ok(f.Dispose(h.ctx))
	j.want(t, "l1 l2 u")
	h.state(f, Disposed)
	if got := h.log.errors(); len(got) != 0 {
		t.Errorf("a cancelled load was logged as a failure: %q", got)
	}
}

func TestDisposeJoins(t *testing.T) {
	h := open(t)
	var count atomic.Int32
	undoing, undone := make(chan struct{}), make(chan struct{})
	boom := errors.New("boom")
	f := h.plug(h.Context, Plugin{Name: "p", Apply: func(x *Context, _ any) error {
		return x.Defer("slow", func(context.Context) error { count.Add(1); close(undoing); <-undone; return boom })
	}}, nil)
	h.ok(f.Wait(h.ctx))
	results := make(chan error, 3)
	for range 3 {
		go func() { results <- f.Dispose(h.ctx) }()
	}
	recv(h, undoing)
	select {
	case <-results:
		t.Error("one dispose returned early")
	default:
	}
	close(undone)
	for range 3 {
		if err := recv(h, results); !errors.Is(err, boom) {
			t.Errorf("Dispose = %v", err)
		}
	}
	if count.Load() != 1 {
		t.Errorf("undone %d times", count.Load())
	}
	if err := f.Dispose(h.ctx); !errors.Is(err, boom) {
		t.Errorf("late Dispose = %v, want the same result", err)
	}
}

func TestDisposeOfPendingAndFailedDrains(t *testing.T) {
	h := open(t)
	var j journal
	pending := h.plug(h.Context, Plugin{Name: "pending", Inject: inject("nowhere"), Apply: nop}, nil)
	h.ok(pending.Scope().Defer("early", j.undo("pending")))
	failed := h.plug(h.Context, Plugin{Name: "failed", Apply: func(*Context, any) error { return errors.New("no") }}, nil)
	if failed.Wait(h.ctx) == nil {
		t.Fatal("did not fail")
	}
	h.ok(failed.Scope().Defer("after", j.undo("failed")))
	h.ok(pending.Dispose(h.ctx))
	h.ok(failed.Dispose(h.ctx))
	h.state(pending, Disposed)
	h.state(failed, Disposed)
	j.want(t, "pending failed")
}

func TestWaitResults(t *testing.T) {
	h := open(t)
	no := errors.New("no")
	pending := h.plug(h.Context, Plugin{Name: "a", Inject: inject("nowhere"), Apply: nop}, nil)
	h.ok(pending.Wait(h.ctx))
	if got := pending.Waiting(); len(got) != 1 || got[0] != "nowhere" {
		t.Errorf("Waiting = %v", got)
	}
	failed := h.plug(h.Context, Plugin{Name: "b", Apply: func(*Context, any) error { return no }}, nil)
	if err := failed.Wait(h.ctx); !errors.Is(err, no) {
		t.Errorf("Wait = %v", err)
	}
	gate := make(chan struct{})
	slow := h.plug(h.Context, Plugin{Name: "c", Apply: func(*Context, any) error { <-gate; return nil }}, nil)
	over, cancel := context.WithCancel(h.ctx)
	cancel()
	if err := slow.Wait(over); !errors.Is(err, context.Canceled) {
		t.Errorf("Wait with an ended context = %v", err)
	}
	close(gate)
	h.ok(slow.Wait(h.ctx))
}

func TestRestartWhileLoading(t *testing.T) {
	h := open(t)
	var j journal
	entered := make(chan struct{}, 2)
	gate := make(chan struct{})
	f := h.plug(h.Context, Plugin{Name: "p", Apply: func(x *Context, config any) error {
		j.add("load-%v", config)
		h.ok(x.Defer("u", j.undo("undo")))
		entered <- struct{}{}
		<-gate
		return nil
	}}, 7)
	recv(h, entered)
	done := make(chan error, 1)
	go func() { done <- f.Restart(h.ctx) }()
	<-f.Scope().Context().Done() // the restart was taken in
	h.state(f, Loading)
	close(gate)
	h.ok(recv(h, done))
	h.state(f, Active)
	j.want(t, "load-7 undo load-7")
}

func TestUpdateWhileLoading(t *testing.T) {
	h := open(t)
	var j journal
	entered := make(chan struct{}, 8)
	gate := make(chan struct{})
	f := h.plug(h.Context, Plugin{Name: "p", Apply: func(_ *Context, config any) error {
		j.add("%v", config)
		entered <- struct{}{}
		<-gate
		return nil
	}}, 1)
	recv(h, entered)
	over, cancel := context.WithCancel(h.ctx)
	cancel()
	for i := 2; i <= 4; i++ { // queued; the last one wins
		if err := f.Update(over, i); !errors.Is(err, context.Canceled) {
			t.Errorf("Update = %v", err)
		}
	}
	close(gate)
	h.quiet()
	h.state(f, Active)
	j.want(t, "1 4")
}

func checkPort(config any) (any, error) {
	m, ok := config.(map[string]any)
	if !ok {
		return nil, errors.New("not a map")
	}
	if _, ok := m["port"]; !ok {
		return map[string]any{"port": 80}, nil
	}
	if m["port"].(int) < 0 {
		return nil, errors.New("port: negative")
	}
	return m, nil
}

func TestInvalidUpdateChangesNothing(t *testing.T) {
	h := open(t)
	var j journal
	f := h.plug(h.Context, Plugin{Name: "p", Check: checkPort, Apply: func(_ *Context, config any) error {
		j.add("%v", config.(map[string]any)["port"])
		return nil
	}}, map[string]any{"port": 1})
	h.ok(f.Wait(h.ctx))
	var ce *ConfigError
	if err := f.Update(h.ctx, map[string]any{"port": -1}); !errors.As(err, &ce) {
		t.Errorf("Update = %v", err)
	}
	h.state(f, Active)
	h.ok(f.Restart(h.ctx))
	j.want(t, "1 1")
	h.ok(f.Update(h.ctx, map[string]any{"port": 2})) // control
	j.want(t, "1 1 2")
}

func TestFailedFiberRecovers(t *testing.T) {
	h := open(t)
	var broken atomic.Bool
	broken.Store(true)
	p := h.plug(h.Context, provider("db", 1), nil)
	f := h.plug(h.Context, Plugin{Name: "c", Inject: inject("db"), Apply: func(_ *Context, config any) error {
		if broken.Load() && config != "good" {
			return errors.New("broken")
		}
		return nil
	}}, "bad")
	h.quiet()
	h.state(f, Failed)
	h.ok(f.Update(h.ctx, "good"))
	h.state(f, Active)
	if f.Err() != nil {
		t.Errorf("error kept: %v", f.Err())
	}
	if err := f.Update(h.ctx, "bad"); err == nil {
		t.Error("Update to a failing configuration returned nil")
	}
	h.state(f, Failed)
	if err := f.Restart(h.ctx); err == nil {
		t.Error("Restart of a failing fiber returned nil")
	}
	broken.Store(false)
	h.state(f, Failed)
	h.ok(p.Restart(h.ctx)) // a bounce of the provider is reason to try again
	h.quiet()
	h.state(f, Active)
	h.ok(f.Wait(h.ctx))
}

func TestFail(t *testing.T) {
	h := open(t)
	var j journal
	gone := errors.New("process exited")
	var last *Context
	f := h.plug(h.Context, Plugin{Name: "p", Apply: func(x *Context, _ any) error {
		last = x
		h.ok(x.Defer("u", j.undo("undo")))
		return x.Provide("db", 1)
	}}, nil)
	c := h.plug(h.Context, consumer(&j, "c", "db"), nil)
	h.quiet()
	old := last
	f.Fail(gone)
	if err := f.Wait(h.ctx); !errors.Is(err, gone) {
		t.Errorf("Wait = %v", err)
	}
	h.state(f, Failed)
	h.quiet()
	h.state(c, Pending)
	h.ok(f.Restart(h.ctx))
	h.quiet()
	h.state(c, Active)
	old.Fail(gone) // an earlier load found out too late: not this one's trouble
	h.quiet()
	h.state(f, Active)
	last.Fail(nil)
	h.quiet()
	h.state(f, Failed)
	j.want(t, "c+ c- undo c+ c- undo")
}

func TestFailWhileLoading(t *testing.T) {
	h := open(t)
	gone := errors.New("gone")
	f := h.plug(h.Context, Plugin{Name: "p", Apply: func(x *Context, _ any) error {
		x.Fail(gone)
		<-x.Context().Done()
		return nil
	}}, nil)
	if err := f.Wait(h.ctx); !errors.Is(err, gone) {
		t.Errorf("Wait = %v", err)
	}
	h.state(f, Failed)
	pending := h.plug(h.Context, Plugin{Name: "q", Inject: inject("nowhere"), Apply: nop}, nil)
	var j journal
	h.ok(pending.Scope().Defer("early", j.undo("undone")))
	pending.Fail(gone)
	h.quiet()
	h.state(pending, Failed)
	j.want(t, "undone")
	h.ok(pending.Scope().Defer("for the next load", j.undo("kept")))
	h.ok(h.Provide("nowhere", 1))
	h.quiet()
	h.state(pending, Active)
	j.want(t, "undone")
}

func TestInvalidInitialConfig(t *testing.T) {
	h := open(t)
	ran := false
	p := Plugin{Name: "p", Check: checkPort, Apply: func(_ *Context, config any) error {
		ran = true
		if got := config.(map[string]any)["port"]; got != 80 {
			t.Errorf("port %v, want the default", got)
		}
		return nil
	}}
	f := h.plug(h.Context, p, "nonsense")
	var ce *ConfigError
	if err := f.Wait(h.ctx); !errors.As(err, &ce) {
		t.Errorf("Wait = %v", err)
	}
	h.state(f, Failed)
	if ran {
		t.Error("body ran with an invalid configuration")
	}
	h.ok(f.Update(h.ctx, map[string]any{}))
	if !ran {
		t.Error("body did not run")
	}
}

func TestEditedConfigSurvivesProviderBounce(t *testing.T) {
	h := open(t)
	var j journal
	p := h.plug(h.Context, provider("db", 1), nil)
	f := h.plug(h.Context, Plugin{Name: "c", Inject: inject("db"), Apply: func(_ *Context, config any) error {
		j.add("%v", config)
		return nil
	}}, "old")
	h.quiet()
	h.ok(f.Update(h.ctx, "new"))
	h.ok(p.Restart(h.ctx))
	h.quiet()
	j.want(t, "old new new")
	if f.Config() != "new" {
		t.Errorf("Config = %v", f.Config())
	}
}

func TestStatesAndUIDs(t *testing.T) {
	for i, name := range []string{"PENDING", "LOADING", "ACTIVE", "FAILED", "DISPOSED", "UNLOADING"} {
		if got := State(i).String(); got != name {
			t.Errorf("state %d is %s, want %s", i, got, name)
		}
	}
	h := open(t)
	if h.Fiber().UID() != 0 || h.Fiber().State() != Active || h.Fiber().Parent() != nil {
		t.Errorf("root: uid %d, %s", h.Fiber().UID(), h.Fiber().State())
	}
	a := h.plug(h.Context, Plugin{Name: "a", Apply: nop}, nil)
	h.ok(a.Dispose(h.ctx))
	b := h.plug(h.Context, Plugin{Apply: nop}, nil)
	if a.UID() != 1 || b.UID() != 2 {
		t.Errorf("uids %d %d, want 1 2: never reused", a.UID(), b.UID())
	}
	if b.Name() != "root" || b.Parent() != h.Fiber() {
		t.Errorf("unnamed fiber is called %q", b.Name())
	}
}

func TestRootDispose(t *testing.T) {
	h := open(t)
	var j journal
	derived := h.Isolate("db", "x")
	a := h.plug(h.Context, consumer(&j, "a"), nil)
	b := h.plug(h.Context, consumer(&j, "b"), nil)
	h.ok(a.Wait(h.ctx))
	h.ok(b.Wait(h.ctx))
	h.ok(h.Provide("one", 1))
	h.ok(h.Fiber().Dispose(h.ctx))
	h.state(a, Disposed)
	h.state(b, Disposed)
	h.state(h.Fiber(), Active)
	if got := j.String(); !strings.HasSuffix(got, "b- a-") {
		t.Errorf("order: %s", got)
	}
	h.ok(h.Provide("one", 1))
	h.ok(derived.Provide("db", 2))
	c := h.plug(h.Context, consumer(&j, "c", "one"), nil)
	h.ok(c.Wait(h.ctx))
	h.state(c, Active)
}

func TestEffectsWhilePendingAndLoading(t *testing.T) {
	h := open(t)
	var j journal
	ev := Event[int, int]{Name: "ping"}
	entered, gate := make(chan struct{}), make(chan struct{})
	f := h.plug(h.Context, Plugin{Name: "p", Inject: inject("db"), Apply: func(*Context, any) error {
		close(entered)
		<-gate
		return nil
	}}, nil)
	h.ok(f.Scope().Defer("pending", j.undo("pending")))
	h.ok(Tap(f.Scope(), ev, func(context.Context, int) error { return nil }))
	h.ok(h.Provide("db", 1))
	recv(h, entered)
	h.ok(f.Scope().Defer("loading", j.undo("loading")))
	close(gate)
	h.quiet()
	h.state(f, Active)
	h.ok(f.Dispose(h.ctx))
	j.want(t, "loading pending")
}

func TestRegistrationIsRefusedWhileUnloadingAndAfter(t *testing.T) {
	h := open(t)
	ev := Event[int, int]{Name: "ping"}
	refusals := func(x *Context) {
		t.Helper()
		nothing := func() (Disposer, error) { t.Error("set-up ran"); return nil, nil }
		attempts := map[string]error{
			"effect":  x.Effect("e", nothing),
			"defer":   x.Defer("d", nil),
			"provide": x.Provide("x", 1),
			"on":      Tap(x, ev, func(context.Context, int) error { return nil }),
			"hook": x.OnUpdate(func(context.Context, any, func(context.Context, any) error) error {
				return nil
			}),
			"watch": x.Watch("x", func(context.Context, ServiceChange) {}),
			"set":   x.Set("x", 1),
			"facts": x.SetFacts("x", 1),
		}
		_, attempts["plugin"] = x.Plugin(Plugin{Name: "late", Apply: nop}, nil)
		_, attempts["group"] = x.Group("g", func(*Context) error { t.Error("group ran"); return nil })
		_, attempts["async"] = x.EffectAsync("a", func(context.Context) (Disposer, error) { return nothing() })
		for what, err := range attempts {
			var ie *InactiveError
			if !errors.As(err, &ie) {
				t.Errorf("%s: %v, want InactiveError", what, err)
			}
		}
	}
	var kept *Context
	f := h.plug(h.Context, Plugin{Name: "p", Apply: func(x *Context, _ any) error {
		kept = x
		return x.Defer("undo", func(context.Context) error { refusals(x); return nil })
	}}, nil)
	h.ok(f.Wait(h.ctx))
	old := kept
	h.ok(f.Restart(h.ctx))
	refusals(old)
	h.ok(kept.Defer("control", nil))
	h.ok(f.Dispose(h.ctx))
	refusals(kept)
	refusals(f.Scope())
	var ie *InactiveError
	if err := f.Restart(h.ctx); !errors.As(err, &ie) {
		t.Errorf("Restart = %v", err)
	}
	if err := f.Update(h.ctx, 1); !errors.As(err, &ie) {
		t.Errorf("Update = %v", err)
	}
}

func TestPluginForms(t *testing.T) {
	h := open(t)
	var j journal
	forms := []Plugin{
		{Name: "closure", Apply: func(x *Context, _ any) error { return x.Defer("u", j.undo("closure")) }},
		{Name: "method", Apply: (&methodPlugin{&j}).apply},
	}
	for _, p := range forms {
		f := h.plug(h.Context, p, nil)
		h.ok(f.Wait(h.ctx))
		h.ok(f.Dispose(h.ctx))
	}
	j.want(t, "closure method")
}

type methodPlugin struct{ j *journal }

func (m *methodPlugin) apply(x *Context, _ any) error { return x.Defer("u", m.j.undo("method")) }

func TestInvalidPlugin(t *testing.T) {
	h := open(t)
	for _, p := range []Plugin{
		{Name: "nothing"},
		{Name: "unnamed need", Inject: inject(""), Apply: nop},
		{Name: "twice", Inject: inject("a", "a"), Apply: nop},
	} {
		var pe *PluginError
		if f, err := h.Plugin(p, nil); f != nil || !errors.As(err, &pe) {
			t.Errorf("%s: %v, %v", p.Name, f, err)
		}
	}
	if n := len(h.Snapshot().Root.Children); n != 0 {
		t.Errorf("%d fibers left", n)
	}
}

func TestNestedPluginsEndWithTheirParent(t *testing.T) {
	h := open(t)
	var j journal
	ev := Event[int, int]{Name: "ping"}
	tap := func(x *Context) { h.ok(Tap(x, ev, func(context.Context, int) error { return nil })) }
	tap(h.Context)
	var nest func(depth int) Plugin
	nest = func(depth int) Plugin {
		return Plugin{Name: fmt.Sprintf("n%d", depth), Apply: func(x *Context, _ any) error {
			tap(x)
			h.ok(x.Defer("before", j.undo(fmt.Sprintf("before%d", depth))))
			if depth > 0 {
				child, err := x.Plugin(nest(depth-1), nil)
				h.ok(err)
				h.ok(child.Wait(x.Context()))
			}
			return x.Defer("after", j.undo(fmt.Sprintf("after%d", depth)))
		}}
	}
	f := h.plug(h.Context, nest(2), nil)
	h.ok(f.Wait(h.ctx))
	if n := len(h.Snapshot().Events[0].Listeners); n != 4 {
		t.Fatalf("%d listeners, want 4", n)
	}
	before := fmt.Sprintf("%+v", shape(h.Snapshot()))
	h.ok(f.Dispose(h.ctx))
	if n := len(h.Snapshot().Events[0].Listeners); n != 1 {
		t.Errorf("%d listeners, want 1", n)
	}
	j.want(t, "after2 after1 after0 before0 before1 before2")
	f = h.plug(h.Context, nest(2), nil)
	h.ok(f.Wait(h.ctx))
	if after := fmt.Sprintf("%+v", shape(h.Snapshot())); after != before {
		t.Errorf("registering again gives\n%s\nbefore it was\n%s", after, before)
	}
}

// shape is a snapshot without its numbers.
func shape(s Snapshot) Snapshot {
	var fiber func(f *FiberInfo)
	var effects func(es []EffectInfo)
	effects = func(es []EffectInfo) {
		for i := range es {
			es[i].Fiber = 0
			effects(es[i].Children)
		}
	}
	fiber = func(f *FiberInfo) {
		f.UID = 0
		effects(f.Effects)
		for i := range f.Needs {
			f.Needs[i].Provider = 0
		}
		for i := range f.Children {
			fiber(&f.Children[i])
		}
	}
	fiber(&s.Root)
	for i := range s.Events {
		for k := range s.Events[i].Listeners {
			s.Events[i].Listeners[k].Fiber = 0
		}
	}
	for i := range s.Services {
		s.Services[i].Provider = 0
		for k := range s.Services[i].Dependents {
			s.Services[i].Dependents[k].UID = 0
		}
	}
	return s
}

func TestChildFailureIsIsolatedUnlessAwaited(t *testing.T) {
	h := open(t)
	no := errors.New("no")
	bad := Plugin{Name: "bad", Apply: func(*Context, any) error { return no }}
	parent := func(await bool) Plugin {
		return Plugin{Name: "parent", Apply: func(x *Context, _ any) error {
			child, err := x.Plugin(bad, nil)
			h.ok(err)
			if await {
				return child.Wait(x.Context())
			}
			return nil
		}}
	}
	careless, careful := h.plug(h.Context, parent(false), nil), h.plug(h.Context, parent(true), nil)
	h.quiet()
	h.state(careless, Active)
	h.state(careful, Failed)
	if !errors.Is(careful.Err(), no) {
		t.Errorf("Err = %v", careful.Err())
	}
}

func TestCreationObserverMayRefuse(t *testing.T) {
	h := open(t)
	no := errors.New("not here")
	var told journal
	h.ok(On(h.Context, FiberEvent, func(ctx context.Context, ch FiberChange, next func(context.Context, FiberChange) (struct{}, error)) (struct{}, error) {
		if !ch.Disposed && ch.Fiber.Name() == "unwanted" {
			return struct{}{}, no
		}
		return next(ctx, ch)
	}))
	h.ok(Tap(h.Context, FiberEvent, func(_ context.Context, ch FiberChange) error {
		if ch.Disposed {
			panic("observer of the disposal")
		}
		return nil
	}))
	h.ok(Tap(h.Context, FiberEvent, func(_ context.Context, ch FiberChange) error {
		if ch.Disposed {
			told.add("%s", ch.Fiber.Name())
		}
		return nil
	}))
	if f, err := h.Plugin(Plugin{Name: "unwanted", Apply: func(*Context, any) error { t.Error("body ran"); return nil }}, nil); f != nil || !errors.Is(err, no) {
		t.Errorf("Plugin = %v, %v", f, err)
	}
	if n := len(h.Snapshot().Root.Children); n != 0 {
		t.Errorf("%d fibers left", n)
	}
	f := h.plug(h.Context, Plugin{Name: "welcome", Apply: nop}, nil)
	h.ok(f.Wait(h.ctx))
	h.ok(f.Dispose(h.ctx))
	h.quiet()
	told.want(t, "unwanted welcome")
}

func TestCreationObserverMayAddNeeds(t *testing.T) {
	h := open(t)
	h.ok(Tap(h.Context, FiberEvent, func(_ context.Context, ch FiberChange) error {
		if !ch.Disposed {
			if err := ch.Fiber.AddNeed(Need{Name: "db"}); err != nil {
				return err
			}
			var pe *PluginError
			if err := ch.Fiber.AddNeed(Need{Name: "db"}); !errors.As(err, &pe) {
				t.Errorf("second AddNeed = %v", err)
			}
			return ch.Fiber.AddNeed(Need{Name: "cache"})
		}
		return nil
	}))
	f := h.plug(h.Context, Plugin{Name: "p", Apply: func(x *Context, _ any) error {
		_, err := Get[int](x, "cache")
		return err
	}}, nil)
	h.quiet()
	h.state(f, Pending)
	h.ok(h.Provide("db", 1))
	h.quiet()
	h.state(f, Pending)
	h.ok(h.Provide("cache", 2))
	h.quiet()
	h.state(f, Active)
	var ie *InactiveError
	if err := f.AddNeed(Need{Name: "late"}); !errors.As(err, &ie) {
		t.Errorf("AddNeed = %v", err)
	}
}

func TestParentJoinsCleanupOfItsChild(t *testing.T) {
	h := open(t)
	undoing, undone := make(chan struct{}), make(chan struct{})
	var child *Fiber
	parent := h.plug(h.Context, Plugin{Name: "parent", Apply: func(x *Context, _ any) (err error) {
		child, err = x.Plugin(Plugin{Name: "child", Apply: func(x *Context, _ any) error {
			return x.Defer("slow", func(context.Context) error { close(undoing); <-undone; return nil })
		}}, nil)
		h.ok(err)
		return child.Wait(x.Context())
	}}, nil)
	h.ok(parent.Wait(h.ctx))
	first := make(chan error, 1)
	go func() { first <- child.Dispose(h.ctx) }()
	recv(h, undoing)
	second := make(chan error, 1)
	go func() { second <- parent.Dispose(h.ctx) }()
	h.until(parent, Unloading)
	select {
	case <-second:
		t.Error("the parent did not wait")
	default:
	}
	close(undone)
	h.ok(recv(h, first))
	h.ok(recv(h, second))
	h.state(child, Disposed)
	h.state(parent, Disposed)
}

func TestUpdateHooks(t *testing.T) {
	h := open(t)
	var j journal
	veto := errors.New("veto")
	f := h.plug(h.Context, Plugin{Name: "p", Apply: func(x *Context, config any) error {
		j.add("load-%v", config)
		gen := config
		return x.OnUpdate(func(ctx context.Context, config any, next func(context.Context, any) error) error {
			switch config {
			case "veto":
				return veto
			case "in place":
				j.add("hook-of-%v", gen)
				return nil
			case "changed":
				return next(ctx, "rewritten")
			}
			return next(ctx, config)
		})
	}}, "one")
	h.ok(f.Wait(h.ctx))
	if err := f.Update(h.ctx, "veto"); !errors.Is(err, veto) {
		t.Errorf("Update = %v", err)
	}
	if f.Config() != "one" {
		t.Errorf("a vetoed configuration was stored: %v", f.Config())
	}
	h.ok(f.Update(h.ctx, "in place"))
	if f.Config() != "in place" {
		t.Errorf("an applied configuration was not stored: %v", f.Config())
	}
	h.ok(f.Update(h.ctx, "two"))
	h.ok(f.Update(h.ctx, "in place")) // generation two answers, and alone
	h.ok(f.Update(h.ctx, "changed"))
	j.want(t, "load-one hook-of-one load-two hook-of-two load-rewritten")
	// Somebody else's hook does not hear it; a global observer does.
	other := h.plug(h.Context, Plugin{Name: "other", Apply: nop}, nil)
	h.ok(other.Wait(h.ctx))
	var seen journal
	h.ok(Tap(h.Context, UpdateEvent, func(_ context.Context, u Update) error { seen.add("%s=%v", u.Fiber.Name(), u.Config); return nil }))
	h.ok(other.Update(h.ctx, "veto"))
	seen.want(t, "other=veto")
}

func TestConfigEventRewritesBeforeCheck(t *testing.T) {
	h := open(t)
	h.ok(On(h.Context, ConfigEvent, func(ctx context.Context, u Update, next func(context.Context, Update) (any, error)) (any, error) {
		if u.Config == "refuse" {
			return nil, errors.New("no")
		}
		return next(ctx, Update{Fiber: u.Fiber, Config: map[string]any{"port": 8080}})
	}))
	f := h.plug(h.Context, Plugin{Name: "p", Check: checkPort, Apply: func(_ *Context, config any) error {
		if got := config.(map[string]any)["port"]; got != 8080 {
			t.Errorf("port %v", got)
		}
		return nil
	}}, "expression")
	h.ok(f.Wait(h.ctx))
	var ce *ConfigError
	g := h.plug(h.Context, Plugin{Name: "q", Apply: nop}, "refuse")
	if err := g.Wait(h.ctx); !errors.As(err, &ce) {
		t.Errorf("Wait = %v", err)
	}
}

func TestAbandonedBody(t *testing.T) {
	h := open(t, WithStopTimeout(time.Millisecond))
	entered, gate := make(chan struct{}), make(chan struct{})
	late := make(chan error, 1)
	var j journal
	f := h.plug(h.Context, Plugin{Name: "p", Apply: func(x *Context, _ any) error {
		h.ok(x.Defer("u", j.undo("undone")))
		close(entered)
		<-gate // deaf to its context
		late <- x.Defer("late", j.undo("never"))
		return nil
	}}, nil)
	recv(h, entered)
	h.ok(f.Dispose(h.ctx))
	h.state(f, Disposed)
	if n := h.Snapshot().Abandoned; n != 1 {
		t.Errorf("%d abandoned calls shown, want 1", n)
	}
	close(gate)
	var ie *InactiveError
	if err := recv(h, late); !errors.As(err, &ie) {
		t.Errorf("late registration = %v", err)
	}
	j.want(t, "undone")
	if got := h.log.errors(); len(got) != 1 {
		t.Errorf("log: %q", got)
	}
}

func TestAudit(t *testing.T) {
	h := open(t)
	h.ok(h.Audit())
	no := errors.New("no")
	for _, p := range []Plugin{
		{Name: "a", Inject: inject("y"), Provides: []string{"x"}, Apply: nop},
		{Name: "b", Inject: inject("x"), Provides: []string{"y"}, Apply: nop},
		{Name: "c", Inject: inject("nowhere"), Apply: nop},
		{Name: "d", Apply: func(*Context, any) error { return no }},
		{Name: "e", Inject: inject("made-by-d"), Apply: nop},
	} {
		h.plug(h.Context, p, nil)
	}
	h.plug(h.Isolate("inside", "red"), provider("inside", 1), nil)
	h.plug(h.Context, Plugin{Name: "f", Inject: inject("inside"), Apply: nop}, nil)
	h.quiet()
	err := h.Audit()
	var ce *CycleError
	var ue *UnmetError
	if !errors.As(err, &ce) || strings.Join(ce.Path, ">") != "a>b>a" {
		t.Errorf("cycle: %v", err)
	}
	if !errors.As(err, &ue) || !errors.Is(err, no) {
		t.Errorf("Audit = %v", err)
	}
	for _, want := range []string{
		"dependency cycle: a → b → a",
		`a: waiting: service "y": waits for itself: a → b → a`,
		`c: waiting: service "nowhere": no provider`,
		`f: waiting: service "inside": no provider in the common realm; provider-inside provides it in realm red`,
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("audit lacks %q:\n%v", want, err)
		}
	}
	if s := h.Snapshot(); len(s.Cycles) != 1 {
		t.Errorf("cycles: %v", s.Cycles)
	}
}

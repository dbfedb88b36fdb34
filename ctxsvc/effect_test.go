package ctxsvc

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

func TestGroupIsUndoneNewestFirst(t *testing.T) {
	h := open(t)
	var j journal
	e, err := h.Group("g", func(x *Context) error {
		for _, n := range []string{"1", "2", "3"} {
			h.ok(x.Defer(n, j.undo(n)))
		}
		return nil
	})
	h.ok(err)
	h.ok(e.Dispose(h.ctx))
	j.want(t, "3 2 1")
	h.ok(e.Dispose(h.ctx)) // again: joins what has happened
	j.want(t, "3 2 1")
}

// Disposers never overlap: in a group, and at fiber level too, where the
// reference starts all at once.
func TestDisposersAreStrictlySequential(t *testing.T) {
	h := open(t)
	var running atomic.Int32
	var j journal
	careful := func(name string) Disposer {
		return func(context.Context) error {
			if running.Add(1) != 1 {
				t.Errorf("%s overlaps another disposer", name)
			}
			done := make(chan struct{})
			go func() { close(done) }()
			<-done
			j.add("%s", name)
			running.Add(-1)
			return nil
		}
	}
	f := h.plug(h.Context, Plugin{Name: "p", Apply: func(x *Context, _ any) error {
		h.ok(x.Defer("1", careful("1")))
		_, err := x.Group("g", func(x *Context) error {
			h.ok(x.Defer("2", careful("2")))
			return x.Defer("3", careful("3"))
		})
		h.ok(err)
		_, err = x.Plugin(Plugin{Name: "child", Apply: func(x *Context, _ any) error { return x.Defer("4", careful("4")) }}, nil)
		h.ok(err)
		return x.Defer("5", careful("5"))
	}}, nil)
	h.quiet()
	h.ok(f.Dispose(h.ctx))
	j.want(t, "5 4 3 2 1")
}

func TestEffectTree(t *testing.T) {
	h := open(t)
	ev := Event[int, int]{Name: "ping"}
	f := h.plug(h.Context, Plugin{Name: "p", Apply: func(x *Context, _ any) error {
		h.ok(x.Defer("alone", nil))
		_, err := x.Group("outer", func(x *Context) error {
			_, err := x.Group("inner", func(x *Context) error { return x.Provide("db", 1) })
			h.ok(err)
			return Tap(x, ev, func(context.Context, int) error { return nil })
		})
		return err
	}}, nil)
	h.ok(f.Wait(h.ctx))
	var draw func(es []EffectInfo) string
	draw = func(es []EffectInfo) string {
		var parts []string
		for _, e := range es {
			s := e.Kind + ":" + e.Label
			if len(e.Children) > 0 {
				s += "(" + draw(e.Children) + ")"
			}
			parts = append(parts, s)
		}
		return strings.Join(parts, " ")
	}
	got := draw(h.Snapshot().Root.Children[0].Effects)
	if want := "effect:alone group:outer(group:inner(service:db) listener:ping)"; got != want {
		t.Errorf("tree\n got %s\nwant %s", got, want)
	}
}

func TestDisposalWaitsForAsyncSetup(t *testing.T) {
	for _, how := range []string{"effect", "fiber"} {
		t.Run(how, func(t *testing.T) {
			h := open(t)
			var j journal
			started := make(chan struct{})
			var e *Effect
			f := h.plug(h.Context, Plugin{Name: "p", Apply: func(x *Context, _ any) (err error) {
				e, err = x.EffectAsync("slow", func(ctx context.Context) (Disposer, error) {
					close(started)
					<-ctx.Done()
					j.add("set-up")
					return j.undo("undone"), nil
				})
				return err
			}}, nil)
			h.ok(f.Wait(h.ctx)) // ACTIVE does not wait for the asynchronous set-up
			h.state(f, Active)
			recv(h, started)
			if how == "effect" {
				h.ok(e.Dispose(h.ctx))
				h.state(f, Active)
			} else {
				h.ok(f.Dispose(h.ctx))
			}
			j.want(t, "set-up undone")
		})
	}
}

func TestAsyncSequenceEndsAtItsNextStep(t *testing.T) {
	h := open(t)
	var j journal
	two := make(chan struct{})
	e, err := h.GroupAsync("steps", func(x *Context) error {
		for _, n := range []string{"1", "2", "3", "4"} {
			if err := x.Effect(n, func() (Disposer, error) {
				j.add("%s", n)
				if n == "2" {
					close(two)
					<-x.Context().Done()
				}
				return j.undo("-" + n), nil
			}); err != nil {
				var ie *InactiveError
				if n != "2" && n != "3" || !errors.As(err, &ie) {
					t.Errorf("step %s: %v", n, err)
				}
				return err
			}
		}
		return nil
	})
	h.ok(err)
	recv(h, two)
	if err := e.Dispose(h.ctx); err != nil && !errors.As(err, new(*EffectError)) {
		t.Errorf("Dispose = %v", err)
	}
	j.want(t, "1 2 -2 -1")
	h.state(h.Fiber(), Active)
}

func TestAwaitAsyncThenDispose(t *testing.T) {
	h := open(t)
	var j journal
	gate := make(chan struct{})
	j.add("1")
	e, err := h.GroupAsync("g", func(x *Context) error {
		<-gate
		j.add("3")
		h.ok(x.Defer("a", j.undo("6")))
		return x.Defer("b", j.undo("5"))
	})
	h.ok(err)
	j.add("2")
	close(gate)
	h.ok(e.Wait(h.ctx))
	j.add("4")
	h.ok(e.Dispose(h.ctx))
	j.want(t, "1 2 3 4 5 6")
}

func TestSetupErrorUndoesAndIsReturned(t *testing.T) {
	h := open(t)
	var j journal
	boom := errors.New("boom")
	e, err := h.Group("g", func(x *Context) error {
		h.ok(x.Defer("1", j.undo("1")))
		h.ok(x.Defer("2", func(context.Context) error { j.add("2"); return errors.New("undo too") }))
		return boom
	})
	var ee *EffectError
	if e != nil || !errors.Is(err, boom) || !errors.As(err, &ee) || ee.Stage != "set-up" {
		t.Errorf("Group = %v, %v", e, err)
	}
	if !strings.Contains(err.Error(), "undo too") {
		t.Errorf("the failed undo is not reported: %v", err)
	}
	j.want(t, "2 1")
	if err := h.Effect("e", func() (Disposer, error) { return nil, boom }); !errors.Is(err, boom) {
		t.Errorf("Effect = %v", err)
	}
	var pe *PanicError
	if err := h.Effect("e", func() (Disposer, error) { panic("set-up") }); !errors.As(err, &pe) {
		t.Errorf("Effect = %v", err)
	}
	if es := h.Snapshot().Root.Effects; len(es) != 0 {
		t.Errorf("left: %v", es)
	}
}

func TestAsyncSetupErrorFailsTheFiber(t *testing.T) {
	h := open(t)
	var j journal
	boom := errors.New("boom")
	gate := make(chan struct{})
	var e *Effect
	f := h.plug(h.Context, Plugin{Name: "p", Apply: func(x *Context, _ any) (err error) {
		h.ok(x.Defer("older", j.undo("older")))
		e, err = x.GroupAsync("g", func(x *Context) error {
			h.ok(x.Defer("1", j.undo("1")))
			<-gate
			return boom
		})
		return err
	}}, nil)
	h.ok(f.Wait(h.ctx))
	h.state(f, Active)
	close(gate)
	if err := e.Wait(h.ctx); !errors.Is(err, boom) {
		t.Errorf("effect Wait = %v", err)
	}
	h.until(f, Failed)
	if err := f.Wait(h.ctx); !errors.Is(err, boom) {
		t.Errorf("Wait = %v", err)
	}
	j.want(t, "1 older")
	if got := h.log.errors(); len(got) != 1 {
		t.Errorf("log: %q", got)
	}
}

func TestAsyncSetupErrorOfTheRootIsLogged(t *testing.T) {
	h := open(t)
	boom := errors.New("boom")
	e, err := h.EffectAsync("e", func(context.Context) (Disposer, error) { return nil, boom })
	h.ok(err)
	if err := e.Wait(h.ctx); !errors.Is(err, boom) {
		t.Errorf("Wait = %v", err)
	}
	if err := e.Dispose(h.ctx); !errors.Is(err, boom) { // undone already
		t.Errorf("Dispose = %v", err)
	}
	for h.ctx.Err() == nil && len(h.log.errors()) == 0 {
		runtime.Gosched()
	}
	h.state(h.Fiber(), Active)
}

// A restart asked for while an effect of the fiber sets up, undoes, or rolls
// back after a failure takes its turn after it.
func TestRestartWaitsForSetupAndRollback(t *testing.T) {
	h := open(t)
	var loads atomic.Int32
	var x1 *Context
	f := h.plug(h.Context, Plugin{Name: "p", Apply: func(x *Context, _ any) error {
		if loads.Add(1) == 1 {
			x1 = x
		}
		return nil
	}}, nil)
	h.ok(f.Wait(h.ctx))
	inSetup, finishSetup := make(chan struct{}), make(chan struct{})
	inUndo, finishUndo := make(chan struct{}), make(chan struct{})
	boom := errors.New("boom")
	setup := make(chan error, 1)
	go func() {
		_, err := x1.Group("g", func(x *Context) error {
			h.ok(x.Defer("1", func(context.Context) error { close(inUndo); <-finishUndo; return nil }))
			close(inSetup)
			<-finishSetup
			return boom
		})
		setup <- err
	}()
	recv(h, inSetup)
	restarted := make(chan error, 1)
	go func() { restarted <- f.Restart(h.ctx) }()
	h.until(f, Unloading)
	close(finishSetup)
	recv(h, inUndo)
	select {
	case <-restarted:
		t.Error("restarted during the rollback")
	default:
	}
	if loads.Load() != 1 {
		t.Error("loaded during the rollback")
	}
	close(finishUndo)
	h.ok(recv(h, restarted))
	if err := recv(h, setup); !errors.Is(err, boom) {
		t.Errorf("Group = %v", err)
	}
	if loads.Load() != 2 {
		t.Errorf("%d loads", loads.Load())
	}
}

func TestEveryDisposerIsAttempted(t *testing.T) {
	h := open(t)
	var j journal
	one, three := errors.New("one"), errors.New("three")
	e, err := h.Group("g", func(x *Context) error {
		h.ok(x.Defer("1", func(context.Context) error { j.add("1"); return one }))
		h.ok(x.Defer("2", func(context.Context) error { j.add("2"); panic("two") }))
		h.ok(x.Defer("3", func(context.Context) error { j.add("3"); return three }))
		return x.Defer("4", func(context.Context) error { j.add("4"); goexit(); return nil })
	})
	h.ok(err)
	err = e.Dispose(h.ctx)
	var pe *PanicError
	if !errors.Is(err, one) || !errors.Is(err, three) || !errors.Is(err, errGoexit) || !errors.As(err, &pe) || pe.Value != "two" {
		t.Errorf("Dispose = %v", err)
	}
	j.want(t, "4 3 2 1")
	if got := h.log.errors(); len(got) != 4 {
		t.Errorf("%d records: %q", len(got), got)
	}
}

func TestHangingDisposerIsLeftBehind(t *testing.T) {
	h := open(t, WithUndoTimeout(time.Millisecond))
	var j journal
	gate := make(chan struct{})
	f := h.plug(h.Context, Plugin{Name: "p", Apply: func(x *Context, _ any) error {
		h.ok(x.Defer("older", j.undo("older")))
		h.ok(x.Defer("polite", func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }))
		return x.Defer("deaf", func(context.Context) error { <-gate; return nil })
	}}, nil)
	h.ok(f.Wait(h.ctx))
	err := f.Dispose(h.ctx)
	var te *TimeoutError
	if !errors.As(err, &te) || te.What != "undo" || !te.Timeout() {
		t.Errorf("Dispose = %v", err)
	}
	j.want(t, "older")
	h.state(f, Disposed)
	if h.Snapshot().Abandoned < 1 {
		t.Error("the abandoned disposer is not shown")
	}
	close(gate)
}

func TestDeadlineOfOneEffect(t *testing.T) {
	h := open(t)
	var long, short time.Time
	note := func(at *time.Time) Disposer {
		return func(ctx context.Context) error { *at, _ = ctx.Deadline(); return nil }
	}
	e, err := h.Group("g", func(x *Context) error {
		h.ok(x.Defer("long", note(&long), UndoWithin(time.Hour)))
		return x.Effect("short", func() (Disposer, error) { return note(&short), nil })
	})
	h.ok(err)
	h.ok(e.Dispose(h.ctx))
	if d := long.Sub(short); d < 50*time.Minute {
		t.Errorf("the longer deadline is %s later", d)
	}
	e, err = h.EffectAsync("deaf", func(context.Context) (Disposer, error) {
		return func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }, nil
	}, UndoWithin(time.Millisecond))
	h.ok(err)
	h.ok(e.Wait(h.ctx))
	if err := e.Dispose(h.ctx); err == nil {
		t.Error("a disposer beyond its deadline is not reported")
	}
}

func TestHangingSetupIsLeftBehindAndUndoneLate(t *testing.T) {
	h := open(t, WithStopTimeout(time.Millisecond))
	undone := make(chan struct{})
	started, gate := make(chan struct{}), make(chan struct{})
	f := h.plug(h.Context, Plugin{Name: "p", Apply: func(x *Context, _ any) error {
		_, err := x.EffectAsync("deaf", func(context.Context) (Disposer, error) {
			close(started)
			<-gate
			return func(context.Context) error { close(undone); return nil }, nil
		})
		return err
	}}, nil)
	recv(h, started)
	var te *TimeoutError
	if err := f.Dispose(h.ctx); !errors.As(err, &te) || te.What != "set-up" {
		t.Errorf("Dispose = %v", err)
	}
	h.state(f, Disposed)
	close(gate)
	recv(h, undone)
}

func TestDisposeRunsWithoutItsCaller(t *testing.T) {
	h := open(t)
	gate, undone := make(chan struct{}), make(chan struct{})
	e, err := h.Group("g", func(x *Context) error {
		return x.Defer("slow", func(context.Context) error { <-gate; close(undone); return nil })
	})
	h.ok(err)
	over, cancel := context.WithCancel(h.ctx)
	cancel()
	if err := e.Dispose(over); !errors.Is(err, context.Canceled) {
		t.Errorf("Dispose = %v", err)
	}
	close(gate)
	recv(h, undone)
	h.ok(e.Dispose(h.ctx))
}

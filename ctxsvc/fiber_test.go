package ctxsvc

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
)

// Row 1, 2: a load is not cancelled when its provider goes; the fiber unloads
// afterwards; a provider that returns meanwhile leads straight to a new load.
func TestProviderLostWhileLoading(t *testing.T) {
	h := open(t)
	var j journal
	p := h.plug(h.Context, provider("db", 1), nil)
	entered, release := make(chan struct{}), make(chan struct{})
	var loads atomic.Int32
	undoing, undone := make(chan struct{}), make(chan struct{})
	f := h.plug(h.Context, Plugin{Name: "c", Inject: inject("db"), Apply: func(x *Context, _ any) error {
		if loads.Add(1) == 1 {
			h.ok(x.Defer("slow", func(context.Context) error { close(undoing); <-undone; return nil }))
			close(entered)
			<-release
		}
		return nil
	}}, nil)
	recv(h, entered)
	h.ok(Tap(h.Context, StatusEvent, func(_ context.Context, s StatusChange) error {
		if s.Fiber == f {
			j.add("%s", s.To)
		}
		return nil
	}))
	disposed := make(chan error, 1)
	go func() { disposed <- p.Dispose(h.ctx) }()
	h.until(p, Unloading)
	h.state(f, Loading)
	close(release)
	recv(h, undoing)
	h.state(f, Unloading)
	// The name is still taken until the consumer is gone, so the next provider
	// is mounted as soon as the dispose has returned.
	close(undone)
	h.ok(recv(h, disposed))
	h.quiet()
	h.state(f, Pending)
	h.plug(h.Context, provider("db", 2), nil)
	h.quiet()
	h.state(f, Active)
	j.want(t, "UNLOADING PENDING LOADING ACTIVE")
}

// Row 6.
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
	if err := bad.Wait(h.ctx); !errors.Is(err, boom) {
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

package host

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
	"github.com/cordon-host/cordon/ctxsvc"
	"github.com/cordon-host/cordon/host/process"
)

// How a crashed plugin comes back.
const (
	backoffFirst = 100 * time.Millisecond
	backoffMax   = 30 * time.Second
	// A generation that lived this long was healthy: the next crash starts at the first backoff again.
	backoffReset = time.Minute
	// Five failures in two minutes: the entry stays down until somebody changes something.
	breakerCrashes = 5
	breakerWindow  = 2 * time.Minute
)

// retries are the rows that wait to be applied again.
type retries struct {
	ctx    context.Context
	tasks  sync.WaitGroup
	booted chan struct{} // closed when every required row came up: before, a row that did not is a reason not to start
}

// supervise restarts the entry's process when it ends by itself, with growing pauses, until it fails too often. Dependents
// are not restarted: they hold on to the entry, and calls fail with a typed error meanwhile. So do the listeners of an entry that was given
// up: a dead one on a security event fails the dispatch, where a missing one would let it pass.
func (e *entry) supervise(ctx context.Context, c *ctxsvc.Context) {
	for {
		e.mu.Lock()
		g, moved := e.current, e.moved
		e.mu.Unlock()
		if g == nil {
			return // the fiber is unloading
		}
		select {
		case <-ctx.Done():
			return
		case <-moved:
			continue // a swap: whoever made it ends the old generation
		case <-g.process.Done():
		}
		if ctx.Err() != nil || !e.lost(g) {
			continue
		}
		if err := g.end(ctx); err != nil {
			e.host.log.Warn("cleaning up after a crash", "entry", e.id, "error", err)
		}
		if !e.comeBack(ctx, c, time.Since(g.started)) {
			return
		}
	}
}

// comeBack tries until something serves the entry again; false when ctx ends first. Lived is how long the last generation did.
func (e *entry) comeBack(ctx context.Context, c *ctxsvc.Context, lived time.Duration) bool {
	for e.idle() {
		pause, moved, ok := e.failed(lived)
		lived = 0
		if !ok {
			select {
			case <-moved:
				continue
			case <-ctx.Done():
				return false
			}
		}
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-moved:
			t.Stop()
			continue
		case <-ctx.Done():
			t.Stop()
			return false
		}
		if err := e.revive(ctx, c); err != nil {
			if ctx.Err() != nil {
				return false
			}
			e.startFailed(err)
		}
	}
	return true
}

// failed counts a failure. It returns how long to wait before the next attempt, or that there is none, and what ends either.
func (e *entry) failed(lived time.Duration) (pause time.Duration, moved <-chan struct{}, ok bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.breaker.Fail() {
		e.problem = fmt.Sprintf("given up after %d failures within %s; `cordon reload %s` or a change tries again; the last: %s",
			breakerCrashes, breakerWindow, e.id, e.problem)
		e.host.log.Error("entry is given up", "entry", e.id, "failures", breakerCrashes, "within", breakerWindow)
		return 0, e.moved, false
	}
	return e.backoff.Next(lived), e.moved, true
}

// revive brings up another generation after one that crashed, unless a swap has done so meanwhile.
func (e *entry) revive(ctx context.Context, c *ctxsvc.Context) error {
	e.starting.Lock()
	defer e.starting.Unlock()
	if !e.idle() {
		return nil
	}
	e.mu.Lock()
	before := e.reply
	e.mu.Unlock()
	next, err := e.start(ctx, e.facts(c))
	if err != nil {
		return err
	}
	e.republish(c, before, next.reply)
	e.host.lookAtPins()
	return nil
}

// lost takes a generation that crashed out of service, if it was in service, and reports the crash.
func (e *entry) lost(g *generation) bool {
	crash := g.process.Crash()
	if crash == nil {
		crash = &process.Crash{Time: time.Now(), Exit: g.process.Exit()}
	}
	e.mu.Lock()
	if e.current != g {
		e.mu.Unlock()
		return false
	}
	e.current, e.problem = nil, "crashed: "+g.process.Exit()
	if head := crash.Head(); head != "" {
		e.problem = "crashed: " + crash.Exit + "; " + head
	}
	e.crash = report(crash, g.provider.Generation)
	e.mu.Unlock()
	e.logCrash(g, crash)
	return true
}

// logCrash logs an end that nobody asked for. One record has all of it.
func (e *entry) logCrash(g *generation, crash *process.Crash) {
	attrs := []any{"entry", e.id, "generation", g.provider.Generation, "exit", crash.Exit}
	switch {
	case crash.Trace != "":
		attrs = append(attrs, "trace", crash.Trace)
	case crash.Stderr != "":
		attrs = append(attrs, "stderr", crash.Stderr)
	}
	e.host.log.Error("plugin crashed", attrs...)
}

func report(c *process.Crash, generation uint64) *controlv1.Crash {
	return &controlv1.Crash{TimeMs: c.Time.UnixMilli(), Generation: generation, Exit: c.Exit, Stderr: c.Stderr, Trace: c.Head()}
}

// startFailed keeps why a generation did not come up, and logs it.
func (e *entry) startFailed(err error) {
	e.mu.Lock()
	number := e.number
	e.problem = err.Error()
	var start *process.StartError
	if errors.As(err, &start) && start.Exit != "" {
		e.crash = report(&process.Crash{Time: time.Now(), Exit: start.Exit, Stderr: start.Stderr, Trace: start.Trace}, number)
	}
	e.mu.Unlock()
	attrs := []any{"entry", e.id, "generation", number, "error", err}
	if start != nil && start.Trace != "" {
		attrs = append(attrs, "trace", start.Trace)
	}
	e.host.log.Error("plugin did not come up", attrs...)
}

// idle reports whether nothing serves the entry.
func (e *entry) idle() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.current == nil
}

// applyLater has a row whose plugin did not come up applied again, with the same pauses and the same end as after a crash. It is called
// while the row is being applied.
func (e *entry) applyLater(f *ctxsvc.Fiber) {
	pause, _, ok := e.failed(0)
	if !ok {
		return
	}
	ctx, cancel := context.WithCancel(e.host.retry.ctx)
	e.mu.Lock()
	e.again = cancel
	e.mu.Unlock()
	e.host.retry.tasks.Go(func() {
		defer cancel()
		select {
		case <-e.host.retry.booted:
		case <-ctx.Done():
			return
		}
		t := time.NewTimer(pause)
		defer t.Stop()
		select {
		case <-t.C:
		case <-ctx.Done():
			return
		}
		// Its failure is the row's, which has its own next attempt; a row that is gone needs none.
		_ = f.Restart(e.host.retry.ctx)
	})
}

// rearm forgets the failures of an entry.
func (e *entry) rearm() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.breaker.Reset()
	e.backoff.Again()
	e.crash = nil
	if e.again != nil {
		e.again()
		e.again = nil
	}
}

// tryAgain has an entry that is down try at once, whatever failed before. One that serves, or waits for others, is left alone.
func (h *Host) tryAgain(ctx context.Context, e *entry) error {
	f := e.mount()
	switch {
	case f == nil:
		return nil
	case f.State() == ctxsvc.Failed:
		e.rearm()
		return f.Restart(ctx)
	case f.State() != ctxsvc.Active || !e.idle():
		return nil
	}
	e.rearm()
	e.mu.Lock()
	c := e.ctx
	e.mu.Unlock()
	err := e.revive(ctx, c)
	if err != nil {
		e.startFailed(err)
		// From here on it comes back as after any crash.
		e.mu.Lock()
		e.signal()
		e.mu.Unlock()
	}
	return err
}

// supervised fills in what supervision knows. The lock is held.
func (e *entry) supervised(out *controlv1.EntryStatus) {
	out.Crash = e.crash
	switch {
	case e.breaker.Tripped():
		out.State = "failed"
	case e.current == nil && out.State == "active":
		out.State = "restarting" // the row stands, its process is on its way back
	}
}

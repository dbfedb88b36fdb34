package ctxsvc

import (
	"context"
	"errors"
	"log/slog"
	"time"
)

// Disposer undoes something. Its context ends with its deadline (the
// container's undo timeout, or [UndoWithin]); after that the container goes on without it.
type Disposer = func(context.Context) error

type effectKind uint8

const (
	kindLeaf effectKind = iota // a disposer
	kindGroup
	kindFiber
	kindService
	kindListener
)

var kindNames = [...]string{"effect", "group", "plugin", "service", "listener"}

type effectState uint8

const (
	effectSettingUp effectState = iota
	effectLive
	effectUndoing
	effectDone
)

var effectStateNames = [...]string{"setting up", "live", "undoing", "done"}

// Effect is anything a fiber did that must be undone when it stops. Effects
// form a tree: a group owns what was registered through its context. They are
// undone strictly newest first, one after the other.
type Effect struct {
	fiber *Fiber
	epoch *epoch
	kind  effectKind
	state effectState
	label string

	parent, prev, next *Effect
	first, last        *Effect

	cancelled bool          // undo was asked for while setting up
	stop      func()        // cancels an asynchronous set-up
	ready     chan struct{} // closed when set-up ended; made when somebody waits
	done      chan struct{} // closed when undone; made when somebody waits
	err       error         // of the set-up, then of the undo

	undo     Disposer
	timeout  time.Duration // of undo; zero: the container's
	child    *Fiber
	impl     *impl
	listener *listener
}

// EffectOption configures an effect that has a disposer.
type EffectOption func(*Effect)

// UndoWithin gives the effect's disposer its own deadline in place of the
// container's undo timeout, for what is known to take longer, such as draining
// a process. A provider whose consumers have such effects needs a container
// with a quiet timeout that is longer still.
func UndoWithin(d time.Duration) EffectOption { return func(e *Effect) { e.timeout = d } }

// Label returns the effect's label.
func (e *Effect) Label() string { return e.label }

// link appends m to the group e. The lock is held.
func (e *Effect) link(m *Effect) {
	m.parent, m.prev = e, e.last
	if e.last != nil {
		e.last.next = m
	} else {
		e.first = m
	}
	e.last = m
}

// unlink takes the effect out of its group. The lock is held.
func (e *Effect) unlink() {
	p := e.parent
	if p == nil {
		return
	}
	if e.prev != nil {
		e.prev.next = e.next
	} else {
		p.first = e.next
	}
	if e.next != nil {
		e.next.prev = e.prev
	} else {
		p.last = e.prev
	}
	e.parent, e.prev, e.next = nil, nil, nil
}

// Effect runs setup at once and registers the disposer it returns. If setup
// fails nothing stays registered and its error is returned as [EffectError].
// A nil disposer is allowed: the label shows in snapshots, nothing is undone.
//
// While setup runs, whoever disposes the fiber waits for it; set-up and undo
// never overlap.
func (x *Context) Effect(label string, setup func() (Disposer, error), opts ...EffectOption) error {
	e, err := x.begin(label, kindLeaf, opts)
	if err != nil {
		return err
	}
	var undo Disposer
	err = x.c().guard(&frame{fiber: x.fiber, kind: frameSetup, effect: e}, "set-up of "+label, func() (err error) {
		undo, err = setup()
		return err
	})
	return x.finish(e, undo, err)
}

// Defer registers undo as an effect: the short form for what is already set
// up.
func (x *Context) Defer(label string, undo Disposer, opts ...EffectOption) error {
	e := &Effect{fiber: x.fiber, kind: kindLeaf, state: effectLive, label: label, undo: undo}
	for _, o := range opts {
		o(e)
	}
	c := x.c()
	c.mu.Lock()
	defer c.mu.Unlock()
	return x.register(e, "register effect "+label)
}

// Group runs fn at once with a context whose registrations belong to the
// returned effect: they appear below it, are undone together by its Dispose,
// newest first, and all of them are undone if fn returns an error.
func (x *Context) Group(label string, fn func(*Context) error) (*Effect, error) {
	e, err := x.begin(label, kindGroup, nil)
	if err != nil {
		return nil, err
	}
	d := x.derive()
	d.scope = e
	err = x.c().guard(&frame{fiber: x.fiber, kind: frameSetup, effect: e}, "set-up of "+label, func() error { return fn(d) })
	if err := x.finish(e, nil, err); err != nil {
		return nil, err
	}
	return e, nil
}

// EffectAsync is Effect with a set-up that takes its time: it runs on a
// goroutine of its own with a context that is cancelled when the effect or its
// fiber is to be undone. Undoing waits for the set-up to end. If the set-up
// fails, what it did is undone and the fiber is FAILED with its error.
func (x *Context) EffectAsync(label string, setup func(context.Context) (Disposer, error), opts ...EffectOption) (*Effect, error) {
	return x.beginAsync(label, kindLeaf, func(d *Context) (Disposer, error) { return setup(d.Context()) }, opts)
}

// GroupAsync is Group on a goroutine of its own; see EffectAsync. Once undo was
// asked for, further registrations through the group's context are refused, so
// that a long sequence ends at its next step and only the steps done are
// undone.
func (x *Context) GroupAsync(label string, fn func(*Context) error) (*Effect, error) {
	return x.beginAsync(label, kindGroup, func(d *Context) (Disposer, error) { return nil, fn(d) }, nil)
}

func (x *Context) begin(label string, kind effectKind, opts []EffectOption) (*Effect, error) {
	e := &Effect{fiber: x.fiber, kind: kind, label: label}
	for _, o := range opts {
		o(e)
	}
	c := x.c()
	c.mu.Lock()
	defer c.mu.Unlock()
	return e, x.register(e, "register effect "+label)
}

func (x *Context) beginAsync(label string, kind effectKind, setup func(*Context) (Disposer, error), opts []EffectOption) (*Effect, error) {
	e, err := x.begin(label, kind, opts)
	if err != nil {
		return nil, err
	}
	c := x.c()
	fr := &frame{fiber: x.fiber, kind: frameSetup, effect: e}
	std, cancel := context.WithCancel(context.WithValue(x.Context(), frameKey{}, fr))
	d := x.derive()
	d.std = std
	if kind == kindGroup {
		d.scope = e
	}
	c.mu.Lock()
	e.stop = cancel
	if e.cancelled {
		cancel()
	}
	c.mu.Unlock()
	go func() { // ends when setup returns
		defer cancel()
		var undo Disposer
		err := <-c.spawn(fr, "set-up of "+label, func() (err error) {
			undo, err = setup(d)
			return err
		})
		c.mu.Lock()
		unwanted := e.cancelled || e.epoch.closed
		c.mu.Unlock()
		if err = x.finish(e, undo, err); err == nil {
			return
		}
		if unwanted {
			c.log.Debug("cancelled set-up ended", append(x.fiber.attrs(err), slog.String("effect", label))...)
			return
		}
		if x.fiber == c.root { // cannot fail; its code asks the effect
			c.log.Error("effect of the root failed", append(x.fiber.attrs(err), slog.String("effect", label))...)
			return
		}
		x.fiber.fail(e.epoch, err)
	}()
	return e, nil
}

// finish ends a set-up: the effect is live, or it is undone at once because
// the set-up failed or nobody waited for it any longer.
func (x *Context) finish(e *Effect, undo Disposer, err error) error {
	c := x.c()
	c.mu.Lock()
	e.undo = undo
	if e.state == effectDone { // given up on: undo late what it did
		e.settled()
		c.mu.Unlock()
		late := errors.Join(err, e.undoAll())
		c.log.Warn("abandoned set-up ended and was undone", append(x.fiber.attrs(late), slog.String("effect", e.label))...)
		return errors.Join(&InactiveError{Fiber: x.fiber.Name(), State: x.fiber.State(), Op: "keep effect " + e.label}, err)
	}
	if err == nil {
		e.state = effectLive
		e.settled()
		if e.cancelled {
			err = &InactiveError{Fiber: x.fiber.Name(), State: x.fiber.state, Op: "keep effect " + e.label}
		}
		c.mu.Unlock()
		return err
	}
	err = &EffectError{Fiber: x.fiber.Name(), Label: e.label, Stage: "set-up", Err: err}
	e.state = effectUndoing
	e.err = err
	e.settled()
	c.mu.Unlock()

	if undone := e.undoAll(); undone != nil {
		err = errors.Join(err, undone)
	}

	c.mu.Lock()
	e.finished(err)
	c.mu.Unlock()
	return err
}

// settled wakes those who wait for the set-up. The lock is held.
func (e *Effect) settled() {
	if e.ready != nil {
		close(e.ready)
		e.ready = nil
	}
}

// finished marks the effect undone. The lock is held.
func (e *Effect) finished(err error) {
	e.unlink()
	e.state = effectDone
	e.err = err
	if e.done != nil {
		close(e.done)
		e.done = nil
	}
}

// Wait returns when the effect's set-up has ended, with its error. A set-up
// that is not asynchronous has always ended.
func (e *Effect) Wait(ctx context.Context) error {
	c := e.fiber.c
	c.mu.Lock()
	if e.state == effectSettingUp {
		if e.ready == nil {
			e.ready = make(chan struct{})
		}
		if err := c.await(ctx, e.ready, wait{op: "wait", fiber: e.fiber, effect: e}); err != nil {
			return err
		}
		c.mu.Lock()
	}
	defer c.mu.Unlock()
	return e.err
}

// Dispose undoes the effect and everything below it, newest first, and returns
// when that is done. A second call joins the first. The error joins every
// disposer's failure.
func (e *Effect) Dispose(ctx context.Context) error {
	c := e.fiber.c
	c.mu.Lock()
	if e.state == effectDone {
		defer c.mu.Unlock()
		return e.err
	}
	if e.done == nil {
		e.done = make(chan struct{})
	}
	done := e.done
	if !e.cancelled && e.state <= effectLive {
		e.requestUndo()
		go func() { _ = e.dispose() }() // ends with the undo, which is bounded
	}
	if err := c.await(ctx, done, wait{op: "dispose", fiber: e.fiber, effect: e}); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return e.err
}

// requestUndo refuses further registrations and stops a running set-up. The
// lock is held.
func (e *Effect) requestUndo() {
	e.cancelled = true
	if e.stop != nil {
		e.stop()
	}
	e.fiber.c.wakeDeadlocked()
}

// dispose undoes the effect and waits for it; it joins an undo under way.
func (e *Effect) dispose() error {
	c := e.fiber.c
	c.mu.Lock()
	if e.state == effectSettingUp {
		e.requestUndo()
		if e.ready == nil {
			e.ready = make(chan struct{})
		}
		ready := e.ready
		c.mu.Unlock()
		done := make(chan error, 1)
		go func() { <-ready; done <- nil }() // ends when the set-up does
		err := waitFor(c, c.stopTimeout, "set-up", done, nil)
		c.mu.Lock()
		if err != nil && e.state == effectSettingUp {
			err = &EffectError{Fiber: e.fiber.Name(), Label: e.label, Stage: "set-up", Err: err}
			e.finished(err)
			c.mu.Unlock()
			c.log.Error("set-up was abandoned", append(e.fiber.attrs(err), slog.String("effect", e.label))...)
			return errors.Join(err, e.undoMembers())
		}
	}
	switch e.state {
	case effectDone:
		defer c.mu.Unlock()
		return e.err
	case effectUndoing:
		if e.done == nil {
			e.done = make(chan struct{})
		}
		done := e.done
		c.mu.Unlock()
		<-done
		c.mu.Lock()
		defer c.mu.Unlock()
		return e.err
	}
	e.cancelled = true
	e.state = effectUndoing
	c.wakeDeadlocked()
	c.mu.Unlock()

	err := e.undoAll()

	c.mu.Lock()
	e.finished(err)
	c.mu.Unlock()
	return err
}

// undoAll undoes the members of a group, newest first, then the effect itself.
func (e *Effect) undoAll() error {
	c := e.fiber.c
	errs := []error{e.undoMembers()}
	switch e.kind {
	case kindLeaf:
		if e.undo != nil {
			errs = append(errs, e.runUndo())
		}
	case kindFiber:
		errs = append(errs, e.child.end())
	case kindService:
		errs = append(errs, e.impl.remove())
	case kindListener:
		c.mu.Lock()
		e.listener.leave()
		c.mu.Unlock()
	}
	return errors.Join(errs...)
}

// undoMembers undoes the members of a group strictly newest first. A failure
// never keeps the rest from being undone.
func (e *Effect) undoMembers() error {
	c := e.fiber.c
	var errs []error
	for {
		c.mu.Lock()
		m := e.last
		c.mu.Unlock()
		if m == nil {
			return errors.Join(errs...)
		}
		if err := m.dispose(); err != nil {
			errs = append(errs, err)
		}
	}
}

// runUndo calls the disposer with a deadline. A disposer that ignores it is
// reported and left behind.
func (e *Effect) runUndo() error {
	c := e.fiber.c
	limit := e.timeout
	if limit <= 0 {
		limit = c.undoTimeout
	}
	fr := &frame{fiber: e.fiber, kind: frameUndo, effect: e}
	ctx, cancel := context.WithTimeout(context.WithValue(context.Background(), frameKey{}, fr), limit)
	defer cancel()
	done := c.spawn(fr, "disposer of "+e.label, func() error { return e.undo(ctx) })
	// One that honours its context gets a tenth longer to say so.
	err := waitFor(c, limit+limit/10, "undo", done, nil)
	if err == nil {
		return nil
	}
	err = &EffectError{Fiber: e.fiber.Name(), Label: e.label, Stage: "undo", Err: err}
	c.log.Error("disposer failed", append(e.fiber.attrs(err), slog.String("effect", e.label))...)
	return err
}

// end disposes a fiber on behalf of its parent and waits for it.
func (f *Fiber) end() error {
	c := f.c
	c.mu.Lock()
	f.requestDispose()
	for f.driving || f.held {
		if f.idle == nil {
			f.idle = make(chan struct{})
		}
		ch := f.idle
		c.mu.Unlock()
		<-ch
		c.mu.Lock()
	}
	defer c.mu.Unlock()
	return f.undoErr
}

// silence takes all listeners below e out of their events. The lock is held.
func (e *Effect) silence() {
	for m := e.last; m != nil; m = m.prev {
		if m.kind == kindListener {
			m.listener.leave()
		}
		if m.first != nil {
			m.silence()
		}
	}
}

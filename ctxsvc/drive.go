package ctxsvc

import (
	"context"
	"errors"
	"log/slog"
	"time"
)

// step is what a fiber has to do next.
type step uint8

const (
	stepRest step = iota
	stepJudge
	stepLoad
	stepUnload
	stepBury
)

// next compares what should be with what is. The lock is held.
func (f *Fiber) next() step {
	ep := f.live.Load()
	switch {
	case f.held || f.state == Disposed:
		return stepRest
	case f.disposing:
		if f.loaded || ep.root.first != nil {
			return stepUnload
		}
		return stepBury
	case ep.spent:
		return stepUnload
	}
	met, unknown := true, false
	for i := range f.needs {
		nd := &f.needs[i]
		if nd.Optional {
			continue
		}
		im, ok, known := nd.visible()
		switch {
		case !known:
			unknown = true
		case !ok:
			met = false
		case f.loaded && (im != nd.bound || im.factsRev != nd.boundRev):
			met = false // met, but not by what the load runs with
		}
	}
	switch {
	case f.loaded && !met:
		return stepUnload
	case unknown:
		return stepJudge
	case f.loaded || !met || f.blocked:
		return stepRest
	}
	return stepLoad
}

// touch forgets a failure once the needs changed. The lock is held.
func (f *Fiber) touch() {
	if !f.blocked {
		return
	}
	for i := range f.needs {
		nd := &f.needs[i]
		if nd.Optional {
			continue
		}
		im, ok, known := nd.visible()
		if known && (!ok && nd.failed != nil || ok && (im != nd.failed || im.factsRev != nd.failedRev)) {
			f.blocked = false
			return
		}
	}
}

// kick looks whether something has to be done and starts it. The lock is held.
func (f *Fiber) kick() {
	f.touch()
	if f.driving || f.held {
		return
	}
	if f.next() == stepRest {
		f.rest()
		return
	}
	f.driving = true
	f.c.busy++
	go f.drive()
}

// rest sets the state of a fiber that has nothing to do. The lock is held.
func (f *Fiber) rest() {
	switch {
	case f.state == Disposed:
	case f.loaded:
		f.setState(Active)
	case f.err != nil:
		f.setState(Failed)
	default:
		f.setState(Pending)
	}
}

// drive runs transitions until there is nothing left to do. It is the only
// goroutine of a fiber and exists only while a transition is in flight.
func (f *Fiber) drive() {
	c := f.c
	c.mu.Lock()
	for {
		switch f.next() {
		case stepJudge:
			f.judge()
		case stepLoad:
			f.load()
		case stepUnload:
			f.unload()
		case stepBury:
			f.bury()
		case stepRest:
			if f.loaded && f.state != Active {
				f.activate()
				continue // publishing may have changed something
			}
			f.rest()
			f.driving = false
			c.busy--
			f.wake()
			c.mu.Unlock()
			return
		}
	}
}

// activate settles a finished load. The lock is held.
func (f *Fiber) activate() {
	f.err = nil
	f.setState(Active)
	for _, im := range f.live.Load().impls {
		im.announce(Available)
	}
}

// judge runs the availability checks whose verdict is missing. The lock is
// held, and released around the checks.
func (f *Fiber) judge() {
	c := f.c
	for i := range f.needs {
		nd := &f.needs[i]
		im, _, known := nd.visible()
		if known || nd.Optional { // an optional need asks when it is read
			continue
		}
		seq := im.seq
		ep := f.live.Load()
		x := f.base(ep)
		c.mu.Unlock()
		ok := false
		err := waitFor(c, c.undoTimeout, "check", c.spawn(&frame{fiber: f, kind: frameBody}, "availability check of "+im.name, func() error {
			ok = im.check(x)
			return nil
		}), nil)
		if err != nil {
			ok = false
			c.log.Error("availability check failed", append(im.fiber.attrs(err), slog.String("service", im.name), slog.String("consumer", f.Name()))...)
		}
		c.mu.Lock()
		nd.judged, nd.judgSeq, nd.judgOK = im, seq, err == nil && ok
	}
	f.touch()
}

// load runs the body once. The lock is held, and released around foreign code.
func (f *Fiber) load() {
	c := f.c
	ep := f.live.Load()
	f.loaded = true
	f.setState(Loading)
	table := make(map[string]*impl, len(f.needs))
	for i := range f.needs {
		nd := &f.needs[i]
		if nd.Optional {
			continue
		}
		nd.bound, _, _ = nd.visible()
		nd.boundRev = nd.bound.factsRev
		nd.bound.use(ep)
		table[nd.Name] = nd.bound
	}
	ep.table.Store(&table)
	x := f.base(ep)
	config := f.config
	ep.body.ended.Store(false)
	c.mu.Unlock()

	done := c.spawn(&frame{fiber: f, kind: frameBody}, "apply", func() error { return f.run(x, config) })
	var err error
	select {
	case err = <-done:
	case <-ep.std.Done():
		err = waitFor(c, c.stopTimeout, "apply", done, func(late error) {
			c.log.Warn("abandoned apply returned", f.attrs(late)...)
		})
	}
	ep.body.ended.Store(true)

	c.mu.Lock()
	if err == nil {
		return
	}
	superseded := ep.spent
	if !superseded {
		f.block(err)
		ep.spent = true
	}
	c.mu.Unlock()
	var late *TimeoutError
	switch {
	case errors.As(err, &late) && late.What == "apply":
		c.log.Error("apply ignored its cancelled context and was abandoned", f.attrs(err)...)
	case superseded:
		// Its end was asked for meanwhile: what it says about being cancelled
		// is not a failure of the plugin.
		c.log.Debug("superseded load ended", f.attrs(err)...)
	default:
		c.log.Error("plugin failed to load", f.attrs(err)...)
	}
	c.mu.Lock()
}

// run is the foreign part of a load: configuration, then body.
func (f *Fiber) run(x *Context, config any) error {
	if f.c.table(ConfigEvent.Name).any() {
		var err error
		config, err = Waterfall(x.Context(), x, ConfigEvent, Update{Fiber: f, Config: config},
			func(_ context.Context, u Update) (any, error) { return u.Config, nil })
		if err != nil {
			return &ConfigError{Fiber: f.Name(), Err: err}
		}
	}
	config, err := f.check(config)
	if err != nil {
		return err
	}
	if err := f.plugin.Apply(x, config); err != nil {
		return &ApplyError{Fiber: f.Name(), Err: err}
	}
	return nil
}

// unload undoes one load. The lock is held, and released while waiting.
//
// It has two phases. First the fiber's services are withdrawn and its
// consumers get the time to unload with everything of the provider still
// working. Then its listeners leave their events, and its effects are undone,
// newest first.
func (f *Fiber) unload() {
	c := f.c
	ep := f.live.Load()
	ep.closed = true
	ep.spent = true
	f.setState(Unloading)
	c.wakeDeadlocked()

	for i := len(ep.impls) - 1; i >= 0; i-- {
		ep.impls[i].withdraw()
	}
	ep.cancel()
	var errs []error
	if err := c.awaitConsumers(ep.impls); err != nil {
		errs = append(errs, &EffectError{Fiber: f.Name(), Label: "consumers", Stage: "undo", Err: err})
	}
	for _, im := range ep.impls {
		im.gone.Store(true)
	}
	ep.root.silence()
	c.mu.Unlock()

	errs = append(errs, ep.root.undoMembers())

	c.mu.Lock()
	for i := range f.needs {
		nd := &f.needs[i]
		if nd.bound != nil {
			nd.bound.leave(ep)
			nd.bound, nd.boundRev = nil, 0
		}
	}
	ep.table.Store(nil)
	ep.over.Store(true)
	if ep.released != nil {
		close(ep.released)
	}
	ep.impls = nil
	f.undoErr = errors.Join(errs...)
	f.loaded = false
	if f.parent == nil {
		f.loaded = true // the root has no body: it is active again at once
	}
	if !f.disposing {
		f.renew()
	}
	f.touch()
}

// bury takes a fiber with nothing left to undo out of the tree. The lock is
// held.
func (f *Fiber) bury() {
	ep := f.live.Load()
	ep.closed = true
	ep.over.Store(true)
	ep.cancel()
	f.unlist()
	f.needs = nil
	delete(f.c.fibers, f.uid)
	for _, name := range f.plugin.Provides {
		delete(f.c.promises[name], f)
		if len(f.c.promises[name]) == 0 {
			delete(f.c.promises, name)
		}
	}
	if f.effect.state == effectLive { // nobody is undoing it from above
		f.effect.unlink()
		f.effect.state = effectDone
	}
	f.setState(Disposed)
	if f.c.table(FiberEvent.Name).any() {
		c := f.c
		c.post(func() {
			Emit(context.Background(), &Context{fiber: c.root}, FiberEvent, FiberChange{Fiber: f, Disposed: true})
		})
	}
}

// setState publishes a state change. The lock is held.
func (f *Fiber) setState(s State) {
	old := f.state
	if old == s {
		return
	}
	f.state = s
	if c := f.c; c.table(StatusEvent.Name).any() {
		c.post(func() {
			Emit(context.Background(), &Context{fiber: c.root}, StatusEvent, StatusChange{Fiber: f, From: old, To: s})
		})
	}
}

// waitFor waits for code the container started, at most d; then it is given up.
func waitFor(c *container, d time.Duration, what string, done <-chan error, late func(error)) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case err := <-done:
		return err
	case <-t.C:
	}
	select {
	case err := <-done: // both were ready: the answer counts
		return err
	default:
	}
	c.giveUp(done, late)
	return &TimeoutError{What: what, After: d}
}

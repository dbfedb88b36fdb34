package ctxsvc

import "context"

// wait is one caller waiting for a fiber to be quiet or for an effect to be
// undone, from inside code the container runs.
type wait struct {
	op      string
	fiber   *Fiber
	effect  *Effect
	unloads bool // the fiber will unload before it is quiet
	frames  []*frame
	refuse  chan struct{}
}

func (w *wait) target() string {
	if w.effect != nil {
		return w.effect.label
	}
	return w.fiber.Name()
}

// await waits for ready. The lock is held on entry and released on return.
//
// A wait from outside the container's code can take long but cannot deadlock.
// A wait from inside is refused when what it waits for (in)directly waits for
// the caller: now, or, because it stays registered, as soon as that becomes so.
func (c *container) await(ctx context.Context, ready <-chan struct{}, w wait) error {
	c.mu.Unlock()
	w.frames = c.current(ctx)
	if len(w.frames) > 0 {
		w.refuse = make(chan struct{})
		c.mu.Lock()
		if c.deadlocked(&w) {
			c.mu.Unlock()
			return &DeadlockError{Op: w.op, Target: w.target()}
		}
		c.waits[&w] = struct{}{}
		c.wakeDeadlocked()
		c.mu.Unlock()
		defer func() {
			c.mu.Lock()
			delete(c.waits, &w)
			c.mu.Unlock()
		}()
	}
	select {
	case <-ready:
		return nil
	default:
	}
	select {
	case <-ready:
		return nil
	case <-w.refuse:
		return &DeadlockError{Op: w.op, Target: w.target()}
	case <-ctx.Done():
		return ctx.Err()
	}
}

// wakeDeadlocked refuses registered waits that became circular. The lock is
// held.
func (c *container) wakeDeadlocked() {
	for w := range c.waits {
		if c.deadlocked(w) {
			close(w.refuse)
			delete(c.waits, w)
		}
	}
}

// deadlocked reports whether what w waits for cannot happen before the
// caller's own code has returned. The lock is held.
func (c *container) deadlocked(w *wait) bool {
	s := search{c: c, w: w, seen: map[*Fiber]bool{}, groups: map[*Effect]bool{}}
	if w.effect != nil {
		return s.effect(w.effect)
	}
	return s.fiber(w.fiber, w.unloads)
}

// search walks from the thing waited for along "cannot finish before".
type search struct {
	c      *container
	w      *wait
	seen   map[*Fiber]bool // value: visited as unloading
	groups map[*Effect]bool
}

func (s *search) fiber(f *Fiber, unloading bool) bool {
	if !f.driving && !f.held && !unloading {
		return false
	}
	ep := f.live.Load()
	unloading = unloading || f.state == Unloading || f.disposing || f.loaded && ep.spent
	if was, ok := s.seen[f]; ok && (was || !unloading) {
		return false
	}
	s.seen[f] = unloading
	for _, fr := range s.w.frames {
		if fr.fiber == f && fr.blocks(unloading) {
			return true
		}
	}
	for other := range s.c.waits {
		for _, fr := range other.frames {
			if fr.fiber == f && fr.blocks(unloading) && s.follow(other) {
				return true
			}
		}
	}
	return unloading && s.effect(&ep.root)
}

func (s *search) follow(w *wait) bool {
	if w.effect != nil {
		return s.effect(w.effect)
	}
	return s.fiber(w.fiber, w.unloads)
}

func (s *search) effect(e *Effect) bool {
	if s.groups[e] {
		return false
	}
	s.groups[e] = true
	for _, fr := range s.w.frames {
		if fr.effect == e {
			return true
		}
	}
	for other := range s.c.waits {
		for _, fr := range other.frames {
			if fr.effect == e && s.follow(other) {
				return true
			}
		}
	}
	switch e.kind {
	case kindFiber:
		if s.fiber(e.child, true) {
			return true
		}
	case kindService:
		for ep := range e.impl.users {
			if !ep.fiber.above(e.fiber) && s.fiber(ep.fiber, true) {
				return true
			}
		}
	}
	for m := e.first; m != nil; m = m.next {
		if s.effect(m) {
			return true
		}
	}
	return false
}

// above reports whether f is g or an ancestor of g.
func (f *Fiber) above(g *Fiber) bool {
	for ; g != nil; g = g.parent {
		if g == f {
			return true
		}
	}
	return false
}

// Quiesce returns when no transition of any fiber is in flight and all
// notifications were delivered. Called from inside the container's own code
// it is refused with [DeadlockError].
func (x *Context) Quiesce(ctx context.Context) error {
	c := x.c()
	if len(c.current(ctx)) > 0 {
		return &DeadlockError{Op: "quiesce", Target: "container"}
	}
	for {
		c.mu.Lock()
		if c.busy == 0 && !c.mailer {
			c.mu.Unlock()
			return nil
		}
		if c.quiet == nil {
			c.quiet = make(chan struct{})
		}
		ch := c.quiet
		c.mu.Unlock()
		select {
		case <-ch:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

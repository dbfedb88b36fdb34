package ctxsvc

import (
	"container/list"
	"weak"
)

type listElement = list.Element

type sharedKey struct{ name, label string }

// realm is where one service name is looked up: at most one provider, and
// every fiber that needs the name here.
type realm struct {
	name       string
	label      string // "" for the common realm of the name and for fresh ones
	private    bool   // made by Isolate
	impl       *impl
	dependents list.List // of *need, in the order the fibers were created
}

func (r *realm) String() string {
	switch {
	case r.label != "":
		return r.label
	case r.private:
		return "(private)"
	}
	return ""
}

// common returns the realm of name for contexts that isolate nothing. The
// lock is held.
func (c *container) common(name string) *realm {
	r := c.realms[name]
	if r == nil {
		r = &realm{name: name}
		c.realms[name] = r
	}
	return r
}

// realm returns the labelled realm, or a fresh one. The lock is held.
func (c *container) realm(name, label string) *realm {
	if label == "" {
		return &realm{name: name, private: true}
	}
	k := sharedKey{name, label}
	if r := c.shared[k].Value(); r != nil {
		return r
	}
	c.sweep()
	r := &realm{name: name, label: label, private: true}
	c.shared[k] = weak.Make(r)
	return r
}

// sweep forgets labelled realms nobody refers to any longer, each time their
// number has doubled: labels may be made per session. The lock is held.
func (c *container) sweep() {
	if len(c.shared) < c.sweepAt {
		return
	}
	for k, w := range c.shared {
		if w.Value() == nil {
			delete(c.shared, k)
		}
	}
	c.sweepAt = max(64, 2*len(c.shared))
}

// Realms derives a context with a realm for each name of the map, as Isolate
// does for one, whose map can be replaced later with Remap.
func (x *Context) Realms(labels map[string]string) *Context {
	c := x.c()
	c.mu.Lock()
	defer c.mu.Unlock()
	d := x.derive()
	d.detached = true
	d.isolate = make(map[string]*realm, len(labels))
	for name, label := range labels {
		d.isolate[name] = c.realm(name, label)
	}
	return d
}

// Remap replaces the realms of a context made by Realms or Isolate, while
// everything below it stays loaded. A name that is missing goes back to the
// realm further out; a name that keeps its label (the empty one too) keeps its
// realm. Services provided below move along, without a restart of their
// provider; a fiber restarts only if the provider of something it needs is
// another one afterwards. If a moved service would meet another in its new
// realm, nothing changes and [DuplicateServiceError] is returned.
func (x *Context) Remap(labels map[string]string) error {
	c := x.c()
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := x.alive(x.current(), "remap realms"); err != nil {
		return err
	}
	if x.isolate == nil {
		return &PluginError{Name: x.fiber.Name(), Reason: "cannot remap a context that Realms or Isolate did not make"}
	}
	old := x.isolate
	next := make(map[string]*realm, len(labels))
	for name, label := range labels {
		if r := old[name]; r != nil && r.label == label {
			next[name] = r
		} else {
			next[name] = c.realm(name, label)
		}
	}
	below := func(y *Context) bool {
		for ; y != nil; y = y.up() {
			if y == x {
				return true
			}
		}
		return false
	}
	return c.rehome(below, nil, func() { x.isolate = next }, func() { x.isolate = old })
}

// Move takes the fiber, and everything below it, to another place of the tree
// without restarting it; what is said of realms at Remap holds here too. The
// fiber ends with the fiber of its new place. Moving a fiber below itself, the
// root, or a fiber that is being disposed, alone or with its place, is refused.
func (f *Fiber) Move(to *Context) error {
	c := f.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if to.c() != c || f.parent == nil || f.above(to.fiber) {
		return &PluginError{Name: f.plugin.Name, Reason: "cannot be moved to " + to.fiber.Name() + ": it would leave its own tree"}
	}
	leaving := f.effect.epoch.closed // its present place is being undone
	for e := f.effect; e != nil; e = e.parent {
		leaving = leaving || e.cancelled || e.state > effectLive
	}
	if f.disposing || f.held || leaving {
		return &InactiveError{Fiber: f.Name(), State: f.state, Op: "move"}
	}
	if err := to.alive(to.current(), "take in "+f.Name()); err != nil {
		return err
	}
	from, parent := f.mount, f.parent
	below := func(y *Context) bool { return f.above(y.fiber) }
	err := c.rehome(below, f, func() { f.mount, f.parent = to, to.fiber }, func() { f.mount, f.parent = from, parent })
	if err != nil {
		return err
	}
	f.effect.unlink()
	f.effect.fiber = to.fiber
	return to.register(f.effect, "take in "+f.Name())
}

// rehome changes where names are looked up for the contexts below (and the
// moved fiber) and carries over what is registered there. The lock is held.
func (c *container) rehome(below func(*Context) bool, moved *Fiber, apply, revert func()) error {
	var impls []*impl
	for im := range c.impls {
		if below(im.ctx) {
			impls = append(impls, im)
		}
	}
	apply()

	// What is below and resolves a name through the changed place shared one
	// realm before and shares one afterwards, so no two services arrive in one;
	// but somebody else may be there.
	arriving := map[*realm]*impl{}
	for _, im := range impls {
		to := im.ctx.realmOf(im.name)
		if to == im.realm {
			continue
		}
		if to.impl != nil {
			revert()
			return &DuplicateServiceError{Name: im.name, Realm: to.String(), Owner: to.impl.fiber.Name()}
		}
		arriving[to] = im
	}

	touched := map[*realm]bool{}
	for to, im := range arriving {
		from := im.realm
		touched[from], touched[to] = true, true
		from.impl, to.impl, im.realm = nil, im, to
		if im.announced && !im.withdrawn {
			c.tell(im, from, Withdrawn)
			c.tell(im, to, Available)
		}
	}
	var seekers []*Fiber
	for _, g := range c.fibers {
		if g.mount == nil || g != moved && !below(g.mount) {
			continue
		}
		for i := range g.needs {
			n := &g.needs[i]
			if to := g.mount.realmOf(n.Name); to != n.realm {
				n.realm.dependents.Remove(n.pos)
				n.realm = to
				n.pos = to.dependents.PushBack(n)
				seekers = append(seekers, g)
			}
		}
	}
	for r := range touched {
		c.notify(r)
	}
	for _, g := range seekers {
		g.kick()
	}
	return nil
}

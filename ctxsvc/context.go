package ctxsvc

import (
	"context"
)

// Context is a view of the container from one place of the tree: whose
// effects are registered, in which realm each service name is looked up, which
// configuration layers a service sees, which subject listeners and dispatches
// have by default. Contexts are cheap; derive as many as needed.
//
// A context given to an Apply belongs to that load: after the fiber unloaded,
// everything registered through it is undone and everything attempted through
// it is refused with [InactiveError].
type Context struct {
	fiber   *Fiber
	epoch   *epoch   // nil on the root fiber: its contexts outlive a dispose
	parent  *Context // nil for the base context of a fiber
	scope   *Effect  // the group registrations go to, nil for the fiber itself
	std     context.Context
	subject string

	isolate   map[string]*realm // guarded by the container's lock
	intercept map[string]any
	detached  bool // some isolate lies between here and the fiber's base
}

func (x *Context) c() *container { return x.fiber.c }

// up returns the context the next lookup step goes to, nil above the root.
func (x *Context) up() *Context {
	if x.parent != nil {
		return x.parent
	}
	return x.fiber.mount
}

func (x *Context) derive() *Context {
	return &Context{fiber: x.fiber, epoch: x.epoch, parent: x, scope: x.scope, std: x.std, subject: x.subject, detached: x.detached}
}

// current returns the load this context belongs to.
func (x *Context) current() *epoch {
	if x.epoch != nil {
		return x.epoch
	}
	return x.fiber.live.Load()
}

// Fiber returns the fiber this context belongs to.
func (x *Context) Fiber() *Fiber { return x.fiber }

// Context returns a context.Context that is cancelled when the fiber starts to
// unload (inside a group: also when the group is disposed while it sets up).
func (x *Context) Context() context.Context {
	if x.std != nil {
		return x.std
	}
	return x.current().std
}

// Root returns the root context of the container.
func (x *Context) Root() *Context { return &Context{fiber: x.c().root} }

// Isolate derives a context in which name is looked up and provided in another
// realm. The empty label makes a fresh realm; all contexts isolated with the
// same label share one.
func (x *Context) Isolate(name, label string) *Context {
	return x.Realms(map[string]string{name: label})
}

// Intercept derives a context that adds one configuration layer for the
// service called name. The service reads the layers of its caller with
// [Context.Layers].
func (x *Context) Intercept(name string, config any) *Context {
	d := x.derive()
	d.intercept = map[string]any{name: config}
	return d
}

// WithSubject derives a context whose listeners and dispatches have the given
// subject unless they name another one.
func (x *Context) WithSubject(subject string) *Context {
	d := x.derive()
	d.subject = subject
	return d
}

// Layers returns the configuration layers pushed for the service name between
// the root and this context, outermost first. Later layers win.
func (x *Context) Layers(name string) []any {
	c := x.c()
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []any
	for y := x; y != nil; y = y.up() {
		if v, ok := y.intercept[name]; ok {
			out = append(out, v)
		}
	}
	for i, j := 0, len(out)-1; i < j; i, j = i+1, j-1 {
		out[i], out[j] = out[j], out[i]
	}
	return out
}

// Merge overlays configuration layers shallowly, later ones winning: a
// service's base, its caller's [Context.Layers], the arguments of the call.
// Layers that are not map[string]any are skipped; a service with structured
// configuration merges its layers itself.
func Merge(layers ...any) map[string]any {
	out := map[string]any{}
	for _, l := range layers {
		m, ok := l.(map[string]any)
		if !ok {
			continue
		}
		for k, v := range m {
			out[k] = v
		}
	}
	return out
}

// realmOf finds the realm of name as seen from x. The lock is held.
func (x *Context) realmOf(name string) *realm {
	for y := x; y != nil; y = y.up() {
		if r, ok := y.isolate[name]; ok {
			return r
		}
	}
	return x.c().common(name)
}

// register checks that x may still register something and links e into the
// scope of x. The lock is held.
func (x *Context) register(e *Effect, op string) error {
	ep := x.current()
	if err := x.alive(ep, op); err != nil {
		return err
	}
	e.epoch = ep
	scope := x.scope
	if scope == nil {
		scope = &ep.root
	}
	scope.link(e)
	return nil
}

// alive refuses a context whose load is over or ending. The lock is held.
func (x *Context) alive(ep *epoch, op string) error {
	f := x.fiber
	if ep.closed || f.live.Load() != ep || f.disposing && f.state == Disposed {
		return &InactiveError{Fiber: f.Name(), State: f.state, Op: op}
	}
	if s := x.scope; s != nil && (s.cancelled || s.state > effectLive) {
		return &InactiveError{Fiber: f.Name(), State: f.state, Op: op + " in group " + s.label}
	}
	return nil
}

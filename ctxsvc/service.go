package ctxsvc

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync/atomic"
	"time"
)

// published is what readers of a service see, replaced as a whole.
type published struct {
	value      any
	facts      any
	generation uint64
}

// impl is one provision of a service by one fiber.
type impl struct {
	name  string
	realm *realm
	fiber *Fiber
	epoch *epoch
	ctx   *Context
	check func(*Context) bool

	now       atomic.Pointer[published]
	factsRev  uint64 // moves when the facts change
	seq       uint64 // moves when availability must be judged again
	withdrawn bool
	announced bool
	gone      atomic.Bool // readers are refused
	users     map[*epoch]struct{}
}

// ProvideOption configures [Context.Provide] and [Context.Set].
type ProvideOption func(*provision)

type provision struct {
	facts    any
	hasFacts bool
	check    func(*Context) bool
	hasCheck bool
}

// WithFacts publishes facts beside the value: data consumers read when they
// start and are restarted for when it changes. Facts are compared with
// reflect.DeepEqual and must not be modified after publishing.
func WithFacts(facts any) ProvideOption {
	return func(p *provision) { p.facts, p.hasFacts = facts, true }
}

// WithCheck makes availability a question: the service counts as provided for
// a consumer only if check returns true for that consumer's context. It is
// asked when the service appears, after SetFacts and Set, and after
// [Context.Recheck]; a panic counts as no.
func WithCheck(check func(*Context) bool) ProvideOption {
	return func(p *provision) { p.check, p.hasCheck = check, true }
}

// Provide offers value under name in this context's realm, as an effect of
// the fiber. The fiber sees its own service at once, consumers when the fiber
// is ACTIVE. One fiber provides a name in a realm: a second gets
// [DuplicateServiceError].
//
// When the service is withdrawn, consumers unload first and can use it while
// they do; Dispose of the provider goes on when they are quiet.
func (x *Context) Provide(name string, value any, opts ...ProvideOption) error {
	if name == "" {
		return &PluginError{Name: x.fiber.Name(), Reason: "provides a service without a name"}
	}
	var p provision
	for _, o := range opts {
		o(&p)
	}
	c := x.c()
	c.mu.Lock()
	defer c.mu.Unlock()
	ep := x.current()
	if err := x.alive(ep, "provide "+name); err != nil {
		return err
	}
	r := x.realmOf(name)
	if r.impl != nil {
		return &DuplicateServiceError{Name: name, Realm: r.String(), Owner: r.impl.fiber.Name()}
	}
	im := &impl{name: name, realm: r, fiber: x.fiber, epoch: ep, ctx: x, check: p.check, factsRev: 1, seq: 1}
	im.now.Store(&published{value: value, facts: p.facts, generation: 1})
	if err := x.register(&Effect{fiber: x.fiber, kind: kindService, state: effectLive, label: name, impl: im}, "provide "+name); err != nil {
		return err
	}
	r.impl = im
	c.impls[im] = struct{}{}
	ep.impls = append(ep.impls, im)
	if x.fiber.state == Active {
		im.announce(Available)
	}
	return nil
}

// own finds the service name of this context's realm and insists that this
// fiber provides it. The lock is held.
func (x *Context) own(name, op string) (*impl, error) {
	if err := x.alive(x.current(), op+" "+name); err != nil {
		return nil, err
	}
	im := x.realmOf(name).impl
	if im == nil {
		return nil, &NotOwnerError{Fiber: x.fiber.Name(), Name: name}
	}
	if im.fiber != x.fiber {
		return nil, &NotOwnerError{Fiber: x.fiber.Name(), Name: name, Owner: im.fiber.Name()}
	}
	return im, nil
}

// Set replaces the value behind a service this fiber provides: a new
// generation of the same entry. Consumers are not restarted, they read the new
// value at their next access; facts given here are compared as SetFacts does,
// and value and facts change in one step.
func (x *Context) Set(name string, value any, opts ...ProvideOption) error {
	var p provision
	for _, o := range opts {
		o(&p)
	}
	c := x.c()
	c.mu.Lock()
	defer c.mu.Unlock()
	im, err := x.own(name, "set")
	if err != nil {
		return err
	}
	old := im.now.Load()
	next := &published{value: value, facts: old.facts, generation: old.generation + 1}
	if p.hasFacts {
		next.facts = p.facts
	}
	if p.hasCheck {
		im.check = p.check
	}
	im.publish(old, next, Replaced)
	return nil
}

// SetFacts replaces the facts of a service this fiber provides. Consumers that
// need it restart if, and only if, the facts changed (reflect.DeepEqual).
func (x *Context) SetFacts(name string, facts any) error {
	c := x.c()
	c.mu.Lock()
	defer c.mu.Unlock()
	im, err := x.own(name, "set facts of")
	if err != nil {
		return err
	}
	old := im.now.Load()
	im.publish(old, &published{value: old.value, facts: facts, generation: old.generation}, FactsChanged)
	return nil
}

// Recheck asks the availability check of a service this fiber provides again,
// for every consumer.
func (x *Context) Recheck(name string) error {
	c := x.c()
	c.mu.Lock()
	defer c.mu.Unlock()
	im, err := x.own(name, "recheck")
	if err != nil {
		return err
	}
	im.seq++
	c.notify(im.realm)
	return nil
}

// publish makes next visible. The lock is held.
func (im *impl) publish(old, next *published, why Change) {
	changed := !reflect.DeepEqual(old.facts, next.facts)
	im.now.Store(next)
	im.seq++
	if changed {
		im.factsRev++
	}
	if !im.announced {
		return
	}
	if changed && why == Replaced {
		im.fiber.c.tell(im, im.realm, Replaced)
		why = FactsChanged
	}
	if why == FactsChanged && !changed {
		return
	}
	im.announce(why)
}

// announce tells consumers and observers about a change. The lock is held.
func (im *impl) announce(why Change) {
	im.announced = true
	im.fiber.c.notify(im.realm)
	im.fiber.c.tell(im, im.realm, why)
}

// tell posts a ServiceEvent to realm r. The lock is held.
func (c *container) tell(im *impl, r *realm, why Change) {
	if !c.table(ServiceEvent.Name).any() {
		return
	}
	p := im.now.Load()
	ev := ServiceChange{Name: im.name, Change: why, Realm: r.String(), Provider: im.fiber, Generation: p.generation, Facts: p.facts}
	x := im.ctx
	c.post(func() {
		Emit(context.Background(), x, ServiceEvent, ev, DispatchOption{within: im.name, realm: r})
	})
}

// withdraw starts taking the service away: consumers are told, the value
// still works. The lock is held.
func (im *impl) withdraw() {
	if im.withdrawn {
		return
	}
	im.withdrawn = true
	if im.announced {
		im.announce(Withdrawn)
	}
}

// remove ends the provision: withdraw, let the consumers finish, then free the
// name.
func (im *impl) remove() error {
	c := im.fiber.c
	c.mu.Lock()
	defer c.mu.Unlock()
	var err error
	if !im.gone.Load() {
		im.withdraw()
		if err = c.awaitConsumers([]*impl{im}); err != nil {
			err = &EffectError{Fiber: im.fiber.Name(), Label: im.name, Stage: "undo", Err: err}
		}
		im.gone.Store(true)
	}
	for i, other := range im.epoch.impls {
		if other == im {
			im.epoch.impls = append(im.epoch.impls[:i:i], im.epoch.impls[i+1:]...)
			break
		}
	}
	if im.realm.impl == im {
		im.realm.impl = nil
	}
	delete(c.impls, im)
	return err
}

// awaitConsumers waits until no load runs with one of the services any longer,
// bounded by the quiet timeout. Ancestors of the provider are not waited for:
// it is they who are waiting. The lock is held, and released while waiting.
func (c *container) awaitConsumers(impls []*impl) error {
	var timer *time.Timer
	for _, im := range impls {
		for {
			var ep *epoch
			for u := range im.users {
				if !u.fiber.above(im.fiber) {
					ep = u
					break
				}
			}
			if ep == nil {
				break
			}
			if ep.released == nil {
				ep.released = make(chan struct{})
			}
			ch := ep.released
			c.mu.Unlock()
			if timer == nil {
				timer = time.NewTimer(c.quietTimeout)
				defer timer.Stop()
			}
			select {
			case <-ch:
				c.mu.Lock()
				continue
			case <-timer.C:
			}
			err := fmt.Errorf("%s still runs with service %q: %w", ep.fiber.Name(), im.name,
				&TimeoutError{What: "consumers", After: c.quietTimeout})
			c.log.Error("consumers did not stop in time", im.fiber.attrs(err)...)
			c.mu.Lock()
			return err
		}
	}
	return nil
}

func (im *impl) use(ep *epoch) {
	if im.users == nil {
		im.users = map[*epoch]struct{}{}
	}
	im.users[ep] = struct{}{}
}

func (im *impl) leave(ep *epoch) { delete(im.users, ep) }

// visible finds the provider that meets the need. known is false while its
// availability check has not been asked yet. The lock is held.
func (n *need) visible() (im *impl, ok, known bool) {
	im = n.realm.impl
	if im == nil || im.withdrawn || im.fiber.state != Active {
		return im, false, true
	}
	if im.check == nil {
		return im, true, true
	}
	if n.judged != im || n.judgSeq != im.seq {
		return im, false, false
	}
	return im, n.judgOK, true
}

func (f *Fiber) need(name string) *need {
	for i := range f.needs {
		if f.needs[i].Name == name {
			return &f.needs[i]
		}
	}
	return nil
}

// Get reads a service.
//
// A fiber reads what it needs, what it provides, and what an ancestor in the
// same realm needs or provides. What it declared stays readable until its
// unload has finished, so that disposers can use it. Errors:
// [NotDeclaredError], [InactiveError] (declared, not there now),
// [NotFoundError] (an optional need without provider; any name on the root),
// [StaleError] (the provider went away without waiting longer), [TypeError].
func Get[T any](x *Context, name string) (T, error) {
	im, err := x.find(name)
	if err != nil {
		var zero T
		return zero, err
	}
	return cast[T](name, im.now.Load().value)
}

func cast[T any](name string, v any) (T, error) {
	t, ok := v.(T)
	if !ok {
		return t, &TypeError{Name: name, Want: reflect.TypeFor[T]().String(), Got: fmt.Sprintf("%T", v)}
	}
	return t, nil
}

// Lookup reads a service without declaring it: whatever an ACTIVE fiber
// provides in this context's realm. It is meant for front ends and status
// pages; a plugin that depends on a service declares it.
func Lookup[T any](x *Context, name string) (T, bool) {
	c := x.c()
	c.mu.Lock()
	im := x.realmOf(name).impl
	ok := im != nil && !im.withdrawn && im.fiber.state == Active
	c.mu.Unlock()
	if !ok {
		var zero T
		return zero, false
	}
	v, ok := im.now.Load().value.(T)
	return v, ok
}

// Facts returns the facts published with a service this context may read.
func (x *Context) Facts(name string) (any, bool) {
	im, err := x.find(name)
	if err != nil {
		return nil, false
	}
	facts := im.now.Load().facts
	return facts, facts != nil
}

// find resolves a name for reading.
func (x *Context) find(name string) (*impl, error) {
	if !x.detached {
		if t := x.current().table.Load(); t != nil {
			if im := (*t)[name]; im != nil && !im.gone.Load() {
				return im, nil
			}
		}
	}
	c := x.c()
	c.mu.Lock()
	im, err := x.walk(name)
	var ask func(*Context) bool
	if err == nil && im.check != nil && x.fiber != im.fiber {
		if n := x.fiber.need(name); n != nil && n.Optional && n.bound == nil {
			ask = im.check
		}
	}
	c.mu.Unlock()
	if ask == nil {
		return im, err
	}
	ok := false
	err = c.guard(&frame{fiber: x.fiber, kind: frameSetup}, "availability check of "+name, func() error {
		ok = ask(x)
		return nil
	})
	if err != nil || !ok {
		return nil, errors.Join(&NotFoundError{Name: name, Realm: im.realm.String()}, err)
	}
	return im, nil
}

// walk goes from the context's fiber towards the root. The lock is held.
func (x *Context) walk(name string) (*impl, error) {
	r := x.realmOf(name)
	own := x.fiber
	if x.epoch != nil && x.epoch.over.Load() {
		return nil, &InactiveError{Fiber: own.Name(), State: own.state, Op: "read service " + name}
	}
	if own.parent == nil {
		if r.impl == nil || r.impl.gone.Load() {
			return nil, &NotFoundError{Name: name, Realm: r.String()}
		}
		return r.impl, nil
	}
	for f := own; ; f = f.parent {
		if r.impl != nil && r.impl.fiber == f && !r.impl.gone.Load() {
			return r.impl, nil
		}
		if n := f.need(name); n != nil && n.realm == r {
			switch {
			case n.Optional:
				if im := r.impl; im != nil && !im.withdrawn && im.fiber.state == Active {
					return im, nil
				}
				return nil, &NotFoundError{Name: name, Realm: r.String()}
			case n.bound == nil:
				return nil, &InactiveError{Fiber: own.Name(), State: own.state, Op: "read service " + name}
			case n.bound.gone.Load():
				return nil, &StaleError{Name: name, Provider: n.bound.fiber.Name(), Held: n.bound.now.Load().generation}
			}
			return n.bound, nil
		}
		if f.parent == nil || f.mount.realmOf(name) != r {
			return nil, &NotDeclaredError{Fiber: own.Name(), Name: name}
		}
	}
}

// Handle is a held reference to a service. It follows the entry that provides
// it: when the provider publishes a new generation, Get returns the new value.
// Once the provider withdrew, or the holder's own load is over, it is refused.
type Handle[T any] struct {
	ctx    *Context
	impl   *impl
	pinned uint64
}

// Hold makes a handle of a service this context may read.
func Hold[T any](x *Context, name string) (Handle[T], error) {
	im, err := x.find(name)
	if err != nil {
		return Handle[T]{}, err
	}
	if _, err := cast[T](name, im.now.Load().value); err != nil {
		return Handle[T]{}, err
	}
	return Handle[T]{ctx: x, impl: im}, nil
}

// Generation returns the generation published now; the first is 1.
func (h Handle[T]) Generation() uint64 { return h.impl.now.Load().generation }

// Pin returns a handle that is refused with [StaleError] as soon as the
// provider publishes another generation.
func (h Handle[T]) Pin() Handle[T] {
	h.pinned = h.Generation()
	return h
}

// Get returns the value. Errors: [InactiveError], [StaleError], [TypeError].
func (h Handle[T]) Get() (T, error) {
	var zero T
	x := h.ctx
	if x.epoch != nil && x.epoch.over.Load() {
		return zero, &InactiveError{Fiber: x.fiber.Name(), State: x.fiber.State(), Op: "use service " + h.impl.name}
	}
	p := h.impl.now.Load()
	if h.impl.gone.Load() {
		return zero, &StaleError{Name: h.impl.name, Provider: h.impl.fiber.Name(), Held: max(h.pinned, p.generation)}
	}
	if h.pinned != 0 && p.generation != h.pinned {
		return zero, &StaleError{Name: h.impl.name, Provider: h.impl.fiber.Name(), Held: h.pinned, Current: p.generation}
	}
	return cast[T](h.impl.name, p.value)
}

// Watch calls fn, in order, whenever the service name of this context's realm
// becomes available, is withdrawn, is replaced or changes its facts: how an
// optional need is followed. It is an effect of the fiber.
func (x *Context) Watch(name string, fn func(ctx context.Context, change ServiceChange)) error {
	return listen(x, ServiceEvent, tapFunc[ServiceChange](func(ctx context.Context, ch ServiceChange) error {
		fn(ctx, ch)
		return nil
	}), kindTap, []ListenOption{Label("watch " + name), watching(name), Subject("")}) // services have no subject
}

package ctxsvc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
)

// State is the state of a fiber. The numbers are public.
type State int

const (
	Pending   State = 0 // waits for a service it needs, or for its first load
	Loading   State = 1 // its Apply runs
	Active    State = 2 // its Apply returned nil and its needs are met
	Failed    State = 3 // its Apply failed, or Fail was called; everything is undone
	Disposed  State = 4 // gone for good
	Unloading State = 5 // its effects are being undone
)

var stateNames = [...]string{"PENDING", "LOADING", "ACTIVE", "FAILED", "DISPOSED", "UNLOADING"}

func (s State) String() string {
	if s < 0 || int(s) >= len(stateNames) {
		return fmt.Sprintf("State(%d)", int(s))
	}
	return stateNames[s]
}

// MarshalText writes the state's name.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// Plugin describes something that can be applied at a place of the tree.
type Plugin struct {
	// Name is shown in errors, logs and snapshots. Empty: the nearest named
	// ancestor's name is shown.
	Name string

	// Inject lists the services the plugin needs. It is loaded while every
	// need that is not optional has an active provider in its realm.
	Inject []Need

	// Provides lists the names Apply will provide. It is optional and binds
	// nothing; with it, fibers that wait for each other are recognised as a
	// cycle before any of them ever ran.
	Provides []string

	// Check validates a configuration and returns it normalised (defaults
	// filled in). It must not have side effects: it runs before every load
	// and before an update is accepted.
	Check func(config any) (any, error)

	// Apply does the plugin's work: it registers effects, services, listeners
	// and children through ctx and returns. What must be undone at the end is
	// registered, not returned. A load whose Apply returns an error is undone
	// and the fiber is FAILED.
	Apply func(ctx *Context, config any) error
}

// Need names a service a plugin uses.
type Need struct {
	Name string

	// Optional needs do not hold up a load and do not restart it: read the
	// service when it is used, and follow it with [Context.Watch].
	Optional bool

	// Intercept, when not nil, is a configuration layer for that service as
	// seen by this plugin and everything below it.
	Intercept any
}

// need is one Need of one fiber, bound to a realm.
type need struct {
	Need
	fiber *Fiber
	realm *realm
	pos   *listElement

	bound    *impl  // what the current load runs with; nil when not loaded
	boundRev uint64 // its facts revision then

	failed    *impl // what the failed load ran with
	failedRev uint64

	judged  *impl // the availability check's latest verdict…
	judgSeq uint64
	judgOK  bool
}

// epoch is one load of a fiber: its effects and everything handed to its body.
type epoch struct {
	fiber    *Fiber
	root     Effect // all effects, as a group without a label
	std      context.Context
	cancel   context.CancelFunc
	body     frame
	table    atomic.Pointer[map[string]*impl] // resolved needs; nil before load and after unload
	closed   bool                             // registrations are refused
	spent    bool                             // this load must end whatever its needs say
	over     atomic.Bool                      // everything is undone: readers are refused
	released chan struct{}                    // closed when fully unloaded; made when somebody waits
	impls    []*impl                          // services provided, in order
}

// Fiber is one application of one plugin at one place of the tree.
//
// A fiber is level-triggered: it compares what should be (disposed? restarted?
// are the needs met, by the same providers with the same facts?) with what is,
// and at most one transition is in flight. A change during a transition is
// looked at when the transition ends, so the last request wins and none is
// lost.
type Fiber struct {
	c      *container
	uid    uint64
	name   string // shown
	plugin Plugin
	parent *Fiber
	mount  *Context // where it was plugged in
	effect *Effect  // its place among the parent's effects

	config any
	needs  []need

	live  atomic.Pointer[epoch]
	state State
	err   error

	loaded    bool // the body of the live epoch was started (or the root)
	held      bool // being created: nothing starts yet
	disposing bool
	blocked   bool // failed: not loaded again before something changes
	driving   bool // a transition is in flight
	idle      chan struct{}
	undoErr   error // of the final unload
}

// Plugin applies p below this context and returns its fiber at once; Apply
// never runs inside this call. The fiber starts when its needs are met and
// ends with this context's fiber. Errors: [PluginError], [InactiveError], or
// the error of an observer of [FiberEvent] that refused the fiber.
func (x *Context) Plugin(p Plugin, config any) (*Fiber, error) {
	if p.Apply == nil {
		return nil, &PluginError{Name: p.Name, Reason: "has no Apply: nothing to run"}
	}
	seen := map[string]bool{}
	for _, n := range p.Inject {
		if n.Name == "" {
			return nil, &PluginError{Name: p.Name, Reason: "needs a service without a name"}
		}
		if seen[n.Name] {
			return nil, &PluginError{Name: p.Name, Reason: fmt.Sprintf("needs %q twice", n.Name)}
		}
		seen[n.Name] = true
	}

	c := x.c()
	c.mu.Lock()
	f := &Fiber{c: c, name: p.Name, plugin: p, parent: x.fiber, mount: x, config: config, held: true}
	if f.name == "" {
		f.name = x.fiber.name
	}
	e := &Effect{fiber: x.fiber, kind: kindFiber, state: effectLive, label: p.Name, child: f}
	if err := x.register(e, "plug in "+p.Name); err != nil {
		c.mu.Unlock()
		return nil, err
	}
	// Ownership first: from here on a dispose of the parent reaches the child.
	c.lastUID++
	f.uid = c.lastUID
	f.effect = e
	c.fibers[f.uid] = f
	f.renew()
	c.busy++
	for _, n := range p.Inject {
		f.addNeed(n)
	}
	f.promise()
	observed := c.table(FiberEvent.Name).any()
	c.mu.Unlock()

	// Then publish: an observer may refuse the fiber, add needs, or dispose.
	var refusal error
	if observed {
		fr := &frame{fiber: f, kind: frameCreate}
		refusal = c.guard(fr, "created", func() error {
			_, err := Waterfall(x.Context(), x, FiberEvent, FiberChange{Fiber: f},
				func(context.Context, FiberChange) (struct{}, error) { return struct{}{}, nil })
			return err
		})
	}

	// Then resolve.
	c.mu.Lock()
	f.held = false
	c.busy--
	if refusal != nil {
		f.disposing = true
	}
	f.kick()
	if !f.driving {
		f.wake()
	}
	c.mu.Unlock()
	if refusal != nil {
		_ = f.Dispose(context.WithoutCancel(x.Context()))
		return nil, refusal
	}
	return f, nil
}

// AddNeed adds a need to a fiber that is being created: observers of
// [FiberEvent] use it. Later it is refused.
func (f *Fiber) AddNeed(n Need) error {
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	if !f.held {
		return &InactiveError{Fiber: f.Name(), State: f.state, Op: "add a need after creation"}
	}
	for i := range f.needs {
		if f.needs[i].Name == n.Name {
			return &PluginError{Name: f.plugin.Name, Reason: fmt.Sprintf("needs %q twice", n.Name)}
		}
	}
	f.unlist()
	kept := f.needs
	f.needs = nil
	for i := range kept {
		f.addNeed(kept[i].Need)
	}
	f.addNeed(n)
	return nil
}

// addNeed appends a need. List elements point at the slice's array, so it is
// only called while the fiber is being created. The lock is held.
func (f *Fiber) addNeed(n Need) {
	if f.needs == nil {
		f.needs = make([]need, 0, len(f.plugin.Inject)+1)
	}
	if len(f.needs) == cap(f.needs) {
		f.unlist()
		f.needs = append(make([]need, 0, 2*cap(f.needs)), f.needs...)
		f.list()
	}
	f.needs = append(f.needs, need{Need: n, fiber: f})
	nd := &f.needs[len(f.needs)-1]
	nd.realm = f.mount.realmOf(n.Name)
	nd.pos = nd.realm.dependents.PushBack(nd)
}

// promise enters the fiber under the names its plugin says it provides. The
// lock is held.
func (f *Fiber) promise() {
	for _, name := range f.plugin.Provides {
		if f.c.promises[name] == nil {
			f.c.promises[name] = map[*Fiber]struct{}{}
		}
		f.c.promises[name][f] = struct{}{}
	}
}

func (f *Fiber) list() {
	for i := range f.needs {
		nd := &f.needs[i]
		nd.pos = nd.realm.dependents.PushBack(nd)
	}
}

func (f *Fiber) unlist() {
	for i := range f.needs {
		nd := &f.needs[i]
		nd.realm.dependents.Remove(nd.pos)
	}
}

// renew gives the fiber a fresh epoch. The lock is held (or f is not shared).
func (f *Fiber) renew() {
	ep := &epoch{fiber: f}
	ep.root = Effect{fiber: f, kind: kindGroup, state: effectLive, epoch: ep}
	ep.body.fiber = f
	ep.body.kind = frameBody
	ep.body.ended.Store(true)
	ep.std, ep.cancel = context.WithCancel(context.WithValue(context.Background(), frameKey{}, &ep.body))
	f.live.Store(ep)
}

// Name returns the plugin's name, or the nearest named ancestor's at the time
// it was plugged in.
func (f *Fiber) Name() string { return f.name }

// UID returns the fiber's number: 0 for the root, never reused.
func (f *Fiber) UID() uint64 { return f.uid }

// Parent returns the fiber this one is plugged into, nil for the root.
func (f *Fiber) Parent() *Fiber {
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	return f.parent
}

// State returns the state at this moment.
func (f *Fiber) State() State {
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	return f.state
}

// Err returns why the fiber is FAILED: a [ConfigError], an [ApplyError], the
// error given to Fail. It is nil again after a successful load.
func (f *Fiber) Err() error {
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	return f.err
}

// Config returns the configuration as it was given, before Check.
func (f *Fiber) Config() any {
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	return f.config
}

// Scope returns a context of the fiber's present or next load. Registrations
// through it are legal while the fiber is PENDING or LOADING as well; they are
// undone with that load.
func (f *Fiber) Scope() *Context {
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	if f.parent == nil {
		return &Context{fiber: f}
	}
	return f.base(f.live.Load())
}

// base makes the base context of one load. The lock is held.
func (f *Fiber) base(ep *epoch) *Context {
	x := &Context{fiber: f, epoch: ep, subject: f.mount.subject}
	for i := range f.needs {
		if v := f.needs[i].Intercept; v != nil {
			if x.intercept == nil {
				x.intercept = map[string]any{}
			}
			x.intercept[f.needs[i].Name] = v
		}
	}
	return x
}

// Wait returns when no transition of the fiber is in flight: nil when it is
// ACTIVE, PENDING (waiting is not a failure; see [Fiber.Waiting]) or disposed,
// its error when FAILED, ctx.Err() when ctx ends first, [DeadlockError] from
// inside code the transition waits for.
func (f *Fiber) Wait(ctx context.Context) error {
	if err := f.settle(ctx, "wait", false); err != nil {
		return err
	}
	return f.Err()
}

// Dispose ends the fiber and everything below it and returns when all of it is
// undone. A second call joins the first. The returned error joins every
// failure of a disposer ([EffectError]); the fiber is DISPOSED all the same.
// When ctx ends first the disposal goes on without the caller. On the root
// fiber it empties the container, which stays usable.
func (f *Fiber) Dispose(ctx context.Context) error {
	f.c.mu.Lock()
	f.requestDispose()
	f.c.mu.Unlock()
	if err := f.settle(ctx, "dispose", true); err != nil {
		return err
	}
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	return f.undoErr
}

// requestDispose asks for the end of the fiber. The lock is held.
func (f *Fiber) requestDispose() {
	if f.parent == nil {
		f.spend()
	} else if !f.disposing {
		f.disposing = true
		f.spend()
	}
	f.kick()
}

// Restart undoes the current load and loads again with the same configuration
// as soon as the needs are met. Called while the fiber loads it takes effect
// when that load has ended. It returns like Wait.
func (f *Fiber) Restart(ctx context.Context) error {
	f.c.mu.Lock()
	if f.disposing {
		err := &InactiveError{Fiber: f.Name(), State: f.state, Op: "restart"}
		f.c.mu.Unlock()
		return err
	}
	f.blocked = false
	f.spend()
	f.kick()
	f.c.mu.Unlock()
	if err := f.settle(ctx, "restart", true); err != nil {
		return err
	}
	return f.Err()
}

// spend marks the current load as over whatever the needs say, and tells a
// body that still runs. The lock is held.
func (f *Fiber) spend() {
	if ep := f.live.Load(); f.loaded && !ep.closed {
		ep.spent = true
		if f.state == Loading {
			ep.cancel()
		}
	}
}

// Update gives the fiber a new configuration.
//
// The configuration is checked first; an invalid one changes nothing and is
// returned as [ConfigError]. An ACTIVE fiber then asks the listeners of
// [UpdateEvent] and the hooks registered with [Context.OnUpdate]. One that
// returns an error vetoes: nothing changes. One that returns nil without
// calling next has applied the change in place: the configuration is stored
// and nothing restarts. Otherwise the configuration is stored and the fiber
// restarts. A fiber that is not ACTIVE takes the configuration for its next
// load, which starts at once if only a failure was in the way; updates during
// a load are not lost, the last one wins. It returns like Wait.
func (f *Fiber) Update(ctx context.Context, config any) error {
	c := f.c
	c.mu.Lock()
	if f.disposing || f.parent == nil {
		err := &InactiveError{Fiber: f.Name(), State: f.state, Op: "update"}
		c.mu.Unlock()
		return err
	}
	ask := f.state == Active && !f.live.Load().spent
	x := f.base(f.live.Load())
	c.mu.Unlock()

	if _, err := f.check(config); err != nil {
		return err
	}
	store := func(config any) {
		c.mu.Lock()
		f.config = config
		f.blocked = false
		f.err = nil
		f.spend()
		f.kick()
		c.mu.Unlock()
	}
	if !ask {
		store(config)
	} else {
		restarts := false
		_, err := dispatchWaterfall(ctx, x, UpdateEvent, Update{Fiber: f, Config: config},
			func(_ context.Context, u Update) (struct{}, error) {
				restarts = true
				store(u.Config)
				return struct{}{}, nil
			}, DispatchOption{target: f})
		switch {
		case err != nil && !restarts:
			return err
		case !restarts:
			c.mu.Lock()
			f.config = config
			c.mu.Unlock()
			return nil
		}
	}
	if err := f.settle(ctx, "update", true); err != nil {
		return err
	}
	return f.Err()
}

// check runs the plugin's Check on config.
func (f *Fiber) check(config any) (any, error) {
	if f.plugin.Check == nil {
		return config, nil
	}
	var out any
	err := f.c.guard(&frame{fiber: f, kind: frameSetup}, "check", func() (err error) {
		out, err = f.plugin.Check(config)
		return err
	})
	if err != nil {
		return nil, &ConfigError{Fiber: f.Name(), Err: err}
	}
	return out, nil
}

// Fail reports that the fiber's work is broken: it unloads and is FAILED with
// err until Update, Restart, or a change of its providers loads it again. On a
// fiber that is not loaded it records the error, on a disposed one it does
// nothing. Code that belongs to one load uses [Context.Fail].
func (f *Fiber) Fail(err error) { f.fail(nil, err) }

// Fail is [Fiber.Fail] for the load this context belongs to: if that load is
// over, it does nothing.
func (x *Context) Fail(err error) { x.fiber.fail(x.current(), err) }

func (f *Fiber) fail(ep *epoch, err error) {
	if err == nil {
		err = errors.New("failed without a reason")
	}
	f.c.mu.Lock()
	live := f.live.Load()
	if f.disposing || f.parent == nil || ep != nil && (ep != live || ep.closed) {
		f.c.mu.Unlock()
		return
	}
	f.block(err)
	f.spend()
	if live.root.first != nil {
		live.spent = true // registered while pending: goes with the failure
	}
	f.c.mu.Unlock()
	f.c.log.Error("plugin failed", f.attrs(err)...) // before it shows
	f.c.mu.Lock()
	f.kick()
	f.c.mu.Unlock()
}

// block records a failure and what it happened with. The lock is held.
func (f *Fiber) block(err error) {
	f.err = err
	f.blocked = true
	for i := range f.needs {
		nd := &f.needs[i]
		nd.failed, nd.failedRev = nil, 0
		if nd.bound != nil {
			nd.failed, nd.failedRev = nd.bound, nd.boundRev
		} else if im, ok, _ := nd.visible(); ok {
			nd.failed, nd.failedRev = im, im.factsRev
		}
	}
}

func (f *Fiber) attrs(err error) []any {
	return []any{slog.String("fiber", f.Name()), slog.Uint64("uid", f.uid), slog.Any("error", err)}
}

// settle waits until no transition is in flight. unloads says whether the
// caller's request makes the fiber unload first.
func (f *Fiber) settle(ctx context.Context, op string, unloads bool) error {
	c := f.c
	c.mu.Lock()
	if !f.driving && !f.held {
		c.mu.Unlock()
		return nil
	}
	if f.idle == nil {
		f.idle = make(chan struct{})
	}
	return c.await(ctx, f.idle, wait{op: op, fiber: f, unloads: unloads})
}

// wake releases those who wait for the fiber to be quiet. The lock is held.
func (f *Fiber) wake() {
	if f.idle != nil {
		close(f.idle)
		f.idle = nil
	}
	f.c.checkQuiet()
}

package ctxsvc

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
)

// Event is a named extension point: a request Q that listeners see in order
// and, for the modes that have a result, an answer A. Share one Event value
// between those who dispatch and those who listen: the first listener of a
// name fixes its contract for as long as the name has listeners.
//
// FailClosed marks an event whose listeners can veto. A dispatch of it fails
// with [ListenerGoneError] when a listener died while the dispatch was under
// way, where an ordinary event goes on without that listener.
type Event[Q, A any] struct {
	Name       string
	FailClosed bool
}

// Next continues a dispatch with the listeners further in. It carries the
// request, changed or not, and may be called at most once per listener
// ([ErrNextTwice]) and only while the listener runs ([ErrNextLate]).
type Next[Q, A any] = func(ctx context.Context, q Q) (A, error)

type (
	aroundFunc[Q, A any] func(ctx context.Context, q Q, next Next[Q, A]) (A, error)
	answerFunc[Q, A any] func(ctx context.Context, q Q) (A, bool, error)
	mapFunc[Q any]       func(ctx context.Context, q Q) (Q, error)
	tapFunc[Q any]       func(ctx context.Context, q Q) error
)

type listenerKind uint8

const (
	kindAround listenerKind = iota
	kindAnswer
	kindMap
	kindTap
)

var listenerKindNames = [...]string{"around", "answer", "map", "tap"}

// listener is one registration.
type listener struct {
	listening
	table *eventTable
	ctx   *Context
	fn    any
	kind  listenerKind
	e     Effect

	pos   *list.Element
	dead  atomic.Bool // left its event: disposed or its fiber unloading
	fired atomic.Bool // a once listener that has had its turn
}

// listening is what the options of a registration say.
type listening struct {
	label    string
	subject  string
	prepend  bool
	once     bool
	global   bool
	terminal bool
	only     *Fiber // hears dispatches aimed at this fiber only
	watch    string // hears dispatches within the realm of this service only
}

// ListenOption configures a registration.
type ListenOption func(*listening)

// Prepend puts the listener in front of (outside) all present ones.
func Prepend() ListenOption { return func(l *listening) { l.prepend = true } }

// Once removes the listener before its first run, so that it runs once even
// under re-entrant or concurrent dispatches.
func Once() ListenOption { return func(l *listening) { l.once = true } }

// Subject scopes the listener: it sees dispatches for this subject and its
// descendants only. A subject is a path, "mcp/cursor/7". It routes, it does
// not protect.
func Subject(subject string) ListenOption { return func(l *listening) { l.subject = subject } }

// Global lets the listener see every dispatch, whatever its subject or realm.
func Global() ListenOption { return func(l *listening) { l.global = true } }

// Terminal makes the listener the innermost one wherever it is registered, in
// front of the dispatcher's base only. An event has at most one; the second
// gets [TerminalTakenError].
func Terminal() ListenOption { return func(l *listening) { l.terminal = true } }

// Label names the listener in errors, logs and snapshots. Without it the
// fiber's name is used.
func Label(label string) ListenOption { return func(l *listening) { l.label = label } }

func watching(name string) ListenOption { return func(l *listening) { l.watch = name } }

func onlyFor(f *Fiber) ListenOption { return func(l *listening) { l.only = f } }

// contract is what the first listener of a name fixes while there are any.
type contract struct {
	typ        reflect.Type
	failClosed bool
}

func (k contract) String() string {
	if k.failClosed {
		return k.typ.String() + " (fail closed)"
	}
	return k.typ.String()
}

// eventTable holds the listeners of one name. It changes under the container's
// lock; dispatches read an immutable snapshot.
type eventTable struct {
	name     string
	contract atomic.Pointer[contract]
	order    list.List // of *listener, without the terminal one
	terminal *listener
	count    atomic.Int32
	snap     atomic.Pointer[[]*listener]
}

func (t *eventTable) any() bool { return t.count.Load() > 0 }

// table finds or makes the table of a name. Names are few and live as long as
// the container, so readers get a map that is never written to.
func (c *container) table(name string) *eventTable {
	for {
		old := c.events.Load()
		if old != nil {
			if t := (*old)[name]; t != nil {
				return t
			}
		}
		next := make(map[string]*eventTable, 8)
		if old != nil {
			for k, v := range *old {
				next[k] = v
			}
		}
		t := &eventTable{name: name}
		next[name] = t
		if c.events.CompareAndSwap(old, &next) {
			return t
		}
	}
}

// listeners returns the present listeners, outermost first.
func (t *eventTable) listeners(c *container) []*listener {
	if p := t.snap.Load(); p != nil {
		return *p
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	out := make([]*listener, 0, t.count.Load())
	for el := t.order.Front(); el != nil; el = el.Next() {
		out = append(out, el.Value.(*listener))
	}
	if t.terminal != nil {
		out = append(out, t.terminal)
	}
	t.snap.Store(&out)
	return out
}

// remove takes l out of its table. The lock is held.
func (l *listener) remove() {
	t := l.table
	switch {
	case t.terminal == l:
		t.terminal = nil
	case l.pos != nil:
		t.order.Remove(l.pos)
		l.pos = nil
	default:
		return
	}
	t.count.Add(-1)
	t.snap.Store(nil)
}

// leave removes l for good: running dispatches treat it as dead. The lock is
// held.
func (l *listener) leave() {
	l.remove()
	l.dead.Store(true)
}

// On registers a listener that surrounds the rest of a dispatch: it may look
// at the request, change it, answer without calling next (a veto of everything
// further in), or work on the answer. It is an effect of the fiber. New
// listeners go last (innermost).
func On[Q, A any](x *Context, ev Event[Q, A], fn func(ctx context.Context, q Q, next func(context.Context, Q) (A, error)) (A, error), opts ...ListenOption) error {
	return listen(x, ev, aroundFunc[Q, A](fn), kindAround, opts)
}

// Answer registers a listener that answers or passes: handled says which, so
// that every value of A is a possible answer.
func Answer[Q, A any](x *Context, ev Event[Q, A], fn func(ctx context.Context, q Q) (a A, handled bool, err error), opts ...ListenOption) error {
	return listen(x, ev, answerFunc[Q, A](fn), kindAnswer, opts)
}

// Map registers a listener that changes the request for those after it. In
// Parallel, which has no after, its result is dropped. Its error ends the
// dispatch as an answer's would.
func Map[Q, A any](x *Context, ev Event[Q, A], fn func(ctx context.Context, q Q) (Q, error), opts ...ListenOption) error {
	return listen(x, ev, mapFunc[Q](fn), kindMap, opts)
}

// Tap registers a listener that only observes. In the modes with a result its
// error is logged and nothing else: a tap cannot veto.
func Tap[Q, A any](x *Context, ev Event[Q, A], fn func(ctx context.Context, q Q) error, opts ...ListenOption) error {
	return listen(x, ev, tapFunc[Q](fn), kindTap, opts)
}

func listen[Q, A any](x *Context, ev Event[Q, A], fn any, kind listenerKind, opts []ListenOption) error {
	l := &listener{ctx: x, fn: fn, kind: kind, listening: listening{subject: x.subject}}
	for _, o := range opts {
		o(&l.listening)
	}
	if l.label == "" {
		l.label = x.fiber.Name()
	}
	return l.register(ev.Name, contract{reflect.TypeFor[Event[Q, A]](), ev.FailClosed})
}

func (l *listener) register(event string, want contract) error {
	x := l.ctx
	c := x.c()
	t := c.table(event)
	c.mu.Lock()
	defer c.mu.Unlock()
	if have := t.contract.Load(); have == nil || !t.any() {
		t.contract.Store(&want)
	} else if *have != want {
		return &EventTypeError{Event: event, Have: have.String(), Want: want.String()}
	}
	if l.terminal && t.terminal != nil {
		return &TerminalTakenError{Event: event, Owner: t.terminal.ctx.fiber.Name()}
	}
	l.table = t
	l.e = Effect{fiber: x.fiber, kind: kindListener, state: effectLive, label: event, listener: l}
	if err := x.register(&l.e, "listen to "+event); err != nil {
		return err
	}
	switch {
	case l.terminal:
		t.terminal = l
	case l.prepend:
		l.pos = t.order.PushFront(l)
	default:
		l.pos = t.order.PushBack(l)
	}
	t.count.Add(1)
	t.snap.Store(nil)
	return nil
}

// DispatchOption says who a dispatch is for. Without options it carries the
// subject of the context it goes through.
type DispatchOption struct {
	subject string
	within  string
	realm   *realm // of within, nil: as seen from the dispatching context
	target  *Fiber
}

// ForSubject dispatches on behalf of a subject: listeners scoped to it or to
// one of its ancestors see it, and those without a scope.
func ForSubject(subject string) DispatchOption { return DispatchOption{subject: subject} }

// Within restricts a dispatch to listeners for whom the service called name
// means the same realm as for the dispatching context: how the events of an
// isolated service stay inside.
func Within(name string) DispatchOption { return DispatchOption{within: name} }

// dispatch is the part of a running dispatch that does not depend on types.
type dispatch struct {
	c          *container
	event      string
	failClosed bool
	list       []*listener
	DispatchOption
}

func newDispatch[Q, A any](mode string, x *Context, ev Event[Q, A], q Q, opts []DispatchOption) (dispatch, error) {
	c := x.c()
	d := dispatch{c: c, event: ev.Name, failClosed: ev.FailClosed, DispatchOption: DispatchOption{subject: x.subject}}
	for _, o := range opts {
		if o.subject != "" {
			d.subject = o.subject
		}
		if o.within != "" {
			d.within, d.realm = o.within, o.realm
		}
		if o.target != nil {
			d.target = o.target
		}
	}
	if c.dispatch.any() && !strings.HasPrefix(ev.Name, "internal/") {
		Emit(context.Background(), x, DispatchEvent, Dispatch{Mode: mode, Event: ev.Name, Request: q, Subject: d.subject})
	}
	t := c.table(ev.Name)
	if have := t.contract.Load(); have != nil && t.any() {
		if want := (contract{reflect.TypeFor[Event[Q, A]](), ev.FailClosed}); *have != want {
			return d, &EventTypeError{Event: ev.Name, Have: have.String(), Want: want.String()}
		}
		d.list = t.listeners(c)
	}
	if d.within != "" && d.realm == nil {
		c.mu.Lock()
		d.realm = x.realmOf(d.within)
		c.mu.Unlock()
	}
	return d, nil
}

// admits reports whether l is to hear this dispatch at all.
func (d *dispatch) admits(l *listener) bool {
	if l.only != nil && l.only != d.target || l.watch != "" && l.watch != d.within {
		return false
	}
	if l.global {
		return true
	}
	if l.subject != "" && !covers(l.subject, d.subject) {
		return false
	}
	if d.within != "" {
		d.c.mu.Lock()
		defer d.c.mu.Unlock()
		return l.ctx.realmOf(d.within) == d.realm
	}
	return true
}

// covers reports whether a listener scoped to scope hears subject.
func covers(scope, subject string) bool {
	return subject == scope || len(subject) > len(scope) && subject[len(scope)] == '/' && subject[:len(scope)] == scope
}

// turn decides whether it is l's turn now. An error fails the dispatch.
func (d *dispatch) turn(l *listener) (bool, error) {
	if !d.admits(l) {
		return false, nil
	}
	if l.dead.Load() {
		if d.failClosed {
			return false, d.gone(l)
		}
		return false, nil
	}
	if l.once {
		if !l.fired.CompareAndSwap(false, true) {
			return false, nil
		}
		d.c.mu.Lock()
		l.remove()
		if l.e.state == effectLive {
			l.e.finished(nil)
		}
		d.c.mu.Unlock()
	}
	return true, nil
}

func (d *dispatch) gone(l *listener) error {
	return &ListenerGoneError{Event: d.event, Listener: l.label, Fiber: l.ctx.fiber.Name()}
}

// contain turns a panic of l into its error.
func (d *dispatch) contain(l *listener, err *error) {
	if v := recover(); v != nil {
		*err = &PanicError{Fiber: l.ctx.fiber.Name(), Where: "listener " + l.label + " of " + d.event, Value: v, Stack: debug.Stack()}
	}
}

// report logs a contained failure.
func (d *dispatch) report(l *listener, err error) {
	d.c.log.Error("listener failed", append(l.ctx.fiber.attrs(err), slog.String("event", d.event), slog.String("listener", l.label))...)
}

// attribute names the listener whose error is one of several.
func (d *dispatch) attribute(l *listener, err error) error {
	return &ListenerError{Event: d.event, Listener: l.label, Fiber: l.ctx.fiber.Name(), Err: err}
}

// flow is one nested dispatch: the listeners from outermost to innermost, then
// the base.
type flow[Q, A any] struct {
	dispatch
	base Next[Q, A]
	used int
	hops [2]hop // enough for most events without another allocation
	more []hop
}

// hop is the state of one around listener's turn.
type hop struct{ state atomic.Uint32 }

const (
	hopFresh uint32 = iota
	hopUsed
	hopOver
)

// Waterfall dispatches ev as nested calls: each listener surrounds those after
// it, and base, the dispatcher's own default, is innermost. The answer of the
// outermost listener is returned; an error travels outwards through the
// listeners, which may handle it. Listeners are those present at the start;
// one that died meanwhile is skipped, or fails the dispatch if the event is
// FailClosed. The dispatch ends with ctx.Err() at the first hop after ctx
// ended. Panics become [PanicError].
func Waterfall[Q, A any](ctx context.Context, x *Context, ev Event[Q, A], q Q, base func(context.Context, Q) (A, error), opts ...DispatchOption) (A, error) {
	return dispatchWaterfall(ctx, x, ev, q, base, opts...)
}

func dispatchWaterfall[Q, A any](ctx context.Context, x *Context, ev Event[Q, A], q Q, base Next[Q, A], opts ...DispatchOption) (A, error) {
	d, err := newDispatch("waterfall", x, ev, q, opts)
	if err != nil {
		var zero A
		return zero, err
	}
	if base == nil {
		var zero A
		return zero, fmt.Errorf("event %q: waterfall without a base: give it the default behaviour", ev.Name)
	}
	f := &flow[Q, A]{dispatch: d, base: base}
	return f.run(ctx, 0, q)
}

// run continues with listener i.
func (f *flow[Q, A]) run(ctx context.Context, i int, q Q) (a A, err error) {
	for ; i < len(f.list); i++ {
		if err := ctx.Err(); err != nil {
			return a, err
		}
		l := f.list[i]
		ok, err := f.turn(l)
		if err != nil {
			return a, err
		}
		if !ok {
			continue
		}
		switch fn := l.fn.(type) {
		case aroundFunc[Q, A]:
			return f.around(ctx, l, fn, i+1, q)
		case answerFunc[Q, A]:
			a, handled, err := f.answer(ctx, l, fn, q)
			if err != nil || handled {
				return a, err
			}
		case mapFunc[Q]:
			if q, err = f.mapped(ctx, l, fn, q); err != nil {
				return a, err
			}
		case tapFunc[Q]:
			if err := f.tapped(ctx, l, fn, q); err != nil {
				f.report(l, err)
			}
		default:
			return a, f.alien(l)
		}
	}
	if err := ctx.Err(); err != nil {
		return a, err
	}
	return f.bottom(ctx, q)
}

func (f *flow[Q, A]) around(ctx context.Context, l *listener, fn aroundFunc[Q, A], rest int, q Q) (a A, err error) {
	h := f.hop()
	defer func() {
		h.state.Store(hopOver)
		if v := recover(); v != nil {
			err = &PanicError{Fiber: l.ctx.fiber.Name(), Where: "listener " + l.label + " of " + f.event, Value: v, Stack: debug.Stack()}
		}
	}()
	a, err = fn(ctx, q, func(ctx context.Context, q Q) (A, error) {
		if !h.state.CompareAndSwap(hopFresh, hopUsed) {
			var zero A
			if h.state.Load() == hopOver {
				return zero, ErrNextLate
			}
			return zero, ErrNextTwice
		}
		return f.run(ctx, rest, q)
	})
	if err == nil && f.failClosed && l.dead.Load() {
		var zero A
		return zero, f.gone(l) // its answer may come from half an undone fiber
	}
	return a, err
}

// hop takes the state for one more turn. Turns begin one inside the other, so
// no two goroutines ask at once.
func (f *flow[Q, A]) hop() *hop {
	i := f.used
	f.used++
	if i < len(f.hops) {
		return &f.hops[i]
	}
	if f.more == nil {
		f.more = make([]hop, len(f.list)-len(f.hops))
	}
	return &f.more[i-len(f.hops)]
}

func (f *flow[Q, A]) answer(ctx context.Context, l *listener, fn answerFunc[Q, A], q Q) (a A, handled bool, err error) {
	defer f.contain(l, &err)
	a, handled, err = fn(ctx, q)
	if err == nil && f.failClosed && l.dead.Load() {
		return a, false, f.gone(l)
	}
	return a, handled, err
}

func (f *flow[Q, A]) mapped(ctx context.Context, l *listener, fn mapFunc[Q], q Q) (out Q, err error) {
	defer f.contain(l, &err)
	out, err = fn(ctx, q)
	if err == nil && f.failClosed && l.dead.Load() {
		return out, f.gone(l)
	}
	return out, err
}

func (f *flow[Q, A]) tapped(ctx context.Context, l *listener, fn tapFunc[Q], q Q) (err error) {
	defer f.contain(l, &err)
	return fn(ctx, q)
}

// bottom runs the dispatcher's base.
func (f *flow[Q, A]) bottom(ctx context.Context, q Q) (a A, err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &PanicError{Fiber: "dispatcher", Where: "base of " + f.event, Value: v, Stack: debug.Stack()}
		}
	}()
	return f.base(ctx, q)
}

// Serial asks the listeners one after the other, waiting for each, until one
// answers: an [Answer] listener that reports handled, or an [On] listener that
// does not call next. An error ends it. handled is false when the request came
// through to the end.
func Serial[Q, A any](ctx context.Context, x *Context, ev Event[Q, A], q Q, opts ...DispatchOption) (a A, handled bool, err error) {
	return ask(ctx, "serial", x, ev, q, opts)
}

// Bail is Serial for decisions made in memory: it takes no context, and the
// one its listeners get does not end. (In a language with promises the two
// modes differ in awaiting; here a listener that returned has been awaited.)
func Bail[Q, A any](x *Context, ev Event[Q, A], q Q, opts ...DispatchOption) (a A, handled bool, err error) {
	return ask(context.Background(), "bail", x, ev, q, opts)
}

func ask[Q, A any](ctx context.Context, mode string, x *Context, ev Event[Q, A], q Q, opts []DispatchOption) (a A, handled bool, err error) {
	d, err := newDispatch(mode, x, ev, q, opts)
	if err != nil {
		return a, false, err
	}
	handled = true
	f := &flow[Q, A]{dispatch: d, base: func(context.Context, Q) (A, error) {
		handled = false
		var zero A
		return zero, nil
	}}
	a, err = f.run(ctx, 0, q)
	if err != nil {
		return a, false, err
	}
	return a, handled, nil
}

// Emit tells every listener, one after the other in order. It has no result:
// a listener's error or panic is logged with its name and keeps nobody else
// from hearing the event. A request changed by a [Map] listener reaches those
// after it.
func Emit[Q, A any](ctx context.Context, x *Context, ev Event[Q, A], q Q, opts ...DispatchOption) {
	d, err := newDispatch("emit", x, ev, q, opts)
	if err != nil {
		x.c().log.Error("event not emitted", x.fiber.attrs(err)...)
		return
	}
	if len(d.list) == 0 {
		return
	}
	f := &flow[Q, A]{dispatch: d}
	for _, l := range f.list {
		ok, err := f.turn(l)
		if ok {
			q, err = f.tell(ctx, l, q)
		}
		if err != nil {
			f.report(l, err)
		}
	}
}

// alien refuses a listener of another contract that took the name while the
// dispatch began.
func (f *flow[Q, A]) alien(l *listener) error {
	return &EventTypeError{Event: f.event, Have: fmt.Sprintf("%T", l.fn), Want: reflect.TypeFor[Event[Q, A]]().String()}
}

// tell runs one listener for itself.
func (f *flow[Q, A]) tell(ctx context.Context, l *listener, q Q) (Q, error) {
	var err error
	switch fn := l.fn.(type) {
	case tapFunc[Q]:
		err = f.tapped(ctx, l, fn, q)
	case mapFunc[Q]:
		var out Q
		if out, err = f.mapped(ctx, l, fn, q); err == nil {
			q = out
		}
	case answerFunc[Q, A]:
		_, _, err = f.answer(ctx, l, fn, q)
	case aroundFunc[Q, A]:
		alone := &flow[Q, A]{dispatch: f.dispatch, base: func(context.Context, Q) (a A, err error) { return a, nil }}
		_, err = alone.around(ctx, l, fn, len(f.list), q)
	default:
		err = f.alien(l)
	}
	return q, err
}

// Parallel tells all listeners at once, waits for all of them and returns
// their errors joined, each as [ListenerError].
func Parallel[Q, A any](ctx context.Context, x *Context, ev Event[Q, A], q Q, opts ...DispatchOption) error {
	d, err := newDispatch("parallel", x, ev, q, opts)
	if err != nil {
		return err
	}
	f := &flow[Q, A]{dispatch: d}
	frames := f.c.current(ctx)
	errs := make([]error, len(f.list))
	var wg sync.WaitGroup
	for i, l := range f.list {
		ok, err := f.turn(l)
		if err != nil {
			errs[i] = err
		}
		if !ok {
			continue
		}
		wg.Add(1)
		go func() { // ends with the listener; Parallel waits for it
			defer wg.Done()
			defer f.c.frames.adopt(frames)() // a wait here keeps the caller waiting
			err := errGoexit
			defer func() {
				if err != nil {
					errs[i] = f.attribute(l, err)
				}
			}()
			_, err = f.tell(ctx, l, q)
		}()
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Internal events. Observers of the container listen to them like to any
// other; those that report what happened are delivered in order on a goroutine
// of their own, after the fact.
var (
	// FiberEvent: a fiber was created (Waterfall, in the call of Plugin: an
	// error refuses the fiber, an observer may add needs), or was disposed
	// (Emit).
	FiberEvent = Event[FiberChange, struct{}]{Name: "internal/plugin"}

	// StatusEvent: a fiber changed its state (Emit).
	StatusEvent = Event[StatusChange, struct{}]{Name: "internal/status"}

	// ServiceEvent: a service became available or was withdrawn, replaced,
	// or changed its facts (Emit, within the service's realm).
	ServiceEvent = Event[ServiceChange, struct{}]{Name: "internal/service"}

	// ConfigEvent: a configuration is about to be checked for a load
	// (Waterfall; the answer is the configuration used).
	ConfigEvent = Event[Update, any]{Name: "internal/config"}

	// UpdateEvent: an active fiber is to get a new configuration (Waterfall);
	// see [Fiber.Update].
	UpdateEvent = Event[Update, struct{}]{Name: "internal/update"}

	// DispatchEvent: an event that is not internal is about to be dispatched
	// (Emit, in the dispatching goroutine).
	DispatchEvent = Event[Dispatch, struct{}]{Name: "internal/dispatch"}
)

// FiberChange is the request of [FiberEvent].
type FiberChange struct {
	Fiber    *Fiber
	Disposed bool
}

// StatusChange is the request of [StatusEvent].
type StatusChange struct {
	Fiber    *Fiber
	From, To State
}

// Change says what happened to a service.
type Change string

const (
	Available    Change = "available"
	Withdrawn    Change = "withdrawn"
	Replaced     Change = "replaced"
	FactsChanged Change = "facts"
)

// ServiceChange is the request of [ServiceEvent].
type ServiceChange struct {
	Name       string
	Change     Change
	Realm      string // "" for the common realm
	Provider   *Fiber
	Generation uint64
	Facts      any
}

// Update is the request of [UpdateEvent] and [ConfigEvent].
type Update struct {
	Fiber  *Fiber
	Config any
}

// Dispatch is the request of [DispatchEvent].
type Dispatch struct {
	Mode    string // "emit", "parallel", "serial", "bail", "waterfall"
	Event   string
	Request any
	Subject string
}

// OnUpdate registers a hook for updates of this fiber alone: how a plugin takes
// a new configuration without restarting. It is an effect of the current load,
// so a restart never leaves an old hook behind. What it may do: see
// [Fiber.Update].
func (x *Context) OnUpdate(fn func(ctx context.Context, config any, next func(context.Context, any) error) error) error {
	f := x.fiber
	return On(x, UpdateEvent, func(ctx context.Context, u Update, next func(context.Context, Update) (struct{}, error)) (struct{}, error) {
		return struct{}{}, fn(ctx, u.Config, func(ctx context.Context, config any) error {
			_, err := next(ctx, Update{Fiber: u.Fiber, Config: config})
			return err
		})
	}, onlyFor(f), Global(), Label("update hook"))
}

package ctxsvc

import (
	"context"
	"io"
	"log/slog"
	"runtime"
	"runtime/debug"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
	"weak"
)

// Named defaults of the container's timers. Each bounds code the container
// does not control; none is a pause.
const (
	// DefaultUndoTimeout bounds one disposer. Ten seconds is what a process
	// usually gets between TERM and KILL; one that needs longer says so with
	// [UndoWithin].
	DefaultUndoTimeout = 10 * time.Second

	// DefaultStopTimeout bounds how long a running Apply or effect set-up may
	// take to return after its context was cancelled.
	DefaultStopTimeout = 30 * time.Second

	// DefaultQuietTimeout bounds how long a provider that stops waits for its
	// consumers to finish their own unload. It is larger than the others
	// because a consumer's unload is made of them.
	DefaultQuietTimeout = 60 * time.Second
)

// Option configures [New].
type Option func(*container)

// WithLogger sets where failures of listeners, bodies and disposers are
// reported. Without it they are discarded (they are still returned).
func WithLogger(l *slog.Logger) Option { return func(c *container) { c.log = l } }

// WithUndoTimeout replaces [DefaultUndoTimeout].
func WithUndoTimeout(d time.Duration) Option { return func(c *container) { c.undoTimeout = d } }

// WithStopTimeout replaces [DefaultStopTimeout].
func WithStopTimeout(d time.Duration) Option { return func(c *container) { c.stopTimeout = d } }

// WithQuietTimeout replaces [DefaultQuietTimeout].
func WithQuietTimeout(d time.Duration) Option { return func(c *container) { c.quietTimeout = d } }

// container is the state all contexts of one root share.
//
// One mutex guards everything that decides: fibers, effects, realms, listener
// lists. It is never held while foreign code runs, so a listener, a body or a
// disposer may call any exported function. Reading a resolved service and
// dispatching an event do not take it.
type container struct {
	mu           sync.Mutex
	log          *slog.Logger
	undoTimeout  time.Duration
	stopTimeout  time.Duration
	quietTimeout time.Duration

	root     *Fiber
	lastUID  uint64
	fibers   map[uint64]*Fiber
	realms   map[string]*realm                 // the common realm of each name
	shared   map[sharedKey]weak.Pointer[realm] // labelled realms, as long as somebody uses them
	sweepAt  int
	promises map[string]map[*Fiber]struct{} // name → fibers whose plugin says it provides it
	impls    map[*impl]struct{}

	events   atomic.Pointer[map[string]*eventTable]
	dispatch *eventTable // internal/dispatch, consulted on every dispatch

	busy   int                // fibers with a transition in flight
	quiet  chan struct{}      // closed when busy and the outbox are empty; nil when nobody waits
	waits  map[*wait]struct{} // waits made from inside container-run code
	outbox []func()           // notifications in the order their causes happened
	mailer bool               // a goroutine is emptying the outbox

	frames    frameTable
	abandoned atomic.Int64 // calls given up on that have not returned yet
}

// New makes a container and returns its root context. The root fiber has uid
// 0, depends on nothing and is always active; disposing it empties the
// container and leaves it usable.
func New(opts ...Option) *Context {
	c := &container{
		log:          slog.New(slog.NewTextHandler(io.Discard, &slog.HandlerOptions{Level: slog.LevelError + 100})),
		undoTimeout:  DefaultUndoTimeout,
		stopTimeout:  DefaultStopTimeout,
		quietTimeout: DefaultQuietTimeout,
		fibers:       map[uint64]*Fiber{},
		realms:       map[string]*realm{},
		shared:       map[sharedKey]weak.Pointer[realm]{},
		promises:     map[string]map[*Fiber]struct{}{},
		impls:        map[*impl]struct{}{},
		waits:        map[*wait]struct{}{},
	}
	for _, o := range opts {
		o(c)
	}
	c.dispatch = c.table(DispatchEvent.Name)
	root := &Fiber{c: c, name: "root", plugin: Plugin{Name: "root"}, loaded: true, state: Active}
	c.root = root
	c.fibers[0] = root
	root.renew()
	return &Context{fiber: root}
}

// notify re-examines every fiber that needs the name of r. The lock is held.
func (c *container) notify(r *realm) {
	for el := r.dependents.Front(); el != nil; el = el.Next() {
		el.Value.(*need).fiber.kick()
	}
}

// post queues a notification. The lock is held. Notifications run in order on
// a goroutine of their own, which ends when the queue is empty: they may call
// back into the container and wait without holding up a transition.
func (c *container) post(fn func()) {
	c.outbox = append(c.outbox, fn)
	if !c.mailer {
		c.mailer = true
		go c.mail()
	}
}

func (c *container) mail() {
	fr, id := &frame{kind: frameMail}, goid()
	c.frames.push(id, fr)
	defer c.frames.pop(id, fr)
	for {
		c.mu.Lock()
		batch := c.outbox
		c.outbox = nil
		if len(batch) == 0 {
			c.mailer = false
			c.checkQuiet()
			c.mu.Unlock()
			return
		}
		c.mu.Unlock()
		for _, fn := range batch {
			fn()
		}
	}
}

func (c *container) checkQuiet() {
	if c.busy == 0 && !c.mailer && c.quiet != nil {
		close(c.quiet)
		c.quiet = nil
	}
}

// frameKind says what a stretch of foreign code keeps from finishing.
type frameKind uint8

const (
	frameBody   frameKind = iota // Apply, Check, availability check: the fiber's load
	frameSetup                   // set-up of an effect: the fiber's unload
	frameUndo                    // a disposer: the fiber's unload
	frameCreate                  // an observer of the fiber's creation
	frameMail                    // an observer that is told afterwards: no fiber, only Quiesce
)

// frame marks code the container is running (or waiting for) on behalf of a
// fiber, so that a wait started from inside it can be recognised.
type frame struct {
	fiber  *Fiber
	kind   frameKind
	effect *Effect
	outer  *frame
	ended  atomic.Bool
}

// blocks reports whether the target fiber cannot settle before this code
// returns.
func (f *frame) blocks(unloading bool) bool {
	return f.kind == frameBody || f.kind == frameCreate || unloading
}

// frameTable finds the frame of the current goroutine. Contexts carry frames
// as well (they reach helper goroutines); the table catches code that passes
// context.Background.
type frameTable struct {
	mu sync.Mutex
	by map[uint64]*frame
}

func (t *frameTable) push(id uint64, f *frame) {
	t.mu.Lock()
	if t.by == nil {
		t.by = map[uint64]*frame{}
	}
	f.outer = t.by[id]
	t.by[id] = f
	t.mu.Unlock()
}

func (t *frameTable) pop(id uint64, f *frame) {
	f.ended.Store(true)
	t.mu.Lock()
	if f.outer != nil {
		t.by[id] = f.outer
	} else {
		delete(t.by, id)
	}
	t.mu.Unlock()
}

type frameKey struct{} // *frame: code running with this context

// current collects the frames the caller runs in: those of its goroutine and
// those its context carries.
func (c *container) current(ctx context.Context) []*frame {
	var out []*frame
	c.frames.mu.Lock()
	if len(c.frames.by) > 0 {
		for f := c.frames.by[goid()]; f != nil; f = f.outer {
			out = append(out, f)
		}
	}
	c.frames.mu.Unlock()
	if f, ok := ctx.Value(frameKey{}).(*frame); ok {
		for ; f != nil; f = f.outer {
			if !f.ended.Load() {
				out = append(out, f)
			}
		}
	}
	return out
}

// goid returns the number of the current goroutine. The runtime offers it in
// stack traces only; it is used for nothing but recognising a wait on oneself.
func goid() uint64 {
	var buf [40]byte
	n := runtime.Stack(buf[:], false)
	const prefix = len("goroutine ")
	end := prefix
	for end < n && buf[end] >= '0' && buf[end] <= '9' {
		end++
	}
	id, _ := strconv.ParseUint(string(buf[prefix:end]), 10, 64)
	return id
}

// adopt lets the current goroutine act for the code in frames until release is
// called.
func (t *frameTable) adopt(frames []*frame) (release func()) {
	if len(frames) == 0 {
		return func() {}
	}
	id := goid()
	own := make([]*frame, len(frames))
	for i, f := range frames {
		own[i] = &frame{fiber: f.fiber, kind: f.kind, effect: f.effect}
		t.push(id, own[i])
	}
	return func() {
		for i := len(own) - 1; i >= 0; i-- {
			t.pop(id, own[i])
		}
	}
}

// spawn runs foreign code on a goroutine of its own and delivers its error.
// The goroutine ends when the code returns; a panic or Goexit is an error.
func (c *container) spawn(f *frame, where string, fn func() error) <-chan error {
	done := make(chan error, 1)
	go func() {
		id := goid()
		c.frames.push(id, f)
		err := error(&EffectError{Fiber: f.fiber.Name(), Label: where, Stage: "run", Err: errGoexit})
		defer func() {
			if v := recover(); v != nil {
				err = &PanicError{Fiber: f.fiber.Name(), Where: where, Value: v, Stack: debug.Stack()}
			}
			c.frames.pop(id, f)
			done <- err
		}()
		err = fn()
	}()
	return done
}

// guard runs foreign code on the caller's goroutine inside frame f.
func (c *container) guard(f *frame, where string, fn func() error) (err error) {
	id := goid()
	c.frames.push(id, f)
	defer func() {
		if v := recover(); v != nil {
			err = &PanicError{Fiber: f.fiber.Name(), Where: where, Value: v, Stack: debug.Stack()}
		}
		c.frames.pop(id, f)
	}()
	return fn()
}

// giveUp counts a call that did not return in time until it does.
func (c *container) giveUp(done <-chan error, after func(error)) {
	c.abandoned.Add(1)
	go func() { // ends when the abandoned code returns
		err := <-done
		c.abandoned.Add(-1)
		if after != nil {
			after(err)
		}
	}()
}

package session

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	rules "github.com/cordon-host/cordon/capability/session"
)

// Options of a Log. The zero value is the one to use outside tests.
type Options struct {
	Logger *slog.Logger     // slog.Default when nil
	Now    func() time.Time // time.Now when nil
	Rand   io.Reader        // where session ids come from; crypto/rand when nil
}

// Log is all sessions of one store. Close it when done.
type Log struct {
	store Store
	opts  Options

	base  context.Context // of observers; ends with Close
	stop  context.CancelFunc
	tasks sync.WaitGroup // goroutines that deliver to observers

	mu        sync.Mutex
	closed    bool
	live      map[string]*Session
	loading   map[string]*load
	vetoes    hooks[func(context.Context, *Session, Candidate) error]
	observers hooks[func(context.Context, *Session, Event)]
}

// load is a cold load that several callers may wait for.
type load struct {
	done chan struct{}
	s    *Session
	err  error
}

// Spec describes a new session.
type Spec struct {
	Cwd    string // absolute path of an existing directory; links in it are resolved
	Parent string // the session this one is a child of, or empty
	ID     string // made up when empty
}

// Open makes a Log over a store. The Log owns the store and closes it.
func Open(ctx context.Context, store Store, opts Options) (*Log, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	opts.Logger = cmp.Or(opts.Logger, slog.Default())
	if opts.Now == nil {
		opts.Now = time.Now
	}
	if opts.Rand == nil {
		opts.Rand = rand.Reader
	}
	base, stop := context.WithCancel(context.Background())
	return &Log{
		store: store, opts: opts, base: base, stop: stop,
		live: map[string]*Session{}, loading: map[string]*load{},
	}, nil
}

// Create makes a session. *ExistsError when the id is taken, *NotFoundError when the parent does not exist.
func (l *Log) Create(ctx context.Context, spec Spec) (*Session, error) {
	cwd, err := canonicalDir(spec.Cwd)
	if err != nil {
		return nil, err
	}
	now := l.opts.Now()
	id := spec.ID
	if id == "" {
		if id, err = newID(now, l.opts.Rand); err != nil {
			return nil, err
		}
	}
	header := Header{
		Version:   rules.FormatVersion,
		ID:        id,
		CreatedAt: time.UnixMilli(max(now.UnixMilli(), 0)).UTC(),
		Cwd:       cwd,
		Parent:    spec.Parent,
	}
	if err := header.Validate(); err != nil {
		return nil, err
	}
	if spec.Parent != "" {
		if _, _, err := l.store.Load(ctx, spec.Parent, beyond); err != nil {
			return nil, fmt.Errorf("parent of session %q: %w", id, err)
		}
	}
	if err := l.isOpen(); err != nil {
		return nil, err
	}
	if err := l.store.Create(ctx, header); err != nil {
		return nil, err
	}
	// The header is on disk. Whoever asks for the id from here on loads it; Get makes sure that there is one Session of it.
	return l.Get(ctx, id)
}

// beyond is a sequence number no log reaches: loading from there gives the header alone.
const beyond = 1<<63 - 1

// canonicalDir resolves the links of an absolute path to a directory.
func canonicalDir(path string) (string, error) {
	if !filepath.IsAbs(path) {
		return "", fmt.Errorf("session header cwd must be an absolute path, got %q", path)
	}
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return "", fmt.Errorf("session cwd %q: %w", path, err)
	}
	info, err := os.Stat(real)
	if err != nil {
		return "", fmt.Errorf("session cwd %q: %w", path, err)
	}
	if !info.IsDir() {
		return "", fmt.Errorf("session cwd %q is not a directory", path)
	}
	return real, nil
}

// newID is a session id: sortable by time to the millisecond, with 80 random bits so that it cannot be guessed.
func newID(now time.Time, random io.Reader) (string, error) {
	const digits = "0123456789abcdefghjkmnpqrstvwxyz"
	var b [16]byte
	binary.BigEndian.PutUint64(b[:8], uint64(max(now.UnixMilli(), 0))<<16)
	if _, err := io.ReadFull(random, b[6:]); err != nil {
		return "", fmt.Errorf("session id: %w", err)
	}
	hi, lo := binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:])
	id := []byte("s-00000000000000000000000000")
	for i := len(id) - 1; i >= 2; i-- {
		id[i] = digits[lo&31]
		lo = lo>>5 | hi<<59
		hi >>= 5
	}
	return string(id), nil
}

func (l *Log) isOpen() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return ErrClosed
	}
	return nil
}

// Get is the session of an id: the live one, or else it is loaded, verified and repaired. *NotFoundError when there is none,
// *CorruptError when what was read is not what was written.
func (l *Log) Get(ctx context.Context, id string) (*Session, error) {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return nil, ErrClosed
	}
	if s := l.live[id]; s != nil {
		l.mu.Unlock()
		return s, nil
	}
	// One caller loads, under a context of its own so that its impatience does not fail the others.
	ld := l.loading[id]
	if ld == nil {
		ld = &load{done: make(chan struct{})}
		l.loading[id] = ld
		l.tasks.Go(func() {
			ld.s, ld.err = l.load(id)
			l.mu.Lock()
			delete(l.loading, id)
			if ld.err == nil {
				l.live[id] = ld.s
			}
			l.mu.Unlock()
			close(ld.done)
		})
	}
	l.mu.Unlock()
	select {
	case <-ld.done:
		return ld.s, ld.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// load reads a session from the store, proves its chain, and closes what a crash left open.
func (l *Log) load(id string) (*Session, error) {
	header, events, err := l.store.Load(l.base, id, 0)
	if err != nil {
		return nil, err
	}
	if header.ID != id {
		return nil, l.corrupt(id, fmt.Errorf("stored session identity mismatch: the header names %q", header.ID))
	}
	if err := header.Validate(); err != nil {
		if version := (*rules.VersionError)(nil); errors.As(err, &version) {
			return nil, err
		}
		return nil, l.corrupt(id, err)
	}
	if err := rules.Verify(header, events); err != nil {
		return nil, l.corrupt(id, err)
	}
	s := newSession(l, header)
	s.publish(events, false, nil)
	closers := s.state.Repair()
	if len(closers) == 0 {
		return s, nil
	}
	if err := l.store.Append(l.base, id, s.state.Next(), closers); err != nil {
		return nil, fmt.Errorf("session %q: repair: %w", id, err)
	}
	l.opts.Logger.Info("session repaired", "session", id, "turns", s.state.OpenTurns(), "events", len(closers))
	s.publish(closers, false, nil)
	return s, nil
}

func (l *Log) corrupt(id string, err error) error {
	e := &CorruptError{ID: id, Err: err}
	if at, ok := l.store.(Locator); ok {
		e.Store = at.Location()
	}
	return e
}

// Read is what the store has of a session, neither verified nor repaired, for audits and exports.
func (l *Log) Read(ctx context.Context, id string) (Header, []Event, error) {
	if err := l.isOpen(); err != nil {
		return Header{}, nil, err
	}
	return l.store.Load(ctx, id, 0)
}

// List is every session of the store, oldest first.
func (l *Log) List(ctx context.Context) ([]Summary, error) {
	if err := l.isOpen(); err != nil {
		return nil, err
	}
	return l.store.List(ctx)
}

// Live are the sessions that are loaded, in the order of their ids.
func (l *Log) Live() []*Session {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := make([]*Session, 0, len(l.live))
	for _, s := range l.live {
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b *Session) int { return cmp.Compare(a.header.ID, b.header.ID) })
	return all
}

// Veto registers fn to see every draft of every session before it is committed; an error refuses the draft. No lock is held:
// fn may read the session. When another event was committed to the session meanwhile, fn is asked again, so that its answer
// holds for the log the event joins. It may not append to the session (*ReentryError) nor wait for someone who does. A panic
// of fn refuses the draft. The closers of EndTurn and of the repair are not asked about. remove may be called more than once.
func (l *Log) Veto(fn func(ctx context.Context, s *Session, d Candidate) error) (remove func()) {
	return l.vetoes.add(&l.mu, fn)
}

// Observe registers fn to see every event of every session after it was committed, in the order of each session's log. No
// lock is held. fn runs in the goroutine of an append, most often of the event's own, which then returns after it. It may not
// append to the session (*ReentryError) nor close the log; a panic is logged and otherwise without effect. The context ends with the Log.
// Events that were loaded are not shown. remove may be called more than once.
func (l *Log) Observe(fn func(ctx context.Context, s *Session, e Event)) (remove func()) {
	return l.observers.add(&l.mu, fn)
}

// Close ends the log: waits for appends that reached the store and for observers, ends subscriptions and closes the store.
func (l *Log) Close() error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return nil
	}
	l.closed = true // no loads and no deliveries begin from here on
	l.mu.Unlock()
	l.stop()
	l.tasks.Wait()
	err := l.store.Close()
	for _, s := range l.Live() {
		s.end()
	}
	return err
}

// background runs fn in a goroutine that Close waits for; not at all once the log is closed.
func (l *Log) background(fn func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.closed {
		l.tasks.Go(fn)
	}
}

// hooks is a list of functions that never changes in place, so that it can be walked without a lock.
type hooks[F any] struct {
	next int
	list []hook[F]
}

type hook[F any] struct {
	id int
	fn F
}

func (h *hooks[F]) add(mu *sync.Mutex, fn F) (remove func()) {
	mu.Lock()
	defer mu.Unlock()
	id := h.next
	h.next++
	h.list = append(slices.Clone(h.list), hook[F]{id, fn})
	return func() {
		mu.Lock()
		defer mu.Unlock()
		h.list = slices.DeleteFunc(slices.Clone(h.list), func(k hook[F]) bool { return k.id == id })
	}
}

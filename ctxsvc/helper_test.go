package ctxsvc

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// hang bounds a test that waits for something that never comes. It is not a
// measure of anything.
const hang = 30 * time.Second

// journal records what happened, in order, from any goroutine.
type journal struct {
	mu    sync.Mutex
	lines []string
}

func (j *journal) add(format string, args ...any) {
	j.mu.Lock()
	j.lines = append(j.lines, fmt.Sprintf(format, args...))
	j.mu.Unlock()
}

func (j *journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return strings.Join(j.lines, " ")
}

func (j *journal) want(t *testing.T, want string) {
	t.Helper()
	if got := j.String(); got != want {
		t.Errorf("journal:\n got %s\nwant %s", got, want)
	}
}

// undo returns a disposer that writes a line.
func (j *journal) undo(line string) Disposer {
	return func(context.Context) error { j.add("%s", line); return nil }
}

// logbook is a logger whose records can be counted.
type logbook struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logbook) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *logbook) errors() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []string
	for _, line := range strings.Split(l.buf.String(), "\n") {
		if strings.Contains(line, "level=ERROR") {
			out = append(out, line)
		}
	}
	return out
}

// house is a container under test.
type house struct {
	*Context
	t   *testing.T
	ctx context.Context
	log *logbook
}

func open(t *testing.T, opts ...Option) *house {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), hang)
	lb := &logbook{}
	root := New(append([]Option{WithLogger(slog.New(slog.NewTextHandler(lb, nil)))}, opts...)...)
	t.Cleanup(func() {
		_ = root.Fiber().Dispose(ctx)
		if err := root.Quiesce(ctx); err != nil {
			t.Errorf("container not quiet at the end: %v", err)
		}
		s := root.Snapshot()
		if len(s.Services) > 0 || len(s.Events) > 0 || len(s.Root.Effects) > 0 {
			t.Errorf("left over at the end: %+v", s)
		}
		cancel()
	})
	return &house{Context: root, t: t, ctx: ctx, log: lb}
}

// plug applies p below x and fails the test if that is refused.
func (h *house) plug(x *Context, p Plugin, config any) *Fiber {
	h.t.Helper()
	f, err := x.Plugin(p, config)
	if err != nil {
		h.t.Fatalf("plug in %s: %v", p.Name, err)
	}
	return f
}

// quiet waits for all transitions and notifications.
func (h *house) quiet() {
	h.t.Helper()
	if err := h.Quiesce(h.ctx); err != nil {
		h.t.Fatalf("quiesce: %v", err)
	}
}

func (h *house) state(f *Fiber, want State) {
	h.t.Helper()
	if got := f.State(); got != want {
		h.t.Fatalf("%s is %s, want %s (error %v, waiting %v)", f.Name(), got, want, f.Err(), f.WaitReasons())
	}
}

func (h *house) ok(err error) {
	h.t.Helper()
	if err != nil {
		h.t.Fatalf("unexpected error: %v", err)
	}
}

// recv waits for a value.
func recv[T any](h *house, ch <-chan T) T {
	h.t.Helper()
	select {
	case v := <-ch:
		return v
	case <-h.ctx.Done():
		h.t.Fatalf("nothing arrived")
		panic("unreachable")
	}
}

// until waits until a fiber reaches a state, by listening to the container.
func (h *house) until(f *Fiber, want State) {
	h.t.Helper()
	reached := make(chan struct{}, 64)
	e, err := h.Group("until", func(x *Context) error {
		return Tap(x, StatusEvent, func(_ context.Context, s StatusChange) error {
			if s.Fiber == f && s.To == want {
				reached <- struct{}{}
			}
			return nil
		})
	})
	h.ok(err)
	if f.State() != want {
		recv(h, reached)
	}
	h.ok(e.Dispose(h.ctx))
}

func inject(names ...string) []Need {
	var out []Need
	for _, n := range names {
		out = append(out, Need{Name: n})
	}
	return out
}

func nop(*Context, any) error { return nil }

// provider is a plugin that provides name with value.
func provider(name string, value any, opts ...ProvideOption) Plugin {
	return Plugin{Name: "provider-" + name, Apply: func(x *Context, _ any) error { return x.Provide(name, value, opts...) }}
}

// consumer is a plugin that notes its starts and stops.
func consumer(j *journal, id string, needs ...string) Plugin {
	return Plugin{Name: id, Inject: inject(needs...), Apply: func(x *Context, _ any) error {
		j.add("%s+", id)
		return x.Defer("stop", j.undo(id+"-"))
	}}
}

func goexit() { runtime.Goexit() }

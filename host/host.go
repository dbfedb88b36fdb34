// Package host is the host process: it turns a compose file into running plugins and keeps them running.
//
// Start owns the sequence. It reads the file; asks whether this tree is trusted, before anything of it is built or run;
// builds and stages the executables; learns each plugin's manifest; checks the whole composition; and only then opens the
// session log, mounts the built-ins and one fiber per row, and listens for the command line. Whatever goes wrong on the way
// undoes what was done before it.
package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	"github.com/cordon-host/cordon/capability/sandbox"
	"github.com/cordon-host/cordon/ctxsvc"
	"github.com/cordon-host/cordon/host/bus"
	"github.com/cordon-host/cordon/host/compose"
	"github.com/cordon-host/cordon/host/grant"
	"github.com/cordon-host/cordon/host/inbox"
	"github.com/cordon-host/cordon/host/logs"
	"github.com/cordon-host/cordon/host/process"
	"github.com/cordon-host/cordon/host/prompt"
	"github.com/cordon-host/cordon/host/route"
	"github.com/cordon-host/cordon/host/session"
	"github.com/cordon-host/cordon/host/session/store/sqlite"
	"github.com/cordon-host/cordon/host/tools"
	"github.com/cordon-host/cordon/host/trust"
)

// stopTimeout bounds the end of the whole composition: the fibers' own deadlines are shorter.
const stopTimeout = 30 * time.Second

// Options say which deployment to host and how.
type Options struct {
	Compose string // path of the compose file
	State   string // where to keep state instead of the default place; "" for that
	Version string
	// Locked refuses everything that the lock file beside the compose file does not accept.
	Locked bool
	Log    io.Writer // the host's log, as text; nil drops it
	// LogLevel is of the host and, to begin with, of its plugins.
	LogLevel slog.Level
}

// Host is a running deployment.
type Host struct {
	options Options
	layout  trust.Layout
	log     *slog.Logger
	logs    *logs.Book
	started time.Time
	ready   time.Duration
	hosting bool // what is composed will run, and is not only looked at

	sessions *session.Log
	logins   *logins
	control  controlv1.ControlClient
	drain    func(context.Context)
	stopping context.Context // ends the streams that others watch
	root     *ctxsvc.Context
	router   *route.Router
	bus      *bus.Bus
	grants   *grant.Store
	inbox    *inbox.Inbox
	tools    *tools.Registry
	prompt   *prompt.Registry
	pins     *pins
	caller   *tools.Caller

	mu            sync.RWMutex
	composition   *composition // what is mounted, or was before an edit that is not accepted
	entries       []*entry     // in the order of the file, the built-ins first
	handed        []string     // directories that were handed out writable to commands of no session
	widestDefault sandbox.Mode // that the deployment had since it started
	rejected      string       // why the newest edit is not what runs; empty when it is

	reload reloader
	retry  retries

	undo     []func(context.Context) error
	stopOnce sync.Once
	stopErr  error
	done     chan struct{}
}

// CompositionError is a compose file that does not hold together. Nothing was started.
type CompositionError struct{ Diagnostics compose.Diagnostics }

func (e *CompositionError) Error() string {
	var b strings.Builder
	if err := e.Diagnostics.Text(&b); err != nil {
		return err.Error()
	}
	return strings.TrimRight(b.String(), "\n")
}

// EnvironmentError is something this machine does not have or allow.
type EnvironmentError struct{ Err error }

func (e *EnvironmentError) Error() string { return e.Err.Error() }
func (e *EnvironmentError) Unwrap() error { return e.Err }

// StartError is a row whose plugin did not come up. Nothing is left running.
type StartError struct {
	Entry string
	Place string // file:line of the row
	Err   error
}

func (e *StartError) Error() string {
	return fmt.Sprintf("%s: entry %q did not start: %v", e.Place, e.Entry, e.Err)
}

func (e *StartError) Unwrap() error { return e.Err }

// Start hosts a deployment. The context bounds the start, not the host. Errors are *CompositionError,
// *trust.UntrustedError, *LockError, *RunningError, *EnvironmentError or *StartError.
func Start(ctx context.Context, o Options) (_ *Host, err error) {
	h, err := prepare(o)
	if err != nil {
		return nil, err
	}
	h.hosting = true
	defer func() {
		if err != nil {
			err = errors.Join(err, h.Stop(context.WithoutCancel(ctx)))
		}
	}()
	if err := h.lock(); err != nil {
		return nil, err
	}
	c, err := h.load(ctx)
	if err != nil {
		return nil, err
	}
	h.composition = c
	if err := h.openLog(ctx); err != nil {
		return nil, err
	}
	if gap := process.Confinable(); gap != "" {
		h.log.Warn("confinement of plugins is incomplete", "reason", gap)
	}
	if err := h.mount(ctx); err != nil {
		return nil, err
	}
	if err := h.serve(); err != nil {
		return nil, err
	}
	if err := h.watch(); err != nil {
		return nil, err
	}
	h.ready = time.Since(h.started)
	return h, nil
}

// prepare makes the parts that need nothing but each other.
func prepare(o Options) (*Host, error) {
	layout, err := trust.LayoutOf(o.Compose, o.State)
	if err != nil {
		return nil, &EnvironmentError{err}
	}
	if o.Log == nil {
		o.Log = io.Discard
	}
	h := &Host{
		options: o, layout: layout, started: time.Now(), done: make(chan struct{}),
		widestDefault: sandbox.ReadOnly,
		bus:           bus.New(), grants: grant.NewStore(), inbox: inbox.New(), tools: tools.NewRegistry(),
	}
	h.reload.ask, h.reload.pins = make(chan look), make(chan struct{}, 1)
	h.logs = logs.NewBook(slog.NewTextHandler(o.Log, &slog.HandlerOptions{Level: o.LogLevel}), o.LogLevel)
	h.log = slog.New(h.logs.Handler())
	h.retry.booted = make(chan struct{})
	h.root = ctxsvc.New(ctxsvc.WithLogger(h.log))
	h.router = route.New(layout.RunDir, resolver{h}, kernelServer{h: h}, h.log)
	h.bus.Use(h.router)
	h.prompt = prompt.New(h.router, h.endTree, h.log)
	h.pins = newPins()
	h.caller = &tools.Caller{Registry: h.tools, Router: h.router, EndTree: h.endTree, Before: h.pins.due, After: h.prompt.News}
	return h, nil
}

// defer_ adds a step to what Stop undoes.
func (h *Host) defer_(undo func(context.Context) error) { h.undo = append(h.undo, undo) }

// openLog opens the session store that the file names.
func (h *Host) openLog(ctx context.Context) error {
	path, err := h.storePath()
	if err != nil {
		return err
	}
	store, err := sqlite.Open(ctx, path, sqlite.Options{})
	if err != nil {
		return &EnvironmentError{err}
	}
	h.sessions, err = session.Open(ctx, store, session.Options{Logger: h.log})
	if err != nil {
		return &EnvironmentError{errors.Join(err, store.Close())}
	}
	h.defer_(func(context.Context) error { return h.sessions.Close() })
	return nil
}

// storePath is where the sqlite store is. Another store is the compose file's mistake until this host knows it.
func (h *Host) storePath() (string, error) {
	kind, path, _ := strings.Cut(h.composition.plan.Session.Store, ":")
	if kind != "sqlite" {
		return "", &EnvironmentError{fmt.Errorf("session store %s: this host keeps sessions in sqlite; write store: \"sqlite:\"", kind)}
	}
	if path == "" {
		return filepath.Join(h.layout.StateDir, "sessions.db"), nil
	}
	if !filepath.IsAbs(path) {
		path = filepath.Join(h.composition.plan.Dir, path)
	}
	return path, nil
}

// deployment is what a plugin is told about where it runs.
func (h *Host) deployment(id string, c *composition) (*kernelv1.Deployment, error) {
	state, err := h.stateOf(id)
	if err != nil {
		return nil, err
	}
	temp := filepath.Join(h.layout.StateDir, "tmp")
	if err := os.MkdirAll(temp, 0o700); err != nil {
		return nil, fmt.Errorf("directory of temp directories: %w", err)
	}
	return &kernelv1.Deployment{
		Id: h.layout.ID, TempDir: temp, OutputDir: h.outputDir(), Root: c.plan.Dir, StateDir: state, Hidden: h.layout.Hidden(), Protected: c.tree.Protected(),
		HostVersion: h.options.Version,
	}, nil
}

// outputDir is the place for long output, outside of what is hidden from sandboxes; empty when this user has no cache directory.
func (h *Host) outputDir() string {
	cache, err := os.UserCacheDir()
	if err != nil {
		h.log.Warn("long output is not kept", "reason", err)
		return ""
	}
	dir := filepath.Join(cache, "cordon", h.layout.ID, "output")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		h.log.Warn("long output is not kept", "reason", err)
		return ""
	}
	return dir
}

// stateOf is the private state directory of a row.
func (h *Host) stateOf(id string) (string, error) {
	dir := filepath.Join(h.layout.StateDir, "plugins", id)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fmt.Errorf("state directory of %s: %w", id, err)
	}
	return dir, nil
}

// endTree ends a call tree and forgets what was kept for it.
func (h *Host) endTree(t *route.Tree) {
	t.End()
	h.grants.EndCall(t.ID)
	h.bus.EndCall(t.ID)
}

// Stop waits for the calls that others are making through this host, until ctx ends or drainTimeout has passed, and then ends
// everything in the reverse order of the start. It is safe to call it again.
func (h *Host) Stop(ctx context.Context) error {
	h.stopOnce.Do(func() {
		var errs []error
		if h.drain != nil {
			h.drain(ctx)
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
		defer cancel()
		for _, undo := range slices.Backward(h.undo) {
			errs = append(errs, undo(ctx))
		}
		h.stopErr = errors.Join(errs...)
		close(h.done)
	})
	return h.stopErr
}

// Done is closed when the host has stopped.
func (h *Host) Done() <-chan struct{} { return h.done }

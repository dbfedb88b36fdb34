package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc/metadata"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
	"github.com/cordon-host/cordon/host"
	"github.com/cordon-host/cordon/host/compose"
	"github.com/cordon-host/cordon/host/lock"
)

// place says which deployment a command is about, and what of its host's log to show.
type place struct {
	compose, state string
	log            io.Writer
	level          slog.Level
	version        string
	locked         bool // run nothing that the lock file does not accept
}

// deployment is where a command gets its host from.
type deployment interface {
	// dial connects to the running host; errNotRunning when there is none.
	dial(context.Context) (controlv1.ControlClient, io.Closer, error)
	// start hosts the deployment in this process; a *busyError when another process does.
	start(context.Context) (hosted, error)
	validate(context.Context) (compose.Diagnostics, []host.Runs, error)
	trust(context.Context) (trusted, error)
	// lock finds out what accepting the composition as it is would change, and how to write that down.
	lock(context.Context) (locking, error)
}

// locking is a lock file that could be written.
type locking struct {
	path    string
	changes []lock.Change
	write   func() error
}

// hosted is a host in this process.
type hosted interface {
	Control() controlv1.ControlClient
	Code() string
	OnCode(func(code string))
	Stop(context.Context) error
	Done() <-chan struct{}
}

// trusted is what `cordon trust` recorded.
type trusted struct {
	Compose string `json:"compose"`
	Digest  string `json:"digest"` // of all files together
	Files   int    `json:"files"`  // how many lead to execution
}

var errNotRunning = errors.New("no host runs this deployment")

// busyError is a deployment that another process hosts.
type busyError struct{ pid int }

func (e *busyError) Error() string {
	return fmt.Sprintf("another host (pid %d) runs this deployment", e.pid)
}

// place finds the compose file.
func (a *app) place(quiet slog.Level) (place, error) {
	p := place{log: a.stderr, level: a.logLevel(quiet), version: version(), locked: a.locked}
	var err error
	if p.compose, err = a.path(a.file); err != nil {
		return p, err
	}
	if p.compose == "" {
		if a.dir == "" {
			return p, failf(exitEnvironment, "the current directory cannot be read; name a compose file with -f")
		}
		if p.compose, err = compose.Find(a.dir); err != nil {
			return p, failf(exitComposition, "%w", err)
		}
	}
	if _, err := os.Stat(p.compose); err != nil {
		return p, failf(exitComposition, "compose file %s: %w", p.compose, cause(err))
	}
	p.state, err = a.path(a.state)
	return p, err
}

// path makes a path of the command line absolute; an empty one stays empty.
func (a *app) path(p string) (string, error) {
	if p == "" || filepath.IsAbs(p) {
		return p, nil
	}
	if a.dir == "" {
		return "", failf(exitEnvironment, "%s: the current directory cannot be read; use an absolute path", p)
	}
	return filepath.Join(a.dir, p), nil
}

// attached is a host to talk to.
type attached struct {
	controlv1.ControlClient
	own    bool // started by this command: whoever started that may decide
	person bool // own, or logged in
	token  string
	close  func() error
}

// with is ctx with the login.
func (h *attached) with(ctx context.Context) context.Context {
	if h.token == "" {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, keyLogin, h.token)
}

// keyLogin is the metadata key of a login token; see api/control/v1.
const keyLogin = "cordon-login"

// How long a host that is starting or stopping is waited for, and how often it is looked at: it is between two states
// that nothing announces. A start may build every plugin.
const (
	busyTimeout = 2 * time.Minute
	busyPoll    = 100 * time.Millisecond
)

// attach finds the running host or starts one. A code logs in to a running one; a host of one's own needs none.
func (a *app) attach(ctx context.Context, code string) (*attached, error) {
	// What goes wrong for this command is its result; the host is nobody else's business.
	p, err := a.place(slog.LevelError)
	if err != nil {
		return nil, err
	}
	d := a.open(p)
	deadline := time.NewTimer(busyTimeout)
	defer deadline.Stop()
	for {
		h, err := a.dial(ctx, d, code)
		if !errors.Is(err, errNotRunning) {
			return h, err
		}
		own, err := d.start(ctx)
		var busy *busyError
		switch {
		case err == nil:
			return &attached{ControlClient: own.Control(), own: true, person: true, close: func() error {
				return own.Stop(a.interrupts.hurry)
			}}, nil
		case !errors.As(err, &busy):
			return nil, err
		}
		select {
		case <-time.After(busyPoll):
		case <-deadline.C:
			return nil, failf(exitEnvironment, "%w, but it does not answer", busy).hint("it may be starting or stopping; see process %d", busy.pid)
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// running is attach for commands that are about a host that runs already.
func (a *app) running(ctx context.Context, code string) (*attached, error) {
	p, err := a.place(slog.LevelWarn)
	if err != nil {
		return nil, err
	}
	h, err := a.dial(ctx, a.open(p), code)
	if errors.Is(err, errNotRunning) {
		return nil, failf(exitFailed, "%w", err).hint("cordon up starts one")
	}
	return h, err
}

func (a *app) dial(ctx context.Context, d deployment, code string) (*attached, error) {
	client, conn, err := d.dial(ctx)
	if err != nil {
		return nil, err
	}
	h := &attached{ControlClient: client, close: conn.Close}
	if a.locked {
		if err := h.held(ctx); err != nil {
			return nil, errors.Join(err, conn.Close())
		}
	}
	if code == "" {
		return h, nil
	}
	if err := h.login(ctx, code); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return h, nil
}

// held holds that the running host is one that runs nothing but what is accepted: a command cannot make it so.
func (h *attached) held(ctx context.Context) error {
	s, err := h.Status(ctx, &controlv1.StatusRequest{})
	if err != nil {
		return err
	}
	if !s.GetLocked() {
		return failf(exitTrust, "the host that runs (pid %d) was not started with --locked", s.GetPid()).hint("stop it, then run  cordon up --locked")
	}
	return nil
}

// login exchanges a one-use code for a token.
func (h *attached) login(ctx context.Context, code string) error {
	r, err := h.Login(ctx, &controlv1.LoginRequest{Code: code})
	if err != nil {
		return err
	}
	h.token, h.person = r.GetToken(), true
	return nil
}

// detach ends the talk, and the host if it is our own.
func (a *app) detach(h *attached, err *error) {
	if closing := h.close(); closing != nil {
		closing = fmt.Errorf("stopping the host: %w", closing)
		if *err == nil {
			*err = failf(exitEnvironment, "%w", closing)
			return
		}
		a.say("warning: %v", closing)
	}
}

package cli

import (
	"context"
	"errors"
	"io"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
	"github.com/cordon-host/cordon/host"
	"github.com/cordon-host/cordon/host/compose"
	"github.com/cordon-host/cordon/host/trust"
)

// hosting is a real deployment.
type hosting struct{ options host.Options }

func openDeployment(p place) deployment {
	return hosting{host.Options{Compose: p.compose, State: p.state, Log: p.log, LogLevel: p.level, Version: p.version, Locked: p.locked}}
}

func (d hosting) dial(ctx context.Context) (controlv1.ControlClient, io.Closer, error) {
	client, conn, err := host.Dial(ctx, d.options)
	if errors.Is(err, host.ErrNotRunning) {
		return nil, nil, errNotRunning
	}
	return client, conn, coded(err)
}

func (d hosting) start(ctx context.Context) (hosted, error) {
	h, err := host.Start(ctx, d.options)
	if err != nil {
		return nil, coded(err)
	}
	return h, nil
}

func (d hosting) validate(ctx context.Context) (compose.Diagnostics, []host.Runs, error) {
	diags, rows, err := host.Validate(ctx, d.options)
	return diags, rows, coded(err)
}

func (d hosting) lock(ctx context.Context) (locking, error) {
	l, err := host.PrepareLock(ctx, d.options)
	if err != nil {
		return locking{}, coded(err)
	}
	return locking{l.Path, l.Changes, func() error { return coded(l.Write()) }}, nil
}

func (d hosting) trust(ctx context.Context) (trusted, error) {
	t, err := host.Trust(ctx, d.options)
	if err != nil {
		return trusted{}, coded(err)
	}
	return trusted{t.Compose, t.Digest, t.Files}, nil
}

// coded gives the errors of package host their exit codes.
func coded(err error) error {
	var (
		composition *host.CompositionError
		start       *host.StartError
		environment *host.EnvironmentError
		running     *host.RunningError
		untrusted   *trust.UntrustedError
		unlocked    *host.LockError
	)
	switch {
	case err == nil:
		return nil
	case errors.As(err, &composition):
		return &failure{code: exitComposition, err: err, text: composition.Error()}
	case errors.As(err, &unlocked):
		return &failure{code: exitTrust, err: err, text: unlocked.Error()}
	case errors.As(err, &start):
		return &failure{code: exitComposition, err: err}
	case errors.As(err, &untrusted):
		return &failure{code: exitTrust, err: err}
	case errors.As(err, &running):
		return &busyError{running.PID}
	case errors.As(err, &environment):
		return &failure{code: exitEnvironment, err: err}
	}
	return err
}

// Interface guards.
var (
	_ deployment = hosting{}
	_ hosted     = (*host.Host)(nil)
)

//go:build !linux

package launch

import (
	"context"
	"errors"
	"fmt"
	"runtime"
)

// Process is a running command. There are none on this platform yet.
type Process struct{}

// Start fails: the guarantees of this package have only been verified on Linux.
func Start(context.Context, Spec) (*Process, error) {
	return nil, fmt.Errorf("running commands on %s: %w", runtime.GOOS, errors.ErrUnsupported)
}

// Pid is the leader's process id.
func (*Process) Pid() int { return 0 }

// Terminate ends the command.
func (*Process) Terminate(error) {}

// Done is closed when the command has ended.
func (*Process) Done() <-chan struct{} { return nil }

// Wait waits for the command to end.
func (*Process) Wait() Result { return Result{Code: -1} }

// CloseOnExec fails, too.
func CloseOnExec() error { return errors.ErrUnsupported }

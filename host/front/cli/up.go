package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync"

	"github.com/spf13/cobra"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
)

func (a *app) upCommand() *cobra.Command {
	var readyFile string
	cmd := &cobra.Command{
		Use:   "up",
		Short: "host the deployment until interrupted",
		Long: `Build what is stale, check the composition, start every entry and host it
until interrupted. What runs is printed on stdout; its last line begins with
"ready". The one-use login code, which lets cordon approve and --code decide,
is printed on stderr whenever it changes: keep it where an agent cannot read
it.

On the first interrupt the host waits for calls in flight and stops, the
second one ends them.`,
		Example: "  cordon up",
		Args:    exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			file, err := a.path(readyFile)
			if err != nil {
				return err
			}
			return a.up(cmd.Context(), file)
		},
	}
	cmd.Flags().StringVar(&readyFile, "ready-file", "", "a `file` that has the host's pid as long as it is ready")
	return cmd
}

func (a *app) up(ctx context.Context, readyFile string) (err error) {
	p, err := a.place(slog.LevelInfo)
	if err != nil {
		return err
	}
	// The host's log, the codes and our own lines come from several goroutines.
	a.stderr = &lockedWriter{w: a.stderr}
	p.log = a.stderr
	h, err := a.open(p).start(ctx)
	var busy *busyError
	if errors.As(err, &busy) {
		return failf(exitFailed, "%w", busy).hint("cordon status shows it")
	}
	if err != nil {
		return err
	}
	defer func() {
		if stopping := h.Stop(a.interrupts.hurry); stopping != nil && err == nil {
			err = failf(exitEnvironment, "stopping: %w", stopping)
		}
	}()
	status, err := h.Control().Status(ctx, &controlv1.StatusRequest{})
	if err != nil {
		return err
	}
	a.say("login code: %s", h.Code())
	h.OnCode(func(code string) { a.say("the login code was used; the next one: %s", code) })
	if a.json {
		err = a.printJSON(newStatusDocument(status))
	} else if err = a.printStatus(status); err == nil {
		err = a.print("ready after %d ms\n", status.GetReadyMs())
	}
	if err != nil {
		return err
	}
	if readyFile != "" {
		if err := writeReady(readyFile, status.GetPid()); err != nil {
			return err
		}
		defer func() {
			if gone := os.Remove(readyFile); gone != nil && !errors.Is(gone, fs.ErrNotExist) && err == nil {
				err = gone
			}
		}()
	}
	select {
	case <-h.Done():
		return failf(exitFailed, "the host has stopped by itself").hint("its log says why")
	case <-ctx.Done():
		if a.verbose {
			a.say("%v: stopping", context.Cause(ctx))
		}
		return nil
	}
}

// writeReady makes the file in one step: whoever sees it sees all of it.
func writeReady(path string, pid int64) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return fmt.Errorf("ready file: %w", err)
	}
	_, err = f.WriteString(strconv.FormatInt(pid, 10) + "\n")
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("ready file: %w", errors.Join(err, os.Remove(f.Name())))
	}
	return nil
}

// lockedWriter lets one write at a time through.
type lockedWriter struct {
	mu sync.Mutex
	w  interface{ Write([]byte) (int, error) }
}

func (l *lockedWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}

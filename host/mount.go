package host

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	"github.com/cordon-host/cordon/ctxsvc"
	"github.com/cordon-host/cordon/host/compose"
	"github.com/cordon-host/cordon/host/process"
)

// mount mounts the built-ins and the rows, and waits until every required one is active.
func (h *Host) mount(ctx context.Context) error {
	h.defer_(func(ctx context.Context) error { return h.root.Fiber().Dispose(ctx) })
	var stop context.CancelFunc
	h.retry.ctx, stop = context.WithCancel(context.Background())
	h.defer_(func(context.Context) error {
		stop()
		h.retry.tasks.Wait()
		return nil
	})
	c := h.composition
	for _, row := range c.plan.Entries {
		for _, d := range c.manifests[row.ID].GetEvents() {
			if err := h.bus.Declare(row.ID, d); err != nil {
				return &StartError{Entry: row.ID, Place: row.Place.String(), Err: err}
			}
		}
	}
	if err := h.mountBuiltins(ctx); err != nil {
		return err
	}
	for _, row := range c.plan.Entries {
		if row.Disabled {
			continue
		}
		if _, err := h.mountRow(c, row); err != nil {
			return &StartError{Entry: row.ID, Place: row.Place.String(), Err: err}
		}
	}
	if err := h.root.Quiesce(ctx); err != nil {
		return err
	}
	var errs []error
	for _, e := range h.mounted() {
		err := e.inactive()
		switch {
		case err == nil:
		case e.now().row != nil && !e.now().row.Required:
			h.log.Warn("optional entry is not active", "entry", e.id, "error", err)
		default:
			errs = append(errs, &StartError{Entry: e.id, Place: e.now().place(), Err: err})
		}
	}
	if len(errs) == 0 {
		close(h.retry.booted)
	}
	return errors.Join(errs...)
}

// mountRow mounts one row in its realms.
func (h *Host) mountRow(c *composition, row *compose.Entry) (*entry, error) {
	level, err := answerLevel(row)
	if err != nil {
		return nil, err
	}
	at := h.root
	for capability, label := range row.Isolate {
		at = at.Isolate(capability, label)
	}
	e := h.newEntry(row.ID, level, h.runnable(c, row))
	return e, h.mountEntry(at, e)
}

// runnable is what a row of a composition runs.
func (h *Host) runnable(c *composition, row *compose.Entry) runnable {
	exe := c.executables[row.ID]
	return runnable{
		composition: c, row: row, manifest: c.manifests[row.ID], digest: exe.digest,
		launch: h.executable(row, exe.path, exe.digest, c.manifests[row.ID].GetUnconfined() && row.Unconfined),
	}
}

func (h *Host) newEntry(id string, level kernelv1.Level, what runnable) *entry {
	return &entry{
		id: id, level: level, host: h, what: what, moved: make(chan struct{}),
		backoff: process.Backoff{First: backoffFirst, Max: backoffMax, Reset: backoffReset},
		breaker: process.Breaker{Failures: breakerCrashes, Window: breakerWindow},
	}
}

func (h *Host) mountEntry(c *ctxsvc.Context, e *entry) error {
	// The entry must be found before its Apply asks for it.
	h.mu.Lock()
	h.entries = append(h.entries, e)
	h.mu.Unlock()
	f, err := c.Plugin(e.plugin(), nil)
	if err != nil {
		h.forget(e)
		return err
	}
	e.mu.Lock()
	e.fiber = f
	e.mu.Unlock()
	return nil
}

// forget takes an entry out of the host's list.
func (h *Host) forget(e *entry) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.entries = slices.DeleteFunc(h.entries, func(x *entry) bool { return x == e })
}

// mounted are the entries, the built-ins first.
func (h *Host) mounted() []*entry {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return slices.Clone(h.entries)
}

// entry is the mounted entry with an id.
func (h *Host) entry(id string) (*entry, bool) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	i := slices.IndexFunc(h.entries, func(e *entry) bool { return e.id == id })
	if i < 0 {
		return nil, false
	}
	return h.entries[i], true
}

// composed is the composition that runs.
func (h *Host) composed() *composition {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.composition
}

// inactive says why an entry is not active; nil when it is.
func (e *entry) inactive() error {
	f := e.mount()
	e.mu.Lock()
	gaveUp := e.breaker.Tripped()
	problem := e.problem
	e.mu.Unlock()
	switch waiting := f.Waiting(); {
	case gaveUp:
		return errors.New(problem)
	case f.State() == ctxsvc.Active:
		return nil
	case f.Err() != nil:
		return f.Err()
	case len(waiting) > 0:
		return fmt.Errorf("it waits for %s, which is not active", strings.Join(waiting, ", "))
	default:
		return fmt.Errorf("it is %s", f.State())
	}
}

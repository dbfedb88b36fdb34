package host

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	policyv1 "github.com/cordon-host/cordon/api/policy/v1"
	"github.com/cordon-host/cordon/capability/approval"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/sandbox"
	rules "github.com/cordon-host/cordon/capability/session"
	"github.com/cordon-host/cordon/ctxsvc"
	"github.com/cordon-host/cordon/host/compose"
	"github.com/cordon-host/cordon/host/lock"
	"github.com/cordon-host/cordon/host/reload"
	"github.com/cordon-host/cordon/host/route"
	"github.com/cordon-host/cordon/host/session"
	"github.com/cordon-host/cordon/host/trust"
)

// What a swap may take.
const (
	// defaultDrain is how long an old generation may serve the calls it began with: as long as the longest command may run.
	defaultDrain = 10 * time.Minute
	// maxDraining bounds the old generations of one entry; the oldest one is ended when there would be more.
	maxDraining = 3
	// endTimeout bounds the end of a drained process.
	endTimeout = 15 * time.Second
)

// reloader is the one place where the composition changes. Everything that wants a change asks it to look again.
type reloader struct {
	watcher *reload.Watcher
	ask     chan look
	pins    chan struct{}
	stop    context.CancelFunc
	tasks   sync.WaitGroup
}

// look is somebody's wish that the reconciler look again, and at an entry of theirs in particular.
type look struct {
	entry string
	reply chan error
}

// draining is a generation that serves out what it began.
type draining struct {
	generation *generation
	giveUp     context.CancelFunc
}

// watch begins to look for changes.
func (h *Host) watch() error {
	w, err := reload.New(h.log)
	if err != nil {
		return &EnvironmentError{err}
	}
	ctx, stop := context.WithCancel(context.Background())
	h.reload.watcher, h.reload.stop = w, stop
	h.defer_(func(ctx context.Context) error {
		stop()
		err := w.Close(ctx)
		h.reload.tasks.Wait()
		return err
	})
	if err := h.watchFiles(); err != nil {
		return &EnvironmentError{err}
	}
	// Presets that come back, by themselves or after a crash, fill in what sessions lack.
	err = h.root.Watch("permission", func(context.Context, ctxsvc.ServiceChange) { h.lookAtPins() })
	if err != nil {
		return err
	}
	h.reload.tasks.Go(func() { h.reconciler(ctx) })
	h.reload.tasks.Go(func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-h.reload.pins:
				h.sweep(ctx)
			}
		}
	})
	return nil
}

// lookAtPins asks for a sweep of the live sessions.
func (h *Host) lookAtPins() {
	select {
	case h.reload.pins <- struct{}{}:
	default: // one is due already, or nothing is watched yet
	}
}

// watchFiles watches what leads to execution, and the trust that a person gives it.
func (h *Host) watchFiles() error {
	c := h.composed()
	files := map[string]bool{}
	dirs := map[string]bool{h.layout.TrustDir: true}
	for _, f := range c.tree.Files() {
		files[f.Path] = true
		dirs[filepath.Dir(f.Path)] = true
	}
	for _, in := range c.inputs {
		for _, d := range slices.Concat(in.Packages, in.Modules) {
			dirs[d] = true
		}
	}
	return h.reload.watcher.Watch(slices.Collect(maps.Keys(dirs)), func(path string) bool {
		name := filepath.Base(path)
		return files[path] || filepath.Dir(path) == h.layout.TrustDir || filepath.Ext(path) == ".go" ||
			slices.Contains([]string{"go.mod", "go.sum", "go.work", compose.FileName, lock.FileName}, name)
	})
}

// reconciler looks again whenever somebody says so, one look at a time.
func (h *Host) reconciler(ctx context.Context) {
	for {
		var asked look
		select {
		case <-ctx.Done():
			return
		case <-h.reload.watcher.Again():
		case asked = <-h.reload.ask:
		}
		err := h.reconcile(ctx)
		h.mu.Lock()
		h.rejected = ""
		if err != nil {
			h.rejected = err.Error()
		}
		h.mu.Unlock()
		if err != nil && ctx.Err() == nil {
			h.log.Error("edit not accepted; the last good composition serves", "reason", err)
		}
		if asked.reply != nil {
			if e, ok := h.entry(asked.entry); ok && err == nil {
				err = h.tryAgain(ctx, e)
			}
			asked.reply <- err
		}
	}
}

// reconcile makes what runs equal to what is on disk, or says why not and leaves what runs alone. The steps: read; is it agreed to; build,
// describe and check the whole; then row by row what differs.
func (h *Host) reconcile(ctx context.Context) error {
	s, err := read(ctx, h.options, h.layout)
	if err != nil {
		return err
	}
	old := h.composed()
	h.mu.RLock()
	settled := h.rejected == ""
	h.mu.RUnlock()
	if settled && s.tree.Digest() == old.tree.Digest() && sameRows(old.plan, s.plan) {
		return nil
	}
	if err := h.agreed(ctx, s); err != nil {
		return err
	}
	c, err := h.compose(ctx, s)
	if err != nil {
		return err
	}
	if c.plan.Session.Store != old.plan.Session.Store {
		return fmt.Errorf("%s: the session store cannot change while the host runs; restart it", c.plan.Session.Place)
	}
	h.mu.Lock()
	h.composition = c
	h.mu.Unlock()
	return errors.Join(h.apply(ctx, c), h.watchFiles())
}

// sameRows reports whether two plans say the same.
func sameRows(a, b *compose.Plan) bool {
	return slices.EqualFunc(a.Entries, b.Entries, func(x, y *compose.Entry) bool {
		return x.ID == y.ID && x.Disabled == y.Disabled && bytes.Equal(x.Config, y.Config) && maps.Equal(x.Env, y.Env)
	})
}

// agreed holds that nothing is built or run which somebody inside a sandbox could have written. An edit that a person made
// elsewhere counts as agreed to, for that person runs this host.
func (h *Host) agreed(ctx context.Context, s *source) error {
	store := trust.Open(h.layout.TrustDir)
	err := store.Check(s.tree)
	var untrusted *trust.UntrustedError
	if !errors.As(err, &untrusted) {
		return err
	}
	roots, everywhere, err := h.writable(ctx)
	if err != nil {
		return err
	}
	for _, path := range slices.Concat(untrusted.Changed, untrusted.Appeared, untrusted.Vanished) {
		within := slices.ContainsFunc(roots, func(root string) bool { return sandbox.Contains(root, path) })
		if everywhere || within {
			return fmt.Errorf("%s changed below the workspace of a session that may write there; a person must agree: %w", path, untrusted)
		}
	}
	return store.Trust(s.tree)
}

// writable are the workspaces in which something confined may have written since this host started; everywhere is true when something ran
// unconfined.
func (h *Host) writable(ctx context.Context) (roots []string, everywhere bool, err error) {
	tree := route.NewTree(route.Call{})
	defer h.endTree(tree)
	standing, err := policyv1.NewPolicyClient(h.router.Conn(tree, "policy")).Resolve(ctx, &policyv1.ResolveRequest{})
	if err != nil {
		// Without a policy nothing runs now, but something may have. Whoever cannot say waits for a person.
		return nil, true, nil
	}
	h.mu.Lock()
	if m := sandbox.Mode(standing.GetMode()); sandbox.Wider(m, h.widestDefault) {
		h.widestDefault = m
	}
	byDefault := h.widestDefault
	roots = append(roots, h.handed...)
	h.mu.Unlock()
	for _, live := range h.sessions.Live() {
		widest := widest(live, byDefault)
		if widest != sandbox.ReadOnly {
			roots = append(roots, live.Header().Cwd)
		}
		everywhere = everywhere || widest == sandbox.DangerFullAccess
	}
	return roots, everywhere, nil
}

// handedOut remembers a directory that something confined may write to without belonging to a session.
func (h *Host) handedOut(root string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !slices.Contains(h.handed, root) {
		h.handed = append(h.handed, root)
	}
}

// widest is the widest mode that anything of a session ever had.
func widest(s *session.Session, standing sandbox.Mode) sandbox.Mode {
	mode := standing
	wider := func(m sandbox.Mode) {
		if sandbox.Wider(m, mode) {
			mode = m
		}
	}
	asked := map[string]sandbox.Mode{}
	for _, e := range s.Events(0) {
		switch e.Type {
		case sandbox.EventMode:
			if c, err := sandbox.ParseModeChange(e.Data); err == nil {
				wider(c.Mode)
			}
		case approval.EventAsked:
			var a approval.Asked
			if json.Unmarshal(e.Data, &a) == nil && a.Widening != nil {
				asked[a.ID] = sandbox.Mode(a.Widening.To)
			}
		case approval.EventDecided:
			var d approval.Decided
			if json.Unmarshal(e.Data, &d) == nil && d.Outcome == approval.AllowedOnce {
				wider(asked[d.ID])
			}
		}
	}
	return mode
}

// apply brings every row to what the composition says. One that fails keeps what it had, and the others go on.
func (h *Host) apply(ctx context.Context, c *composition) error {
	var errs []error
	for _, e := range h.mounted() {
		if what := e.now(); what.row != nil {
			if row := c.plan.Entry(e.id); row == nil || row.Disabled {
				errs = append(errs, h.unmount(ctx, e))
			}
		}
	}
	for _, row := range c.plan.Entries {
		if row.Disabled {
			continue
		}
		if err := h.bring(ctx, c, row); err != nil {
			errs = append(errs, &StartError{Entry: row.ID, Place: row.Place.String(), Err: err})
		}
	}
	return errors.Join(errs...)
}

// bring brings one row to what the composition says: a new row is mounted, a changed one swapped, or mounted anew where it is no
// longer the same to others, and what has not changed is left alone.
func (h *Host) bring(ctx context.Context, c *composition, row *compose.Entry) error {
	next := h.runnable(c, row)
	for _, d := range next.manifest.GetEvents() {
		if err := h.bus.Declare(row.ID, d); err != nil {
			return err
		}
	}
	e, mounted := h.entry(row.ID)
	if !mounted {
		added, err := h.mountRow(c, row)
		if err != nil {
			return err
		}
		return h.settled(ctx, added)
	}
	now := e.now()
	switch {
	case now.same(next):
		e.mu.Lock()
		e.what = next // its place in the file may have changed
		e.mu.Unlock()
		// What is down has its own next attempt, or is given up until something of its own changes.
		if err := e.mount().Err(); err != nil && row.Required {
			return err
		}
		return nil
	case now.alike(next) && e.mount().State() == ctxsvc.Active:
		return h.swap(ctx, e, next)
	}
	return h.remount(ctx, e, c, row, next)
}

// same reports whether two generations would be the same. What builds sandboxes is told which paths lead to execution, so for it another
// list is another generation.
func (r runnable) same(o runnable) bool {
	if r.manifest.GetUnconfined() && !slices.Equal(r.composition.tree.Protected(), o.composition.tree.Protected()) {
		return false
	}
	return r.digest == o.digest && r.alike(o) && bytes.Equal(r.row.Config, o.row.Config) && maps.Equal(r.row.Env, o.row.Env) &&
		r.row.Limits == o.row.Limits && r.row.Timeouts == o.row.Timeouts
}

// alike reports whether two generations are the same to everybody else: they can take each other's place.
func (r runnable) alike(o runnable) bool {
	a, b := proto.CloneOf(r.manifest), proto.CloneOf(o.manifest)
	for _, m := range []*kernelv1.Manifest{a, b} {
		m.Version, m.ConfigSchema, m.Tools, m.Appends, m.Descriptors = "", nil, nil, nil, nil
	}
	return proto.Equal(a, b) && maps.Equal(r.row.Isolate, o.row.Isolate) && r.row.Answers == o.row.Answers
}

// swap moves an entry to a new generation while sessions are live: start the new one, hidden; move everything to it in one step; let the old one
// serve what it began; tell the sessions. If the new one does not come up, the old one never noticed.
func (h *Host) swap(ctx context.Context, e *entry, next runnable) error {
	e.starting.Lock()
	defer e.starting.Unlock()
	e.mu.Lock()
	c := e.ctx
	e.mu.Unlock()
	g, err := e.bring(ctx, next, e.facts(c))
	if err != nil {
		return err
	}
	if err := h.tools.Set(e.id, g.reply.GetTools(), e.provider); err != nil {
		return errors.Join(err, g.end(ctx))
	}
	e.mu.Lock()
	before := e.reply
	e.mu.Unlock()
	e.rearm() // what failed was another executable or another row
	old := e.become(g)
	if old != nil {
		h.drainOut(e, old)
	}
	e.republish(c, before, g.reply)
	if g.provider.Offers("permission") {
		h.lookAtPins()
	}
	// Where the facts are others, dependents are applied again; the next row is looked at when they are.
	if err := h.root.Quiesce(ctx); err != nil {
		return err
	}
	h.log.Info("swapped", "entry", e.id, "generation", g.provider.Generation, "digest", next.digest)
	return h.pins.add(ctx, rules.Pin{
		Entry: e.id, Version: next.manifest.GetVersion(), Digest: next.digest, Generation: int64(g.provider.Generation), Reason: "reload",
	}, h.sessions.Live())
}

// drainOut lets an old generation serve the call trees that are on it and then ends it.
func (h *Host) drainOut(e *entry, old *generation) {
	idle := old.provider.Retire()
	timeout := defaultDrain
	if old.what.row != nil && old.what.row.Timeouts.Drain > 0 {
		timeout = old.what.row.Timeouts.Drain
	}
	ctx, giveUp := context.WithTimeout(context.Background(), timeout)
	d := &draining{old, giveUp}
	e.mu.Lock()
	e.draining = append(e.draining, d)
	if len(e.draining) > maxDraining {
		e.draining[0].giveUp()
	}
	e.mu.Unlock()
	unhook := context.AfterFunc(h.stopping, giveUp)
	h.reload.tasks.Go(func() {
		defer unhook()
		defer giveUp()
		select {
		case <-idle:
		case <-old.process.Done():
			if crash := old.process.Crash(); crash != nil {
				e.logCrash(old, crash)
			}
		case <-ctx.Done():
			h.log.Warn("generation ended before its calls", "entry", e.id, "generation", old.provider.Generation)
		}
		end, cancel := context.WithTimeout(context.Background(), endTimeout)
		defer cancel()
		if err := old.end(end); err != nil {
			h.log.Warn("ending an old generation", "entry", e.id, "generation", old.provider.Generation, "error", err)
		}
		e.mu.Lock()
		e.draining = slices.DeleteFunc(e.draining, func(x *draining) bool { return x == d })
		e.mu.Unlock()
	})
}

// remount replaces an entry by one that others must meet anew. The new generation is tried first, hidden: one that does not come up
// replaces nothing.
func (h *Host) remount(ctx context.Context, e *entry, c *composition, row *compose.Entry, next runnable) error {
	e.mu.Lock()
	at := e.ctx
	e.mu.Unlock()
	if at != nil {
		trial, err := e.bring(ctx, next, e.facts(at))
		if err != nil {
			return err
		}
		if err := trial.end(ctx); err != nil {
			h.log.Warn("ending a trial", "entry", e.id, "error", err)
		}
	}
	if err := h.unmount(ctx, e); err != nil {
		return err
	}
	added, err := h.mountRow(c, row)
	if err != nil {
		return err
	}
	return h.settled(ctx, added)
}

func (h *Host) unmount(ctx context.Context, e *entry) error {
	defer h.forget(e)
	return e.mount().Dispose(ctx)
}

// settled waits until a mounted entry is active.
func (h *Host) settled(ctx context.Context, e *entry) error {
	if err := h.root.Quiesce(ctx); err != nil {
		return err
	}
	return e.inactive()
}

// reloadEntry looks at one entry now.
func (h *Host) reloadEntry(ctx context.Context, id string) (*controlv1.ReloadReply, error) {
	e, ok := h.entry(id)
	if !ok {
		return nil, fault.New(codes.NotFound, "NO_ENTRY", "entry %q is not in the composition; see `cordon status`", id)
	}
	before := e.now().digest
	reply := make(chan error, 1)
	select {
	case h.reload.ask <- look{id, reply}:
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-h.stopping.Done():
		return nil, fault.New(codes.Unavailable, "STOPPING", "the host is stopping")
	}
	if err := <-reply; err != nil {
		return nil, fault.New(codes.FailedPrecondition, "NOT_ACCEPTED", "%s", strings.TrimSpace(err.Error()))
	}
	if now, ok := h.entry(id); ok {
		e = now // it may have been mounted anew
	}
	g, err := e.serving()
	if err != nil {
		return nil, err
	}
	return &controlv1.ReloadReply{Generation: g.provider.Generation, Digest: g.what.digest, Changed: g.what.digest != before}, nil
}

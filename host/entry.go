package host

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	"github.com/cordon-host/cordon/capability/approval"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/ctxsvc"
	"github.com/cordon-host/cordon/host/bus"
	"github.com/cordon-host/cordon/host/compose"
	"github.com/cordon-host/cordon/host/process"
	"github.com/cordon-host/cordon/host/route"
)

// How a crashed plugin comes back.
const (
	backoffFirst = 100 * time.Millisecond
	backoffMax   = 30 * time.Second
	// A generation that lived this long was healthy: the next crash starts at the first backoff again.
	backoffReset = time.Minute
	// Five crashes in two minutes: the entry fails and stays down until somebody changes something.
	breakerCrashes = 5
	breakerWindow  = 2 * time.Minute
)

// setupTimeout bounds Setup with Apply in it, and Activate, unless the row says otherwise.
const setupTimeout = 30 * time.Second

// entry is one row of the composition and whatever process serves it. Its identity is what dependents hold on to; the
// generation behind it changes without their noticing.
type entry struct {
	id    string
	level kernelv1.Level
	host  *Host

	starting sync.Mutex // one next generation at a time

	mu       sync.Mutex
	fiber    *ctxsvc.Fiber   // set once, when it is mounted
	what     runnable        // of the current generation, or of the next one to try
	ctx      *ctxsvc.Context // of the fiber, while it is applied
	current  *generation
	draining []*draining   // generations before it, oldest first
	moved    chan struct{} // closed and replaced when a swap has moved the entry to another generation
	number   uint64
	crashes  []time.Time
	problem  string // the last crash, or why a start failed
}

// runnable is what a generation is made from.
type runnable struct {
	composition *composition
	row         *compose.Entry // nil for a built-in
	manifest    *kernelv1.Manifest
	digest      string
	launch      func(ctx context.Context, generation uint64, log *slog.Logger) (generationProcess, error)
}

// place is where the row is.
func (r runnable) place() string {
	if r.row == nil {
		return "built in"
	}
	return r.row.Place.String()
}

// generationProcess is what runs a generation: a process of its own, or the host's.
type generationProcess interface {
	Conn() route.Conn
	Kernel() kernelv1.PluginClient
	Done() <-chan struct{}
	Exit() string
	PID() int
	Stop(ctx context.Context) error
}

// generation is one running plugin with its ways in and out.
type generation struct {
	what     runnable
	process  generationProcess
	provider *route.Provider
	channel  *route.Channel
	link     *bus.Link
	reply    *kernelv1.SetupReply
	started  time.Time
}

// plugin is the entry as the container sees it.
func (e *entry) plugin() ctxsvc.Plugin {
	p := ctxsvc.Plugin{Name: e.id, Apply: e.apply}
	what := e.now()
	for _, o := range what.manifest.GetOffers() {
		p.Provides = append(p.Provides, o.GetCapability())
	}
	for _, n := range what.manifest.GetNeeds() {
		// An optional need that the composition meets is waited for like any other: what a plugin sees at its Apply must not depend
		// on who was faster.
		if !n.GetOptional() || what.composition.offered(what.row, n.GetCapability()) {
			p.Inject = append(p.Inject, ctxsvc.Need{Name: n.GetCapability()})
		}
	}
	return p
}

// apply brings the entry up: a first generation, everything it registered, and somebody who watches it. What it did is undone
// by the container, newest first.
func (e *entry) apply(c *ctxsvc.Context, _ any) error {
	e.mu.Lock()
	e.ctx = c
	e.mu.Unlock()
	facts := e.facts(c)
	first, err := e.start(c.Context(), facts)
	if err != nil {
		e.setProblem(err.Error())
		return err
	}
	if err := c.Effect("generation", func() (ctxsvc.Disposer, error) { return e.stop, nil }); err != nil {
		return errors.Join(err, first.end(context.Background()))
	}
	if err := c.Effect("tools", func() (ctxsvc.Disposer, error) {
		return func(context.Context) error { return e.host.tools.Set(e.id, nil, nil) }, e.host.tools.Set(e.id, first.reply.GetTools(), e.provider)
	}); err != nil {
		return err
	}
	for _, d := range first.reply.GetContexts() {
		if err := c.Effect("context "+d.GetName(), func() (ctxsvc.Disposer, error) {
			remove := e.host.prompt.Register(e.id, d, e.provider)
			return func(context.Context) error { remove(); return nil }, nil
		}); err != nil {
			return err
		}
	}
	for _, l := range first.reply.GetListeners() {
		if err := e.host.bus.Listen(c, e.id, l, e.level, e.provider); err != nil {
			return err
		}
	}
	for _, capability := range slices.Sorted(maps.Keys(first.reply.GetFacts())) {
		if err := c.Provide(capability, e, ctxsvc.WithFacts(string(first.reply.GetFacts()[capability].GetJson()))); err != nil {
			return err
		}
	}
	return c.Effect("supervisor", func() (ctxsvc.Disposer, error) {
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() {
			defer close(done)
			e.supervise(ctx, c)
		}()
		return func(context.Context) error {
			cancel()
			<-done
			return nil
		}, nil
	})
}

// mount is the fiber of the entry.
func (e *entry) mount() *ctxsvc.Fiber {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.fiber
}

// now is what the entry runs.
func (e *entry) now() runnable {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.what
}

// facts are what the providers of the needs published.
func (e *entry) facts(c *ctxsvc.Context) map[string]*kernelv1.Facts {
	out := map[string]*kernelv1.Facts{}
	for _, n := range e.now().manifest.GetNeeds() {
		if f, ok := c.Facts(n.GetCapability()); ok {
			raw, _ := f.(string) // nothing else is ever published
			out[n.GetCapability()] = &kernelv1.Facts{Json: []byte(raw)}
		}
	}
	return out
}

// start brings up the next generation and makes it the current one.
func (e *entry) start(ctx context.Context, facts map[string]*kernelv1.Facts) (*generation, error) {
	g, err := e.bring(ctx, e.now(), facts)
	if err == nil {
		e.become(g)
	}
	return g, err
}

// become moves the entry to a generation, in one step: whatever looks it up from now on finds the new one. It returns the old one.
func (e *entry) become(g *generation) *generation {
	defer e.host.prompt.Moved()
	e.mu.Lock()
	defer e.mu.Unlock()
	old := e.current
	e.current, e.what, e.problem = g, g.what, ""
	if old != nil {
		close(e.moved)
		e.moved = make(chan struct{})
	}
	return old
}

// bring brings up the next generation, hidden: nothing finds it yet. The sequence: the process, a channel for it to the host, Setup,
// Activate, its event stream.
func (e *entry) bring(ctx context.Context, what runnable, facts map[string]*kernelv1.Facts) (g *generation, err error) {
	e.mu.Lock()
	e.number++
	number := e.number
	e.mu.Unlock()

	g = &generation{started: time.Now(), what: what}
	defer func() {
		if err != nil {
			err = errors.Join(err, g.end(context.WithoutCancel(ctx)))
		}
	}()
	log := e.host.log.With("entry", e.id, "generation", number)
	if g.process, err = what.launch(ctx, number, log); err != nil {
		return g, err
	}
	g.provider = &route.Provider{
		Entry: e.id, Generation: number, Manifest: what.manifest, Conn: g.process.Conn(),
		Done: g.process.Done(), Exit: g.process.Exit,
	}
	if g.channel, err = e.host.router.Open(g.provider); err != nil {
		return g, err
	}
	timeout := setupTimeout
	if what.row != nil && what.row.Timeouts.Start > 0 {
		timeout = what.row.Timeouts.Start
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	deployment, err := e.host.deployment(e.id, what.composition)
	if err != nil {
		return g, err
	}
	setup := &kernelv1.SetupRequest{
		Entry: e.id, Generation: number, HostAddress: g.channel.Address, ChannelToken: g.channel.Token,
		LogLevel: e.host.logLevel, Facts: facts, Deployment: deployment,
	}
	if what.row != nil {
		setup.Config = what.row.Config
	}
	if g.reply, err = g.process.Kernel().Setup(ctx, setup); err != nil {
		return g, g.blame(err)
	}
	if err := within(what.manifest, g.reply); err != nil {
		return g, err
	}
	if _, err := g.process.Kernel().Activate(ctx, &kernelv1.ActivateRequest{}); err != nil {
		return g, g.blame(err)
	}
	if g.link, err = e.host.bus.Connect(g.provider, g.process.Kernel()); err != nil {
		return g, err
	}
	return g, nil
}

// within holds that a plugin registered no more than its manifest says: the composition was checked by that.
func within(m *kernelv1.Manifest, r *kernelv1.SetupReply) error {
	beyond := func(what, name string) error {
		return fmt.Errorf("plugin %s registered %s %q, which its manifest does not declare", m.GetName(), what, name)
	}
	for _, t := range r.GetTools() {
		if !slices.Contains(m.GetTools(), t.GetName()) {
			return beyond("tool", t.GetName())
		}
	}
	for _, l := range r.GetListeners() {
		if !slices.ContainsFunc(m.GetListeners(), func(d *kernelv1.Listener) bool { return proto.Equal(d, l) }) {
			return beyond("a listener for", l.GetEvent())
		}
	}
	for _, c := range r.GetContexts() {
		if !slices.ContainsFunc(m.GetContexts(), func(d *kernelv1.Context) bool { return proto.Equal(d, c) }) {
			return beyond("context", c.GetName())
		}
	}
	for capability := range r.GetFacts() {
		if !slices.ContainsFunc(m.GetOffers(), func(o *kernelv1.Offer) bool { return o.GetCapability() == capability }) {
			return beyond("capability", capability)
		}
	}
	return nil
}

// blame explains an error of a start by the end of the process, if that is what it was.
func (g *generation) blame(err error) error {
	if fault.Reason(err) != "" {
		return errors.New(fault.Message(err))
	}
	return g.provider.Broken(fault.Message(err))
}

// end closes what a generation has, in the reverse order of start.
func (g *generation) end(ctx context.Context) error {
	var err error
	if g.link != nil {
		g.link.Close()
	}
	if g.process != nil {
		err = g.process.Stop(ctx)
	}
	if g.channel != nil {
		g.channel.Close()
	}
	return err
}

// stop ends the current generation.
func (e *entry) stop(ctx context.Context) error {
	e.mu.Lock()
	g := e.current
	e.current = nil
	e.mu.Unlock()
	if g == nil {
		return nil
	}
	return g.end(ctx)
}

// supervise restarts the entry's process when it ends by itself, with growing pauses, until it crashes too often. Dependents
// are not restarted: they hold on to the entry, and calls fail with a typed error meanwhile.
func (e *entry) supervise(ctx context.Context, c *ctxsvc.Context) {
	pause := backoffFirst
	for {
		e.mu.Lock()
		g, moved := e.current, e.moved
		e.mu.Unlock()
		if g == nil {
			return // the fiber is unloading
		}
		select {
		case <-ctx.Done():
			return
		case <-moved:
			continue // a swap: whoever made it ends the old generation
		case <-g.process.Done():
		}
		if ctx.Err() != nil || !e.lost(g) {
			continue
		}
		exit := g.process.Exit()
		e.host.log.Error("plugin crashed", "entry", e.id, "generation", g.provider.Generation, "exit", exit)
		if err := g.end(ctx); err != nil {
			e.host.log.Warn("cleaning up after a crash", "entry", e.id, "error", err)
		}
		if time.Since(g.started) > backoffReset {
			pause = backoffFirst
		}
		for e.idle() {
			if e.tooManyCrashes() {
				c.Fiber().Fail(fmt.Errorf("%s crashed %d times in %s; last: %s", e.id, breakerCrashes, breakerWindow, e.lastProblem()))
				return
			}
			if !sleep(ctx, pause/2+rand.N(pause/2+1)) {
				return
			}
			pause = min(2*pause, backoffMax)
			err := e.revive(ctx, c, g)
			if err == nil {
				break
			}
			if ctx.Err() != nil {
				return
			}
			e.setProblem(err.Error())
			e.host.log.Error("plugin did not come back", "entry", e.id, "error", err)
		}
	}
}

// revive brings up another generation after one that crashed, unless a swap has done so meanwhile.
func (e *entry) revive(ctx context.Context, c *ctxsvc.Context, crashed *generation) error {
	e.starting.Lock()
	defer e.starting.Unlock()
	if !e.idle() {
		return nil
	}
	next, err := e.start(ctx, e.facts(c))
	if err != nil {
		return err
	}
	e.republish(c, crashed.reply, next.reply)
	e.host.lookAtPins()
	return nil
}

// lost takes a generation that crashed out of service, if it was in service.
func (e *entry) lost(g *generation) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.current != g {
		return false
	}
	e.current, e.problem = nil, "crashed: "+g.process.Exit()
	return true
}

// idle reports whether nothing serves the entry.
func (e *entry) idle() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.current == nil
}

// republish publishes the facts of a new generation; dependents whose facts changed are applied again.
func (e *entry) republish(c *ctxsvc.Context, old, now *kernelv1.SetupReply) {
	for capability, f := range now.GetFacts() {
		if bytes.Equal(f.GetJson(), old.GetFacts()[capability].GetJson()) {
			continue
		}
		if err := c.SetFacts(capability, string(f.GetJson())); err != nil {
			e.host.log.Error("facts not published", "entry", e.id, "capability", capability, "error", err)
		}
	}
}

// tooManyCrashes counts a crash and reports whether the entry should be given up.
func (e *entry) tooManyCrashes() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := time.Now()
	e.crashes = slices.DeleteFunc(append(e.crashes, now), func(t time.Time) bool { return now.Sub(t) > breakerWindow })
	return len(e.crashes) >= breakerCrashes
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

func (e *entry) setProblem(text string) {
	e.mu.Lock()
	e.problem = text
	e.mu.Unlock()
}

func (e *entry) lastProblem() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.problem
}

// serving is the current generation, or a typed error that says why there is none.
func (e *entry) serving() (*generation, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.current != nil {
		return e.current, nil
	}
	why := e.problem
	if why == "" {
		why = "it is not started"
	}
	return nil, fault.With(codes.Unavailable, "PLUGIN_NOT_RUNNING", fmt.Sprintf("%s is not running: %s", e.id, why),
		route.FaultDetail(&kernelv1.PluginFault{Entry: e.id, Generation: e.number, Reason: "PLUGIN_NOT_RUNNING", Exit: why, Retryable: true}))
}

func (e *entry) provider() (*route.Provider, error) {
	g, err := e.serving()
	if err != nil {
		return nil, err
	}
	return g.provider, nil
}

// executable launches generations as processes of a staged executable, confined unless manifest and row agree that it is not.
func (h *Host) executable(row *compose.Entry, path, digest string, unconfined bool) func(context.Context, uint64, *slog.Logger) (generationProcess, error) {
	return func(ctx context.Context, number uint64, log *slog.Logger) (generationProcess, error) {
		dir, err := os.MkdirTemp(h.layout.RunDir, "p") // short: a socket's path has 108 bytes
		if err != nil {
			return nil, fmt.Errorf("run directory of %s: %w", row.ID, err)
		}
		state, err := h.stateOf(row.ID)
		if err != nil {
			return nil, err
		}
		var limits process.Limits
		if number > 0 { // else it is only asked what it is
			limits = limitsOf(row)
		}
		g, err := process.Start(ctx, process.Spec{
			Entry: row.ID, Path: path, Digest: digest, Env: process.Environment(row.Env), Dir: state, RunDir: dir,
			Log: log, LogOutput: h.pluginLog(row.ID), StartTimeout: row.Timeouts.Start, Unconfined: unconfined,
			Limits: limits, Name: fmt.Sprintf("%s-%d", row.ID, number),
		})
		if err != nil {
			return nil, errors.Join(err, os.RemoveAll(dir))
		}
		return processGeneration{g, dir}, nil
	}
}

// processGeneration is a process with its run directory.
type processGeneration struct {
	*process.Generation
	runDir string
}

func (p processGeneration) Conn() route.Conn { return p.Generation.Conn() }

func (p processGeneration) Stop(ctx context.Context) error {
	return errors.Join(p.Generation.Stop(ctx), os.RemoveAll(p.runDir))
}

// answerLevel is what the answers of a row are worth.
func answerLevel(row *compose.Entry) (kernelv1.Level, error) {
	return approval.ParseLevel(string(row.Answers))
}

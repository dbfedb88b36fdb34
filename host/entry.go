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
	"path/filepath"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

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
	id       string
	row      *compose.Entry // nil for a built-in
	place    string
	manifest *kernelv1.Manifest
	level    kernelv1.Level
	digest   string
	launch   func(ctx context.Context, generation uint64, log *slog.Logger) (generationProcess, error)
	host     *Host

	mu      sync.Mutex
	ctx     *ctxsvc.Context // of the fiber, while it is applied
	current *generation
	number  uint64
	crashes []time.Time
	problem string // the last crash, or why a start failed
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
	for _, o := range e.manifest.GetOffers() {
		p.Provides = append(p.Provides, o.GetCapability())
	}
	for _, n := range e.manifest.GetNeeds() {
		// An optional need that the composition meets is waited for like any other: what a plugin sees at its Apply must not depend
		// on who was faster.
		if !n.GetOptional() || e.host.composed(e.row, n.GetCapability()) {
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
	for _, t := range first.reply.GetTools() {
		if err := c.Effect("tool "+t.GetName(), func() (ctxsvc.Disposer, error) {
			remove, err := e.host.tools.Register(e.id, t, e.provider)
			return func(context.Context) error { remove(); return nil }, err
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
			e.supervise(ctx, c, first)
		}()
		return func(context.Context) error {
			cancel()
			<-done
			return nil
		}, nil
	})
}

// facts are what the providers of the needs published.
func (e *entry) facts(c *ctxsvc.Context) map[string]*kernelv1.Facts {
	out := map[string]*kernelv1.Facts{}
	for _, n := range e.manifest.GetNeeds() {
		if f, ok := c.Facts(n.GetCapability()); ok {
			raw, _ := f.(string) // nothing else is ever published
			out[n.GetCapability()] = &kernelv1.Facts{Json: []byte(raw)}
		}
	}
	return out
}

// start brings up the next generation, hidden until it has become the current one, in one step. The sequence: a channel for it
// to the host, the process, Setup, Activate, its event stream.
func (e *entry) start(ctx context.Context, facts map[string]*kernelv1.Facts) (g *generation, err error) {
	e.mu.Lock()
	e.number++
	number := e.number
	e.mu.Unlock()

	g = &generation{started: time.Now()}
	defer func() {
		if err != nil {
			err = errors.Join(err, g.end(context.WithoutCancel(ctx)))
		}
	}()
	log := e.host.log.With("entry", e.id, "generation", number)
	if g.process, err = e.launch(ctx, number, log); err != nil {
		return g, err
	}
	g.provider = &route.Provider{
		Entry: e.id, Generation: number, Manifest: e.manifest, Conn: g.process.Conn(),
		Done: g.process.Done(), Exit: g.process.Exit,
	}
	if g.channel, err = e.host.router.Open(g.provider); err != nil {
		return g, err
	}
	timeout := setupTimeout
	if e.row != nil && e.row.Timeouts.Start > 0 {
		timeout = e.row.Timeouts.Start
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	deployment, err := e.host.deployment(e.id)
	if err != nil {
		return g, err
	}
	setup := &kernelv1.SetupRequest{
		Entry: e.id, Generation: number, HostAddress: g.channel.Address, ChannelToken: g.channel.Token,
		LogLevel: e.host.logLevel, Facts: facts, Deployment: deployment,
	}
	if e.row != nil {
		setup.Config = e.row.Config
	}
	if g.reply, err = g.process.Kernel().Setup(ctx, setup); err != nil {
		return g, g.blame(err)
	}
	if _, err := g.process.Kernel().Activate(ctx, &kernelv1.ActivateRequest{}); err != nil {
		return g, g.blame(err)
	}
	if g.link, err = e.host.bus.Connect(g.provider, g.process.Kernel()); err != nil {
		return g, err
	}
	e.mu.Lock()
	e.current, e.problem = g, ""
	e.mu.Unlock()
	return g, nil
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
func (e *entry) supervise(ctx context.Context, c *ctxsvc.Context, g *generation) {
	pause := backoffFirst
	for {
		select {
		case <-ctx.Done():
			return
		case <-g.process.Done():
		}
		if ctx.Err() != nil {
			return
		}
		exit := g.process.Exit()
		e.host.log.Error("plugin crashed", "entry", e.id, "generation", g.provider.Generation, "exit", exit)
		e.setProblem("crashed: " + exit)
		if err := e.stop(ctx); err != nil {
			e.host.log.Warn("cleaning up after a crash", "entry", e.id, "error", err)
		}
		if time.Since(g.started) > backoffReset {
			pause = backoffFirst
		}
		for {
			if e.tooManyCrashes() {
				c.Fiber().Fail(fmt.Errorf("%s crashed %d times in %s; last: %s", e.id, breakerCrashes, breakerWindow, e.lastProblem()))
				return
			}
			if !sleep(ctx, pause/2+rand.N(pause/2+1)) {
				return
			}
			pause = min(2*pause, backoffMax)
			next, err := e.start(ctx, e.facts(c))
			if err == nil {
				e.republish(c, g.reply, next.reply)
				g = next
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

// executable launches generations as processes of a staged executable.
func (h *Host) executable(row *compose.Entry, path, digest string) func(context.Context, uint64, *slog.Logger) (generationProcess, error) {
	return func(ctx context.Context, number uint64, log *slog.Logger) (generationProcess, error) {
		dir := filepath.Join(h.layout.RunDir, fmt.Sprintf("p%d-%d", slices.Index(h.plan.Entries, row), number))
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fmt.Errorf("run directory of %s: %w", row.ID, err)
		}
		state, err := h.stateOf(row.ID)
		if err != nil {
			return nil, err
		}
		g, err := process.Start(ctx, process.Spec{
			Entry: row.ID, Path: path, Digest: digest, Env: process.Environment(row.Env), Dir: state, RunDir: dir,
			Log: log, LogOutput: h.pluginLog(row.ID), StartTimeout: row.Timeouts.Start,
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

package host

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	"github.com/cordon-host/cordon/capability/approval"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/journal"
	"github.com/cordon-host/cordon/ctxsvc"
	"github.com/cordon-host/cordon/host/bus"
	"github.com/cordon-host/cordon/host/compose"
	"github.com/cordon-host/cordon/host/logs"
	"github.com/cordon-host/cordon/host/process"
	"github.com/cordon-host/cordon/host/route"
)

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
	reply    *kernelv1.SetupReply // of the newest generation
	draining []*draining          // generations before it, oldest first
	moved    chan struct{}        // closed and replaced when supervision must look again: another generation, or a reason to try
	number   uint64
	backoff  process.Backoff
	breaker  process.Breaker
	problem  string             // the last crash, or why a start failed
	crash    *controlv1.Crash   // the last one since the row or its executable changed
	again    context.CancelFunc // ends the pause before the row is applied again; nil when there is none
}

// runnable is what a generation is made from.
type runnable struct {
	composition *composition
	row         *compose.Entry // nil for a built-in
	manifest    *kernelv1.Manifest
	digest      string
	launch      func(ctx context.Context, generation uint64, log *logs.Writer) (generationProcess, error)
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
	Crash() *process.Crash
	Timings() process.Timings
	// Failed explains an error of a call that is part of the start.
	Failed(phase process.Phase, timeout time.Duration, err error) error
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
	timings  process.Timings
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
		e.startFailed(err)
		if c.Context().Err() == nil {
			e.applyLater(c.Fiber())
		}
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
	e.current, e.what, e.reply, e.problem = g, g.what, g.reply, ""
	e.signal()
	return old
}

// signal has supervision look again. The lock is held.
func (e *entry) signal() {
	close(e.moved)
	e.moved = make(chan struct{})
}

// errStartTimeout is why a start is given up when its time has passed.
var errStartTimeout = errors.New("start timeout")

// bring brings up the next generation, hidden: nothing finds it yet. The sequence: the process, a channel for it to the host, Setup,
// Activate, its event stream. One time bounds all of it.
func (e *entry) bring(ctx context.Context, what runnable, facts map[string]*kernelv1.Facts) (g *generation, err error) {
	e.mu.Lock()
	e.number++
	number, now := e.number, e.what
	e.mu.Unlock()
	if what.row != nil {
		// As long as both may run, neither's secrets may show.
		e.host.hide(what.row, what.manifest, now)
	}
	timeout := process.DefaultStartTimeout
	if what.row != nil && what.row.Timeouts.Start > 0 {
		timeout = what.row.Timeouts.Start
	}
	whole := ctx
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, errStartTimeout)
	defer cancel()

	g = &generation{started: time.Now(), what: what}
	defer func() {
		if err != nil {
			err = errors.Join(err, g.end(context.WithoutCancel(whole)))
		}
	}()
	log := e.host.logs.Writer(e.id, number)
	if g.process, err = what.launch(ctx, number, log); err != nil {
		return g, err
	}
	g.timings = g.process.Timings()
	g.provider = &route.Provider{
		Entry: e.id, Generation: number, Manifest: what.manifest, Conn: g.process.Conn(),
		Done: g.process.Done(), Exit: g.process.Exit, Crash: func() string { return g.process.Crash().Head() },
	}
	if g.channel, err = e.host.router.Open(g.provider); err != nil {
		return g, err
	}
	deployment, err := e.host.deployment(e.id, what.composition)
	if err != nil {
		return g, err
	}
	level, _ := log.Level()
	setup := &kernelv1.SetupRequest{
		Entry: e.id, Generation: number, HostAddress: g.channel.Address, ChannelToken: g.channel.Token,
		LogLevel: journal.LevelName(level), Facts: facts, Deployment: deployment,
	}
	if what.row != nil {
		setup.Config = what.row.Config
	}
	failed := func(phase process.Phase, err error) error {
		if context.Cause(ctx) == errStartTimeout {
			return g.process.Failed(phase, timeout, err)
		}
		return g.process.Failed(phase, 0, err)
	}
	begin := time.Now()
	if g.reply, err = g.process.Kernel().Setup(ctx, setup); err != nil {
		return g, failed(process.PhaseSetup, err)
	}
	g.timings.Setup = time.Since(begin)
	if err := within(what.manifest, g.reply); err != nil {
		return g, err
	}
	begin = time.Now()
	if _, err := g.process.Kernel().Activate(ctx, &kernelv1.ActivateRequest{}); err != nil {
		return g, failed(process.PhaseActivate, err)
	}
	if g.link, err = e.host.bus.Connect(g.provider, g.process.Kernel()); err != nil {
		return g, failed(process.PhaseActivate, err)
	}
	g.timings.Activate = time.Since(begin)
	t := g.timings
	log.Log().Debug("plugin started", "hash", t.Hash, "exec", t.Exec, "handshake", t.Handshake, "setup", t.Setup, "activate", t.Activate)
	return g, nil
}

// hide keeps the secrets of a row, and of what ran before it, out of the log.
func (h *Host) hide(row *compose.Entry, m *kernelv1.Manifest, before ...runnable) {
	secrets, err := row.Secrets(m)
	for _, b := range before {
		if b.row != nil {
			more, err2 := b.row.Secrets(b.manifest)
			secrets, err = append(secrets, more...), errors.Join(err, err2)
		}
	}
	if err != nil {
		// Config and schema were checked before: this is a mistake of ours, and no reason to show anything.
		h.log.Error("secrets of an entry cannot be told", "entry", row.ID, "error", err)
	}
	h.logs.Hide(row.ID, secrets)
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
		route.FaultDetail(&kernelv1.PluginFault{
			Entry: e.id, Generation: e.number, Reason: "PLUGIN_NOT_RUNNING", Exit: why, Retryable: true, Crash: e.crash.GetTrace(),
		}))
}

func (e *entry) provider() (*route.Provider, error) {
	g, err := e.serving()
	if err != nil {
		return nil, err
	}
	return g.provider, nil
}

// executable launches generations as processes of a staged executable, confined unless manifest and row agree that it is not.
func (h *Host) executable(row *compose.Entry, path, digest string, unconfined bool) func(context.Context, uint64, *logs.Writer) (generationProcess, error) {
	return func(ctx context.Context, number uint64, log *logs.Writer) (generationProcess, error) {
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
			Log: log, StartTimeout: row.Timeouts.Start, BeatTimeout: row.Timeouts.Beat, Unconfined: unconfined,
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

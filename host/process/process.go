// Package process runs generations of plugins: one process each, started through go-plugin with a runner of our own, and
// ended within a bounded time whatever they do.
package process

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	goplugin "github.com/hashicorp/go-plugin"
	"github.com/hashicorp/go-plugin/runner"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/host/logs"
)

// How a stop proceeds when the plugin does not co-operate. Each step has its own time.
const (
	// DrainTimeout bounds the Drain call: calls that are still in flight when a generation is told to stop have been given up.
	DrainTimeout = time.Second
	// StopRPCTimeout bounds the Stop call, in which a plugin undoes its effects.
	StopRPCTimeout = 5 * time.Second
	// FlushTimeout is how long the records are waited for that a plugin still has when it has stopped.
	FlushTimeout = 500 * time.Millisecond
	// TermGrace is how long a process may live after its standard input ended, and again after SIGTERM.
	TermGrace = time.Second
	// DefaultStartTimeout bounds a start. Large binaries on cold disks take seconds.
	DefaultStartTimeout = 60 * time.Second
)

// handshake mirrors plugin.Handshake; the host does not import what authors import. A test holds them together.
var handshake = goplugin.HandshakeConfig{
	ProtocolVersion:  1,
	MagicCookieKey:   "CORDON_PLUGIN",
	MagicCookieValue: "cordon",
}

// Spec says what to run.
type Spec struct {
	Entry  string
	Path   string // the staged executable
	Digest string // its sha256, hex
	Env    []string
	Dir    string // working directory
	RunDir string // private directory for the plugin's socket
	// Log takes what the plugin logs and what the process prints; nil drops it.
	Log *logs.Writer
	// StartTimeout bounds the start; 0 for DefaultStartTimeout.
	StartTimeout time.Duration
	// BeatTimeout is how long the plugin may be silent; 0 for DefaultBeatTimeout.
	BeatTimeout time.Duration
	// Unconfined runs the process with everything this one can do. Otherwise it gets the confinement of plugins; see confine.
	Unconfined bool
	// Limits bound the process with everything it starts. Name tells its control group from those of other entries.
	Limits Limits
	Name   string
}

// Generation is one running process of an entry.
type Generation struct {
	entry   string
	log     *logs.Writer
	conn    *grpc.ClientConn
	client  *goplugin.Client
	run     *execRunner
	said    *transcript
	control *control // nil before the handshake

	stopping atomic.Bool
	verdict  atomic.Pointer[string] // why the host ended it

	done  chan struct{} // closed when the process is gone and all it said was taken
	crash *Crash        // how it ended; valid after done
}

// Start runs a plugin and returns when its gRPC server answers the handshake. Its control stream is open then; nothing has been set up
// yet. The error is a *StartError.
func Start(ctx context.Context, spec Spec) (*Generation, error) {
	timeout := spec.StartTimeout
	if timeout == 0 {
		timeout = DefaultStartTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if spec.Log == nil {
		spec.Log = logs.Discard()
	}
	said := &transcript{log: spec.Log}
	g := &Generation{entry: spec.Entry, log: spec.Log, said: said, done: make(chan struct{})}
	g.run = &execRunner{
		path: spec.Path, digest: spec.Digest, name: spec.Entry, dir: spec.Dir, said: said, done: make(chan struct{}),
		runDir: spec.RunDir, unconfined: spec.Unconfined, limits: spec.Limits, group: spec.Name, ctx: ctx, phase: PhaseHash,
	}
	// What a Go program prints after it began to serve comes over go-plugin's own stream.
	stdout, stderr := &lines{take: said.stdout}, &lines{take: said.stderr}
	g.client = goplugin.NewClient(&goplugin.ClientConfig{
		HandshakeConfig:  handshake,
		Plugins:          goplugin.PluginSet{"cordon": bareConn{}},
		AllowedProtocols: []goplugin.Protocol{goplugin.ProtocolGRPC},
		AutoMTLS:         true,
		SkipHostEnv:      true,
		StartTimeout:     timeout + time.Minute, // ours ends first and says more
		Logger:           hclog.NewNullLogger(),
		SyncStdout:       stdout,
		SyncStderr:       stderr,
		UnixSocketConfig: &goplugin.UnixSocketConfig{TempDir: spec.RunDir},
		RunnerFunc: func(_ hclog.Logger, cmd *exec.Cmd, _ string) (runner.Runner, error) {
			g.run.env = append(slices.Clone(spec.Env), cmd.Env...)
			return g.run, nil
		},
	})
	begin := time.Now()
	conn, err := g.connect()
	if err != nil {
		phase, late := g.run.phase, errors.Is(ctx.Err(), context.DeadlineExceeded)
		if ctx.Err() != nil && !late {
			err = ctx.Err() // whoever asked for the start gave it up
		}
		g.kill()
		e := &StartError{Entry: spec.Entry, Phase: phase, Err: err}
		if late {
			e.Timeout = timeout
		}
		if g.PID() != 0 {
			<-g.run.done
			g.run.drained.Wait()
			closeAll(g.run.outR, g.run.errR) // nobody else does when go-plugin never came to wait
			if !late {                       // else it was the host who ended it
				e.Exit = g.run.exit()
			}
		}
		e.Stderr, e.Trace = said.end()
		return nil, e
	}
	g.run.timings.Handshake = time.Since(begin) - g.run.timings.Hash - g.run.timings.Exec
	g.conn = conn
	g.openControl(spec.BeatTimeout)
	go g.watch(stdout, stderr)
	return g, nil
}

// connect starts the process and dials it. The end of the start's context kills the process, and so ends this.
func (g *Generation) connect() (*grpc.ClientConn, error) {
	if _, err := g.client.Start(); err != nil {
		return nil, firstLine(err)
	}
	protocol, err := g.client.Client()
	if err != nil {
		return nil, err
	}
	raw, err := protocol.Dispense("cordon")
	if err != nil {
		return nil, err
	}
	if !g.run.release() {
		return nil, g.run.ctx.Err()
	}
	return raw.(*grpc.ClientConn), nil
}

// firstLine drops go-plugin's general advice on unreadable handshakes; the plugin's own last words say more.
func firstLine(err error) error {
	text, _, more := strings.Cut(err.Error(), "\n")
	if !more {
		return err
	}
	return errors.New(text)
}

// watch waits for the process to end and for what it still had to say.
func (g *Generation) watch(stdout, stderr *lines) {
	<-g.run.done
	g.run.drained.Wait()
	<-g.control.done
	stdout.end()
	stderr.end()
	c := &Crash{Time: time.Now(), Exit: g.run.exit()}
	if why := g.verdict.Load(); why != nil {
		c.Exit += "; " + *why
	}
	c.Stderr, c.Trace = g.said.end()
	g.crash = c
	close(g.done)
}

// Conn is the connection to the plugin.
func (g *Generation) Conn() *grpc.ClientConn { return g.conn }

// Kernel is the plugin's side of the kernel protocol.
func (g *Generation) Kernel() kernelv1.PluginClient { return kernelv1.NewPluginClient(g.conn) }

// PID is the process id; 0 before there is one.
func (g *Generation) PID() int { return int(g.run.pid.Load()) }

// Done is closed when the process is gone.
func (g *Generation) Done() <-chan struct{} { return g.done }

// Timings are how long the steps of the start took that happened here: hash, exec and handshake.
func (g *Generation) Timings() Timings { return g.run.timings }

// Exit says how the process ended and quotes what it wrote last; empty as long as it runs.
func (g *Generation) Exit() string {
	c := g.ended()
	if c == nil {
		return ""
	}
	if c.Stderr != "" {
		return c.Exit + "; its last words:\n" + c.Stderr
	}
	return c.Exit
}

func (g *Generation) ended() *Crash {
	select {
	case <-g.done:
		return g.crash
	default:
		return nil
	}
}

// Crash is the report of an end that nobody asked for; nil as long as the process runs, and after a stop.
func (g *Generation) Crash() *Crash {
	if g.stopping.Load() {
		return nil
	}
	return g.ended()
}

// Failed explains an error of a call that is part of the start by the end of the process, if that is what it was. It waits a moment
// for that end: a connection breaks before its process is reaped. Timeout is the time that the start had, when that has passed.
func (g *Generation) Failed(phase Phase, timeout time.Duration, err error) error {
	e := &StartError{Entry: g.entry, Phase: phase, Err: errors.New(g.log.Redact(fault.Message(err))), Timeout: timeout}
	if status.Code(err) == codes.Unavailable {
		t := time.NewTimer(reapWait)
		defer t.Stop()
		select {
		case <-g.done:
		case <-t.C:
		}
	}
	if c := g.ended(); c != nil {
		e.Exit, e.Stderr, e.Trace = c.Exit, c.Stderr, c.Trace
	}
	return e
}

// reapWait is how long a broken connection waits to learn that its process is gone.
const reapWait = time.Second

// Stop ends the process: the Drain call, so that it takes no more calls; the Stop call, in which it undoes its effects; then the end of its
// standard input, SIGTERM, and SIGKILL to the whole group. Each has its own time, or less if ctx ends. It returns when the process
// has been reaped.
func (g *Generation) Stop(ctx context.Context) error {
	err := g.ask(ctx)
	_ = g.run.lifeline.Close()
	if !g.wait(ctx, TermGrace) {
		g.run.signal(unix.SIGTERM)
		g.wait(ctx, TermGrace)
	}
	g.kill()
	<-g.done
	return err
}

// ask tells the plugin to stop.
func (g *Generation) ask(ctx context.Context) error {
	select {
	case <-g.run.done:
		return nil // there is nobody to ask, and the end was no stop
	default:
	}
	g.stopping.Store(true)
	drain, cancel := context.WithTimeout(ctx, DrainTimeout)
	_, err := g.Kernel().Drain(drain, &kernelv1.DrainRequest{})
	cancel()
	if err != nil && status.Code(err) != codes.Unimplemented {
		g.log.Log().Debug("plugin was not drained", "error", err)
	}
	stop, cancel := context.WithTimeout(ctx, StopRPCTimeout)
	defer cancel()
	_, err = g.Kernel().Stop(stop, &kernelv1.StopRequest{})
	select {
	case <-g.run.done:
		return nil // it ended before it could answer
	default:
	}
	if err == nil {
		t := time.NewTimer(FlushTimeout)
		defer t.Stop()
		select {
		case <-g.control.done:
		case <-g.run.done:
		case <-t.C:
		case <-ctx.Done():
		}
	}
	return err
}

// wait waits for the end of the process.
func (g *Generation) wait(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-g.run.done:
		return true
	case <-t.C:
	case <-ctx.Done():
	}
	return false
}

// kill ends the group and lets go-plugin close what it holds, which it does at once when the process is gone.
func (g *Generation) kill() {
	g.run.kill()
	g.client.Kill()
}

// bareConn is the host's half of plugin.Glue.
type bareConn struct {
	goplugin.NetRPCUnsupportedPlugin
}

func (bareConn) GRPCServer(*goplugin.GRPCBroker, *grpc.Server) error {
	return errors.New("the host serves no go-plugin plugin")
}

func (bareConn) GRPCClient(_ context.Context, _ *goplugin.GRPCBroker, conn *grpc.ClientConn) (any, error) {
	return conn, nil
}

// Environment is what a plugin process gets: an allow-list of the host's, and the row's own variables over it.
func Environment(row map[string]string) []string {
	var env []string
	for _, kv := range os.Environ() {
		name, _, _ := strings.Cut(kv, "=")
		if _, own := row[name]; !own && allowed(name) {
			env = append(env, kv)
		}
	}
	for name, value := range row {
		env = append(env, name+"="+value)
	}
	slices.Sort(env)
	return env
}

// inherited are the variables of the host that a plugin gets: where programs, the person's files and temporary files are, who the
// person is, language, time zone, and which certificates to believe. Whole names only: a prefix such as SSL_ or LC_ would let
// through what somebody put a secret into, as SSL_KEY_PASSWORD, or what a remote login may set.
var inherited = []string{
	"PATH", "HOME", "TMPDIR", "USER", "LOGNAME", "SHELL", "TZ",
	"LANG", "LANGUAGE", "LC_ALL", "LC_ADDRESS", "LC_COLLATE", "LC_CTYPE", "LC_IDENTIFICATION", "LC_MEASUREMENT", "LC_MESSAGES",
	"LC_MONETARY", "LC_NAME", "LC_NUMERIC", "LC_PAPER", "LC_TELEPHONE", "LC_TIME",
	"SSL_CERT_FILE", "SSL_CERT_DIR",
}

func allowed(name string) bool { return slices.Contains(inherited, name) }

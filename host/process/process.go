// Package process runs generations of plugins: one process each, started through go-plugin with a runner of our own, and
// ended within a bounded time whatever they do.
package process

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	goplugin "github.com/hashicorp/go-plugin"
	"github.com/hashicorp/go-plugin/runner"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
)

// How a stop proceeds when the plugin does not co-operate.
const (
	// StopRPCTimeout bounds the Stop call, in which a plugin undoes its effects.
	StopRPCTimeout = 5 * time.Second
	// TermGrace is how long a process may live after SIGTERM.
	TermGrace = time.Second
	// DefaultStartTimeout bounds exec to handshake. Large binaries on cold disks take seconds.
	DefaultStartTimeout = 30 * time.Second
)

// stderrTail is how many of the last lines of a plugin's stderr an error quotes.
const stderrTail = 20

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
	Log    *slog.Logger
	// LogOutput receives the plugin's own records; nil drops them.
	LogOutput    hclog.Logger
	StartTimeout time.Duration // 0 for DefaultStartTimeout
	// Unconfined runs the process with everything this one can do. Otherwise it gets the confinement of plugins; see confine.
	Unconfined bool
	// Limits bound the process with everything it starts. Name tells its control group from those of other entries.
	Limits Limits
	Name   string
}

// Generation is one running process of an entry.
type Generation struct {
	entry  string
	conn   *grpc.ClientConn
	client *goplugin.Client
	run    *execRunner
	tail   *tail
	done   chan struct{}
	exit   string // valid after done
}

// StartError is a generation that did not come up.
type StartError struct {
	Entry  string
	Phase  string // exec, handshake
	Exit   string // how the process ended, if it did
	Stderr string // the last lines it wrote
	Err    error
}

func (e *StartError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "plugin %s: %s: %v", e.Entry, e.Phase, e.Err)
	if e.Exit != "" {
		fmt.Fprintf(&b, " (%s)", e.Exit)
	}
	if e.Stderr != "" {
		fmt.Fprintf(&b, "; its last words:\n%s", e.Stderr)
	}
	return b.String()
}

func (e *StartError) Unwrap() error { return e.Err }

// Start runs a plugin and returns when its gRPC server answers the handshake. Nothing has been set up yet.
func Start(ctx context.Context, spec Spec) (*Generation, error) {
	if spec.StartTimeout == 0 {
		spec.StartTimeout = DefaultStartTimeout
	}
	output := spec.LogOutput
	if output == nil {
		output = hclog.NewNullLogger()
	}
	g := &Generation{entry: spec.Entry, tail: &tail{max: stderrTail}, done: make(chan struct{})}
	g.run = &execRunner{
		path: spec.Path, digest: spec.Digest, name: spec.Entry, dir: spec.Dir, log: spec.Log, done: make(chan struct{}),
		runDir: spec.RunDir, unconfined: spec.Unconfined, limits: spec.Limits, group: spec.Name,
	}
	g.client = goplugin.NewClient(&goplugin.ClientConfig{
		HandshakeConfig:  handshake,
		Plugins:          goplugin.PluginSet{"cordon": bareConn{}},
		AllowedProtocols: []goplugin.Protocol{goplugin.ProtocolGRPC},
		AutoMTLS:         true,
		SkipHostEnv:      true,
		StartTimeout:     spec.StartTimeout,
		Logger:           output,
		Stderr:           g.tail,
		SyncStdout:       logLines(spec.Log, "stdout"),
		SyncStderr:       io.MultiWriter(g.tail, logLines(spec.Log, "stderr")),
		UnixSocketConfig: &goplugin.UnixSocketConfig{TempDir: spec.RunDir},
		RunnerFunc: func(_ hclog.Logger, cmd *exec.Cmd, _ string) (runner.Runner, error) {
			g.run.env = append(slices.Clone(spec.Env), cmd.Env...)
			return g.run, nil
		},
	})
	conn, phase, err := g.connect(ctx)
	if err != nil {
		g.kill()
		e := &StartError{Entry: spec.Entry, Phase: phase, Stderr: g.tail.String(), Err: err}
		if g.PID() != 0 {
			<-g.run.done
			e.Exit = g.run.exit()
		}
		return nil, e
	}
	g.conn = conn
	go g.watch()
	return g, nil
}

// connect starts the process and dials it; ctx cancels the wait for the handshake by killing the process.
func (g *Generation) connect(ctx context.Context) (conn *grpc.ClientConn, phase string, err error) {
	stop := context.AfterFunc(ctx, func() { g.run.signal(unix.SIGKILL) })
	defer stop()
	if _, err := g.client.Start(); err != nil {
		phase = "handshake"
		if g.PID() == 0 {
			phase = "exec"
		}
		return nil, phase, errors.Join(firstLine(err), ctx.Err())
	}
	protocol, err := g.client.Client()
	if err != nil {
		return nil, "dial", err
	}
	raw, err := protocol.Dispense("cordon")
	if err != nil {
		return nil, "dial", err
	}
	return raw.(*grpc.ClientConn), "", nil
}

// firstLine drops go-plugin's general advice on unreadable handshakes; the plugin's own last words say more.
func firstLine(err error) error {
	text, _, more := strings.Cut(err.Error(), "\n")
	if !more {
		return err
	}
	return errors.New(text)
}

// watch waits for the process to end.
func (g *Generation) watch() {
	<-g.run.done
	g.exit = g.run.exit()
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

// Exit says how the process ended and quotes what it wrote last; empty as long as it runs.
func (g *Generation) Exit() string {
	select {
	case <-g.done:
	default:
		return ""
	}
	if words := g.tail.String(); words != "" {
		return g.exit + "; its last words:\n" + words
	}
	return g.exit
}

// Stop ends the process: the Stop call, in which it undoes its effects, then the end of its standard input, SIGTERM and
// SIGKILL to the whole group. It returns when the process has been reaped, at most StopRPCTimeout + 2·TermGrace later
// or sooner if ctx ends.
func (g *Generation) Stop(ctx context.Context) error {
	rpc, cancel := context.WithTimeout(ctx, StopRPCTimeout)
	_, err := g.Kernel().Stop(rpc, &kernelv1.StopRequest{})
	cancel()
	select {
	case <-g.done:
		err = nil // it ended before it could answer
	default:
	}
	_ = g.run.lifeline.Close()
	if !g.wait(ctx, TermGrace) {
		g.run.signal(unix.SIGTERM)
		g.wait(ctx, TermGrace)
	}
	g.kill()
	return err
}

func (g *Generation) wait(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-g.done:
		return true
	case <-t.C:
	case <-ctx.Done():
	}
	return false
}

// kill ends the group and lets go-plugin close what it holds, which it does at once when the process is gone.
func (g *Generation) kill() {
	if g.PID() != 0 {
		g.run.signal(unix.SIGKILL)
		<-g.run.done
	}
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

// tail keeps the last lines written to it that are not structured records.
type tail struct {
	max int

	mu    sync.Mutex
	lines []string
	part  []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, chunk := range bytes.SplitAfter(p, []byte("\n")) {
		if room := maxLine - len(t.part); room > 0 {
			t.part = append(t.part, chunk[:min(room, len(chunk))]...)
		}
		if !bytes.HasSuffix(chunk, []byte("\n")) {
			continue
		}
		line := strings.TrimRight(string(t.part), "\n")
		t.part = t.part[:0]
		if line == "" || strings.HasPrefix(line, `{"@timestamp"`) {
			continue
		}
		if t.lines = append(t.lines, line); len(t.lines) > t.max {
			t.lines = t.lines[1:]
		}
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.Join(append(slices.Clone(t.lines), string(t.part)), "\n")
}

// logLines logs what a plugin prints, one record a line.
func logLines(log *slog.Logger, stream string) io.Writer { return lineLogger{log, stream} }

type lineLogger struct {
	log    *slog.Logger
	stream string
}

func (l lineLogger) Write(p []byte) (int, error) {
	for line := range bytes.Lines(p) {
		if line = bytes.TrimRight(line, "\r\n"); len(line) > 0 {
			l.log.Info(string(line), "stream", l.stream)
		}
	}
	return len(p), nil
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

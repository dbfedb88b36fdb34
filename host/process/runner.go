package process

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hashicorp/go-plugin/runner"
	"golang.org/x/sys/unix"
)

// childExecFD is the number under which the child finds the executable it was forked for.
const childExecFD = 3

// pipeDrain is how long output is still read after the process group is gone; a descendant that left the group may hold
// the pipe open for ever.
const pipeDrain = 250 * time.Millisecond

// handshakeLine is what go-plugin prints on a plugin's stdout, core protocol to certificate. Everything else there is a log, also
// what was printed before it on the same line.
var handshakeLine = regexp.MustCompile(`1\|\d+\|(unix|tcp)\|[^|]+\|grpc(\|[^|]*)*$`)

// maxHandshake is more than a handshake with its certificate takes, and less than go-plugin reads of a line.
const maxHandshake = 32 << 10

// execRunner runs one plugin process for go-plugin. It differs from go-plugin's own in what people were hurt by:
//
//   - the bytes that are hashed are the bytes that run: both go through one descriptor;
//   - the process leads its own group, which is what gets killed, so that its children go with it;
//   - it dies with the host, whichever way that ends: the kernel kills it with the thread that forked it, and a pipe on
//     its standard input closes;
//   - nothing but the handshake reaches go-plugin from its standard output, and reading never stops at a long line;
//   - it is confined before its first instruction, so that no plugin can skip it;
//   - stopping is bounded, also when a descendant holds the output pipes.
type execRunner struct {
	path   string
	digest string // expected sha256 of the executable, hex
	name   string
	env    []string
	dir    string
	runDir string
	said   *transcript

	unconfined bool
	limits     Limits
	group      string // the name of its control group
	// ctx bounds the start: its end kills the process until release is called.
	ctx context.Context

	phase    Phase
	timings  Timings
	release  func() bool  // nil until started
	pid      atomic.Int64 // 0 until started
	lifeline *os.File     // closing it tells the plugin to end
	outR     *os.File
	errR     *os.File
	shake    *io.PipeReader

	done    chan struct{}    // closed when the process was reaped and its group killed
	drained sync.WaitGroup   // what it printed was read
	state   *os.ProcessState // valid after done
	hit     string           // which limits it ran into; valid after done
}

// beforeExec is for tests: it runs between the check of an executable and its execution.
var beforeExec = func(path string) {}

// Start forks the process from a thread that lives as long as it does: the parent-death signal follows the thread.
func (r *execRunner) Start(ctx context.Context) error {
	begin := time.Now()
	r.phase = PhaseHash
	exe, err := os.Open(r.path)
	if err != nil {
		return fmt.Errorf("plugin executable: %w", err)
	}
	defer exe.Close()
	content := &checked{file: exe, digest: r.digest}
	if err := content.check(); err != nil {
		return fmt.Errorf("plugin executable: %w", err)
	}
	r.timings.Hash = time.Since(begin)
	begin, r.phase = time.Now(), PhaseExec
	beforeExec(r.path)

	files, err := newPipes()
	if err != nil {
		return err
	}
	defer files.closeChild()
	group, err := newLeaf(r.limits, r.group)
	if err != nil {
		files.closeHost()
		return fmt.Errorf("plugin %s: %w", r.name, err)
	}

	cmd := &exec.Cmd{
		Path:        "/proc/self/fd/" + strconv.Itoa(childExecFD),
		Args:        []string{r.name},
		Env:         r.env,
		Dir:         r.dir,
		Stdin:       files.inR,
		Stdout:      files.outW,
		Stderr:      files.errW,
		ExtraFiles:  []*os.File{exe},
		SysProcAttr: &unix.SysProcAttr{Setpgid: true, Pdeathsig: unix.SIGKILL},
	}
	group.place(cmd.SysProcAttr)
	started := make(chan error, 1)
	go func() {
		// The thread is never given back: a restriction of it cannot be lifted, and ends with it.
		runtime.LockOSThread()
		err := errors.Join(ctx.Err(), r.ctx.Err())
		if err == nil {
			err = content.check()
		}
		if err == nil && !r.unconfined {
			// By its descriptor: another file may have the name by now.
			err = confine("/proc/self/fd/"+strconv.Itoa(int(exe.Fd())), r.dir, r.runDir)
		}
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			started <- err
			return
		}
		r.pid.Store(int64(cmd.Process.Pid))
		started <- nil
		_ = cmd.Wait() // the state says it all
		r.state = cmd.ProcessState
		// What the plugin left behind in its group ends with it.
		_ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL)
		left := make(chan struct{})
		go func() { // on another thread: this one may not write to control groups
			defer close(left)
			var err error
			if r.hit, err = group.end(); err != nil {
				r.said.log.Log().Error("control group of a plugin stays", "error", err)
			}
		}()
		<-left
		close(r.done)
	}()
	if err := <-started; err != nil {
		files.closeHost()
		_, leaving := group.end()
		return fmt.Errorf("plugin %s: start: %w", r.name, errors.Join(err, leaving))
	}
	r.timings.Exec = time.Since(begin)
	r.phase = PhaseHandshake
	r.lifeline, r.outR, r.errR = files.inW, files.outR, files.errR
	var shakeW *io.PipeWriter
	r.shake, shakeW = io.Pipe()
	r.drained.Go(func() { r.readStdout(shakeW) })
	r.drained.Go(r.readStderr)
	go r.watchPipes() // ends with the process
	// From here on nobody can write to the file: the kernel refuses it while the file is executed. If somebody did before, what runs is not
	// what was checked.
	if err := content.check(); err != nil {
		r.signal(unix.SIGKILL)
		return fmt.Errorf("plugin %s: start: %w", r.name, err)
	}
	r.release = context.AfterFunc(r.ctx, func() { r.signal(unix.SIGKILL) })
	return nil
}

// checked is an open executable whose bytes are known. Replacing the file by another is no matter: the descriptor has the old one.
type checked struct {
	file    *os.File
	digest  string
	changed syscall.Timespec // the file's change time when it was hashed
}

// check hashes the file if that was not done since its last change.
func (c *checked) check() error {
	info, err := c.file.Stat()
	if err != nil {
		return err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return fmt.Errorf("%s has no change time", c.file.Name())
	}
	if stat.Ctim == c.changed {
		return nil
	}
	h := sha256.New()
	if _, err := io.Copy(h, io.NewSectionReader(c.file, 0, info.Size())); err != nil {
		return fmt.Errorf("%s: %w", c.file.Name(), err)
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != c.digest {
		return fmt.Errorf("%s: sha256 is %s, want %s: it changed after it was checked", c.file.Name(), got, c.digest)
	}
	c.changed = stat.Ctim
	return nil
}

// readStdout hands the handshake line on and logs everything else, for as long as anything can be read.
func (r *execRunner) readStdout(shake *io.PipeWriter) {
	defer shake.Close()
	in := bufio.NewReader(r.outR)
	waiting := true
	for {
		line, truncated, err := readLine(in)
		if waiting && !truncated {
			if at := handshakeLine.FindIndex(line); at != nil && at[1]-at[0] <= maxHandshake {
				waiting = false
				_, _ = shake.Write(append(bytes.Clone(line[at[0]:]), '\n')) // fails only when go-plugin gave up on this start
				line = line[:at[0]]
			}
		}
		r.said.stdout(line, truncated)
		if err != nil {
			return
		}
	}
}

// readStderr reads what the process writes there, to the end, whatever it is.
func (r *execRunner) readStderr() {
	in := bufio.NewReader(r.errR)
	for {
		line, truncated, err := readLine(in)
		if err == nil || len(line) > 0 {
			r.said.stderr(line, truncated)
		}
		if err != nil {
			return
		}
	}
}

// Wait returns when the process is gone and its group with it, and what it printed has been read.
func (r *execRunner) Wait(context.Context) error {
	<-r.done
	r.drained.Wait()
	closeAll(r.outR, r.errR)
	if r.state.Success() {
		return nil
	}
	return errors.New(exitText(r.state))
}

// Kill ends the process and its whole group at once. It returns when the process has been reaped.
func (r *execRunner) Kill(context.Context) error {
	r.kill()
	return nil
}

// kill ends the group, if there is one, and returns when its leader has been reaped.
func (r *execRunner) kill() {
	if r.pid.Load() == 0 {
		return
	}
	r.signal(unix.SIGKILL)
	<-r.done
}

// signal reaches the whole group, as long as its leader has not been reaped: after that the number may be somebody else's.
func (r *execRunner) signal(sig unix.Signal) {
	pid := r.pid.Load()
	if pid == 0 {
		return
	}
	select {
	case <-r.done:
	default:
		_ = unix.Kill(-int(pid), sig) // ESRCH: it is going already
	}
}

// watchPipes closes the output pipes a moment after the process ended, so that nobody waits for a descendant that holds them.
func (r *execRunner) watchPipes() {
	<-r.done
	deadline := time.Now().Add(pipeDrain)
	_ = r.outR.SetReadDeadline(deadline)
	_ = r.errR.SetReadDeadline(deadline)
	_ = r.lifeline.Close()
	// Nobody may be left waiting to hand a handshake on.
	_ = r.shake.Close()
}

func (r *execRunner) Diagnose(context.Context) string { return "" }
func (r *execRunner) Stdout() io.ReadCloser           { return r.shake }
func (r *execRunner) Stderr() io.ReadCloser           { return io.NopCloser(strings.NewReader("")) } // read here
func (r *execRunner) Name() string                    { return r.name }

func (r *execRunner) ID() string {
	if pid := r.pid.Load(); pid != 0 {
		return strconv.FormatInt(pid, 10)
	}
	return ""
}

func (*execRunner) PluginToHost(network, addr string) (string, string, error) {
	return network, addr, nil
}
func (*execRunner) HostToPlugin(network, addr string) (string, string, error) {
	return network, addr, nil
}

// exit says how the process ended, and which limits it ran into.
func (r *execRunner) exit() string {
	text := exitText(r.state)
	if r.hit != "" {
		text += "; " + r.hit
	}
	return text
}

// exitText says how a process ended.
func exitText(s *os.ProcessState) string {
	if ws, ok := s.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return "signal " + unix.SignalName(ws.Signal())
	}
	return "exit code " + strconv.Itoa(s.ExitCode())
}

// pipes are the standard streams of a child, both ends.
type pipes struct {
	inR, inW, outR, outW, errR, errW *os.File
}

func newPipes() (p pipes, err error) {
	for _, pair := range []struct{ r, w **os.File }{{&p.inR, &p.inW}, {&p.outR, &p.outW}, {&p.errR, &p.errW}} {
		if *pair.r, *pair.w, err = os.Pipe(); err != nil {
			p.closeChild()
			p.closeHost()
			return p, fmt.Errorf("plugin pipes: %w", err)
		}
	}
	return p, nil
}

func (p pipes) closeChild() { closeAll(p.inR, p.outW, p.errW) }
func (p pipes) closeHost()  { closeAll(p.inW, p.outR, p.errR) }

func closeAll(files ...*os.File) {
	for _, f := range files {
		if f != nil {
			_ = f.Close()
		}
	}
}

// Interface guard.
var _ runner.Runner = (*execRunner)(nil)

package launch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// pollPeriod is how often a terminated group is looked at for survivors. There is no event for "a group is empty"; the
// reference uses the same period.
const pollPeriod = 15 * time.Millisecond

// Process is a running command. Its life is told in supervise.
type Process struct {
	pid    int
	grace  time.Duration
	runner bool // the leader confines the command

	exited  chan struct{} // the leader has exited and is still a zombie
	settled chan struct{} // nothing will be signalled any more: the leader may be reaped
	done    chan struct{}
	result  Result // valid once done is closed

	stopOnce sync.Once
	stop     chan struct{}
	cause    error // set before stop is closed

	outputs []*output
	input   *input // nil without stdin
}

// Start starts a command. The command ends no later than the context plus the grace period. Errors say which argv could not be
// started and carry the *fs.PathError or *exec.Error that capability/sandbox attributes to a runner.
func Start(ctx context.Context, spec Spec) (*Process, error) {
	if ctx.Err() != nil {
		return nil, &AbortedError{Cause: context.Cause(ctx)}
	}
	c, err := spec.command()
	if err != nil {
		return nil, err
	}
	path, err := lookPath(c.argv[0], c.env, c.dir)
	if err != nil {
		return nil, err
	}
	// Descriptors that this process inherited itself would go on into every child.
	if err := CloseOnExec(); err != nil {
		return nil, err
	}

	p := &Process{
		grace:   c.grace,
		runner:  spec.Launch != nil,
		exited:  make(chan struct{}),
		settled: make(chan struct{}),
		done:    make(chan struct{}),
		stop:    make(chan struct{}),
	}
	cmd := &exec.Cmd{
		Path: path,
		Args: c.argv,
		Env:  c.env,
		Dir:  c.dir,
		SysProcAttr: &syscall.SysProcAttr{
			Setsid:    true,
			Pdeathsig: syscall.SIGKILL,
		},
	}
	// child are the command's ends of everything, closed here once it has them.
	var child []*os.File
	defer func() {
		for _, f := range child {
			f.Close()
		}
	}()
	started := false
	defer func() {
		if !started {
			for _, o := range p.outputs {
				o.pipe.Close()
			}
			if p.input != nil {
				p.input.close()
				if p.input.poll != nil {
					p.input.poll.Close()
				}
			}
		}
	}()

	if spec.Stdin != nil {
		r, w, err := os.Pipe()
		if err != nil {
			return nil, fmt.Errorf("stdin pipe: %w", err)
		}
		child = append(child, r)
		cmd.Stdin = r
		if p.input, err = newInput(spec.Stdin, w); err != nil {
			w.Close()
			return nil, err
		}
	}
	pipeTo := func(w io.Writer) (*os.File, error) {
		r, child0, err := os.Pipe()
		if err != nil {
			return nil, fmt.Errorf("output pipe: %w", err)
		}
		child = append(child, child0)
		p.outputs = append(p.outputs, &output{pipe: r, to: w, done: make(chan struct{})})
		return child0, nil
	}
	// A typed nil *os.File in cmd.Stdout would not be /dev/null, hence the care.
	var out *os.File
	if spec.Stdout != nil {
		if out, err = pipeTo(spec.Stdout); err != nil {
			return nil, err
		}
		cmd.Stdout = out
	}
	switch {
	case spec.Stderr == nil:
	case spec.Stdout != nil && same(spec.Stdout, spec.Stderr):
		cmd.Stderr = out
	default:
		f, err := pipeTo(spec.Stderr)
		if err != nil {
			return nil, err
		}
		cmd.Stderr = f
	}
	for i, content := range c.files {
		f, err := sealed(fmt.Sprintf("cordon-launch-%d", i), content)
		if err != nil {
			return nil, err
		}
		child = append(child, f)
		cmd.ExtraFiles = append(cmd.ExtraFiles, f)
	}

	up := make(chan error, 1)
	go p.own(cmd, up)
	if err := <-up; err != nil {
		return nil, err
	}
	started = true
	for _, o := range p.outputs {
		go o.copy()
	}
	if p.input != nil {
		go p.input.copy()
	}
	unwatch := context.AfterFunc(ctx, func() { p.Terminate(context.Cause(ctx)) })
	go p.supervise(unwatch)
	return p, nil
}

// Pid is the leader's process id, which is also its group's and session's.
func (p *Process) Pid() int { return p.pid }

// Terminate ends the command: SIGTERM to its group, or to what runs below its runner, and SIGKILL after the grace period. The first cause counts; nil stands
// for "terminated". It does not wait.
func (p *Process) Terminate(cause error) {
	p.stopOnce.Do(func() {
		if cause == nil {
			cause = errTerminated
		}
		p.cause = cause
		close(p.stop)
	})
}

// Done is closed when Wait would return.
func (p *Process) Done() <-chan struct{} { return p.done }

// Wait waits until the leader has been reaped, its output has been drained, and nothing of its group is left.
func (p *Process) Wait() Result {
	<-p.done
	return p.result
}

// own forks on a thread of its own and keeps it until the child has been reaped, because the parent-death signal follows
// the thread: were it to end, or the Go runtime to drop it, the command would be killed.
func (p *Process) own(cmd *exec.Cmd, up chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := cmd.Start(); err != nil {
		up <- err
		return
	}
	p.pid = cmd.Process.Pid
	up <- nil

	// WNOWAIT leaves the leader a zombie, and a zombie's pid is not given to anybody else.
	for {
		err := unix.Waitid(unix.P_PID, p.pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if err != unix.EINTR {
			break
		}
	}
	close(p.exited)
	<-p.settled
	state, err := cmd.Process.Wait()
	p.result.Code = -1
	if err == nil {
		if ws, ok := state.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
			p.result.Signal = ws.Signal()
		} else {
			p.result.Code = state.ExitCode()
		}
	}
	// What was killed in the group takes a moment to be gone. Nothing is signalled here any more, so it does not matter
	// whose the number is by now; and one system call settles the common case of an empty group.
	for end := time.Now().Add(reapDeadline); syscall.Kill(-p.pid, 0) == nil && groupAlive(p.pid) && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	close(p.done)
}

// supervise is the life of a command after its start: it runs; it is told to end, perhaps; its output is drained; what is
// left of it is killed; it is reaped.
func (p *Process) supervise(unwatch func() bool) {
	defer unwatch()
	stop, exited := p.stop, p.exited
	var deadline <-chan time.Time // SIGKILL, whatever the leader did meanwhile
	family := tree{leader: p.pid, fds: make(map[int]int)}
	terminate := func() {
		stop = nil
		family.look()
		// A runner passes no signals on: SIGTERM would end it, and with it, at once, the command that should have had the
		// grace period. So the processes below it are asked instead. Where there is no more than one, the runner is not done
		// with its own setup, and nothing is lost.
		if p.runner && len(family.fds) > 1 {
			family.signal(unix.SIGTERM)
		} else {
			p.signal(syscall.SIGTERM)
		}
		deadline = time.After(p.grace)
	}

	// The leader runs.
	for exited != nil {
		select {
		case <-exited:
			exited = nil
		case <-stop:
			p.result.Cause = p.cause
			terminate()
		case <-deadline:
			deadline = nil
			family.look()
			p.signal(syscall.SIGKILL)
			family.signal(unix.SIGKILL)
		}
	}

	// The leader is a zombie. Its output may still be held open by others, and after SIGTERM others may still be cleaning
	// up; both have until the deadline.
	killed := p.result.Cause != nil && deadline == nil
	if deadline == nil {
		deadline = time.After(p.grace)
	}
	drained := make(chan struct{})
	go func() {
		for _, o := range p.outputs {
			<-o.done
		}
		close(drained)
	}()
	poll := time.NewTicker(pollPeriod)
	defer poll.Stop()
	for waiting := !killed; waiting; {
		select {
		case <-deadline:
			waiting = false
		case <-stop:
			terminate()
		case <-poll.C:
			// Without a SIGTERM nobody is cleaning up, and the end of the output is the end.
			waiting = !closed(drained) || stop == nil && groupAlive(p.pid)
		case <-p.outputEnd(drained, stop):
			waiting = false
		}
	}
	p.signal(syscall.SIGKILL)
	family.signal(unix.SIGKILL)

	// With everybody dead that can be reached, what is in the pipes is all there will be.
	for _, o := range p.outputs {
		o.cut()
	}
	if p.input != nil {
		p.input.close()
	}
	// A slow reader of ours may take its time, unless the command was told to end.
	var patience <-chan time.Time
	if stop == nil {
		patience = time.After(p.grace)
	}
	for waiting := true; waiting; {
		select {
		case <-drained:
			waiting = false
		case <-stop:
			stop = nil
			patience = time.After(p.grace)
		case <-patience:
			waiting = false
		}
	}
	for _, o := range p.outputs {
		// A copy that is still stuck in its writer is left to it; what it has not written is missing.
		wasCut, err := o.outcome()
		wasCut = wasCut || !closed(o.done)
		p.result.Cut = p.result.Cut || wasCut
		if p.result.OutputErr == nil {
			p.result.OutputErr = err
		}
	}
	family.wait(reapDeadline)
	close(p.settled)
}

// outputEnd is drained while the command has not been told to end; after that the group counts, too, and is polled.
func (p *Process) outputEnd(drained, stop <-chan struct{}) <-chan struct{} {
	if stop == nil {
		return nil
	}
	return drained
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// signal sends sig to the group. The leader has not been reaped, so the group is still ours.
func (p *Process) signal(sig syscall.Signal) {
	// ESRCH cannot happen before the leader is reaped; EPERM only for members that changed their user.
	_ = syscall.Kill(-p.pid, sig)
}

// output copies one pipe.
type output struct {
	pipe *os.File
	to   io.Writer
	done chan struct{}

	mu     sync.Mutex
	wasCut bool
	err    error
}

func (o *output) copy() {
	defer close(o.done)
	defer o.pipe.Close()
	_, err := io.Copy(onlyWriter{o.to}, onlyReader{o.pipe})
	if errors.Is(err, os.ErrDeadlineExceeded) {
		var open bool
		if open, err = o.rest(); open {
			o.mu.Lock()
			o.wasCut = true
			o.mu.Unlock()
		}
	}
	o.mu.Lock()
	o.err = err
	o.mu.Unlock()
}

// cut ends the copying: what is in the pipe now is still copied.
func (o *output) cut() {
	// The only error is "already closed", and then there is nothing to cut.
	_ = o.pipe.SetReadDeadline(time.Unix(1, 0))
}

// rest copies what the pipe holds, and at most what it can hold, so that a writer that never stops cannot make it endless.
// open says that somebody still has the other end.
func (o *output) rest() (open bool, err error) {
	raw, err := o.pipe.SyscallConn()
	if err != nil {
		return false, err
	}
	var data []byte
	ctlErr := raw.Control(func(fd uintptr) {
		size, err := unix.FcntlInt(fd, unix.F_GETPIPE_SZ, 0)
		if err != nil {
			size = 64 << 10 // pipe(7)
		}
		buf := make([]byte, 32<<10)
		open = true
		for len(data) < size {
			n, err := unix.Read(int(fd), buf)
			if err == unix.EINTR {
				continue
			}
			if n <= 0 {
				open = err == unix.EAGAIN
				break
			}
			data = append(data, buf[:n]...)
		}
	})
	if ctlErr != nil {
		return false, ctlErr
	}
	_, err = o.to.Write(data)
	return open, err
}

func (o *output) outcome() (wasCut bool, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.wasCut, o.err
}

// onlyReader and onlyWriter keep io.Copy from handing the descriptors to splice(2) or sendfile(2), which would move
// bytes between files of the caller's behind the deadline's back.
type onlyReader struct{ io.Reader }
type onlyWriter struct{ io.Writer }

// input relays the caller's reader into the command's stdin.
type input struct {
	from io.Reader
	pipe *os.File
	wake *os.File // closed to interrupt a wait for from; nil unless from is a file
	poll *os.File // the end of wake that is waited on
}

func newInput(from io.Reader, pipe *os.File) (*input, error) {
	in := &input{from: from, pipe: pipe}
	if _, ok := from.(*os.File); ok {
		var fds [2]int
		// Not os.Pipe: poll(2) waits on it, not the runtime.
		if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
			return nil, fmt.Errorf("stdin wake pipe: %w", err)
		}
		in.poll, in.wake = os.NewFile(uintptr(fds[0]), "wake"), os.NewFile(uintptr(fds[1]), "wake")
	}
	return in, nil
}

func (in *input) copy() {
	defer in.pipe.Close()
	from := in.from
	if f, ok := from.(*os.File); ok {
		defer in.poll.Close()
		from = &waitingReader{file: f, wake: in.poll}
	}
	// A command that does not read its input, or has ended, is its own business.
	_, _ = io.Copy(onlyWriter{in.pipe}, onlyReader{from})
}

// close ends the relay. A write that is blocked in the pipe returns; so does a wait for a file.
func (in *input) close() {
	in.pipe.Close()
	if in.wake != nil {
		in.wake.Close()
	}
}

// waitingReader reads a file only when there is something to read, and ends when wake is closed. Reading a terminal or a
// pipe cannot be interrupted otherwise, and the next one to read it would lose what this reader takes.
type waitingReader struct{ file, wake *os.File }

func (r *waitingReader) Read(p []byte) (int, error) {
	raw, err := r.file.SyscallConn()
	if err != nil {
		return 0, err
	}
	wake, err := r.wake.SyscallConn()
	if err != nil {
		return 0, err
	}
	ended := false
	var pollErr error
	err = raw.Control(func(fd uintptr) {
		pollErr = wake.Control(func(w uintptr) {
			fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}, {Fd: int32(w), Events: unix.POLLIN}}
			for {
				_, err := unix.Poll(fds, -1)
				if err == unix.EINTR {
					continue
				}
				ended = err != nil || fds[1].Revents != 0
				return
			}
		})
	})
	if err = errors.Join(err, pollErr); err != nil {
		return 0, err
	}
	if ended {
		return 0, io.EOF
	}
	return r.file.Read(p)
}

// same reports whether two writers are one. Writers of types that cannot be compared are not.
func same(a, b io.Writer) (is bool) {
	defer func() {
		if recover() != nil {
			is = false
		}
	}()
	return a == b
}

// sealed is a descriptor with fixed content that nobody can change, also not by reopening it.
func sealed(name string, content []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("launch file: memfd_create: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	_, err = f.Write(content)
	if err == nil {
		_, err = f.Seek(0, io.SeekStart)
	}
	if err == nil {
		_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_SEAL|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE)
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("launch file: %w", err)
	}
	return f, nil
}

// lookPath finds the program as the command's own environment says. Relative entries of PATH are skipped, as os/exec
// does: what runs must not depend on the directory a model chose.
func lookPath(name string, env []string, dir string) (string, error) {
	if strings.Contains(name, "/") {
		return name, nil
	}
	var path string
	for _, kv := range env {
		if v, ok := strings.CutPrefix(kv, "PATH="); ok {
			path = v
		}
	}
	failure := exec.ErrNotFound
	for _, entry := range filepath.SplitList(path) {
		if !filepath.IsAbs(entry) {
			continue
		}
		file := filepath.Join(entry, name)
		fi, err := os.Stat(file)
		if err != nil || fi.IsDir() {
			continue
		}
		if err := unix.Access(file, unix.X_OK); err == nil {
			return file, nil
		}
		failure = fs.ErrPermission
	}
	return "", &exec.Error{Name: name, Err: failure}
}

// CloseOnExec marks every descriptor from 3 up as not to be inherited. A process calls it when it starts, before it
// opens anything it means to pass on; what os/exec passes on is not affected. See close_range(2).
func CloseOnExec() error {
	err := unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC)
	if err == nil {
		return nil
	}
	// Kernels before 5.11 do not know the flag, and some seccomp profiles refuse the call.
	entries, readErr := os.ReadDir("/proc/self/fd")
	if readErr != nil {
		return fmt.Errorf("inherited descriptors cannot be closed: close_range: %w; /proc/self/fd: %w", err, readErr)
	}
	for _, e := range entries {
		var fd int
		if _, err := fmt.Sscan(e.Name(), &fd); err == nil && fd > 2 {
			unix.CloseOnExec(fd)
		}
	}
	return nil
}

// Package launch runs a command: the answer of a sandbox provider, or a plain argv where no sandbox is wanted. Both are
// run the same way, so that only the confinement differs.
//
// What holds for every process that Start returns:
//
//   - It leads a session and a process group of its own and has no controlling terminal.
//   - It has descriptors 0, 1 and 2 and those its launch asks for, nothing else. The three are pipes or /dev/null, never
//     the caller's own files: a descriptor can be reopened through /proc/self/fd with rights it does not have, and a
//     terminal can be typed into.
//   - It gets SIGKILL when this process dies. The kernel ties that to the thread that forked, so the thread is kept until
//     the process has been reaped.
//   - It ends when its context does: SIGTERM to its group (to the processes below it if it is a runner, which would die of
//     it and take the command along), SIGKILL after the grace period, also when the leader is long gone by then. What it leaves running in its group when it ends by itself is killed, too. Leaders are reaped last, so
//     no signal can reach a recycled process group.
//   - Its output is copied byte for byte. Whoever keeps a pipe open beyond the leader's end delays the result by the
//     grace period at most.
package launch

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"syscall"
	"time"

	sandboxv1 "github.com/cordon-host/cordon/api/sandbox/v1"
)

// DefaultGrace is how long a command has between SIGTERM and SIGKILL, and how long its output is waited for after its
// end: enough to flush and clean up, short enough for somebody who pressed Ctrl-C.
const DefaultGrace = 3 * time.Second

// reapDeadline bounds the wait for killed processes to be gone. SIGKILL needs no cooperation; only a process inside an
// uninterruptible system call, as on a dead network file system, takes longer, and nobody can wait for that.
const reapDeadline = 2 * time.Second

// Spec is what to run. Exactly one of Launch and Argv is set.
type Spec struct {
	// Launch is a sandbox provider's answer. Its argv form is used.
	Launch *sandboxv1.Launch
	// Argv runs without any confinement. A name without a slash is looked for in the PATH of Env.
	Argv []string

	// Env is the whole environment, as NAME=VALUE; nothing is inherited. The last value of a name counts. A launch's own
	// changes are applied on top.
	Env []string
	// Dir is where Argv starts; empty for this process's own directory. A launch brings its own.
	Dir string

	// Stdin is relayed to the command; nil gives /dev/null. A file (*os.File) is no longer read once the command has
	// ended; any other reader that blocks keeps one goroutine until its Read returns.
	Stdin io.Reader
	// Stdout and Stderr get what the command writes, in its order; nil discards it. If both are the same writer, the command
	// gets one pipe for both, and at most one goroutine at a time calls Write. A writer that fails closes the pipe, as
	// the end of a reading program would. A writer that blocks holds the command up, and Wait with it, until the command
	// is told to end.
	Stdout, Stderr io.Writer

	// Grace is the time between SIGTERM and SIGKILL and the limit for draining output; 0 means DefaultGrace.
	Grace time.Duration
}

// Result is how a command ended.
type Result struct {
	// Code is the exit code, -1 if a signal ended the leader.
	Code int
	// Signal ended the leader; 0 if it exited.
	Signal syscall.Signal
	// Cause is why the command was terminated: the cause of the context, or what Terminate was given. It is nil when the
	// leader ended by itself first.
	Cause error
	// Cut says that something still held an output pipe open when the grace period ended; output of that is missing.
	Cut bool
	// OutputErr is the first error of Stdout or Stderr.
	OutputErr error
}

// ExitCode is the exit code in the form the failure classification of capability/sandbox takes: nil after a death by
// signal.
func (r Result) ExitCode() *int {
	if r.Signal != 0 {
		return nil
	}
	return &r.Code
}

// ErrArgv is the error for a command without a program.
var ErrArgv = errors.New("invalid argv: expected a non-empty program name at argv[0]")

// AbortedError is the error of Start when the context had ended before anything was started.
type AbortedError struct{ Cause error }

func (e *AbortedError) Error() string { return "aborted before spawn: " + e.Cause.Error() }
func (e *AbortedError) Unwrap() error { return e.Cause }

// errTerminated is the cause of a Terminate without a reason.
var errTerminated = errors.New("terminated")

// command is a checked Spec.
type command struct {
	argv  []string
	env   []string // of argv's process
	dir   string
	files [][]byte
	grace time.Duration
}

func (s Spec) command() (*command, error) {
	c := &command{argv: s.Argv, dir: s.Dir, grace: s.Grace}
	if c.grace == 0 {
		c.grace = DefaultGrace
	}
	if c.grace < 0 {
		return nil, fmt.Errorf("launch grace must not be negative, got %v", c.grace)
	}
	if (s.Launch != nil) == (s.Argv != nil) {
		return nil, errors.New("a launch spec takes either a launch or an argv")
	}
	if s.Launch != nil {
		c.argv, c.dir = s.Launch.GetArgv(), s.Launch.GetCwd()
		for _, f := range s.Launch.GetFiles() {
			c.files = append(c.files, f.GetContent())
		}
	}
	if len(c.argv) == 0 || c.argv[0] == "" {
		return nil, ErrArgv
	}
	env, err := environment(s.Env, s.Launch)
	if err != nil {
		return nil, err
	}
	if words := s.Launch.GetEnvWords(); len(words) > 0 {
		c.files = append(c.files, encodeEnv(env, words))
		c.env = []string{}
		return c, nil
	}
	if c.dir != "" && s.Launch == nil {
		env = setEnv(env, "PWD", c.dir)
	}
	c.env = env
	return c, nil
}

// environment is base with a launch's changes. The result is never nil: os/exec takes nil for "inherit".
func environment(base []string, l *sandboxv1.Launch) ([]string, error) {
	env := make([]string, 0, len(base)+len(l.GetEnv()))
	for _, kv := range base {
		name, value, ok := strings.Cut(kv, "=")
		if !ok || !validName(name) || strings.ContainsRune(value, 0) {
			return nil, fmt.Errorf("environment variable %q is not NAME=VALUE", name)
		}
		env = setEnv(env, name, value)
	}
	for _, name := range l.GetUnsetEnv() {
		env = slices.DeleteFunc(env, func(kv string) bool { return strings.HasPrefix(kv, name+"=") })
	}
	for _, v := range l.GetEnv() {
		if !validName(v.GetName()) || strings.ContainsRune(v.GetValue(), 0) {
			return nil, fmt.Errorf("environment variable %q of the launch is not usable", v.GetName())
		}
		env = setEnv(env, v.GetName(), v.GetValue())
	}
	return env, nil
}

func validName(name string) bool { return name != "" && !strings.ContainsAny(name, "=\x00") }

func setEnv(env []string, name, value string) []string {
	prefix := name + "="
	if i := slices.IndexFunc(env, func(kv string) bool { return strings.HasPrefix(kv, prefix) }); i >= 0 {
		env[i] = prefix + value
		return env
	}
	return append(env, prefix+value)
}

func encodeEnv(env, words []string) []byte {
	var b []byte
	for _, kv := range env {
		name, value, _ := strings.Cut(kv, "=")
		for _, w := range append(slices.Clone(words), name, value) {
			b = append(append(b, w...), 0)
		}
	}
	return b
}

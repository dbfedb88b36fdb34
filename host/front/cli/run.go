package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
	sandboxv1 "github.com/cordon-host/cordon/api/sandbox/v1"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/sandbox"
	"github.com/cordon-host/cordon/plugin/launch"
)

func (a *app) runCommand() *cobra.Command {
	var mode, cwd string
	cmd := &cobra.Command{
		Use:   "run [--mode MODE] -- COMMAND [ARGUMENT ...]",
		Short: "run a command in the deployment's sandbox",
		Long: `Run a command of yours as the deployment confines its tools, with the
directory it starts in as the workspace. Input and output pass through
unchanged, signals are passed on, and the command's exit code is cordon's
own, 128 plus its number for a death by signal. 125 stands for every failure
of cordon itself, 126 for a command that cannot be executed, 127 for one
that does not exist.

The mode is the deployment's default, or read-only, workspace-write or
danger-full-access. The last runs the command without any sandbox: whoever
types this is outside of it already.`,
		Example: "  cordon run --mode workspace-write -- sh -c 'date > now.txt'",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usagef("run: COMMAND is missing").hint("see cordon run --help")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if mode != "" {
				if _, err := sandbox.ParseMode(mode); err != nil {
					return usagef("%w", err)
				}
			}
			dir, err := a.path(cwd)
			if err != nil {
				return err
			}
			if dir == "" {
				dir = a.dir
			}
			return a.runConfined(cmd.Context(), sandbox.Mode(mode), dir, args)
		},
	}
	flags := cmd.Flags()
	flags.SortFlags = false
	flags.SetInterspersed(false) // what follows the command is the command's
	flags.StringVar(&mode, "mode", "", "the `mode` of the sandbox (default: as the deployment says)")
	flags.StringVar(&cwd, "cwd", "", "the `directory` to start in (default: this one)")
	return cmd
}

func (a *app) runConfined(ctx context.Context, mode sandbox.Mode, dir string, argv []string) (err error) {
	if err := a.executable(argv[0], dir); err != nil {
		return err
	}
	spec := launch.Spec{Env: a.environ, Stdin: a.stdin, Stdout: a.stdout}
	if !mode.Confined() {
		spec.Argv, spec.Dir = argv, dir
		return a.runLaunch(ctx, spec, false, nil)
	}
	h, err := a.attach(ctx, "")
	if err != nil {
		return err
	}
	defer a.detach(h, &err)
	confined, err := h.Confine(ctx, &controlv1.ConfineRequest{Argv: argv, Cwd: dir, Mode: string(mode)})
	if fault.Reason(err) == "BAD_MODE" && mode == "" {
		return failf(exitFailed, "the deployment's default mode has no sandbox").hint("repeat with --mode danger-full-access if that is meant")
	}
	if err != nil {
		return err
	}
	spec.Launch = confined.GetLaunch()
	wrapped := !slices.Equal(spec.Launch.GetArgv(), argv)
	return a.runLaunch(ctx, spec, wrapped, confined.GetRunnerFailureRules())
}

// stderrTail is how much of a command's stderr is kept to see whether it was the runner that failed, in bytes. A runner that
// fails writes little, and nothing comes after it.
const stderrTail = 16 << 10

// insist is the number of interrupts after which a command that does not end is made to.
const insist = 3

// runLaunch runs a command to its end and turns the end into an exit code. It is wrapped when what is started is a runner that
// starts the command.
func (a *app) runLaunch(ctx context.Context, spec launch.Spec, wrapped bool, rules []*sandboxv1.RunnerFailureRule) error {
	tail, err := launch.NewTail(stderrTail, launch.Spill{})
	if err != nil {
		return err
	}
	spec.Stderr = io.MultiWriter(a.stderr, tail)
	if err := context.Cause(ctx); err != nil {
		return err
	}
	p, err := launch.Start(context.WithoutCancel(ctx), spec)
	if err != nil {
		return failf(exitRun, "%w", err)
	}
	a.interrupts.notify(syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2)
	endings := 0
	defer a.interrupts.to(func(s syscall.Signal) {
		if s == syscall.SIGINT || s == syscall.SIGTERM {
			endings++
		}
		if endings >= insist {
			p.Terminate(&interrupted{s})
			return
		}
		signalCommand(p.Pid(), wrapped, s)
	})()
	if ctx.Err() != nil {
		p.Terminate(context.Cause(ctx)) // the signal came before it could be passed on
	}
	r := p.Wait()
	if line, failed := sandbox.ClassifyRunnerFailure(r.ExitCode(), string(tail.Output().Data), rules); failed {
		return failf(exitRun, "the sandbox runner failed, the command did not run: %s", line).hint("cordon doctor says what works")
	}
	switch {
	case r.Cut:
		a.say("warning: something the command started still holds its output; that was cut off")
	case r.OutputErr != nil && !errors.Is(r.OutputErr, syscall.EPIPE):
		return failf(exitRun, "output: %w", r.OutputErr)
	}
	switch {
	case r.Signal != 0:
		return exit(exitSignal + int(r.Signal))
	case r.Code != 0:
		return exit(r.Code)
	}
	return nil
}

// executable looks whether there is a command of that name, so that its absence is told apart from a failure of the runner.
func (a *app) executable(name, dir string) error {
	if fi, err := os.Stat(dir); err != nil || !fi.IsDir() {
		if err == nil {
			err = unix.ENOTDIR
		}
		return failf(exitRun, "cwd %s: %w", dir, cause(err))
	}
	if strings.ContainsRune(name, '/') {
		path := name
		if !filepath.IsAbs(path) {
			path = filepath.Join(dir, path)
		}
		switch fi, err := os.Stat(path); {
		case errors.Is(err, fs.ErrNotExist):
			return failf(exitNotFound, "%s: no such command", name)
		case err != nil:
			return failf(exitNoExec, "%s: %w", name, cause(err))
		case fi.IsDir():
			return failf(exitNoExec, "%s: is a directory", name)
		case fi.Mode()&0o111 == 0:
			return failf(exitNoExec, "%s: is not executable", name)
		}
		return nil
	}
	// The PATH of this process is the command's.
	if _, err := exec.LookPath(name); err != nil {
		if errors.Is(err, fs.ErrPermission) {
			return failf(exitNoExec, "%s: is not executable", name)
		}
		return failf(exitNotFound, "%s: no such command in PATH", name)
	}
	return nil
}

// cause is the reason of a failed system call without the path, for messages that name it themselves.
func cause(err error) error {
	var path *fs.PathError
	if errors.As(err, &path) {
		return path.Err
	}
	return err
}

// signalCommand passes a signal on to a command. A runner would die of it and take the command along before that could clean
// up; so below one the signal goes to what the runner has started. Like a terminal's, an interrupt, a quit and a hang-up go
// to everything that belongs to the command, other signals to the command alone.
func signalCommand(leader int, wrapped bool, s syscall.Signal) {
	targets := []int{leader}
	if runner, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", leader)); wrapped && err == nil {
		if below := outermost(leader, runner); len(below) > 0 {
			targets = below
		}
	}
	everything := s == syscall.SIGINT || s == syscall.SIGQUIT || s == syscall.SIGHUP
	for len(targets) > 0 {
		pid := targets[0]
		targets = targets[1:]
		if everything {
			targets = append(targets, children(pid)...)
		}
		_ = unix.Kill(pid, s) // an error says that it has ended
	}
}

// outermost are the first processes below pid that belong to the command: those that run another program than the runner and
// are not the init of its pid namespace, which waits for the command and would not act on a signal.
func outermost(pid int, runner string) []int {
	var out []int
	for _, child := range children(pid) {
		exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", child))
		below := outermost(child, runner)
		if len(below) > 0 && (isInit(child) || err == nil && exe == runner) {
			out = append(out, below...)
			continue
		}
		out = append(out, child)
	}
	return out
}

// isInit reports whether a process is the init of a pid namespace below ours; see NSpid in proc_pid_status(5).
func isInit(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(text)) {
		if ids, ok := strings.CutPrefix(line, "NSpid:"); ok {
			all := strings.Fields(ids)
			return len(all) > 1 && all[len(all)-1] == "1"
		}
	}
	return false
}

// children are the processes that pid's threads have started; see proc_pid_children(5).
func children(pid int) []int {
	var out []int
	lists, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		return nil
	}
	for _, path := range lists {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // the thread has ended
		}
		for word := range strings.FieldsSeq(string(text)) {
			var child int
			if _, err := fmt.Sscan(word, &child); err == nil {
				out = append(out, child)
			}
		}
	}
	return out
}

package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	policyv1 "github.com/cordon-host/cordon/api/policy/v1"
	sandboxv1 "github.com/cordon-host/cordon/api/sandbox/v1"
	shellv1 "github.com/cordon-host/cordon/api/shell/v1"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/sandbox"
	"github.com/cordon-host/cordon/plugin"
	"github.com/cordon-host/cordon/plugin/launch"
)

// scopeMode is the scope of the grants that widen a mode.
const scopeMode = "sandbox-mode"

// confineTimeout bounds the wait for the sandbox provider, whose probes are bounded by seconds themselves: a provider that
// hangs must not look like a command that runs.
const confineTimeout = 30 * time.Second

// errTimeout is why a command was ended at its time limit.
var errTimeout = errors.New("time limit reached")

type shellServer struct {
	shellv1.UnimplementedShellServer
	plugin  *plugin.Context
	cfg     Config
	spill   string // directory for long output; empty for none
	policy  policyv1.PolicyClient
	sandbox sandboxv1.SandboxClient
	environ []string // the host's environment, NAME=VALUE
}

// Run runs one command, in six steps of which each can end it: check the request; resolve the standing policy; redeem the
// grant, if one came along, which widens that policy by what was approved and nothing else; check the working directory;
// have the sandbox wrap the command; run it. Then it says how it ended.
func (s *shellServer) Run(ctx context.Context, r *shellv1.RunRequest) (*shellv1.RunReply, error) {
	if err := check(r); err != nil {
		return nil, err
	}
	policy, err := s.policy.Resolve(ctx, &policyv1.ResolveRequest{})
	if err != nil {
		return nil, err
	}
	mode, err := sandbox.ParseMode(policy.GetMode())
	if err != nil {
		return nil, fault.New(codes.FailedPrecondition, "UNKNOWN_MODE", "policy resolved to no known mode, so nothing ran: %v", err)
	}
	if r.GetGrant() != "" {
		if mode, err = s.widen(ctx, mode, policy.GetWorkspaceRoot(), r); err != nil {
			return nil, err
		}
	}
	workdir, err := workingDirectory(r.GetWorkdir(), policy.GetWorkspaceRoot())
	if err != nil {
		return nil, err
	}
	c := &command{
		server: s, request: r, mode: mode, workdir: workdir,
		env:     environment(s.environ, r.GetEnv(), plugin.Caller(ctx).Session),
		timeout: s.timeout(r.GetTimeoutMs()),
	}
	if mode.Confined() {
		if c.confined, err = s.confine(ctx, mode, workdir, policy.GetWorkspaceRoot(), argv(r)); err != nil {
			return nil, err
		}
	}
	return c.run(ctx)
}

// confine has the sandbox provider wrap one command. Nothing is kept: the next call asks again.
func (s *shellServer) confine(ctx context.Context, mode sandbox.Mode, workdir, root string, argv []string) (*sandboxv1.ConfineReply, error) {
	limited, cancel := context.WithTimeout(ctx, confineTimeout)
	defer cancel()
	confined, err := s.sandbox.Confine(limited, &sandboxv1.ConfineRequest{
		Argv: argv, Cwd: workdir, Mode: string(mode), WorkspaceRoot: root, Session: plugin.Caller(ctx).Session,
	})
	switch {
	case err != nil && limited.Err() != nil && ctx.Err() == nil:
		return nil, sandbox.Unavailable(mode, fmt.Sprintf("the sandbox provider did not answer within %v", confineTimeout))
	case err != nil:
		return nil, err
	case len(confined.GetLaunch().GetArgv()) == 0:
		return nil, sandbox.Unavailable(mode, "the sandbox provider answered without a command to start")
	}
	return confined, nil
}

func argv(r *shellv1.RunRequest) []string { return []string{"bash", "-c", r.GetCommand()} }

// maxArgument is the longest single argument execve(2) takes, in bytes without the final NUL: 32 pages.
var maxArgument = 32*os.Getpagesize() - 1

// check refuses what cannot become a process.
func check(r *shellv1.RunRequest) error {
	bad := func(format string, args ...any) error {
		return fault.New(codes.InvalidArgument, "INVALID_REQUEST", format, args...)
	}
	switch {
	case r.GetCommand() == "":
		return bad("invalid command: expected a non-empty string")
	case strings.ContainsRune(r.GetCommand(), 0):
		return bad("invalid command: a NUL character cannot be passed to a program")
	case len(r.GetCommand()) > maxArgument:
		return bad("invalid command: %d bytes exceed the kernel's limit of %d for one argument; write a script to a file and run that", len(r.GetCommand()), maxArgument)
	case r.GetTimeoutMs() < 0:
		return bad("shell-sandbox: request.timeoutMs must be a positive finite number")
	case strings.ContainsRune(r.GetWorkdir(), 0):
		return bad("invalid workdir: a path has no NUL character in it")
	case r.GetWorkdir() != "" && !filepath.IsAbs(r.GetWorkdir()):
		return bad("invalid workdir: expected an absolute path, got %q", r.GetWorkdir())
	}
	for name, value := range r.GetEnv() {
		if name == "" || strings.ContainsAny(name, "=\x00") {
			return bad("invalid env: %q is not a name", name)
		}
		if strings.ContainsRune(value, 0) || len(name)+len(value)+1 > maxArgument {
			return bad("invalid env: the value of %s has a NUL character or is too long", name)
		}
	}
	return nil
}

// widen is the standing mode, widened by what the grant is worth. The host says what that is, and for which command, in which
// directory: what a person approved is what runs. A grant that widens nothing was approved for a mode the session has left since, and is
// refused rather than guessed about.
func (s *shellServer) widen(ctx context.Context, standing sandbox.Mode, root string, r *shellv1.RunRequest) (sandbox.Mode, error) {
	g, err := plugin.Redeem(ctx, s.plugin, r.GetGrant())
	if err != nil {
		return "", err
	}
	granted := sandbox.Mode(g.GetValue())
	switch {
	case g.GetScope() != scopeMode || !granted.Valid():
		return "", fault.New(codes.PermissionDenied, "GRANT_FOREIGN", "grant is for %s %q, not for a sandbox mode", g.GetScope(), g.GetValue())
	case g.GetSubject() != r.GetCommand():
		return "", fault.New(codes.PermissionDenied, "GRANT_FOREIGN", "grant was approved for another command, so nothing ran")
	case sandbox.CanonicalPath(cmp.Or(g.GetCwd(), root)) != sandbox.CanonicalPath(cmp.Or(r.GetWorkdir(), root)):
		return "", fault.New(codes.PermissionDenied, "GRANT_FOREIGN", "grant was approved for another directory, so nothing ran")
	case !sandbox.Wider(granted, standing):
		return "", fault.New(codes.FailedPrecondition, "GRANT_NOT_WIDER",
			`grant is for mode "%s", and the session is in "%s" by now; ask again if that does not suffice`, granted, standing)
	}
	return granted, nil
}

// workingDirectory is where the command starts. A directory that cannot be entered would fail like a missing runner, so it is
// looked at before anything is started.
func workingDirectory(requested, root string) (string, error) {
	dir, what := requested, "invalid workdir"
	if dir == "" {
		dir, what = root, "invalid workdir: the workspace root"
	}
	bad := func(format string, args ...any) error {
		return fault.New(codes.InvalidArgument, "INVALID_WORKDIR", what+": "+format, args...)
	}
	if !filepath.IsAbs(dir) {
		return "", bad("%q is not an absolute path", dir)
	}
	fi, err := os.Stat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", bad("%q does not exist", dir)
	case err != nil:
		return "", bad("%q cannot be used: %v", dir, err)
	case !fi.IsDir():
		return "", bad("%q is not a directory", dir)
	}
	if err := unix.Access(dir, unix.X_OK); err != nil {
		return "", bad("%q cannot be entered: %v", dir, err)
	}
	return dir, nil
}

// secret are the names of variables that commands do not inherit, whatever their values: the reference system's pattern.
var secret = regexp.MustCompile(`(?i)KEY|PASSWORD|SECRET|TOKEN`)

// environment is what a command finds: the host's environment without what looks secret or belongs to Cordon; no colours, no
// pagers; what the request sets; and last what Cordon says about itself.
func environment(host []string, request map[string]string, session string) []string {
	var env []string
	for _, kv := range host {
		name, _, ok := strings.Cut(kv, "=")
		if ok && name != "" && !secret.MatchString(name) && !strings.HasPrefix(strings.ToUpper(name), "CORDON_") {
			env = append(env, kv)
		}
	}
	env = append(env, "NO_COLOR=1", "TERM=dumb", "PAGER=cat", "GIT_PAGER=cat")
	for _, name := range slices.Sorted(maps.Keys(request)) {
		env = append(env, name+"="+request[name])
	}
	env = append(env, "CORDON_SHELL=1")
	if session == "" {
		return slices.DeleteFunc(env, func(kv string) bool { return strings.HasPrefix(kv, "CORDON_SESSION_ID=") })
	}
	return append(env, "CORDON_SESSION_ID="+session)
}

func (s *shellServer) timeout(requested int64) time.Duration {
	if requested == 0 {
		requested = s.cfg.TimeoutMs
	}
	return time.Duration(min(requested, s.cfg.MaxTimeoutMs)) * time.Millisecond
}

// command is one command about to run.
type command struct {
	server   *shellServer
	request  *shellv1.RunRequest
	mode     sandbox.Mode
	workdir  string
	env      []string
	timeout  time.Duration
	confined *sandboxv1.ConfineReply // nil under danger-full-access
}

func (c *command) run(ctx context.Context) (*shellv1.RunReply, error) {
	stdout, err := c.tail("stdout")
	if err != nil {
		return nil, err
	}
	defer stdout.Close()
	stderr, err := c.tail("stderr")
	if err != nil {
		return nil, err
	}
	defer stderr.Close()
	limited, cancel := context.WithTimeoutCause(ctx, c.timeout, errTimeout)
	defer cancel()
	spec := launch.Spec{
		Env: c.env, Stdout: stdout, Stderr: stderr, Grace: time.Duration(c.server.cfg.GraceMs) * time.Millisecond,
	}
	if c.confined != nil {
		spec.Launch = c.confined.GetLaunch()
	} else {
		spec.Argv, spec.Dir = argv(c.request), c.workdir
	}
	if len(c.request.GetStdin()) > 0 {
		spec.Stdin = bytes.NewReader(c.request.GetStdin())
	}
	p, err := launch.Start(limited, spec)
	if err != nil {
		return nil, c.notStarted(ctx, err)
	}
	result := p.Wait()
	if err := ctx.Err(); err != nil {
		return nil, err // nobody is left to tell, and a result that was cut off is none
	}
	if err := errors.Join(stdout.Close(), stderr.Close()); err != nil {
		c.server.plugin.Logger().Warn("long output not kept", "error", err)
	}
	return c.reply(result, stdout.Output(), stderr.Output())
}

func (c *command) tail(label string) (*launch.Tail, error) {
	return launch.NewTail(int(c.server.cfg.MaxOutputBytes), launch.Spill{
		Dir: c.server.spill, Label: label, Max: c.server.cfg.MaxSpillBytes,
	})
}

// notStarted says whose fault it was that nothing ran.
func (c *command) notStarted(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if c.confined != nil && sandbox.IsRunnerSpawnFailure(err, c.confined.GetLaunch().GetArgv()[0], c.workdir) {
		return sandbox.Unavailable(c.mode, err.Error())
	}
	return fault.New(codes.FailedPrecondition, "SPAWN_FAILED", "command could not be started: %v", err)
}

// reply explains the end of the command: the runner's own failure comes first, since then the command did not run.
func (c *command) reply(result launch.Result, stdout, stderr launch.Output) (*shellv1.RunReply, error) {
	exit := result.ExitCode()
	facts := &shellv1.SandboxFacts{Mode: string(c.mode)}
	if c.confined != nil {
		if line, failed := sandbox.ClassifyRunnerFailure(exit, string(stderr.Data), c.confined.GetRunnerFailureRules()); failed {
			return nil, sandbox.Unavailable(c.mode, line)
		}
		facts.Denied = sandbox.ClassifyDenial(exit, string(stderr.Data), c.confined.GetDenialSignatures())
		facts.Runner, facts.Enforcement = c.confined.GetRunner(), c.confined.GetEnforcement().GetLevel()
	}
	out := &shellv1.RunReply{
		TimedOut: errors.Is(result.Cause, errTimeout), TimeoutMs: c.timeout.Milliseconds(),
		Stdout: output(stdout), Stderr: output(stderr), Sandbox: facts,
	}
	if exit != nil {
		code := int32(*exit)
		out.ExitCode = &code
	} else {
		out.Signal = signalName(result.Signal)
	}
	return out, nil
}

func output(o launch.Output) *shellv1.Output {
	return &shellv1.Output{Data: o.Data, Truncated: o.Truncated, SpillPath: o.SpillPath, TotalBytes: o.Total}
}

// signalName is a signal's name; SIG and its number for one without.
func signalName(s syscall.Signal) string {
	if name := unix.SignalName(s); name != "" {
		return name
	}
	return fmt.Sprintf("SIG%d", int(s))
}

// Interface guard.
var _ shellv1.ShellServer = (*shellServer)(nil)

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	sandboxv1 "github.com/cordon-host/cordon/api/sandbox/v1"
	"github.com/cordon-host/cordon/capability/sandbox"
	"github.com/cordon-host/cordon/plugin/launch"
)

func platformRunners(cfg Config, in surroundings) []runner {
	return []runner{bwrapRunner{in}}
}

func noRunner(cfg Config) *sandboxv1.RunnerReport {
	return &sandboxv1.RunnerReport{Name: cfg.Runner, Reason: "there is no such runner on this platform"}
}

// bwrapRunner looks for bubblewrap.
type bwrapRunner struct{ in surroundings }

// bwrap runs commands in bubblewrap, one sandbox per call.
type bwrap struct {
	in      surroundings
	path    string // canonical
	seccomp []byte // program for --seccomp
}

func (bwrapRunner) name() string { return "bwrap" }
func (*bwrap) name() string      { return "bwrap" }

// probeGrace is how long a trial that ran out of time has between SIGTERM and SIGKILL. Nothing in it needs cleaning up.
const probeGrace = 50 * time.Millisecond

// probe looks bubblewrap up and runs the full profile around a command that does nothing. Anything less, like asking for
// its version, says nothing about the kernel.
func (r bwrapRunner) probe(ctx context.Context) (confiner, *sandboxv1.RunnerReport) {
	report := &sandboxv1.RunnerReport{Name: r.name()}
	refuse := func(reason, fix string) (confiner, *sandboxv1.RunnerReport) {
		report.Reason, report.Fix = reason, fix
		return nil, report
	}
	path, err := findBwrap(r.in.getenv("PATH"))
	if err != nil {
		return refuse(err.Error(), "install bubblewrap (package bubblewrap) where PATH finds it")
	}
	program, err := seccompProgram()
	if err != nil {
		return refuse(err.Error(), "")
	}
	b := &bwrap{in: r.in, path: path, seccomp: program}
	report.Version = bwrapVersion(ctx, path)
	for trial := 1; ; trial++ {
		reply, err := b.confine(request{argv: []string{"/bin/sh", "-c", "exit 0"}, cwd: "/", mode: sandbox.ReadOnly, root: "/"})
		if err != nil {
			return refuse(err.Error(), "")
		}
		result, stderr, err := runTrial(ctx, launch.Spec{Launch: reply.GetLaunch(), Env: []string{"PATH=/usr/bin:/bin"}})
		switch {
		case err != nil:
			return refuse(err.Error(), "")
		case errors.Is(result.Cause, context.DeadlineExceeded):
			return refuse("the trial run did not end in time", "raise probeTimeoutMs if this machine is that slow")
		case result.Cause != nil:
			return refuse("the trial run was ended: "+result.Cause.Error(), "")
		case result.Code == 0:
			return b, report
		case strings.Contains(stderr, vanished) && trial < maxTrials:
			continue
		}
		reason, fix := diagnose(stderr, result)
		return refuse(reason, fix)
	}
}

// vanished is how bubblewrap says that something to be covered is gone, which a socket of another program may be in the moment between
// the look and the mount. It says nothing about whether this machine can confine, so the trial is made again, and as the verdict is kept
// it must not hang on one bad moment.
const (
	vanished  = "Can't create file at"
	maxTrials = 5
)

func runTrial(ctx context.Context, spec launch.Spec) (launch.Result, string, error) {
	tail, err := launch.NewTail(4096, launch.Spill{})
	if err != nil {
		return launch.Result{}, "", err
	}
	spec.Stdout, spec.Stderr, spec.Grace = tail, tail, probeGrace
	p, err := launch.Start(ctx, spec)
	if err != nil {
		return launch.Result{}, "", err
	}
	r := p.Wait()
	return r, string(tail.Output().Data), nil
}

func bwrapVersion(ctx context.Context, path string) string {
	_, out, err := runTrial(ctx, launch.Spec{Argv: []string{path, "--version"}})
	if err != nil {
		return ""
	}
	return strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(out), "bubblewrap"))
}

// findBwrap takes the first bubblewrap on PATH that only its owner, root or this user, can have written: what is found
// here runs outside every sandbox. Relative entries of PATH are skipped.
func findBwrap(path string) (string, error) {
	var refused []string
	for _, dir := range filepath.SplitList(path) {
		if !filepath.IsAbs(dir) {
			continue
		}
		file := sandbox.CanonicalPath(filepath.Join(dir, "bwrap"))
		if fi, err := os.Stat(file); err != nil || !fi.Mode().IsRegular() || unix.Access(file, unix.X_OK) != nil {
			continue
		}
		if err := trusted(file); err != nil {
			refused = append(refused, err.Error())
			continue
		}
		return file, nil
	}
	if len(refused) > 0 {
		return "", errors.New(strings.Join(refused, "; "))
	}
	return "", errors.New("bwrap is not on PATH")
}

// trusted checks a canonical path: the file and every directory above it may only be written by root or this user. In
// a sticky directory others can add files, but not replace this one.
func trusted(file string) error {
	for p := file; ; p = filepath.Dir(p) {
		fi, err := os.Lstat(p)
		if err != nil {
			return err
		}
		st, ok := fi.Sys().(*syscall.Stat_t)
		if !ok {
			return fmt.Errorf("%s: its owner cannot be told", p)
		}
		if st.Uid != 0 && int(st.Uid) != os.Geteuid() {
			return fmt.Errorf("%s belongs to another user (uid %d)", p, st.Uid)
		}
		if writable := fi.Mode().Perm() & 0o022; writable != 0 && (fi.Mode()&os.ModeSticky == 0 || !fi.IsDir()) {
			return fmt.Errorf("%s can be written by others (mode %#o)", p, fi.Mode().Perm())
		}
		if p == "/" {
			return nil
		}
	}
}

// diagnose puts what bubblewrap said together with what this kernel says about the cause.
func diagnose(stderr string, r launch.Result) (reason, fix string) {
	line := strings.TrimSpace(stderr)
	if i := strings.IndexByte(line, '\n'); i >= 0 {
		line = line[:i]
	}
	if line == "" {
		line = fmt.Sprintf("the trial run failed without a word (exit code %d, signal %v)", r.Code, r.Signal)
	}
	var uts unix.Utsname
	if unix.Uname(&uts) == nil {
		line += "; kernel " + unix.ByteSliceToString(uts.Release[:])
	}
	sysctl := func(name string) string {
		b, err := os.ReadFile("/proc/sys/" + name)
		if err != nil {
			return ""
		}
		return string(bytes.TrimSpace(b))
	}
	low := strings.ToLower(line)
	about := func(words ...string) bool {
		for _, w := range words {
			if strings.Contains(low, w) {
				return true
			}
		}
		return false
	}
	switch {
	case !about("namespace", "uid map", "unshare", "clone"):
		if about("mount proc", "/newroot/proc") {
			return line, "mount(2) of a new procfs is refused here, as in an unprivileged container; run the container with an unmasked /proc"
		}
		return line, ""
	case sysctl("user/max_user_namespaces") == "0":
		return line + "; user.max_user_namespaces is 0", "sysctl -w user.max_user_namespaces=15000"
	case sysctl("kernel/unprivileged_userns_clone") == "0":
		return line + "; kernel.unprivileged_userns_clone is 0", "sysctl -w kernel.unprivileged_userns_clone=1"
	case sysctl("kernel/apparmor_restrict_unprivileged_userns") == "1":
		return line + "; AppArmor restricts unprivileged user namespaces", "install the AppArmor profile for bwrap, or sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
	}
	return line + "; clone(2) with CLONE_NEWUSER is refused", "a seccomp profile or a security module forbids namespaces to this process; allow clone, unshare and mount to it"
}

// erofs is how bubblewrap's read-only mounts answer.
var erofs = []string{"read-only file system"}

// failureRules tell a failure of the runner from one of the command. bubblewrap ends with 1 whenever it fails itself.
func failureRules() []*sandboxv1.RunnerFailureRule {
	return []*sandboxv1.RunnerFailureRule{
		{AllowedExitCodes: []int32{1}, FatalSignatures: []string{"bwrap: "}},
		{AllowedExitCodes: []int32{stageExit}, FatalSignatures: []string{stagePrefix}},
	}
}

func (b *bwrap) enforcement() *sandboxv1.Enforcement {
	return &sandboxv1.Enforcement{
		Level: "full", // of file effects; the network is another layer's
		Rights: map[string]string{
			"read":  "none", // everything but hidden directories can be read
			"write": "full", "create": "full", "remove": "full", "rename": "full", "truncate": "full",
			"chmod": "full", "chown": "full", "xattr": "full", "utime": "full",
			"mount": "full", "namespace": "full", "device": "full", "sysctl": "full", "cgroup": "full",
			"signal": "full", "ptrace": "full", "ipc": "full", "keyring": "full", "terminal": "full", "capability": "full",
			// Pathname sockets outside /run, /tmp and the like are masked if they are there when the command starts;
			// later ones and those in the workspace are not. Abstract ones need a network namespace.
			"unix-socket": "partial", "abstract-socket": "none",
			"tcp": "none", "udp": "none", "vsock": "full",
			// Pipes with a name anywhere on the disk: a read-only mount does not keep a process from writing into one.
			"fifo": "none",
			// Only a mount that others share brings later ones in, and those are as writable as the host made them.
			"later-mounts": laterMounts(),
			// A protected name that does not exist yet can be made; the lock file's digests notice.
			"protected-existing": "full", "protected-absent": "none",
		},
	}
}

func (b *bwrap) confine(req request) (*sandboxv1.ConfineReply, error) {
	args, err := b.profile(req)
	if err != nil {
		return nil, err
	}
	if req.mode == sandbox.WorkspaceWrite && sandbox.Contains(req.root, b.path) {
		return nil, sandbox.Unavailable(req.mode, fmt.Sprintf("bwrap: %s lies inside the writable workspace root %s", b.path, req.root))
	}
	// Descriptor 3 is the seccomp program, 4 the environment, see EnvWords.
	argv := append([]string{b.path}, args...)
	argv = append(argv, "--seccomp", "3", "--args", "4", "--chdir", req.cwd, "--", "/bin/sh", "-c", stage, "sh")
	argv = append(argv, req.argv...)
	l := &sandboxv1.Launch{
		Argv:     argv,
		Cwd:      "/",
		Files:    []*sandboxv1.LaunchFile{{Content: b.seccomp}},
		EnvWords: []string{"--setenv"},
		UnsetEnv: unreachable,
	}
	if req.mode == sandbox.WorkspaceWrite {
		l.Env = []*sandboxv1.EnvVar{{Name: "TMPDIR", Value: "/tmp"}}
	}
	return &sandboxv1.ConfineReply{
		Launch:             l,
		Runner:             b.name(),
		Enforcement:        b.enforcement(),
		DenialSignatures:   erofs,
		RunnerFailureRules: failureRules(),
	}, nil
}

// unreachable are variables that name something a sandbox hides. Programs do better without them than with a path that
// is not there.
var unreachable = []string{
	"TMPDIR", "XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS", "DBUS_SYSTEM_BUS_ADDRESS", "SSH_AUTH_SOCK", "GPG_AGENT_INFO",
	"DOCKER_HOST", "CONTAINER_HOST", "TMUX", "TMUX_PANE", "TMUX_TMPDIR", "STY", "WAYLAND_DISPLAY", "DISPLAY", "PULSE_SERVER",
	"NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES",
}

// laterMounts says whether what the host mounts while a command runs stays outside. bubblewrap makes its mounts slaves of the
// host's, so on a host whose mounts are shared, as systemd makes them, they come in.
func laterMounts() string {
	info, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || sharedMount(string(info)) {
		return "none"
	}
	return "full"
}

// sharedMount reports whether a mount in the text of mountinfo propagates; see proc_pid_mountinfo(5), field 7.
func sharedMount(info string) bool {
	for line := range strings.Lines(info) {
		fields, _, _ := strings.Cut(line, " - ")
		if strings.Contains(fields, " shared:") {
			return true
		}
	}
	return false
}

// socketLine is a row of /proc/net/unix whose socket has a path; see unix(7) and proc_pid_net(5).
var socketLine = regexp.MustCompile(`^[0-9a-fA-F]+: [0-9a-fA-F]+ [0-9a-fA-F]+ [0-9a-fA-F]+ [0-9a-fA-F]+ [0-9a-fA-F]+ +[0-9]+ (/.*)$`)

// boundSockets are the paths of the unix sockets in the text of /proc/net/unix. A path with a newline in it is cut there
// and matches nothing later.
func boundSockets(table string) []string {
	var paths []string
	for line := range strings.Lines(table) {
		if m := socketLine.FindStringSubmatch(strings.TrimSuffix(line, "\n")); m != nil {
			paths = append(paths, m[1])
		}
	}
	return paths
}

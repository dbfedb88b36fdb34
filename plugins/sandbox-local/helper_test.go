//go:build linux

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	sandboxv1 "github.com/cordon-host/cordon/api/sandbox/v1"
	"github.com/cordon-host/cordon/internal/testenv"
	"github.com/cordon-host/cordon/plugin/launch"
)

// helperVar makes the test binary do one system call or so instead of running tests: what shells have no command for.
// It prints "done" if it could.
const helperVar = "SANDBOX_TEST_HELPER"

// arenaVar is where tests may make their directories: outside /tmp, which every sandbox replaces.
const arenaVar = "SANDBOX_TEST_ARENA"

func TestMain(m *testing.M) {
	if os.Getenv(helperVar) != "" {
		if err := helper(os.Args[1], os.Args[2:]); err != nil {
			fmt.Println("failed:", err)
			os.Exit(1)
		}
		fmt.Println("done")
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func helper(op string, args []string) error {
	raw := func(nr uintptr, a ...uintptr) error {
		for len(a) < 6 {
			a = append(a, 0)
		}
		if _, _, e := unix.RawSyscall6(nr, a[0], a[1], a[2], a[3], a[4], a[5]); e != 0 {
			return e
		}
		return nil
	}
	switch op {
	case "inspect":
		// Asks a provider, as a plugin in this place would be asked, and then for a sandbox.
		p := newProvider(Plugin.Default(), slog.New(slog.DiscardHandler), surroundings{getenv: os.Getenv})
		in, err := p.Inspect(context.Background(), &sandboxv1.InspectRequest{})
		if err != nil {
			return err
		}
		r := in.GetRunners()[0]
		fmt.Printf("usable %v\nreason %s\nfix %s\n", r.GetUsable(), r.GetReason(), r.GetFix())
		_, err = p.Confine(context.Background(), &sandboxv1.ConfineRequest{Argv: []string{"true"}, Cwd: "/", Mode: "read-only", WorkspaceRoot: "/"})
		return err
	case "xattr":
		return unix.Setxattr(args[0], "user.cordon", []byte("x"), 0)
	case "mount-setattr":
		if err := unix.MountSetattr(unix.AT_FDCWD, "/", unix.AT_RECURSIVE, &unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_RDONLY}); err != nil {
			return err
		}
		return os.WriteFile(args[0], nil, 0o644)
	case "open-tree":
		fd, err := unix.OpenTree(unix.AT_FDCWD, args[0], unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
		if err != nil {
			return err
		}
		return unix.Close(fd)
	case "clone-user":
		// A child in a user namespace of its own; Go forks it with clone.
		cmd := exec.Command("/bin/true")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER}
		return cmd.Run()
	case "clone3-user":
		args := [11]uint64{0: unix.CLONE_NEWUSER, 4: uint64(unix.SIGCHLD)}
		runtime.LockOSThread()
		pid, _, e := unix.RawSyscall(unix.SYS_CLONE3, uintptr(unsafe.Pointer(&args)), unsafe.Sizeof(args), 0)
		if e != 0 {
			return e
		}
		if pid == 0 {
			_ = raw(unix.SYS_EXIT_GROUP, 0)
		}
		// A Go program that was forked like this has one thread of many, and may wait for another for ever before it gets to its exit.
		_ = unix.Kill(int(pid), unix.SIGKILL)
		_, err := unix.Wait4(int(pid), nil, 0, nil)
		return err
	case "add-key":
		_, err := unix.AddKey("user", args[0], []byte("x"), unix.KEY_SPEC_USER_KEYRING)
		return err
	case "shm":
		key, err := strconv.Atoi(args[0])
		if err != nil {
			return err
		}
		_, err = unix.SysvShmGet(key, 4096, unix.IPC_CREAT|unix.IPC_EXCL|0o600)
		return err
	case "connect":
		c, err := net.Dial("unix", args[0])
		if err != nil {
			return err
		}
		_, err = c.Write([]byte("x"))
		return errors.Join(err, c.Close())
	case "send":
		c, err := net.Dial("unixgram", args[0])
		if err != nil {
			return err
		}
		_, err = c.Write([]byte("x"))
		return errors.Join(err, c.Close())
	case "vsock":
		_, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM, 0)
		return err
	case "ptrace":
		pid, err := strconv.Atoi(args[0])
		if err != nil {
			return err
		}
		return raw(unix.SYS_PTRACE, unix.PTRACE_SEIZE, uintptr(pid))
	case "ptrace-child":
		runtime.LockOSThread()
		cmd := exec.Command("/bin/true")
		cmd.SysProcAttr = &syscall.SysProcAttr{Ptrace: true}
		if err := cmd.Start(); err != nil {
			return err
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		return nil
	case "tiocsti", "tiocsti-high":
		m, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
		if err != nil {
			return err
		}
		unlock := 0
		if err := raw(unix.SYS_IOCTL, m.Fd(), unix.TIOCSPTLCK, uintptr(unsafe.Pointer(&unlock))); err != nil {
			return err
		}
		n, err := unix.IoctlGetInt(int(m.Fd()), unix.TIOCGPTN)
		if err != nil {
			return err
		}
		s, err := os.OpenFile("/dev/pts/"+strconv.Itoa(n), os.O_RDWR|unix.O_NOCTTY, 0)
		if err != nil {
			return err
		}
		// It must be the controlling terminal, or the kernel wants a capability.
		if pid, _, _ := unix.RawSyscall(unix.SYS_GETSID, 0, 0, 0); int(pid) != os.Getpid() {
			_, _ = unix.Setsid()
		}
		_ = raw(unix.SYS_IOCTL, s.Fd(), unix.TIOCSCTTY, 0)
		c, req := byte('x'), uintptr(unix.TIOCSTI)
		if op == "tiocsti-high" {
			req |= 1 << 32
		}
		return raw(unix.SYS_IOCTL, s.Fd(), req, uintptr(unsafe.Pointer(&c)))
	case "io-uring":
		var params [120]byte
		return raw(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(&params)))
	case "bpf":
		// BPF_MAP_CREATE of a one-element array.
		var attr [72]byte
		for i, v := range []uint32{2, 4, 4, 1} {
			binary.NativeEndian.PutUint32(attr[4*i:], v)
		}
		return raw(unix.SYS_BPF, 0, uintptr(unsafe.Pointer(&attr)), 72)
	case "userfaultfd":
		return raw(unix.SYS_USERFAULTFD, 1) // UFFD_USER_MODE_ONLY
	case "perf":
		attr := unix.PerfEventAttr{Type: unix.PERF_TYPE_SOFTWARE, Config: unix.PERF_COUNT_SW_TASK_CLOCK, Bits: unix.PerfBitExcludeKernel | unix.PerfBitExcludeHv}
		attr.Size = uint32(unsafe.Sizeof(attr))
		_, err := unix.PerfEventOpen(&attr, 0, -1, -1, 0)
		return err
	case "mknod":
		return unix.Mknod(args[0], unix.S_IFBLK|0o600, int(unix.Mkdev(7, 0)))
	case "open-by-handle":
		h, mnt, err := unix.NameToHandleAt(unix.AT_FDCWD, args[0], 0)
		if err != nil {
			return err
		}
		_ = mnt
		dir, err := unix.Open(filepath.Dir(args[0]), unix.O_RDONLY, 0)
		if err != nil {
			return err
		}
		_, err = unix.OpenByHandleAt(dir, h, unix.O_RDWR)
		return err
	case "writable-switches":
		// Anything of the machine's own that access(2) says could be written.
		found := ""
		for _, root := range []string{"/proc", "/sys"} {
			_ = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
				if err != nil {
					return nil
				}
				name := filepath.Base(path)
				if _, err := strconv.Atoi(name); err == nil && filepath.Dir(path) == "/proc" || path == "/proc/self" || path == "/proc/thread-self" {
					return fs.SkipDir
				}
				if found == "" && d.Type().IsRegular() && unix.Access(path, unix.W_OK) == nil {
					found = path
				}
				if found != "" || strings.Count(path, "/") > 5 {
					return fs.SkipDir
				}
				return nil
			})
		}
		if found == "" {
			return errors.New("nothing is writable")
		}
		fmt.Println(found)
		return nil
	}
	return fmt.Errorf("no such operation: %s", op)
}

// arena is one layout on the real disk for one command.
type arena struct {
	t       *testing.T
	base    string
	ws      string // the workspace
	out     string // beside it: f, d/, x
	state   string // hidden; holds secret and the session temps
	in      surroundings
	bin     string // a copy of this binary that a sandbox can see
	session string
	token   string // in the arguments of what a script leaves running
	victim  *exec.Cmd
	lines   chan string // what listeners got
}

var arenaCount int

func newArena(t *testing.T, base string) *arena {
	t.Helper()
	arenaCount++
	a := &arena{t: t, base: base, ws: base + "/ws", out: base + "/out", state: base + "/state", bin: helperBinary(t),
		token: fmt.Sprintf("cordon-token-%d-%d", os.Getpid(), arenaCount), lines: make(chan string, 10)}
	for _, dir := range []string{a.ws + "/sub", a.ws + "/conf", a.ws + "/plugins/one", a.ws + "/deploy", a.ws + "/deep/state", a.ws + "/.git", a.out + "/d", a.state} {
		must(t, os.MkdirAll(dir, 0o755))
	}
	for _, f := range []string{a.ws + "/f", a.ws + "/conf/compose.yml", a.ws + "/conf/other", a.ws + "/plugins/one/main.go", a.ws + "/deploy/compose.yml", a.ws + "/deep/state/secret",
		a.ws + "/.git/config", a.out + "/f", a.state + "/secret"} {
		must(t, os.WriteFile(f, []byte("secret\n"), 0o644))
	}
	must(t, os.Symlink(a.out+"/via-link", a.ws+"/link"))
	a.in = surroundings{
		stateDir:  a.state + "/sandbox",
		tempDir:   a.state + "/tmp",
		root:      a.ws + "/deploy",
		hidden:    []string{a.state, a.ws + "/deep/state"},
		protected: []string{a.ws + "/conf/compose.yml", a.ws + "/plugins/one", a.ws + "/absent.lock", "/usr/bin"},
		getenv:    os.Getenv,
	}
	return a
}

// arenaBase is a fresh directory outside /tmp.
func arenaBase(t *testing.T) string {
	t.Helper()
	parent := os.Getenv(arenaVar)
	if parent == "" && os.Geteuid() == 0 {
		parent = "/var/lib"
	}
	if parent == "" {
		cache, err := os.UserCacheDir()
		must(t, err)
		must(t, os.MkdirAll(cache, 0o700))
		parent = cache
	}
	dir, err := os.MkdirTemp(parent, "cordon-sandbox-test-")
	must(t, err)
	must(t, os.Chmod(dir, 0o755))
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	return dir
}

var helperPath string

// helperBinary is a copy of the test binary where sandboxes and other users see it.
func helperBinary(t *testing.T) string {
	t.Helper()
	if helperPath != "" && exists(helperPath) {
		return helperPath
	}
	self, err := os.ReadFile("/proc/self/exe")
	must(t, err)
	helperPath = arenaBase(t) + "/helper"
	must(t, os.WriteFile(helperPath, self, 0o755))
	return helperPath
}

func (a *arena) env() []string {
	env := []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=" + a.base, helperVar + "=1", "H=" + a.bin,
		"W=" + a.ws, "OUT=" + a.out, "STATE=" + a.state, "TOKEN=" + a.token, "CORDON_SECRET=" + a.token}
	if a.victim != nil {
		env = append(env, "VICTIM="+strconv.Itoa(a.victim.Process.Pid))
	}
	return env
}

// outcome is what one script did, as far as it says so itself.
type outcome struct {
	launch.Result
	stdout, stderr string
	reply          *sandboxv1.ConfineReply
}

func (o outcome) String() string {
	return fmt.Sprintf("exit %d %v, stdout %q, stderr %q", o.Code, o.Signal, o.stdout, o.stderr)
}

// provider has the verdict of requireBwrap, so that not every check pays for a probe of its own.
func (a *arena) provider() *provider {
	a.t.Helper()
	p := newProvider(Plugin.Default(), slog.New(slog.DiscardHandler), a.in)
	if probed.path == "" {
		a.t.Fatal("the test did not call requireBwrap")
	}
	p.verdict = &verdict{selected: &bwrap{in: a.in, path: probed.path, seccomp: probed.seccomp}}
	return p
}

var probed bwrap

func (a *arena) confine(mode, cwd string, argv ...string) (*sandboxv1.ConfineReply, error) {
	return a.provider().Confine(a.t.Context(), &sandboxv1.ConfineRequest{Argv: argv, Cwd: cwd, Mode: mode, WorkspaceRoot: a.ws, Session: a.session})
}

// confined runs a script in a sandbox, in the workspace.
func (a *arena) confined(mode, script string, edit ...func(*launch.Spec)) outcome {
	a.t.Helper()
	reply, err := a.confine(mode, a.ws, "sh", "-c", script)
	must(a.t, err)
	o := a.start(launch.Spec{Launch: reply.GetLaunch()}, edit...)
	o.reply = reply
	return o
}

// plain runs a script without a sandbox.
func (a *arena) plain(script string, edit ...func(*launch.Spec)) outcome {
	a.t.Helper()
	return a.start(launch.Spec{Argv: []string{"sh", "-c", script}, Dir: a.ws}, edit...)
}

func (a *arena) start(spec launch.Spec, edit ...func(*launch.Spec)) outcome {
	a.t.Helper()
	var out, errs bytes.Buffer
	spec.Env, spec.Stdout, spec.Stderr = a.env(), &out, &errs
	for _, e := range edit {
		e(&spec)
	}
	p, err := launch.Start(a.t.Context(), spec)
	must(a.t, err)
	r := p.Wait()
	return outcome{Result: r, stdout: out.String(), stderr: errs.String()}
}

// listen opens a socket whose messages come in a.lines.
func (a *arena) listen(network, path string) {
	a.t.Helper()
	got := func(b []byte) {
		if len(b) > 0 {
			a.lines <- string(b)
		}
	}
	if network == "unixgram" {
		c, err := net.ListenPacket(network, path)
		must(a.t, err)
		a.t.Cleanup(func() { c.Close(); os.Remove(path) })
		must(a.t, os.Chmod(path, 0o666))
		go func() {
			b := make([]byte, 10)
			for {
				n, _, err := c.ReadFrom(b)
				if err != nil {
					return
				}
				got(b[:n])
			}
		}()
		return
	}
	l, err := net.Listen(network, path)
	must(a.t, err)
	a.t.Cleanup(func() { l.Close() })
	if path[0] != '@' { // an abstract one has no file
		must(a.t, os.Chmod(path, 0o666))
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			a.lines <- "connected"
			c.Close()
		}
	}()
}

// running finds processes whose arguments carry the arena's token.
func (a *arena) running() []int {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	must(a.t, err)
	var pids []int
	for _, d := range dirs {
		cmdline, err := os.ReadFile(d + "/cmdline")
		if err == nil && bytes.Contains(cmdline, []byte(a.token)) {
			pid, err := strconv.Atoi(filepath.Base(d))
			must(a.t, err)
			pids = append(pids, pid)
		}
	}
	return pids
}

// startVictim starts a process outside that a script may try to hurt.
func (a *arena) startVictim() {
	a.t.Helper()
	a.victim = exec.Command("sh", "-c", "echo up; exec sleep 1000")
	a.victim.Env = append(os.Environ(), "VICTIM_SECRET="+a.token)
	out, err := a.victim.StdoutPipe()
	must(a.t, err)
	must(a.t, a.victim.Start())
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "up\n" {
		a.t.Fatalf("the victim said %q, %v", line, err)
	}
	a.t.Cleanup(func() {
		_ = a.victim.Process.Kill()
		_ = a.victim.Wait()
	})
}

func (a *arena) victimDead() bool {
	var ws unix.WaitStatus
	pid, err := unix.Wait4(a.victim.Process.Pid, &ws, unix.WNOHANG, nil)
	return err != nil || pid != 0
}

func requireBwrap(t *testing.T) {
	t.Helper()
	testenv.Require(t, "bwrap", func() error {
		if probed.path != "" {
			return nil
		}
		// Whether this machine is quick enough is another question than whether it can.
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		usable, report := bwrapRunner{surroundings{getenv: os.Getenv}}.probe(ctx)
		if usable == nil {
			return errors.New(report.GetReason())
		}
		probed = *usable.(*bwrap)
		return nil
	})
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return ""
	}
	must(t, err)
	return string(b)
}

func there(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

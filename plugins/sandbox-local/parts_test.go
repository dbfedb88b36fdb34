//go:build linux

package main

import (
	"encoding/binary"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	sandboxv1 "github.com/cordon-host/cordon/api/sandbox/v1"
	"github.com/cordon-host/cordon/capability/sandbox"
	"github.com/cordon-host/cordon/internal/testenv"
	"github.com/cordon-host/cordon/plugin/launch"
	"github.com/cordon-host/cordon/plugin/plugintest"
)

// TestSeccompProgram runs the very bytes that bubblewrap gets on made-up system calls.
func TestSeccompProgram(t *testing.T) {
	raw, err := seccompProgram()
	must(t, err)
	var prog []bpf.RawInstruction
	for b := raw; len(b) > 0; b = b[8:] {
		prog = append(prog, bpf.RawInstruction{Op: binary.LittleEndian.Uint16(b), Jt: b[2], Jf: b[3], K: binary.LittleEndian.Uint32(b[4:])})
	}
	insns, ok := bpf.Disassemble(prog)
	if !ok {
		t.Fatal("the program does not disassemble")
	}
	vm, err := bpf.NewVM(insns)
	must(t, err)
	arch, x32, err := auditArch(runtime.GOARCH)
	must(t, err)
	call := func(arch, nr uint32, args ...uint64) uint32 {
		// The VM reads packets, which are big-endian; an argument's low word comes first all the same.
		data := binary.BigEndian.AppendUint32(nil, nr)
		data = binary.BigEndian.AppendUint32(data, arch)
		data = binary.BigEndian.AppendUint64(data, 0)
		for i := range 6 {
			var v uint64
			if i < len(args) {
				v = args[i]
			}
			data = binary.BigEndian.AppendUint32(data, uint32(v))
			data = binary.BigEndian.AppendUint32(data, uint32(v>>32))
		}
		r, err := vm.Run(data)
		must(t, err)
		return uint32(r)
	}
	const perm, nosys, noaf = retErrno | uint32(unix.EPERM), retErrno | uint32(unix.ENOSYS), retErrno | uint32(unix.EAFNOSUPPORT)
	for _, c := range []struct {
		name string
		nr   uint32
		args []uint64
		want uint32
	}{
		{"read", unix.SYS_READ, nil, retAllow},
		{"execve", unix.SYS_EXECVE, nil, retAllow},
		{"a call from the future", 9999, nil, retAllow},
		{"mount", unix.SYS_MOUNT, nil, perm},
		{"keyctl", unix.SYS_KEYCTL, nil, perm},
		{"syslog, the end of the list", unix.SYS_SETDOMAINNAME, nil, perm},
		{"clone3", unix.SYS_CLONE3, nil, nosys},
		{"clone of a process", unix.SYS_CLONE, []uint64{uint64(unix.SIGCHLD)}, retAllow},
		{"clone of a thread", unix.SYS_CLONE, []uint64{unix.CLONE_VM | unix.CLONE_THREAD | unix.CLONE_SIGHAND}, retAllow},
		{"clone of a user namespace", unix.SYS_CLONE, []uint64{unix.CLONE_NEWUSER | uint64(unix.SIGCHLD)}, perm},
		{"clone of a network namespace", unix.SYS_CLONE, []uint64{unix.CLONE_NEWNET}, perm},
		{"unshare of descriptors", unix.SYS_UNSHARE, []uint64{unix.CLONE_FILES}, retAllow},
		{"unshare of a user namespace", unix.SYS_UNSHARE, []uint64{unix.CLONE_NEWUSER}, perm},
		{"unshare of time", unix.SYS_UNSHARE, []uint64{unix.CLONE_NEWTIME}, perm},
		{"unshare with high bits", unix.SYS_UNSHARE, []uint64{1<<32 | unix.CLONE_NEWNS}, perm},
		{"ioctl", unix.SYS_IOCTL, []uint64{0, unix.TCGETS}, retAllow},
		{"ioctl of TIOCSTI", unix.SYS_IOCTL, []uint64{0, unix.TIOCSTI}, perm},
		{"ioctl of TIOCSTI with high bits", unix.SYS_IOCTL, []uint64{0, 7<<32 | unix.TIOCSTI}, perm},
		{"ioctl of TIOCLINUX", unix.SYS_IOCTL, []uint64{0, unix.TIOCLINUX}, perm},
		{"socket", unix.SYS_SOCKET, []uint64{unix.AF_INET}, retAllow},
		{"unix socket", unix.SYS_SOCKET, []uint64{unix.AF_UNIX}, retAllow},
		{"vsock", unix.SYS_SOCKET, []uint64{unix.AF_VSOCK}, noaf},
		{"vsock with high bits", unix.SYS_SOCKET, []uint64{1<<40 | unix.AF_VSOCK}, noaf},
	} {
		if got := call(arch, c.nr, c.args...); got != c.want {
			t.Errorf("%s: %#x, want %#x", c.name, got, c.want)
		}
	}
	for _, nr := range append(deniedCalls, deniedHere...) {
		if got := call(arch, nr); got != perm {
			t.Errorf("call %d: %#x", nr, got)
		}
	}
	if got := call(unix.AUDIT_ARCH_I386, 4); got != retKill {
		t.Errorf("another architecture: %#x", got)
	}
	if x32 != 0 {
		if got := call(arch, x32|unix.SYS_READ); got != nosys {
			t.Errorf("x32: %#x", got)
		}
	}
	if _, _, err := auditArch("riscv64"); err == nil || !strings.Contains(err.Error(), "riscv64") {
		t.Errorf("unknown architecture: %v", err)
	}
}

// TestStage gives the stage sandboxes in which one thing is missing. It must refuse before the command runs, and in the
// words of a runner failure.
func TestStage(t *testing.T) {
	requireBwrap(t)
	a := newArena(t, arenaBase(t))
	without := func(args []string, drop ...string) []string {
		i := slices.Index(args, drop[0])
		if i < 0 {
			t.Fatalf("the profile has no %s", drop[0])
		}
		return slices.Concat(args[:i], args[i+len(drop):])
	}
	for _, c := range []struct {
		name string
		drop []string
		root bool
		word string
	}{
		{"no pid namespace", []string{"--as-pid-1"}, false, "no pid namespace"},
		{"no seccomp program", []string{"--seccomp", "3"}, false, "no seccomp program"},
		{"capabilities", []string{"--cap-drop", "ALL"}, true, "capabilities are left"},
	} {
		if c.root && !asRoot() {
			continue
		}
		reply, err := a.confine("workspace-write", a.ws, "sh", "-c", "echo x >ran")
		must(t, err)
		l := reply.GetLaunch()
		l.Argv = without(l.Argv, c.drop...)
		o := a.start(launch.Spec{Launch: l})
		line, failed := sandbox.ClassifyRunnerFailure(o.ExitCode(), o.stderr, reply.GetRunnerFailureRules())
		if o.Code != stageExit || !failed || !strings.HasPrefix(line, stagePrefix) || !strings.Contains(line, c.word) || there(a.ws+"/ran") {
			t.Errorf("%s: %v", c.name, o)
		}
	}
	// The root writable.
	reply, err := a.confine("workspace-write", a.ws, "sh", "-c", "echo x >ran")
	must(t, err)
	l := reply.GetLaunch()
	i := slices.Index(l.Argv, "--ro-bind")
	l.Argv[i] = "--bind"
	if o := a.start(launch.Spec{Launch: l}); asRoot() && (o.Code != stageExit || !strings.Contains(o.stderr, "the root is writable") || there(a.ws+"/ran")) {
		t.Errorf("writable root: %v", o)
	}
}

func TestBoundSockets(t *testing.T) {
	const table = `Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00010000 0001 01 20661 /run/dbus/system bus
0000000000000000: 00000002 00000000 00000000 0002 01 20662 /dev/log
0000000000000000: 00000003 00000000 00000000 0001 03 17002
0000000000000000: 00000002 00000000 00010000 0001 01 20663 @/tmp/abstract
junk
`
	if diff := cmp.Diff([]string{"/run/dbus/system bus", "/dev/log"}, boundSockets(table)); diff != "" {
		t.Error(diff)
	}
}

func FuzzTables(f *testing.F) {
	f.Add("0: 2 0 00010000 0001 01 5 /a b\n36 35 98:0 /a /b rw shared:1 - ext4 x rw\n")
	f.Add("net:[1] 4 0:4 net:[4026532] /run/x rw shared:2 - nsfs nsfs rw\n")
	f.Fuzz(func(t *testing.T, table string) {
		sharedMount(table)
		for _, p := range boundSockets(table) {
			if !strings.HasPrefix(p, "/") || strings.Contains(p, "\n") {
				t.Fatalf("path %q", p)
			}
		}
	})
}

func TestSharedMount(t *testing.T) {
	for line, want := range map[string]bool{
		"27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n":              false,
		"27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n":     true,
		"27 1 254:0 / / rw master:5 - ext4 /dev/vda rw\n":              false,
		"27 1 254:0 / / rw - fuse a\\040shared:1 rw\n":                 false,
		"27 1 0:4 net:[4026532] /run/x rw shared:2 - nsfs nsfs rw\n\n": true,
	} {
		if got := sharedMount(line); got != want {
			t.Errorf("%q: %v", line, got)
		}
	}
}

func TestTrusted(t *testing.T) {
	base := arenaBase(t)
	dir := base + "/bin"
	must(t, os.Mkdir(dir, 0o755))
	file := dir + "/bwrap"
	must(t, os.WriteFile(file, nil, 0o755))
	if os.Geteuid() == 0 {
		must(t, trusted(file))
	}
	must(t, os.Chmod(dir, 0o777))
	if err := trusted(file); err == nil || !strings.Contains(err.Error(), "can be written by others") {
		t.Errorf("in a directory for all: %v", err)
	}
	must(t, os.Chmod(dir, 0o777|os.ModeSticky))
	if err := trusted(file); os.Geteuid() == 0 && err != nil {
		t.Errorf("in a sticky directory: %v", err)
	}
	must(t, os.Chmod(file, 0o775))
	if err := trusted(file); err == nil {
		t.Error("a file its group can write was accepted")
	}
	must(t, os.Chmod(file, 0o755))
	cred := testenv.User(t)
	must(t, os.Chown(file, int(cred.Uid), -1))
	if err := trusted(file); err == nil || !strings.Contains(err.Error(), "another user") {
		t.Errorf("another user's file: %v", err)
	}
	if _, err := findBwrap(":.:bin"); err == nil {
		t.Error("a relative PATH was searched")
	}
}

// TestPutBack checks what comes back of a covered directory, and how.
func TestPutBack(t *testing.T) {
	base := sandbox.CanonicalPath(t.TempDir())
	run := base + "/run"
	for _, dir := range []string{run + "/resolve", run + "/sw-1/bin", base + "/etc"} {
		must(t, os.MkdirAll(dir, 0o755))
	}
	must(t, os.WriteFile(run+"/resolve/stub.conf", nil, 0o644))
	must(t, os.Symlink("../run/resolve/stub.conf", base+"/etc/resolv.conf"))
	must(t, os.Symlink("sw-1", run+"/current"))
	must(t, os.Symlink("loop", run+"/loop"))
	must(t, unix.Mkfifo(run+"/fifo", 0o600))
	p := &profile{covers: []string{run}, placed: make(map[string]bool)}
	for _, path := range []string{base + "/etc/resolv.conf", run + "/current/bin", run + "/current/bin", run + "/loop", run + "/gone", run + "/fifo", run, "/usr/bin"} {
		p.putBack(path, 0)
	}
	want := []string{
		"--ro-bind", run + "/resolve/stub.conf", run + "/resolve/stub.conf",
		"--symlink", "sw-1", run + "/current",
		"--ro-bind", run + "/sw-1/bin", run + "/sw-1/bin",
		"--symlink", "loop", run + "/loop",
	}
	if diff := cmp.Diff(want, p.args); diff != "" {
		t.Error(diff)
	}
}

func TestConfig(t *testing.T) {
	for _, c := range []struct {
		config Config
		want   string
	}{
		{Plugin.Default(), ""},
		{Config{Runner: "bwrap", ProbeTimeoutMs: 0.5}, ""},
		{Config{Runner: "bwrap", ProbeTimeoutMs: 1e300}, ""},
		{Config{Runner: "auto"}, "sandbox-local: probeTimeoutMs must be a positive finite number"},
		{Config{Runner: "auto", ProbeTimeoutMs: -1}, "sandbox-local: probeTimeoutMs must be a positive finite number"},
		{Config{Runner: "docker", ProbeTimeoutMs: 1}, `sandbox-local: runner must be one of "auto" or "bwrap", got "docker"`},
	} {
		if err := c.config.check(); fmt.Sprint(err) != c.want && !(err == nil && c.want == "") {
			t.Errorf("%+v: %v", c.config, err)
		}
		if c.want == "" && c.config.probeTimeout() <= 0 {
			t.Errorf("%+v: timeout %v", c.config, c.config.probeTimeout())
		}
	}
}

// TestPlugin goes through the SDK, as a host does.
func TestPlugin(t *testing.T) {
	requireBwrap(t)
	p := plugintest.Start(t, Plugin, plugintest.Config(map[string]any{"runner": "bwrap", "probeTimeoutMs": 60000}))
	client := sandboxv1.NewSandboxClient(p.Conn())
	reply, err := client.Inspect(t.Context(), &sandboxv1.InspectRequest{})
	must(t, err)
	if reply.GetSelected() != "bwrap" {
		t.Errorf("got %v", reply)
	}
	if _, err := plugintest.Load(t, Plugin, plugintest.Config(map[string]any{"probeTimeoutMs": 0})); err == nil {
		t.Error("a timeout of 0 was accepted")
	}
}

//go:build linux

package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cordon-host/cordon/internal/testenv"
	"github.com/cordon-host/cordon/plugin/launch"
)

// attack is one way out. Whether it worked is judged on the disk and in the process table of the host, or, where the
// effect is knowledge, by what came out. Every attack is first run without a sandbox: if it then has no effect, the
// check would prove nothing, and the test fails or, where the machine lacks the feature, is skipped.
type attack struct {
	name   string
	script string
	// worked says whether the attack had its effect.
	worked func(a *arena, o outcome) bool
	before func(a *arena)
	// undo cleans up what is not below the arena.
	undo func(a *arena)
	edit func(a *arena) func(*launch.Spec)

	writeOnly bool // only makes sense with a writable workspace
	root      bool // only root could do it outside
	feature   bool // a machine without the feature is no failure
	// noControl: running it outside would hurt the machine or has no meaning there.
	noControl bool
}

func said(word string) func(*arena, outcome) bool {
	return func(_ *arena, o outcome) bool { return strings.Contains(o.stdout, word) }
}

func made(rel string) func(*arena, outcome) bool {
	return func(a *arena, _ outcome) bool { return there(a.base + rel) }
}

func lost(rel string) func(*arena, outcome) bool {
	return func(a *arena, _ outcome) bool { return !there(a.base + rel) }
}

func changed(rel string) func(*arena, outcome) bool {
	return func(a *arena, _ outcome) bool { return read(a.t, a.base+rel) != "secret\n" }
}

func heard(a *arena, _ outcome) bool {
	select {
	case <-a.lines:
		return true
	case <-time.After(100 * time.Millisecond): // the message of a successful send is there at once
		return false
	}
}

func remains(a *arena, _ outcome) bool { return len(a.running()) > 0 }

func endRemains(a *arena) {
	for _, pid := range a.running() {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}

const runSocket = "/run/cordon-sandbox-test.sock"
const tmpSocket = "/tmp/cordon-sandbox-test.sock"
const shmKey = 0x636f7264

var attacks = []attack{
	// Files outside.
	{name: "create a file", script: `echo >"$OUT/new"`, worked: made("/out/new")},
	{name: "append to a file", script: `echo x >>"$OUT/f"`, worked: changed("/out/f")},
	{name: "truncate a file", script: `cp /dev/null "$OUT/f"`, worked: changed("/out/f")},
	{name: "remove a file", script: `rm -f "$OUT/f"`, worked: lost("/out/f")},
	{name: "rename a file", script: `mv "$OUT/f" "$OUT/g"`, worked: made("/out/g")},
	{name: "replace a file", script: `cp "$W/f" "$OUT/n" && echo x >>"$OUT/n"; mv "$OUT/n" "$OUT/f"`, worked: changed("/out/f")},
	{name: "make a directory", script: `mkdir "$OUT/n"`, worked: made("/out/n")},
	{name: "remove a directory", script: `rmdir "$OUT/d"`, worked: lost("/out/d")},
	{name: "make a link", script: `ln -s /x "$OUT/l"`, worked: made("/out/l")},
	{name: "make a fifo", script: `mkfifo "$OUT/p"`, worked: made("/out/p")},
	{name: "hard link outside", script: `ln "$OUT/f" "$OUT/h"`, worked: made("/out/h")},
	{name: "hard link in", script: `ln "$OUT/f" "$W/h"`, worked: made("/ws/h")},
	{name: "hard link out", script: `ln "$W/f" "$OUT/h"`, worked: made("/out/h")},
	{name: "move out", script: `mv "$W/f" "$OUT/moved"`, worked: made("/out/moved")},
	{name: "move in", script: `mv "$OUT/f" "$W/moved"`, worked: lost("/out/f")},
	{name: "write through a link", script: `echo x >"$W/link"`, worked: made("/out/via-link")},
	{name: "write through a new link", script: `ln -s "$OUT/new" "$W/l2"; echo x >"$W/l2"`, worked: made("/out/new"), writeOnly: true},
	{name: "write through dots", script: `echo x >"$W/sub/../../out/new"`, worked: made("/out/new")},
	{name: "chmod", script: `chmod 777 "$OUT/f"`, worked: func(a *arena, _ outcome) bool {
		fi, err := os.Stat(a.out + "/f")
		must(a.t, err)
		return fi.Mode().Perm() == 0o777
	}},
	{name: "chown", script: `chown 12345 "$OUT/f"`, root: true, worked: func(a *arena, _ outcome) bool {
		fi, err := os.Stat(a.out + "/f")
		must(a.t, err)
		return fi.Sys().(*syscall.Stat_t).Uid == 12345
	}},
	{name: "set times", script: `touch -d 2001-01-01 "$OUT/f"`, worked: func(a *arena, _ outcome) bool {
		fi, err := os.Stat(a.out + "/f")
		must(a.t, err)
		return fi.ModTime().Year() == 2001
	}},
	{name: "set an extended attribute", script: `"$H" xattr "$OUT/f"`, worked: said("done"), feature: true},
	{name: "write to /etc", script: `: >/etc/cordon-sandbox-test`, root: true,
		worked: func(*arena, outcome) bool { return there("/etc/cordon-sandbox-test") },
		undo:   func(*arena) { os.Remove("/etc/cordon-sandbox-test") }},
	{name: "write to the home directory", script: `echo >"$HOME/.profile"`, worked: made("/.profile")},
	{name: "make a device", script: `"$H" mknod "$W/loop"`, worked: made("/ws/loop"), root: true},
	{name: "open by handle", script: `"$H" open-by-handle "$OUT/f"`, worked: said("done"), root: true, feature: true},
	{name: "leave the workspace writable in read-only mode", script: `[ "$MODE" = workspace-write ] || echo x >"$W/new"`, noControl: true, worked: made("/ws/new")},

	// Descriptors.
	{name: "write through stdin", script: `echo x >/proc/self/fd/0`, worked: changed("/out/f"), edit: func(a *arena) func(*launch.Spec) {
		f, err := os.Open(a.out + "/f")
		must(a.t, err)
		a.t.Cleanup(func() { f.Close() })
		return func(s *launch.Spec) { s.Stdin = f }
	}},
	{name: "inherited directory", script: `for d in /proc/self/fd/*; do echo >"$d/leaked"; done 2>/dev/null`, worked: made("/out/leaked"), before: func(a *arena) {
		fd, err := unix.Open(a.out, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		must(a.t, err)
		a.t.Cleanup(func() { unix.Close(fd) })
	}},

	// Mounts and namespaces.
	{name: "remount the root", script: `mount -o remount,bind,rw / && echo >"$OUT/new"`, worked: made("/out/new"), root: true},
	{name: "remount the directory", script: `mount -o remount,bind,rw "$OUT"; mount --bind "$OUT" "$OUT" && echo >"$OUT/new"; umount "$OUT"`, worked: made("/out/new"), root: true},
	{name: "clear read-only with the new interface", script: `"$H" mount-setattr "$OUT/new"`, worked: made("/out/new"), root: true, feature: true},
	{name: "clone a mount tree", script: `"$H" open-tree "$OUT"`, worked: said("done"), root: true},
	{name: "a user namespace by unshare", script: `unshare -Urm sh -c 'mount -o remount,bind,rw / ; echo >"$OUT/new"'`, worked: made("/out/new")},
	{name: "a user namespace by clone", script: `"$H" clone-user`, worked: said("done")},
	{name: "a user namespace by clone3", script: `"$H" clone3-user`, worked: said("done")},
	{name: "a mount namespace", script: `unshare -m true && echo done`, worked: said("done"), root: true},
	{name: "enter another mount namespace", script: `nsenter -t "$VICTIM" -m true && echo done`, worked: said("done"), root: true, before: (*arena).startVictim},
	{name: "the root of a host process", script: `echo >"/proc/$VICTIM/root/$OUT/new"`, worked: made("/out/new"), before: (*arena).startVictim},

	// The kernel's switches.
	{name: "open a sysctl for writing", script: `: 3>/proc/sys/kernel/core_pattern && echo done`, worked: said("done"), root: true},
	{name: "anything writable in /proc and /sys", script: `"$H" writable-switches`, worked: said("done"), root: true},
	{name: "make a cgroup", script: `for d in /sys/fs/cgroup /sys/fs/cgroup/*; do mkdir "$d/$TOKEN"; done 2>/dev/null`, root: true, feature: true,
		worked: func(a *arena, _ outcome) bool { return len(cgroups(a)) > 0 },
		undo: func(a *arena) {
			for _, d := range cgroups(a) {
				os.Remove(d)
			}
		}},
	{name: "a disk", script: `for d in /dev/[svx]d[a-z]* /dev/loop* /dev/mem /dev/kmsg /dev/nvme*; do [ -e "$d" ] && echo done; done; true`, worked: said("done"), feature: true},
	{name: "add to the user's keyring", script: `"$H" add-key "$TOKEN"`, feature: true, worked: func(a *arena, _ outcome) bool {
		_, err := unix.KeyctlSearch(unix.KEY_SPEC_USER_KEYRING, "user", a.token, 0)
		return err == nil
	}, undo: func(a *arena) {
		if id, err := unix.KeyctlSearch(unix.KEY_SPEC_USER_KEYRING, "user", a.token, 0); err == nil {
			_, _ = unix.KeyctlInt(unix.KEYCTL_UNLINK, id, unix.KEY_SPEC_USER_KEYRING, 0, 0)
		}
	}},
	{name: "bpf", script: `"$H" bpf`, worked: said("done"), root: true, feature: true},
	{name: "io_uring", script: `"$H" io-uring`, worked: said("done"), feature: true},
	{name: "userfaultfd", script: `"$H" userfaultfd`, worked: said("done"), feature: true},
	{name: "perf", script: `"$H" perf`, worked: said("done"), feature: true},
	{name: "capabilities", script: `grep -E '^Cap(Inh|Prm|Eff|Amb):' /proc/self/status | grep -v '0000000000000000$' && echo done`, worked: said("done"), root: true},
	{name: "gain privileges", script: `grep -q '^NoNewPrivs:.1' /proc/self/status || echo done`, worked: said("done")},

	// Processes.
	{name: "kill a host process", script: `kill -9 "$VICTIM"`, before: (*arena).startVictim, worked: func(a *arena, _ outcome) bool {
		time.Sleep(20 * time.Millisecond) // a delivered SIGKILL needs no longer
		return a.victimDead()
	}},
	{name: "read a host process's environment", script: `cat "/proc/$VICTIM/environ" | tr '\0' '\n' | grep VICTIM_SECRET`, before: (*arena).startVictim, worked: said("VICTIM_SECRET")},
	{name: "see host processes", script: `for p in /proc/[0-9]*; do tr '\0' ' ' <"$p/cmdline"; done 2>/dev/null`, before: (*arena).startVictim, worked: said("sleep 1000")},
	{name: "trace a host process", script: `"$H" ptrace "$VICTIM"`, before: (*arena).startVictim, worked: said("done"), feature: true},
	{name: "trace a child", script: `"$H" ptrace-child`, worked: said("done")},
	{name: "leave a job behind", script: `sleep 1000 "$TOKEN" 2>/dev/null & sh -c 'sleep 300; :' "$TOKEN" >/dev/null 2>&1 &`, noControl: true, worked: remains, undo: endRemains},
	{name: "leave a session behind", script: `setsid sh -c 'sleep 300; :' "$TOKEN" </dev/null >/dev/null 2>&1 & sleep 0.1`, worked: remains, undo: endRemains},
	{name: "leave a daemon behind", script: `(setsid setsid sh -c 'trap "" TERM HUP INT; sleep 300; :' "$TOKEN" </dev/null >/dev/null 2>&1 &) ; sleep 0.1`, worked: remains, undo: endRemains},
	{name: "go on writing after the call", script: `(setsid sh -c 'sleep 0.3; echo x >"$W/late"' "$TOKEN" </dev/null >/dev/null 2>&1 &)`, writeOnly: true, worked: func(a *arena, _ outcome) bool {
		time.Sleep(500 * time.Millisecond)
		return there(a.ws + "/late")
	}},
	{name: "System V shared memory", script: fmt.Sprintf(`"$H" shm %d`, shmKey), feature: true, worked: func(*arena, outcome) bool {
		_, err := unix.SysvShmGet(shmKey, 1, 0)
		return err == nil
	}, undo: func(*arena) {
		if id, err := unix.SysvShmGet(shmKey, 1, 0); err == nil {
			_, _ = unix.SysvShmCtl(id, unix.IPC_RMID, nil)
		}
	}},
	{name: "shared memory files", script: `echo >"/dev/shm/$TOKEN"`, worked: func(a *arena, _ outcome) bool { return there("/dev/shm/" + a.token) },
		undo: func(a *arena) { os.Remove("/dev/shm/" + a.token) }},
	{name: "type into a terminal", script: `setsid "$H" tiocsti`, worked: said("done"), feature: true},
	{name: "type into a terminal, high bits set", script: `setsid "$H" tiocsti-high`, worked: said("done"), feature: true},

	// Sockets and temp.
	{name: "a socket in /run", script: `"$H" connect ` + runSocket, worked: heard, root: true, before: func(a *arena) { a.listen("unix", runSocket) }},
	{name: "a socket in /tmp", script: `"$H" connect ` + tmpSocket, worked: heard, before: func(a *arena) { a.listen("unix", tmpSocket) }},
	{name: "a socket somewhere else", script: `"$H" connect "$OUT/s"`, worked: heard, before: func(a *arena) { a.listen("unix", a.out+"/s") }},
	{name: "a datagram socket somewhere else", script: `"$H" send "$OUT/s"`, worked: heard, before: func(a *arena) { a.listen("unixgram", a.out+"/s") }},
	{name: "vsock", script: `"$H" vsock`, worked: said("done"), feature: true},
	{name: "the host's /tmp", script: `echo >"/tmp/$TOKEN"; echo >"/var/tmp/$TOKEN"`, worked: func(a *arena, _ outcome) bool {
		return there("/tmp/"+a.token) || there("/var/tmp/"+a.token)
	}, undo: func(a *arena) { os.Remove("/tmp/" + a.token); os.Remove("/var/tmp/" + a.token) }},
	{name: "files of others in /tmp", script: `cat /tmp/cordon-test-*.txt`, worked: said("secret"), before: func(a *arena) {
		path := "/tmp/cordon-test-" + a.token + ".txt"
		must(a.t, os.WriteFile(path, []byte("secret"), 0o644))
		a.t.Cleanup(func() { os.Remove(path) })
	}},

	// The host's own state.
	{name: "read the state", script: `cat "$STATE/secret"`, worked: said("secret")},
	{name: "list the state", script: `ls "$STATE"`, worked: said("secret")},
	{name: "write into the state", script: `echo >"$STATE/new"`, worked: made("/state/new")},
	{name: "move the state", script: `mv "$STATE" "$STATE.old"`, worked: lost("/state")},
	{name: "read the state inside the workspace", script: `cat "$W/deep/state/secret"`, worked: said("secret")},
	{name: "write into the state inside the workspace", script: `echo >"$W/deep/state/new"`, worked: made("/ws/deep/state/new")},
	{name: "move what the state is in", script: `mv "$W/deep" "$W/deep2"`, worked: lost("/ws/deep/state")},

	// What leads to execution, inside the workspace.
	{name: "edit a plugin", script: `echo x >>"$W/plugins/one/main.go"`, worked: changed("/ws/plugins/one/main.go")},
	{name: "add to a plugin", script: `echo >"$W/plugins/one/new.go"`, worked: made("/ws/plugins/one/new.go")},
	{name: "remove a plugin", script: `rm -rf "$W/plugins/one"`, worked: lost("/ws/plugins/one/main.go")},
	{name: "move a plugin", script: `mv "$W/plugins/one" "$W/plugins/two"`, worked: lost("/ws/plugins/one")},
	{name: "move what plugins are in", script: `mv "$W/plugins" "$W/p2"; mkdir -p "$W/plugins/one"; echo x >"$W/plugins/one/main.go"`, worked: changed("/ws/plugins/one/main.go")},
	{name: "swap what plugins are in for a link", script: `mkdir -p "$W/evil/one"; echo x >"$W/evil/one/main.go"; rm -rf "$W/plugins"; ln -s evil "$W/plugins"`, worked: changed("/ws/plugins/one/main.go")},
	{name: "edit the compose file", script: `echo x >>"$W/conf/compose.yml"`, worked: changed("/ws/conf/compose.yml")},
	{name: "truncate the compose file", script: `cp /dev/null "$W/conf/compose.yml"`, worked: changed("/ws/conf/compose.yml")},
	{name: "remove the compose file", script: `rm -f "$W/conf/compose.yml"`, worked: lost("/ws/conf/compose.yml")},
	{name: "replace the compose file", script: `echo x >"$W/n"; mv -f "$W/n" "$W/conf/compose.yml"`, worked: changed("/ws/conf/compose.yml")},
	{name: "edit it through a hard link", script: `ln "$W/conf/compose.yml" "$W/alias" && echo x >>"$W/alias"`, worked: changed("/ws/conf/compose.yml")},
	{name: "edit it through a link", script: `ln -s conf/compose.yml "$W/alias"; echo x >>"$W/alias"`, worked: changed("/ws/conf/compose.yml")},
	{name: "move what it is in", script: `mv "$W/conf" "$W/conf2"; mkdir "$W/conf"; echo x >"$W/conf/compose.yml"`, worked: changed("/ws/conf/compose.yml")},
	{name: "chmod the compose file", script: `chmod 600 "$W/conf/compose.yml"`, worked: func(a *arena, _ outcome) bool {
		fi, err := os.Stat(a.ws + "/conf/compose.yml")
		must(a.t, err)
		return fi.Mode().Perm() == 0o600
	}},
	{name: "unmount the protection", script: `umount "$W/conf/compose.yml"; umount -l "$W/plugins/one"; echo x >>"$W/conf/compose.yml"`, worked: changed("/ws/conf/compose.yml")},
	{name: "edit the deployment", script: `echo x >>"$W/deploy/compose.yml"`, worked: changed("/ws/deploy/compose.yml")},
	{name: "add to the deployment", script: `echo >"$W/deploy/go.work"`, worked: made("/ws/deploy/go.work")},
	{name: "move the deployment", script: `mv "$W/deploy" "$W/d2"`, worked: lost("/ws/deploy")},
	{name: "move the workspace", script: `mv "$W" "$W.old"`, worked: lost("/ws")},
}

func cgroups(a *arena) []string {
	var found []string
	for _, pattern := range []string{"/sys/fs/cgroup/" + a.token, "/sys/fs/cgroup/*/" + a.token} {
		m, err := filepath.Glob(pattern)
		must(a.t, err)
		found = append(found, m...)
	}
	return found
}

// asRoot reports whether what takes root to do is to be tried.
func asRoot() bool { return os.Geteuid() == 0 }

// TestEscape tries every attack in both modes.
func TestEscape(t *testing.T) {
	requireBwrap(t)
	base := arenaBase(t)
	n := 0
	for _, at := range attacks {
		if at.root && !asRoot() {
			continue
		}
		for _, mode := range []string{"", "read-only", "workspace-write"} {
			if mode == "" && (at.noControl || os.Getenv(noControlVar) != "") || mode == "read-only" && at.writeOnly {
				continue
			}
			name := mode
			if mode == "" {
				name = "control"
			}
			ok := t.Run(at.name+"/"+name, func(t *testing.T) {
				n++
				a := newArena(t, fmt.Sprintf("%s/%d", base, n))
				if at.undo != nil {
					at.undo(a)
					defer at.undo(a)
				}
				if at.before != nil {
					at.before(a)
				}
				var edits []func(*launch.Spec)
				if at.edit != nil {
					edits = append(edits, at.edit(a))
				}
				if mode == "" {
					if o := a.bare(at.script, edits...); !at.worked(a, o) {
						if at.feature {
							t.Skipf("not possible on this machine: %v", o)
						}
						t.Errorf("the attack has no effect even without a sandbox: %v", o)
					}
					return
				}
				edits = append(edits, func(s *launch.Spec) { s.Env = append(s.Env, "MODE="+mode) })
				o := a.confined(mode, at.script, edits...)
				if at.worked(a, o) {
					t.Errorf("ESCAPE: %v", o)
				}
				if o.Code == stageExit || strings.Contains(o.stderr, "bwrap: ") || strings.Contains(o.stderr, stagePrefix) {
					t.Errorf("the sandbox itself failed, so nothing was tried: %v", o)
				}
			})
			if mode == "" && !ok {
				break // without a control the rest means nothing
			}
		}
	}
}

// bare runs a script with os/exec alone, so that the control does not profit from package launch either: files are
// handed over as they are, and descriptors are inherited.
func (a *arena) bare(script string, edit ...func(*launch.Spec)) outcome {
	a.t.Helper()
	spec := launch.Spec{Env: a.env()}
	for _, e := range edit {
		e(&spec)
	}
	fds, err := os.ReadDir("/proc/self/fd")
	must(a.t, err)
	for _, fd := range fds {
		// What package launch has closed for its own children, inherited directories that is.
		if to, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && to == a.out {
			var n int
			_, err := fmt.Sscan(fd.Name(), &n)
			must(a.t, err)
			_, err = unix.FcntlInt(uintptr(n), unix.F_SETFD, 0)
			must(a.t, err)
		}
	}
	cmd := exec.Command("sh", "-c", script)
	var out, errs bytes.Buffer
	cmd.Dir, cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = a.ws, spec.Env, spec.Stdin, &out, &errs
	_ = cmd.Run()
	o := outcome{stdout: out.String(), stderr: errs.String()}
	o.Code = cmd.ProcessState.ExitCode()
	return o
}

// TestAsUser runs this file's tests again as an ordinary user.
func TestAsUser(t *testing.T) {
	cred := testenv.User(t)
	requireBwrap(t)
	base := arenaBase(t)
	must(t, os.Chown(base, int(cred.Uid), int(cred.Gid)))
	cmd := exec.Command(helperBinary(t), "-test.run", "^(TestEscape|TestConfined.*|TestStage|TestUnavailable.*)$", "-test.v", "-test.count=1")
	cmd.Env = append(os.Environ(), arenaVar+"="+base, "HOME="+base, "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "TMPDIR=/tmp", testenv.RequireVar+"=bwrap")
	cmd.Dir = base
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: cred}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("as uid %d: %v\n%s", cred.Uid, err, failures(out))
	}
	ran := bytes.Count(out, []byte("--- PASS: TestEscape/"))
	t.Logf("as uid %d: %d escape checks and controls passed, %d were skipped", cred.Uid, ran, bytes.Count(out, []byte("--- SKIP: TestEscape/")))
	if ran < 40 {
		t.Errorf("only %d checks ran", ran)
	}
}

// noControlVar leaves the controls out, where a run elsewhere has shown them and this place lacks what they need.
const noControlVar = "SANDBOX_TEST_NO_CONTROL"

// throwaway is a user namespace in which no further one can be made, as under user.max_user_namespaces=0; the setting
// is the namespace's own. The command runs in it as root, with capabilities over it or, if bare, without any.
func throwaway(bare bool, argv ...string) *exec.Cmd {
	script := `echo 0 >/proc/sys/user/max_user_namespaces && exec "$@"`
	args := []string{"-Urm", "sh", "-c", script, "sh"}
	if bare {
		args = append(args, "setpriv", "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all")
	}
	return exec.Command("unshare", append(args, argv...)...)
}

// TestWithoutUserNamespaces tries the attacks where root cannot make a user namespace, and capabilities are only gone
// because they were dropped.
func TestWithoutUserNamespaces(t *testing.T) {
	if !asRoot() {
		t.Skip("only root can do without a user namespace")
	}
	requireBwrap(t)
	cmd := throwaway(false, helperBinary(t), "-test.run", "^(TestEscape|TestConfined.*)$", "-test.v", "-test.count=1")
	cmd.Env = append(os.Environ(), arenaVar+"="+arenaBase(t), noControlVar+"=1", testenv.RequireVar+"=bwrap")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%v\n%s", err, failures(out))
	}
	if n := bytes.Count(out, []byte("--- PASS: TestEscape/")); n < 100 {
		t.Errorf("only %d checks ran", n)
	}
}

// TestUnavailableWithoutUserNamespaces: without capabilities there is no way then, and the reason names the switch.
func TestUnavailableWithoutUserNamespaces(t *testing.T) {
	if !asRoot() {
		t.Skip("making the throwaway namespace takes root here")
	}
	testenv.Require(t, "bwrap")
	testenv.Require(t, "setpriv")
	cmd := throwaway(true, helperBinary(t), "inspect")
	cmd.Env = append(os.Environ(), helperVar+"=1")
	out, _ := cmd.Output()
	for _, w := range []string{"usable false", "bwrap: ", "user.max_user_namespaces is 0", "fix sysctl -w user.max_user_namespaces", "no sandbox backend is usable"} {
		if !bytes.Contains(out, []byte(w)) {
			t.Errorf("%q is not in %s", w, out)
		}
	}
}

// failures keeps what is not a pass.
func failures(out []byte) string {
	var keep []string
	for line := range strings.Lines(string(out)) {
		if s := strings.TrimSpace(line); !strings.HasPrefix(s, "=== ") && !strings.HasPrefix(s, "--- PASS") && !strings.HasPrefix(s, "--- SKIP") {
			keep = append(keep, line)
		}
	}
	return strings.Join(keep, "")
}

// TestNaiveProfile is the control of the whole battery: the usual short bubblewrap command, run by root, is left by
// several of the ways that the profile here closes.
func TestNaiveProfile(t *testing.T) {
	if !asRoot() {
		t.Skip("the naive profile leaks most to root")
	}
	requireBwrap(t)
	base := arenaBase(t)
	naive := []string{"bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--die-with-parent", "--tmpfs", "/tmp"}
	open := map[string]bool{
		"remount the root": false, "a socket in /run": false, "a socket somewhere else": false, "kill a host process": false,
		"open a sysctl for writing": false, "edit a plugin": false, "move what plugins are in": false, "capabilities": false,
	}
	n := 0
	for _, at := range attacks {
		if _, want := open[at.name]; !want {
			continue
		}
		n++
		a := newArena(t, fmt.Sprintf("%s/%d", base, n))
		if at.before != nil {
			at.before(a)
		}
		argv := append(append([]string{}, naive...), "--bind", a.ws, a.ws, "--", "sh", "-c", at.script)
		o := a.start(launch.Spec{Argv: argv, Dir: a.ws})
		open[at.name] = at.worked(a, o)
		if !open[at.name] {
			t.Errorf("%s: the naive profile holds, so the check proves little: %v", at.name, o)
		}
	}
	if n != len(open) {
		t.Errorf("%d of %d named attacks exist", n, len(open))
	}
}

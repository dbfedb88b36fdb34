package launch

import (
	"bytes"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// process is one line of the process table.
type process struct {
	pid, parent, group int
	state              byte
	start              string // in clock ticks since boot: tells two processes with one pid apart
}

// processes reads the process table. Processes that end meanwhile are left out.
func processes() []process {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1)
	all := make([]process, 0, len(names))
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil {
			if p, ok := readProcess(pid); ok {
				all = append(all, p)
			}
		}
	}
	return all
}

// readProcess reads /proc/PID/stat; see proc_pid_stat(5). The command name may contain anything, so fields are counted
// from its closing bracket.
func readProcess(pid int) (process, bool) {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return process{}, false
	}
	return parseStat(pid, stat)
}

func parseStat(pid int, stat []byte) (process, bool) {
	f := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(f) < 20 || len(f[0]) != 1 {
		return process{}, false
	}
	parent, err1 := strconv.Atoi(string(f[1]))
	group, err2 := strconv.Atoi(string(f[2]))
	if err1 != nil || err2 != nil {
		return process{}, false
	}
	return process{pid: pid, parent: parent, group: group, state: f[0][0], start: string(f[19])}, true
}

func (p process) dead() bool { return p.state == 'Z' || p.state == 'X' }

// groupAlive reports whether a process group has a member that has not exited.
func groupAlive(group int) bool {
	for _, p := range processes() {
		if p.group == group && !p.dead() {
			return true
		}
	}
	return false
}

// tree holds the descendants of a leader as pidfds. Signals to the group miss those that made a session of their own,
// and a pid namespace dies a moment after the process that owns it; both are in the tree.
type tree struct {
	leader int
	fds    map[int]int // pid → pidfd
}

// look adds the descendants there are now. They must be looked at before the leader ends: orphans belong to nobody.
func (t *tree) look() {
	children := make(map[int][]process)
	for _, p := range processes() {
		if !p.dead() {
			children[p.parent] = append(children[p.parent], p)
		}
	}
	todo := []int{t.leader}
	for pid := range t.fds {
		todo = append(todo, pid)
	}
	for len(todo) > 0 {
		pid := todo[0]
		todo = todo[1:]
		for _, p := range children[pid] {
			if _, known := t.fds[p.pid]; known {
				continue
			}
			fd, err := unix.PidfdOpen(p.pid, 0)
			if err != nil {
				continue
			}
			if again, ok := readProcess(p.pid); !ok || again.start != p.start {
				unix.Close(fd) // ended and recycled in between
				continue
			}
			t.fds[p.pid] = fd
			todo = append(todo, p.pid)
		}
	}
}

func (t *tree) signal(sig unix.Signal) {
	for _, fd := range t.fds {
		// ESRCH: it has ended, which is all that is wanted.
		_ = unix.PidfdSendSignal(fd, sig, nil, 0)
	}
}

// wait waits for every known descendant to have exited, at most until the limit, and lets go of them.
func (t *tree) wait(limit time.Duration) {
	end := time.Now().Add(limit)
	for pid, fd := range t.fds {
		for {
			left := time.Until(end)
			if left < 0 {
				left = 0
			}
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(left.Milliseconds()))
			if err == unix.EINTR {
				continue
			}
			_ = n // exited or out of time: either way there is nothing more to do for it
			break
		}
		unix.Close(fd)
		delete(t.fds, pid)
	}
}

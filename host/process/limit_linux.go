package process

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Limits are enforced by control groups of the second version (cgroups(7), the kernel's admin-guide/cgroup-v2): each generation with
// limits has a leaf of its own, and is forked into it, so that there is no moment in which it is outside. Resource limits are no
// substitute: RLIMIT_NPROC counts all processes of the user and does not bind root, RLIMIT_AS and RLIMIT_DATA count what a Go
// program reserves rather than what it uses, and both hold for one process and not for what it starts.
//
// The host works only below the group it was started in, and only if it is alone there: the kernel hands controllers on only
// from a group without processes, so the host moves itself, and nobody else, into a leaf of its own first. Whoever starts it
// gives it such a group; `systemd-run --user --scope -p Delegate=yes` does.

// delegated is the fix for most of what can be missing.
const delegated = "start the host in a control group of its own, as with  systemd-run --user --scope -p Delegate=yes cordon up, or remove limits from the row"

// Names of the host's groups. Whatever begins with the prefix below a host's own group was made by a host.
const (
	groupPrefix = "cordon-"
	hostGroup   = groupPrefix + "host"
)

// Limitable is nil if limits can be enforced, else a *LimitError that says what is missing. It changes nothing.
func Limitable(l Limits) error {
	if l == (Limits{}) {
		return nil
	}
	return groups.probe(l)
}

// PrepareLimits makes this process ready to enforce limits: it moves to a control group below the one it was started in. It must
// be done before anything is started, since a group with processes hands nothing on. Without limits it does nothing. The
// error is a *LimitError.
func PrepareLimits(l Limits) error {
	if l == (Limits{}) {
		return nil
	}
	return groups.prepare(l)
}

// grouping is the group of this process and what it has made of it.
type grouping struct {
	// Where the kernel tells, and what; tests have others.
	selfCgroup, mountInfo string
	pid                   int

	mu    sync.Mutex
	own   string // the directory of the group that this host was started in; empty until it is needed
	count atomic.Uint64
}

// groups is of this process: it can be in one group only.
var groups = &grouping{selfCgroup: "/proc/self/cgroup", mountInfo: "/proc/self/mountinfo", pid: os.Getpid()}

func missing(format string, args ...any) *LimitError {
	return &LimitError{Missing: fmt.Sprintf(format, args...), Fix: delegated}
}

// controllers are those that limits need.
func (l Limits) controllers() []string {
	var out []string
	if l.Memory > 0 {
		out = append(out, "memory")
	}
	if l.Pids > 0 {
		out = append(out, "pids")
	}
	return out
}

// find is the directory of the group that this process is in now.
func (g *grouping) find() (string, error) {
	text, err := os.ReadFile(g.selfCgroup)
	if err != nil {
		return "", missing("the control group of this process cannot be told: %v", err)
	}
	path := ""
	for line := range strings.Lines(string(text)) {
		// The second version has the one hierarchy without a number and without controllers in its name.
		if rest, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::"); ok {
			path = rest
		}
	}
	if !strings.HasPrefix(path, "/") || strings.Contains(path, "/../") || strings.HasSuffix(path, "/..") {
		return "", missing("this process is in no control group of version 2 that it can see")
	}
	root, at, err := g.mount()
	if err != nil {
		return "", err
	}
	// A mount may show a part of the hierarchy only.
	rel, ok := strings.CutPrefix(path, strings.TrimSuffix(root, "/"))
	if !ok || rel != "" && rel[0] != '/' {
		return "", missing("the control group %s of this process is outside of what is mounted at %s", path, at)
	}
	return filepath.Join(at, rel), nil
}

// mount is where control groups of version 2 are mounted, and which part of their hierarchy; see proc_pid_mountinfo(5).
func (g *grouping) mount() (root, at string, err error) {
	f, err := os.Open(g.mountInfo)
	if err != nil {
		return "", "", missing("mounts cannot be read: %v", err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		before, after, ok := strings.Cut(lines.Text(), " - ")
		left, right := strings.Fields(before), strings.Fields(after)
		if ok && len(left) >= 5 && len(right) >= 1 && right[0] == "cgroup2" {
			root, at = unescape(left[3]), unescape(left[4]) // the last one is on top
		}
	}
	if err := lines.Err(); err != nil {
		return "", "", missing("mounts cannot be read: %v", err)
	}
	if at == "" {
		return "", "", &LimitError{Missing: "control groups of version 2 are not mounted", Fix: "use a system that has them (systemd.unified_cgroup_hierarchy=1), or remove limits from the row"}
	}
	return root, at, nil
}

// unescape undoes how mountinfo writes spaces and the like.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// probe says whether limits could be enforced, without changing anything.
func (g *grouping) probe(l Limits) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	own := g.own
	if own == "" {
		var err error
		if own, err = g.find(); err != nil {
			return err
		}
	}
	return g.look(own, l)
}

// look holds that own can have leaves with the controllers that limits need.
func (g *grouping) look(own string, l Limits) error {
	available, err := words(filepath.Join(own, "cgroup.controllers"))
	if err != nil {
		return missing("control group %s cannot be read: %v", own, err)
	}
	for _, c := range l.controllers() {
		if !slices.Contains(available, c) {
			return missing("control group %s has no %s controller", own, c)
		}
	}
	for _, name := range []string{"", "cgroup.procs", "cgroup.subtree_control"} {
		path := filepath.Join(own, name)
		if err := unix.Faccessat(unix.AT_FDCWD, path, unix.W_OK, unix.AT_EACCESS); err != nil {
			return missing("%s cannot be written by this user: %v", path, err)
		}
	}
	handed, err := words(filepath.Join(own, "cgroup.subtree_control"))
	if err != nil {
		return missing("control group %s cannot be read: %v", own, err)
	}
	if containsAll(handed, l.controllers()) {
		return nil
	}
	if _, err := os.Stat(filepath.Join(own, "cgroup.type")); err != nil {
		return missing("this process is in the root control group, which is not its own")
	}
	members, err := words(filepath.Join(own, "cgroup.procs"))
	if err != nil {
		return missing("control group %s cannot be read: %v", own, err)
	}
	for _, m := range members {
		if m != strconv.Itoa(g.pid) {
			return missing("control group %s has other processes than this host, such as %s", own, m)
		}
	}
	return nil
}

func containsAll(have, want []string) bool {
	return !slices.ContainsFunc(want, func(w string) bool { return !slices.Contains(have, w) })
}

func words(path string) ([]string, error) {
	text, err := os.ReadFile(path)
	return strings.Fields(string(text)), err
}

func set(dir, name, value string) error {
	f, err := os.OpenFile(filepath.Join(dir, name), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}

// prepare makes the host's group one that hands controllers on. It happens once, and again only for a controller more.
func (g *grouping) prepare(l Limits) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.own == "" {
		own, err := g.find()
		if err != nil {
			return err
		}
		if err := g.look(own, l); err != nil {
			return err
		}
		g.own = own
		g.sweep()
	}
	handed, err := words(filepath.Join(g.own, "cgroup.subtree_control"))
	if err == nil && containsAll(handed, l.controllers()) {
		return nil
	}
	if err := g.look(g.own, l); err != nil {
		return err
	}
	if err == nil {
		err = g.moveSelf()
	}
	for _, c := range l.controllers() {
		if err == nil {
			err = set(g.own, "cgroup.subtree_control", "+"+c)
		}
	}
	if err != nil {
		return missing("controllers of %s cannot be handed on: %v", g.own, err)
	}
	return nil
}

// moveSelf moves this process out of its group into a leaf below, if it is not there yet.
func (g *grouping) moveSelf() error {
	members, err := words(filepath.Join(g.own, "cgroup.procs"))
	if err != nil || len(members) == 0 {
		return err
	}
	leaf := filepath.Join(g.own, hostGroup)
	if err := os.Mkdir(leaf, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return set(leaf, "cgroup.procs", strconv.Itoa(g.pid))
}

// sweep removes the leaves that a dead host left. One that has processes is not removable, and nobody's who is dead.
func (g *grouping) sweep() {
	left, err := filepath.Glob(filepath.Join(g.own, groupPrefix+"*"))
	if err != nil {
		return
	}
	for _, dir := range left {
		pid, err := strconv.Atoi(strings.SplitN(strings.TrimPrefix(filepath.Base(dir), groupPrefix), "-", 2)[0])
		if err != nil || pid == g.pid || unix.Kill(pid, 0) == nil {
			continue
		}
		_ = os.Remove(dir) // EBUSY: somebody is in it
	}
}

// leaf is the group of one generation.
type leaf struct {
	dir    string
	fd     *os.File
	limits Limits
}

// newLeaf makes a group with those limits; nil if there are none.
func newLeaf(l Limits, name string) (*leaf, error) {
	if l == (Limits{}) {
		return nil, nil
	}
	return groups.leaf(l, name)
}

func (g *grouping) leaf(l Limits, name string) (_ *leaf, err error) {
	if err := g.prepare(l); err != nil {
		return nil, err
	}
	dir := filepath.Join(g.own, fmt.Sprintf("%s%d-%s-%d", groupPrefix, g.pid, name, g.count.Add(1)))
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, missing("no control group can be made below %s: %v", g.own, reasonOf(err))
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(dir))
		}
	}()
	if l.Memory > 0 {
		// The whole group goes, not one process of it that the others would wait for; and there is no way around by swap.
		for _, s := range []struct {
			name, value string
			optional    bool
		}{
			{"memory.max", strconv.FormatInt(l.Memory, 10), false}, {"memory.oom.group", "1", false},
			{"memory.swap.max", "0", true}, // missing where the kernel does not account for swap, as when there is none
		} {
			if err := set(dir, s.name, s.value); err != nil && !(s.optional && errors.Is(err, fs.ErrNotExist)) {
				return nil, missing("%s of %s cannot be set: %v", s.name, dir, reasonOf(err))
			}
		}
	}
	if l.Pids > 0 {
		if err := set(dir, "pids.max", strconv.Itoa(l.Pids)); err != nil {
			return nil, missing("pids.max of %s cannot be set: %v", dir, reasonOf(err))
		}
	}
	fd, err := os.Open(dir)
	if err != nil {
		return nil, missing("control group %s cannot be opened: %v", dir, reasonOf(err))
	}
	return &leaf{dir, fd, l}, nil
}

func reasonOf(err error) error {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		return pe.Err
	}
	return err
}

// place has a process forked into the leaf.
func (l *leaf) place(attr *unix.SysProcAttr) {
	if l != nil {
		attr.UseCgroupFD, attr.CgroupFD = true, int(l.fd.Fd())
	}
}

// emptyTimeout bounds the wait for a killed group to be empty: the kernel needs no co-operation for it, but a process in a system
// call that cannot be interrupted, as on a dead network disk, stays.
const emptyTimeout = 5 * time.Second

// end kills whatever is left in the leaf, removes it, and says which limits were hit, empty for none.
func (l *leaf) end() (hit string, err error) {
	if l == nil {
		return "", nil
	}
	defer l.fd.Close()
	hit = l.hit()
	if err := set(l.dir, "cgroup.kill", "1"); errors.Is(err, fs.ErrNotExist) {
		// Before Linux 5.14 one by one; what forks meanwhile is met again. The loop is bounded by the limit of what it can hold.
		err = l.killEach()
		if err != nil {
			return hit, fmt.Errorf("control group %s: %w", l.dir, err)
		}
	} else if err != nil {
		return hit, fmt.Errorf("control group %s: kill: %w", l.dir, err)
	}
	if err := l.empty(); err != nil {
		return hit, fmt.Errorf("control group %s: %w", l.dir, err)
	}
	return hit, os.Remove(l.dir)
}

// rounds of killing one by one: a group that outlives them forks faster than it is killed.
const killRounds = 100

func (l *leaf) killEach() error {
	for range killRounds {
		members, err := words(filepath.Join(l.dir, "cgroup.procs"))
		if err != nil || len(members) == 0 {
			return err
		}
		for _, m := range members {
			if pid, err := strconv.Atoi(m); err == nil && pid > 0 {
				_ = unix.Kill(pid, unix.SIGKILL)
			}
		}
	}
	return nil
}

// empty waits until the leaf has no process; the kernel announces it on cgroup.events.
func (l *leaf) empty() error {
	f, err := os.Open(filepath.Join(l.dir, "cgroup.events"))
	if err != nil {
		return err
	}
	defer f.Close()
	deadline := time.Now().Add(emptyTimeout)
	for {
		populated, err := counter(f, "populated")
		if err != nil || populated == 0 {
			return err
		}
		left := time.Until(deadline)
		if left <= 0 {
			return errors.New("processes are left that cannot be killed")
		}
		fds := []unix.PollFd{{Fd: int32(f.Fd()), Events: unix.POLLPRI}}
		if _, err := unix.Poll(fds, int(left.Milliseconds())+1); err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// counter is one number of a file of names and numbers.
func counter(f *os.File, name string) (int64, error) {
	buf := make([]byte, 4096) // such files have a handful of lines
	n, err := f.ReadAt(buf, 0)
	if n == 0 && err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(buf[:n])) {
		if fields := strings.Fields(line); len(fields) == 2 && fields[0] == name {
			return strconv.ParseInt(fields[1], 10, 64)
		}
	}
	return 0, nil
}

// hit says which limits stood in the way of the generation.
func (l *leaf) hit() string {
	var out []string
	for _, c := range []struct {
		limit      int64
		file, name string
		text       string
	}{
		{l.limits.Memory, "memory.events", "oom_kill", fmt.Sprintf("out of memory: it may use %d bytes (limits.memory)", l.limits.Memory)},
		{int64(l.limits.Pids), "pids.events", "max", fmt.Sprintf("it was refused more than %d processes and threads (limits.pids)", l.limits.Pids)},
	} {
		if c.limit == 0 {
			continue
		}
		f, err := os.Open(filepath.Join(l.dir, c.file))
		if err != nil {
			continue
		}
		if n, err := counter(f, c.name); err == nil && n > 0 {
			out = append(out, c.text)
		}
		_ = f.Close()
	}
	return strings.Join(out, "; ")
}

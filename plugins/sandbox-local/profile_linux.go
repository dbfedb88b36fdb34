package main

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"google.golang.org/grpc/codes"

	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/sandbox"
)

// Limits of the memory file systems a command gets; they end with the call.
const (
	tempSize = 1 << 30   // /tmp without a session
	shmSize  = 512 << 20 // /dev/shm: shared memory of browsers and databases under test fits
)

// maxSockets bounds how many unix sockets outside the hidden directories are masked one by one. bubblewrap's time is
// quadratic in mounts, and a machine that has more of them needs a runner that is not.
const maxSockets = 64

// procWritable are the entries of a fresh procfs that root, even without any capability, could change the machine with.
// Most of /proc/sys checks the user and not a capability.
var procWritable = []string{"sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi", "driver", "mtrr", "pressure", "dynamic_debug", "latency_stats"}

// systemDirs must not be inside a writable workspace root: the dynamic linker, the shell of the stage and this host's own
// configuration come from there, so a command that can write them runs unconfined code soon after.
var systemDirs = []string{"/bin", "/sbin", "/lib", "/lib64", "/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib64", "/etc", "/dev", "/proc", "/sys", "/run", "/boot"}

// profile is one sandbox as bubblewrap's arguments. bubblewrap applies them in order, and each step covers what the steps
// before it made visible:
//
//  1. namespaces, no capabilities, a session of its own, death with the parent;
//  2. the whole root, read-only, with a fresh minimal /dev and a /proc whose switches are read-only;
//  3. empty /run, /tmp and /var/tmp, with what name resolution and PATH need there put back, and the session's temp
//     directory in workspace-write mode;
//  4. the workspace: writable in workspace-write mode, put back where step 3 has covered it;
//  5. inside the workspace, what is protected, read-only, and every directory on the way pinned against renaming;
//  6. what is hidden, and the sockets of other programs, covered;
//  7. the empty directories of step 3 sealed read-only.
//
// Paths are arguments of their own everywhere.
type profile struct {
	args   []string
	mode   sandbox.Mode
	root   string
	covers []string // fresh directories: what was below is out of sight
	seal   []string // to be remounted read-only at the end
	placed map[string]bool
}

func (p *profile) add(args ...string) { p.args = append(p.args, args...) }

func (b *bwrap) profile(req request) ([]string, error) {
	p := &profile{mode: req.mode, root: req.root, placed: make(map[string]bool)}
	if err := b.checkRoot(req); err != nil {
		return nil, err
	}
	p.namespaces()
	p.base()
	p.covered(b.in.getenv("PATH"))
	if err := p.temp(b.in.tempDir, req.session); err != nil {
		return nil, err
	}
	p.workspace()
	hidden := b.hidden(req.root)
	if err := p.protect(b.in, hidden); err != nil {
		return nil, err
	}
	p.hide(hidden)
	p.sockets(hidden)
	for _, dir := range p.seal {
		p.add("--remount-ro", dir)
	}
	if !p.visible(req.cwd, hidden) {
		return nil, notExpressible("the working directory %q is not visible in the sandbox; it lies in a directory that is empty there", req.cwd)
	}
	return p.args, nil
}

// checkRoot refuses roots that cannot be confined to.
func (b *bwrap) checkRoot(req request) error {
	for _, dir := range []string{"/proc", "/sys"} {
		if req.root != "/" && sandbox.Contains(dir, req.root) {
			return notExpressible("workspace root %q lies in %s", req.root, dir)
		}
	}
	for _, h := range append(slices.Clone(b.in.hidden), b.in.stateDir, b.in.tempDir) {
		if h != "" && sandbox.Contains(sandbox.CanonicalPath(h), req.root) {
			return notExpressible("workspace root %q lies in a directory of the host's own state", req.root)
		}
	}
	if req.mode != sandbox.WorkspaceWrite {
		return nil
	}
	for _, dir := range systemDirs {
		if c := sandbox.CanonicalPath(dir); sandbox.Contains(req.root, dir) || sandbox.Contains(req.root, c) {
			return notExpressible("workspace root %q contains %s, which this host itself runs on; choose a directory of your own", req.root, dir)
		}
	}
	for _, dir := range []string{"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/dev", "/boot"} {
		if c := sandbox.CanonicalPath(dir); sandbox.Contains(c, req.root) && !sandbox.Contains("/dev/shm", req.root) {
			return notExpressible("workspace root %q lies in %s, which this host itself runs on; choose a directory of your own", req.root, dir)
		}
	}
	return nil
}

func (p *profile) namespaces() {
	// As root a user namespace may be out of reach in a container; without capabilities root needs none, and the stage
	// checks that they are gone. Anybody else gets one in any case.
	p.add("--unshare-user-try", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
		"--cap-drop", "ALL", "--new-session", "--die-with-parent",
		"--as-pid-1") // the stage is pid 1, see there
}

func (p *profile) base() {
	p.add("--ro-bind", "/", "/", "--dev", "/dev")
	p.tmpfs("/dev/shm", "1777", shmSize)
	p.covers = append(p.covers, "/dev")
	p.seal = append(p.seal, "/dev")
	p.add("--proc", "/proc")
	for _, name := range procWritable {
		if path := "/proc/" + name; exists(path) {
			p.add("--ro-bind", path, path)
		}
	}
}

func (p *profile) tmpfs(dir, perms string, size int) {
	p.add("--perms", perms, "--size", strconv.Itoa(size), "--tmpfs", dir)
}

// covered empties the runtime directories: a socket to a privileged helper is a way out.
func (p *profile) covered(path string) {
	for _, dir := range []string{"/run", "/var/run"} {
		if c := sandbox.CanonicalPath(dir); exists(c) && !p.covering(c) {
			p.tmpfs(c, "0755", 1<<20)
			p.covers = append(p.covers, c)
			p.seal = append(p.seal, c)
		}
	}
	for _, file := range []string{"/etc/resolv.conf", "/etc/hosts", "/etc/hostname", "/etc/localtime", "/etc/machine-id"} {
		p.putBack(file, 0)
	}
	for _, dir := range filepath.SplitList(path) {
		if filepath.IsAbs(dir) {
			p.putBack(filepath.Clean(dir), 0)
		}
	}
}

// putBack makes one path work again whose way leads through a covered directory: links on the way are made anew, and
// what they lead to is bound. Anything else than files and directories stays away.
func (p *profile) putBack(path string, depth int) {
	const maxLinks = 40 // as the kernel's
	if depth > maxLinks {
		return
	}
	at := "/"
	parts := strings.Split(strings.Trim(path, "/"), "/")
	for i, part := range parts {
		at = filepath.Join(at, part)
		fi, err := os.Lstat(at)
		if err != nil {
			return
		}
		if fi.Mode()&os.ModeSymlink == 0 {
			continue
		}
		target, err := os.Readlink(at)
		if err != nil {
			return
		}
		if p.covering(at) && !p.placed[at] {
			p.placed[at] = true
			p.add("--symlink", target, at)
		}
		if !filepath.IsAbs(target) {
			target = filepath.Join(filepath.Dir(at), target)
		}
		p.putBack(filepath.Join(append([]string{target}, parts[i+1:]...)...), depth+1)
		return
	}
	fi, err := os.Lstat(at)
	if err != nil || !fi.Mode().IsRegular() && !fi.IsDir() || !p.covering(at) || slices.Contains(p.covers, at) || p.placed[at] {
		return
	}
	p.placed[at] = true
	p.add("--ro-bind", at, at)
}

// covering reports whether a path lies in a directory that is fresh in the sandbox.
func (p *profile) covering(path string) bool {
	return slices.ContainsFunc(p.covers, func(c string) bool { return sandbox.Contains(c, path) })
}

// temp gives a command its temp directory, over /tmp and /var/tmp: the session's own, shared by its calls, or a fresh one
// for a call without a session. In read-only mode both are empty and sealed.
//
// Where the workspace itself lies below /tmp the call gets a fresh one, too. bubblewrap would have to make the mount
// point of the workspace inside the session's directory, where another command of the session could swap it for a link
// meanwhile.
func (p *profile) temp(tempDir, session string) error {
	own := ""
	if p.mode == sandbox.WorkspaceWrite && session != "" && tempDir != "" {
		var err error
		if own, err = makeTemp(tempDir, session); err != nil {
			return err
		}
	}
	for _, dir := range []string{"/tmp", "/var/tmp"} {
		c := sandbox.CanonicalPath(dir)
		if !exists(c) || p.covering(c) {
			continue
		}
		switch {
		case p.mode != sandbox.WorkspaceWrite:
			p.tmpfs(c, "0755", 1<<20)
			p.seal = append(p.seal, c)
		case own != "" && !sandbox.Contains(c, p.root):
			p.add("--bind", own, c)
		default:
			p.tmpfs(c, "1777", tempSize)
		}
		p.covers = append(p.covers, c)
	}
	return nil
}

// makeTemp makes a session's temp directory if it is not there yet.
func makeTemp(tempDir, session string) (string, error) {
	dir, err := sandbox.SessionTemp(tempDir, session)
	if err != nil {
		return "", fault.New(codes.InvalidArgument, reasonInvalid, "session temp directory: %v", err)
	}
	if err := os.MkdirAll(tempDir, 0o700); err != nil {
		return "", fmt.Errorf("session temp directory: %w", err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", fmt.Errorf("session temp directory: %w", err)
	}
	fi, err := os.Lstat(dir)
	if err != nil {
		return "", fmt.Errorf("session temp directory: %w", err)
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); !ok || !fi.IsDir() || int(st.Uid) != os.Geteuid() {
		return "", fmt.Errorf("session temp directory %s is not a directory of this user", dir)
	}
	return dir, nil
}

func (p *profile) workspace() {
	switch {
	case p.mode == sandbox.WorkspaceWrite:
		p.add("--bind", p.root, p.root)
	case p.covering(p.root) && !slices.Contains(p.covers, p.root):
		p.add("--ro-bind", p.root, p.root)
	}
}

// protect makes what leads to execution read-only inside the writable root. Outside of it everything is already.
//
// A read-only mount keeps its own name from being removed or replaced, but not a directory above it from being renamed,
// after which the name is free; so each directory on the way becomes a mount, too. A protected name that does not
// exist cannot be covered without leaving a file behind on the host.
func (p *profile) protect(in surroundings, hidden []string) error {
	if p.mode != sandbox.WorkspaceWrite {
		return nil
	}
	paths := slices.Clone(in.protected)
	if in.root != "" && sandbox.CanonicalPath(in.root) != p.root {
		// The deployment's own tree, unless the workspace is that tree or a part of it.
		if sandbox.Contains(p.root, sandbox.CanonicalPath(in.root)) {
			paths = append(paths, in.root)
		}
	}
	var leaves []string
	for _, path := range paths {
		if !filepath.IsAbs(path) {
			return notExpressible("protected path %q is not absolute", path)
		}
		spelled := path
		path, link := walk(path, p.root)
		if link != "" {
			return notExpressible("the way to the protected path %q leads over the symbolic link %q in the workspace, which could be replaced; put the file itself there", spelled, link)
		}
		if sandbox.Contains(path, p.root) {
			return notExpressible("workspace root %q lies inside the protected path %q", p.root, path)
		}
		if !sandbox.Contains(p.root, path) {
			continue
		}
		fi, err := os.Lstat(path)
		switch {
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
			continue
		case err != nil:
			return notExpressible("protected path %q: %v", path, err)
		}
		if st, ok := fi.Sys().(*syscall.Stat_t); ok && fi.Mode().IsRegular() && st.Nlink > 1 {
			return notExpressible("protected file %q has %d hard links, through which it could be written; copy it", path, st.Nlink)
		}
		leaves = append(leaves, path)
	}
	slices.Sort(leaves)
	leaves = slices.Compact(leaves)
	leaves = slices.DeleteFunc(leaves, func(path string) bool {
		return slices.ContainsFunc(leaves, func(other string) bool { return other != path && sandbox.Contains(other, path) })
	})
	bind := make(map[string]string)
	pin := func(path string) {
		for dir := filepath.Dir(path); dir != p.root && sandbox.Contains(p.root, dir); dir = filepath.Dir(dir) {
			if bind[dir] == "" {
				bind[dir] = "--bind"
			}
		}
	}
	for _, leaf := range leaves {
		pin(leaf)
		bind[leaf] = "--ro-bind"
	}
	for _, h := range hidden {
		within := slices.ContainsFunc(leaves, func(leaf string) bool { return sandbox.Contains(leaf, h) })
		if sandbox.Contains(p.root, h) && !within {
			pin(h)
		}
	}
	// Sorted, a directory comes before what is in it, and so does its mount.
	for _, path := range slices.Sorted(maps.Keys(bind)) {
		p.add(bind[path], path, path)
	}
	return nil
}

// walk follows a path without symbolic links as far as it exists. A link that lies in root ends it: whoever can write
// there can make it lead elsewhere, so that what it leads to now is beside the point.
func walk(path, root string) (canonical, link string) {
	at := "/"
	for _, part := range strings.Split(strings.Trim(filepath.Clean(path), "/"), "/") {
		at = filepath.Join(at, part)
		fi, err := os.Lstat(at)
		if err != nil || fi.Mode()&os.ModeSymlink == 0 {
			continue
		}
		if sandbox.Contains(root, at) {
			return "", at
		}
		at = sandbox.CanonicalPath(at)
	}
	return at, ""
}

// hidden are the directories and files to cover, canonical: those of the deployment, and runtime directories of this user
// that are not where they usually are.
func (b *bwrap) hidden(root string) []string {
	var all []string
	take := func(path string) {
		if path == "" || !filepath.IsAbs(path) {
			return
		}
		if c := sandbox.CanonicalPath(path); exists(c) && !slices.Contains(all, c) {
			all = append(all, c)
		}
	}
	for _, h := range b.in.hidden {
		take(h)
	}
	take(b.in.stateDir)
	take(b.in.tempDir)
	for _, dir := range b.runtimeDirs() {
		// A variable can say anything; the workspace and the way to it stay.
		if dir != "" && filepath.IsAbs(dir) && !sandbox.Contains(sandbox.CanonicalPath(dir), root) && !sandbox.Contains(sandbox.CanonicalPath(dir), "/usr/bin") {
			take(dir)
		}
	}
	slices.Sort(all)
	return all
}

// runtimeDirs are where multiplexers and container tools keep sockets when it is not /run or /tmp.
func (b *bwrap) runtimeDirs() []string {
	dirs := []string{b.in.getenv("XDG_RUNTIME_DIR"), b.in.getenv("TMUX_TMPDIR"), b.in.getenv("SCREENDIR"),
		"/var/lib/lxd/unix.socket", "/var/snap/lxd/common/lxd/unix.socket", "/var/lib/incus/unix.socket"}
	if home := b.in.getenv("HOME"); home != "" {
		for _, d := range []string{".docker/run", ".docker/desktop", ".colima", ".lima", ".orbstack/run", ".rd", ".screen"} {
			dirs = append(dirs, filepath.Join(home, d))
		}
	}
	return dirs
}

func (p *profile) hide(hidden []string) {
	for i, h := range hidden {
		if p.gone(h) || slices.ContainsFunc(hidden[:i], func(o string) bool { return sandbox.Contains(o, h) }) {
			continue
		}
		if fi, err := os.Stat(h); err == nil && fi.IsDir() {
			p.tmpfs(h, "0555", 1<<12)
			p.seal = append(p.seal, h)
		} else {
			p.add("--ro-bind", "/dev/null", h)
		}
	}
}

// gone reports whether a path is out of sight already: covered, and not part of the workspace.
func (p *profile) gone(path string) bool {
	return p.covering(path) && !p.own(path)
}

// own reports whether a path belongs to the workspace. A root that is the whole machine, which only read-only mode takes,
// owns nothing.
func (p *profile) own(path string) bool {
	return p.root != "/" && sandbox.Contains(p.root, path)
}

// sockets covers the sockets that other programs have outside the empty directories, e.g. in somebody's home. Those in a
// writable workspace are the workspace's own.
func (p *profile) sockets(hidden []string) {
	table, err := os.ReadFile("/proc/net/unix")
	if err != nil {
		return
	}
	found := boundSockets(string(table))
	slices.Sort(found)
	n := 0
	for _, path := range slices.Compact(found) {
		path = filepath.Join(sandbox.CanonicalPath(filepath.Dir(path)), filepath.Base(path))
		if fi, err := os.Lstat(path); err != nil || fi.Mode()&os.ModeSocket == 0 {
			continue // of another mount namespace, or removed
		}
		if p.gone(path) || p.mode == sandbox.WorkspaceWrite && p.own(path) || slices.ContainsFunc(hidden, func(h string) bool { return sandbox.Contains(h, path) }) {
			continue
		}
		if n++; n > maxSockets {
			return
		}
		p.add("--ro-bind", "/dev/null", path)
	}
}

// visible reports whether a directory can be entered in the sandbox.
func (p *profile) visible(dir string, hidden []string) bool {
	c := sandbox.CanonicalPath(dir)
	for _, h := range hidden {
		if sandbox.Contains(h, c) {
			return false
		}
	}
	if p.own(c) || !p.covering(c) || slices.Contains(p.covers, c) {
		return true
	}
	for placed := range p.placed {
		if sandbox.Contains(placed, c) {
			return true
		}
	}
	return false
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

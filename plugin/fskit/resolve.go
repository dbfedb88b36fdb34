//go:build unix

package fskit

import (
	"errors"
	iofs "io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"

	"github.com/cordon-host/cordon/capability/sandbox"
)

// maxLinks is how many symbolic links one path may lead over: the kernel's limit.
const maxLinks = 40

// What names and paths can be at most, in bytes, on the file systems of the platforms there are.
const (
	maxName = 255
	maxPath = 4095
)

// errNotDirectory is for a path that leads through something that is no directory.
var errNotDirectory = errors.New("not a directory")

// view is the file system as one call sees it: the host's, with other directories in some places.
type view struct {
	Policy
	mounts    []mount  // longest first
	hidden    []string // canonical; covered even in the workspace
	covered   []string // canonical; covered unless in the workspace
	protected []string // canonical up to the last name

	ids []identity // of what is hidden or protected and exists
}

// mount puts a directory of the host in a place of the view. Without one, an empty directory is there.
type mount struct{ at, host string }

// Places that commands find empty: sockets of privileged helpers, other processes, shared memory of others. The same files
// are out of sight here.
var coveredDirs = []string{"/run", "/var/run", "/proc", "/dev/shm"}

// knownFiles are put back for commands where they lie in a covered directory.
var knownFiles = []string{"/etc/resolv.conf", "/etc/hosts", "/etc/hostname", "/etc/localtime", "/etc/machine-id"}

// tempDirs are the places where a session finds its temp directory.
var tempDirs = []string{"/tmp", "/var/tmp"}

func newView(p Policy) *view {
	v := &view{Policy: p}
	if !p.Mode.Confined() {
		return v
	}
	temp := ""
	if p.Mode == sandbox.WorkspaceWrite && p.Temp != "" {
		temp = sandbox.CanonicalPath(p.Temp)
	}
	for _, dir := range tempDirs {
		at := sandbox.CanonicalPath(dir)
		if sandbox.Contains(v.Root, at) || slices.Contains(v.mounts, mount{at, temp}) {
			continue // the workspace lies over it
		}
		v.mounts = append(v.mounts, mount{at, temp})
	}
	if slices.ContainsFunc(v.mounts, func(m mount) bool { return sandbox.Contains(m.at, v.Root) }) {
		v.mounts = append(v.mounts, mount{v.Root, v.Root})
	}
	slices.SortFunc(v.mounts, func(a, b mount) int { return len(b.at) - len(a.at) })
	for _, h := range p.Hidden {
		c := canonical(h)
		v.hidden = append(v.hidden, c)
		if st, err := lstatHost(c); err == nil {
			v.ids = append(v.ids, st.id)
		}
	}
	for _, c := range coveredDirs {
		v.covered = append(v.covered, sandbox.CanonicalPath(c))
	}
	v.protect()
	return v
}

// protect finds the canonical names of what is protected. There may be hundreds, in few directories.
func (v *view) protect() {
	dirs := map[string]string{}
	for _, q := range v.Protected {
		dir := path.Dir(q)
		if dirs[dir] == "" {
			dirs[dir] = canonical(dir)
		}
		name := path.Join(dirs[dir], path.Base(q))
		v.protected = append(v.protected, name)
		switch st, err := lstatHost(name); {
		case err != nil: // it need not exist
		case st.link:
			// The name, which must not be replaced, and what it leads to.
			v.protected = append(v.protected, canonical(q))
		default:
			v.ids = append(v.ids, st.id)
		}
	}
}

// canonical is sandbox.CanonicalPath for paths whose last names may not exist yet.
func canonical(p string) string {
	if !path.IsAbs(p) {
		return p
	}
	if loc, err := new(view).resolve(p); err == nil {
		return loc.host
	}
	return p
}

// location is where a path leads.
type location struct {
	view    string // canonical path in the view
	host    string // the same on the host; empty where the view has nothing
	missing int    // how many of its last names do not exist
	dir     bool   // it is a directory
	dirOnly bool   // it was spelled as a directory: a trailing separator or dot
}

// at is where a path of the view is on the host; false where nothing can be.
func (v *view) at(p string) (string, bool) {
	for _, m := range v.mounts {
		if sandbox.Contains(m.at, p) {
			return m.host + p[len(m.at):], m.host != ""
		}
	}
	return p, true
}

// mountPoint reports whether a path is where something is mounted, or leads there. Such a path is a directory, whatever
// lies below.
func (v *view) mountPoint(p string) bool {
	return slices.ContainsFunc(v.mounts, func(m mount) bool { return sandbox.Contains(p, m.at) })
}

// resolve walks a path as the kernel does in the view: component by component, links where they are met, and `..` from
// where the walk has come. A path whose last names do not exist leads to where they would be made. Relative ones start at the
// workspace root.
//
// The errors are errNotDirectory, fs.ErrNotExist and what the operating system says.
func (v *view) resolve(p string) (location, error) {
	if !path.IsAbs(p) {
		p = v.Root + "/" + p
	}
	loc := location{view: "/", dir: true}
	pending := strings.Split(p, "/")
	for links := 0; len(pending) > 0; {
		name := pending[0]
		pending = pending[1:]
		if name == "" || name == "." {
			if len(pending) == 0 && loc.view != "/" {
				loc.dirOnly = true
			}
			if loc.missing == 0 && !loc.dir {
				return location{}, errNotDirectory
			}
			continue
		}
		if !loc.dir && loc.missing == 0 {
			return location{}, errNotDirectory
		}
		if name == ".." {
			if loc.missing > 0 {
				return location{}, iofs.ErrNotExist
			}
			loc.view = path.Dir(loc.view)
			loc.dirOnly = len(pending) == 0
			continue
		}
		next := strings.TrimSuffix(loc.view, "/") + "/" + name
		if len(name) > maxName || len(next) > maxPath {
			return location{}, syscall.ENAMETOOLONG // where nothing is, the host would not say so until something is made
		}
		if loc.missing > 0 {
			loc.view, loc.missing = next, loc.missing+1
			continue
		}
		if v.mountPoint(next) {
			loc.view = next
			continue
		}
		target, kind, err := v.look(next)
		switch {
		case errors.Is(err, iofs.ErrNotExist):
			loc.view, loc.missing, loc.dir = next, 1, false
		case err != nil:
			return location{}, err
		case kind == os.ModeSymlink:
			if links++; links > maxLinks {
				return location{}, syscall.ELOOP
			}
			if path.IsAbs(target) {
				loc.view = "/"
			}
			pending = append(strings.Split(target, "/"), pending...)
		default:
			loc.view, loc.dir = next, kind == os.ModeDir
		}
	}
	if host, ok := v.at(loc.view); ok {
		loc.host = host
	}
	return loc, nil
}

// look tells what a path of the view is, and for a link where it leads.
func (v *view) look(p string) (target string, kind os.FileMode, err error) {
	host, ok := v.at(p)
	if !ok {
		return "", 0, iofs.ErrNotExist
	}
	fi, err := os.Lstat(host)
	if err != nil {
		return "", 0, err
	}
	if fi.Mode()&os.ModeSymlink != 0 {
		target, err = os.Readlink(host)
	}
	return target, fi.Mode().Type(), err
}

// readable reports whether a location may be read. In the reference system every mode reads everything; here what confined
// commands do not see, file tools do not either.
func (v *view) readable(loc location) bool {
	if !v.Mode.Confined() {
		return true
	}
	if within(v.hidden, loc.view) {
		return false
	}
	if !within(v.covered, loc.view) || v.Root != "/" && sandbox.Contains(v.Root, loc.view) {
		return true
	}
	return slices.ContainsFunc(knownFiles, func(f string) bool { return sandbox.CanonicalPath(f) == loc.view })
}

// writable is the writable root that a location lies in, canonical, and its path below it. The error of a location that lies
// in none, or must not be changed, is errDenied.
func (v *view) writable(loc location) (root, below string, err error) {
	if !v.Mode.Confined() {
		return "/", strings.TrimPrefix(loc.host, "/"), nil
	}
	if loc.host == "" || within(v.hidden, loc.view) || within(v.protected, loc.host) || v.system(loc.host) {
		return "", "", errDenied
	}
	roots := sandbox.WritableRoots(v.Mode, v.Root, v.Temp)
	for _, root := range roots {
		if sandbox.Contains(root, loc.host) {
			return root, strings.TrimPrefix(loc.host[len(root):], "/"), nil
		}
	}
	return v.alias(roots, loc)
}

// alias finds a root by its identity where names do not tell: on file systems that do not distinguish case, and where a
// directory is mounted in two places.
func (v *view) alias(roots []string, loc location) (root, below string, err error) {
	for _, root := range roots {
		fi, err := os.Stat(root)
		if err != nil {
			continue
		}
		for dir := loc.host; ; dir = path.Dir(dir) {
			if other, err := os.Lstat(dir); err == nil && os.SameFile(fi, other) {
				below := strings.TrimPrefix(strings.TrimPrefix(loc.host, dir), "/")
				// What is protected or hidden is so under the root's own name, too.
				at := path.Join(root, below)
				if within(v.protected, at) || within(v.hidden, at) || v.system(at) {
					return "", "", errDenied
				}
				return root, below, nil
			}
			if dir == "/" {
				break
			}
		}
	}
	return "", "", errDenied
}

// errDenied is for what the policy does not allow.
var errDenied = errors.New("denied by the policy")

// systemDirs must not be changed because a workspace root lies above them: the linker, the shells and this host's own
// configuration come from there, so whoever can write them runs unconfined code soon after. Sandboxes for commands refuse
// such roots as a whole.
var systemDirs = []string{"/bin", "/sbin", "/lib", "/lib32", "/lib64", "/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/etc", "/dev", "/proc", "/sys", "/run", "/boot"}

// system reports whether a path lies in a system directory that the workspace does not lie in itself.
func (v *view) system(host string) bool {
	return slices.ContainsFunc(systemDirs, func(d string) bool {
		c := sandbox.CanonicalPath(d)
		return (sandbox.Contains(c, host) || sandbox.Contains(d, host)) && !(v.Root != c && sandbox.Contains(c, v.Root))
	})
}

// guarded reports whether an open directory, what is named in it or a directory above is hidden or protected, by identity:
// the names were compared before. The session's temp directory lies in a hidden one and is not asked about.
func (v *view) guarded(loc location, parent *dir, name string) (bool, error) {
	if len(v.ids) == 0 || loc.view != loc.host {
		return false, nil
	}
	if st, err := parent.lstat(name); err == nil && slices.Contains(v.ids, st.id) {
		return true, nil
	}
	line, err := parent.line()
	if err != nil {
		return false, err
	}
	return slices.ContainsFunc(line, func(id identity) bool { return slices.Contains(v.ids, id) }), nil
}

func within(dirs []string, p string) bool {
	return slices.ContainsFunc(dirs, func(d string) bool { return sandbox.Contains(d, p) })
}

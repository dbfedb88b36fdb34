//go:build unix

package fskit

import (
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// dir is an open directory. Everything it does is relative to it and follows no symbolic link.
type dir struct{ fd int }

// identity names a file or directory whatever its path.
type identity struct{ dev, ino uint64 }

// status is what lstat tells.
type status struct {
	id           identity
	mode         uint32 // type and permission bits
	perm         uint32
	uid, gid     int
	size         int64
	version      string
	link, folder bool
	regular      bool
}

func (s status) kind() string {
	switch {
	case s.regular:
		return KindFile
	case s.folder:
		return KindDirectory
	}
	return KindOther
}

func statusOf(st *unix.Stat_t) status {
	// The types of these fields differ by platform.
	mode, dev, ino := uint32(st.Mode), uint64(st.Dev), uint64(st.Ino)
	return status{
		id: identity{dev, ino}, mode: mode, perm: mode & 0o7777, uid: int(st.Uid), gid: int(st.Gid), size: st.Size,
		version: fmt.Sprintf("%d:%d:%d:%d:%d", dev, ino, st.Size, st.Mtim.Nano(), st.Ctim.Nano()),
		link:    mode&unix.S_IFMT == unix.S_IFLNK,
		folder:  mode&unix.S_IFMT == unix.S_IFDIR,
		regular: mode&unix.S_IFMT == unix.S_IFREG,
	}
}

// lstatHost is the status of a path of the host.
func lstatHost(p string) (status, error) {
	var st unix.Stat_t
	if err := ignoreEINTR(func() error { return unix.Lstat(p, &st) }); err != nil {
		return status{}, err
	}
	return statusOf(&st), nil
}

// fstat is the status of an open file.
func fstat(f *os.File) (status, error) {
	var st unix.Stat_t
	if err := ignoreEINTR(func() error { return unix.Fstat(int(f.Fd()), &st) }); err != nil {
		return status{}, err
	}
	return statusOf(&st), nil
}

// openRoot opens a directory by its canonical path. A link anywhere in it is errMoved.
func openRoot(canonical string) (*dir, error) {
	fd, err := unix.Open("/", openPath|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	top := &dir{fd}
	if canonical == "/" {
		return top, nil
	}
	defer top.close()
	return top.descend(strings.TrimPrefix(canonical, "/"))
}

// openParent opens the parent of a path below a canonical root, and returns the last name. Where create is set, directories
// that are missing are made.
func openParent(root, below string, create bool) (*dir, string, error) {
	top, err := openRoot(root)
	if err != nil {
		return nil, "", err
	}
	parent, name := path.Split(below)
	parent = strings.TrimSuffix(parent, "/")
	if parent == "" {
		return top, name, nil
	}
	defer top.close()
	d, err := top.descend(parent)
	if errors.Is(err, unix.ENOENT) && create {
		d, err = top.descendMaking(parent)
	}
	return d, name, err
}

// descendMaking is descend for a path whose directories are made where they are missing.
func (d *dir) descendMaking(below string) (*dir, error) {
	at := d
	for name := range strings.SplitSeq(below, "/") {
		next, err := at.descend(name)
		if errors.Is(err, unix.ENOENT) {
			// Somebody else may make it first; what counts is what is there then.
			if err = ignoreEINTR(func() error { return unix.Mkdirat(at.fd, name, 0o777) }); err == nil || errors.Is(err, unix.EEXIST) {
				next, err = at.descend(name)
			}
		}
		if at != d {
			at.close()
		}
		if err != nil {
			return nil, err
		}
		at = next
	}
	return at, nil
}

// walk is descend by single steps, for kernels that do not offer it as one.
func (d *dir) walk(below string) (*dir, error) {
	at := d
	for name := range strings.SplitSeq(below, "/") {
		fd, err := openat(at.fd, name, openPath|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
		if at != d {
			at.close()
		}
		if err != nil {
			return nil, changed(err)
		}
		at = &dir{fd}
	}
	return at, nil
}

// changed is errMoved for the errors of a walk that met something that was not there, or not the same, when the path was
// canonical.
func changed(err error) error {
	for _, e := range []unix.Errno{unix.ELOOP, unix.ENOTDIR, unix.EAGAIN, unix.EXDEV} {
		if errors.Is(err, e) {
			return errors.Join(errMoved, err)
		}
	}
	return err
}

func (d *dir) close() { unix.Close(d.fd) }

func (d *dir) lstat(name string) (status, error) {
	var st unix.Stat_t
	if name == "" {
		name = "."
	}
	if err := ignoreEINTR(func() error { return unix.Fstatat(d.fd, name, &st, unix.AT_SYMLINK_NOFOLLOW) }); err != nil {
		return status{}, err
	}
	return statusOf(&st), nil
}

// line is the directory and those above it.
func (d *dir) line() ([]identity, error) {
	var line []identity
	at := d
	for {
		var st unix.Stat_t
		err := ignoreEINTR(func() error { return unix.Fstatat(at.fd, ".", &st, 0) })
		var next int
		if err == nil {
			next, err = openat(at.fd, "..", openPath|unix.O_DIRECTORY, 0)
		}
		if at != d {
			at.close()
		}
		if err != nil {
			return nil, err
		}
		id := statusOf(&st).id
		if len(line) > 0 && line[len(line)-1] == id { // the top is its own parent
			unix.Close(next)
			return line, nil
		}
		line = append(line, id)
		at = &dir{next}
	}
}

// open opens a regular file for reading, without waiting for the other end of a pipe somebody puts there.
func (d *dir) open(name string) (*os.File, error) {
	st, err := d.lstat(name)
	switch {
	case err != nil:
		return nil, err
	case st.link:
		return nil, errMoved
	case !st.regular:
		return nil, errNotRegular
	}
	fd, err := openat(d.fd, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, changed(err)
	}
	f := os.NewFile(uintptr(fd), name)
	if now, err := fstat(f); err != nil || now.id != st.id {
		f.Close()
		return nil, errors.Join(errMoved, err)
	}
	return f, nil
}

// errNotRegular is for a path that leads to no regular file.
var errNotRegular = errors.New("not a regular file")

// names are the names in the directory, in no order.
func (d *dir) names() ([]string, error) {
	fd, err := openat(d.fd, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), ".")
	defer f.Close()
	return f.Readdirnames(-1)
}

// mayWrite is an error where the host's permissions do not let this process write an existing file. Replacing it takes no
// more than the directory's permission, which is not what its owner meant.
func (d *dir) mayWrite(name string) error {
	return ignoreEINTR(func() error { return unix.Faccessat(d.fd, name, unix.W_OK, 0) })
}

// stage is new content that has no name yet, or one that nobody knows.
type stage struct {
	file *os.File
	dir  *dir
	name string // empty for a file without a name
}

// tempName is a name for a staged file; it says what it is for as far as that fits into 255 bytes.
func tempName(base string) string {
	if len(base) > 200 {
		base = base[:200]
	}
	return "." + base + "." + rand.Text() + ".tmp"
}

// stageNamed stages new content under a temporary name.
func (d *dir) stageNamed(base string) (*stage, error) {
	name := tempName(base)
	fd, err := openat(d.fd, name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	return &stage{os.NewFile(uintptr(fd), name), d, name}, nil
}

// discard gives a stage up. The error is nil or says that something was left behind.
func (s *stage) discard() error {
	s.file.Close()
	if s.name == "" {
		return nil
	}
	if err := unix.Unlinkat(s.dir.fd, s.name, 0); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("temp cleanup failed (%w)", err)
	}
	return nil
}

// create publishes the staged content under a name that is free. The error of one that is not is EEXIST.
func (s *stage) create(name string) error {
	if s.name == "" {
		return s.link(name)
	}
	err := renameNoReplace(s.dir.fd, s.name, name)
	if errors.Is(err, errNoRename) {
		// The link leaves the temporary name for discard.
		return ignoreEINTR(func() error { return unix.Linkat(s.dir.fd, s.name, s.dir.fd, name, 0) })
	}
	if err == nil {
		s.name = ""
	}
	return err
}

// replace publishes the staged content under a name, in place of whatever has it.
func (s *stage) replace(name string) error {
	if s.name == "" {
		temp := tempName(name)
		if err := s.link(temp); err != nil {
			return err
		}
		s.name = temp
	}
	if err := ignoreEINTR(func() error { return unix.Renameat(s.dir.fd, s.name, s.dir.fd, name) }); err != nil {
		return err
	}
	s.name = ""
	return nil
}

// errNoRename is for file systems and kernels without a rename that does not replace.
var errNoRename = errors.New("no rename without replacing")

// sync makes the directory's names durable. A directory that may be written and not read cannot be synced; its names are then
// as durable as the file system makes them.
func (d *dir) sync() error {
	fd, err := openat(d.fd, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if errors.Is(err, unix.EACCES) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := ignoreEINTR(func() error { return unix.Fsync(fd) }); err != nil && !errors.Is(err, unix.EINVAL) {
		return err
	}
	return nil
}

func openat(fd int, name string, flags int, mode uint32) (int, error) {
	var out int
	err := ignoreEINTR(func() (err error) {
		out, err = unix.Openat(fd, name, flags|unix.O_CLOEXEC, mode)
		return err
	})
	return out, err
}

func ignoreEINTR(fn func() error) error {
	for {
		if err := fn(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

package fskit

import (
	"errors"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// openPath opens a directory to work from, which takes the permission to search it and no more.
const openPath = unix.O_PATH

// descend opens a directory below d without following any link on the way. One that is met is errMoved.
func (d *dir) descend(below string) (*dir, error) {
	how := &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	}
	var fd int
	err := ignoreEINTR(func() (err error) {
		fd, err = unix.Openat2(d.fd, below, how)
		return err
	})
	switch {
	case err == nil:
		return &dir{fd}, nil
	case errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EPERM):
		// A kernel before 5.6, or a seccomp filter that does not know the call.
		return d.walk(below)
	}
	return nil, changed(err)
}

// stage prepares a place for new content of a file called base, with mode 0600. Where the file system can, it has no name
// until it is complete, so that nothing is left behind whatever happens.
func (d *dir) stage(base string) (*stage, error) {
	fd, err := openat(d.fd, ".", unix.O_TMPFILE|unix.O_RDWR, 0o600)
	if err == nil {
		s := &stage{os.NewFile(uintptr(fd), base), d, ""}
		if _, err := os.Lstat(s.proc()); err == nil {
			return s, nil
		}
		s.file.Close()
		return d.stageNamed(base)
	}
	for _, e := range []unix.Errno{unix.EOPNOTSUPP, unix.EISDIR, unix.EINVAL, unix.ENOENT} {
		if errors.Is(err, e) {
			return d.stageNamed(base)
		}
	}
	return nil, err
}

// link gives a staged file without a name one.
func (s *stage) link(name string) error {
	return ignoreEINTR(func() error {
		return unix.Linkat(unix.AT_FDCWD, s.proc(), s.dir.fd, name, unix.AT_SYMLINK_FOLLOW)
	})
}

// proc is the staged file's path through procfs: linking a descriptor itself takes a capability.
func (s *stage) proc() string { return "/proc/self/fd/" + strconv.Itoa(int(s.file.Fd())) }

func renameNoReplace(dirfd int, from, to string) error {
	err := ignoreEINTR(func() error { return unix.Renameat2(dirfd, from, dirfd, to, unix.RENAME_NOREPLACE) })
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) {
		return errNoRename
	}
	return err
}

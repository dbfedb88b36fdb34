//go:build unix

package sqlite

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"syscall"
)

// An inUseError is a lock that another process holds.
type inUseError struct{ pid string }

func (e *inUseError) Error() string { return "locked by process " + e.pid }

func (e *inUseError) hint() string {
	if e.pid == "" {
		return "stop it, or use its socket"
	}
	return fmt.Sprintf("it is process %s: stop it, or use its socket", e.pid)
}

// lockFile takes the lock that goes with the file's open description, so that the kernel gives it up with the process however
// that ends. The lock is on a file of its own: SQLite has its own locks on the database, and closing any descriptor of that
// would drop them.
func lockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		defer f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			pid, _ := io.ReadAll(io.LimitReader(f, 32))
			return nil, &inUseError{strings.TrimSpace(string(pid))}
		}
		return nil, err
	}
	// For the hint above only.
	if err := f.Truncate(0); err == nil {
		_, err = fmt.Fprintf(f, "%d\n", os.Getpid())
		if err != nil {
			f.Truncate(0)
		}
	}
	return f, nil
}

func isReadOnly(err error) bool {
	return errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS)
}

func isFull(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

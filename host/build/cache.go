// Package build makes programs out of what a composition names: Go main packages are compiled on demand, executables
// are copied. Either way what comes out is a private file whose digest is known and which nobody but its owner can have
// written.
//
// Nothing of a tree is executed to find out what would be built. [Cache.Inputs] lists every local file that leads to a
// binary, with its digest, so that somebody can first decide whether they are trusted; [Cache.Build] then compiles a
// private copy of exactly those bytes. A tree that changes in between, or while the compiler runs, therefore cannot
// get anything built that was not agreed to.
//
// The go command runs with an environment of its own making: no cgo, no GOFLAGS, no go.work, no settings of go env -w,
// no other toolchain, no version control and no network. What a module requires must be in the module cache or in its
// vendor directory, where go.sum vouches for it.
package build

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

// Cache is a private directory of built and copied programs, named by content. It may be used by several processes at
// once.
type Cache struct {
	dir string

	mu   sync.Mutex
	tool *toolchain // the last one used
}

// Binary is a program that is ready to run.
type Binary struct {
	Path   string
	SHA256 string // hex
}

// The directories of a cache.
const (
	binDir   = "bin"   // what was compiled, by key of the inputs
	execDir  = "exec"  // copies of executables, by digest
	indexDir = "index" // what is known of the inputs of a package, by its path
	lockDir  = "lock"  // one file per module
	tmpDir   = "tmp"   // what is being made
)

// Open prepares a cache in dir, which is made if it is missing. It must belong to the caller and be open to nobody
// else: whoever can write there decides what runs.
func Open(dir string) (*Cache, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return nil, err
	}
	for _, d := range []string{"", binDir, execDir, indexDir, lockDir, tmpDir} {
		d = filepath.Join(dir, d)
		if err := os.Mkdir(d, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, err
		}
		if err := private(d); err != nil {
			return nil, err
		}
	}
	return &Cache{dir: dir}, nil
}

// Dir is the directory of the cache.
func (c *Cache) Dir() string { return c.dir }

// private refuses a directory that others can write to or list, or that is not the caller's.
func private(dir string) error {
	info, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	switch {
	case !info.IsDir():
		return fmt.Errorf("%s is not a directory; remove it", dir)
	case !ok || int(st.Uid) != os.Geteuid():
		return fmt.Errorf("%s belongs to another user; remove it or name another place", dir)
	case info.Mode().Perm()&0o077 != 0:
		return fmt.Errorf("%s is open to others (mode %04o); chmod 700 it once you know that nobody changed it", dir, info.Mode().Perm())
	}
	return nil
}

// lockPoll is how often a lock held by another process is tried again: flock cannot be waited for with a deadline, and
// a build takes far longer than this.
const lockPoll = 20 * time.Millisecond

// lock keeps other processes from building what name stands for, until the returned function is called.
func (c *Cache) lock(ctx context.Context, name string) (func(), error) {
	f, err := os.OpenFile(filepath.Join(c.dir, lockDir, name), os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	poll := time.NewTicker(lockPoll)
	defer poll.Stop()
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, fmt.Errorf("waiting for another build: %w", ctx.Err())
		case <-poll.C:
		}
	}
}

// Stage makes a private copy of an executable and returns it with the digest of exactly the bytes it holds. The file is
// opened once, so that it does not matter what happens to the path meanwhile.
func (c *Cache) Stage(path string) (*Binary, error) {
	in, err := openRegular(path)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	info, err := in.Stat()
	if err != nil {
		return nil, err
	}
	if info.Mode()&0o111 == 0 {
		return nil, fmt.Errorf("%s is not executable; chmod +x it", path)
	}
	return c.keep(in)
}

// keep copies a program into the cache under the name of its digest.
func (c *Cache) keep(in io.Reader) (*Binary, error) {
	// A process forked while the copy is open for writing would keep it busy until its own exec, and running the copy
	// would fail with ETXTBSY.
	syscall.ForkLock.RLock()
	tmp, sum, err := c.copy(in)
	syscall.ForkLock.RUnlock()
	if err != nil {
		return nil, err
	}
	b := &Binary{filepath.Join(c.dir, execDir, sum), sum}
	if inUse.hold(b.Path) == nil { // the same bytes are there already
		return b, os.Remove(tmp)
	}
	if err := os.Rename(tmp, b.Path); err != nil {
		os.Remove(tmp)
		return nil, err
	}
	if err := inUse.hold(b.Path); err != nil {
		return nil, err
	}
	return b, c.prune(execDir)
}

func (c *Cache) copy(in io.Reader) (path, sum string, err error) {
	tmp, err := os.CreateTemp(filepath.Join(c.dir, tmpDir), "exec-")
	if err != nil {
		return "", "", err
	}
	h := sha256.New()
	_, err = io.Copy(io.MultiWriter(tmp, h), in)
	err = errors.Join(err, tmp.Chmod(0o500), tmp.Close())
	if err != nil {
		os.Remove(tmp.Name())
		return "", "", err
	}
	return tmp.Name(), hex.EncodeToString(h.Sum(nil)), nil
}

// Digest is the SHA-256 of a regular file, in hex.
func Digest(path string) (string, error) {
	f, err := openRegular(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// openRegular opens a file for reading that is one: opening a named pipe would wait, a device could never end.
func openRegular(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", path)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

package build

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"
)

// kept is how many programs of each kind that no process holds are kept. An edit of what all plugins share makes one
// more of each; this many go back some dozen edits without filling a disk.
const kept = 64

// holds are programs locked against being pruned, by path.
type holds struct {
	mu    sync.Mutex
	files map[string]*os.File
}

// inUse are the programs this process has handed out, from whichever cache. They stay locked until the process ends:
// whoever got a path may run it again any time, after a crash for instance.
var inUse = &holds{files: map[string]*os.File{}}

// hold locks a program and marks it as used now. The error is fs.ErrNotExist if there is no such program.
func (h *holds) hold(path string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if f := h.files[path]; f != nil {
		if sameFile(f, path) == nil {
			return nil
		}
		delete(h.files, path)
		f.Close()
	}
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	// A process that prunes holds the lock exclusively for as long as it takes to remove a file.
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_SH)
	if err == nil {
		err = sameFile(f, path)
	}
	if err == nil {
		err = os.Chtimes(path, time.Time{}, time.Now())
	}
	if err != nil {
		return errors.Join(err, f.Close())
	}
	h.files[path] = f
	return nil
}

// sameFile is nil if path still names the regular file f.
func sameFile(f *os.File, path string) error {
	open, err := f.Stat()
	if err != nil {
		return err
	}
	named, err := os.Lstat(path)
	if err != nil {
		return err
	}
	if !named.Mode().IsRegular() || !os.SameFile(open, named) {
		return fmt.Errorf("%s was replaced: %w", path, fs.ErrNotExist)
	}
	return nil
}

// abandoned is the age beyond which something half made belongs to a process that was killed: no build takes a day.
const abandoned = 24 * time.Hour

// prune removes the programs of one kind that were handed out longest ago, but for those some process holds, and what
// killed processes left half made.
func (c *Cache) prune(kind string) error {
	halves, err := os.ReadDir(filepath.Join(c.dir, tmpDir))
	if err != nil {
		return err
	}
	for _, h := range halves {
		if info, err := h.Info(); err == nil && time.Since(info.ModTime()) > abandoned {
			if err := os.RemoveAll(filepath.Join(c.dir, tmpDir, h.Name())); err != nil {
				return err
			}
		}
	}
	type program struct {
		path, whole string // the file, and what goes with it
		used        time.Time
	}
	var all []program
	entries, err := os.ReadDir(filepath.Join(c.dir, kind))
	if err != nil {
		return err
	}
	for _, e := range entries {
		p := program{path: filepath.Join(c.dir, kind, e.Name())}
		p.whole = p.path
		if e.IsDir() {
			p.path = filepath.Join(p.path, programName)
		}
		if info, err := os.Lstat(p.path); err == nil {
			p.used = info.ModTime()
		}
		all = append(all, p)
	}
	slices.SortFunc(all, func(a, b program) int { return cmp.Compare(b.used.UnixNano(), a.used.UnixNano()) })
	for _, p := range all[min(kept, len(all)):] {
		f, err := os.OpenFile(p.path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
		if err != nil {
			continue // another process prunes too, or is making it
		}
		if syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil {
			err = os.RemoveAll(p.whole)
		}
		if err = errors.Join(err, f.Close()); err != nil {
			return err
		}
	}
	return nil
}

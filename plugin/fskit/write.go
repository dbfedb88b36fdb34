//go:build unix

package fskit

import (
	"context"
	"errors"
	"fmt"
	iofs "io/fs"
	"os"
	"path"

	"golang.org/x/sys/unix"

	"github.com/cordon-host/cordon/capability/fs"
	"github.com/cordon-host/cordon/capability/sandbox"
)

// writeChunk is how much is written before a canceled call is noticed.
const writeChunk = 1 << 20

// Write creates a file or replaces its content. Missing directories are made. A new file has mode 0600, an existing one keeps
// its permissions, and its owner where this process may give files away.
func (f *FS) Write(ctx context.Context, p Policy, name string, content []byte, pre Precondition) (Written, error) {
	var out Written
	err := f.mutating(ctx, p, fs.Write, name, pre.LeadsTo, func(t target) error {
		if t.loc.missing > 0 && pre.Version != "" {
			return fs.ErrGone(t.shown)
		}
		return t.within(func(parent *dir, base string) error {
			old, err := parent.lstat(base)
			switch {
			case errors.Is(err, iofs.ErrNotExist):
				if pre.Version != "" {
					return fs.ErrGone(t.shown)
				}
				out, err = f.publish(ctx, t, parent, base, nil, content, pre.MustNotExist)
				return err
			case err != nil:
				return err
			case old.link:
				return errMoved
			case !old.regular:
				return fs.ErrNotRegularFile(fs.Write, t.shown)
			case pre.MustNotExist:
				return fs.ErrOverwrite(t.shown)
			case pre.Version != "" && old.version != pre.Version:
				return fs.ErrChanged(fs.Write, t.shown)
			}
			out, err = f.publish(ctx, t, parent, base, &old, content, pre.Version != "")
			return err
		})
	})
	return out, err
}

// target is what a mutation works on.
type target struct {
	view  *view
	op    fs.Op
	loc   location
	shown string
	root  string // canonical; the writable root
	below string // path below it; empty for the root itself
}

// mutating walks a path, takes the lock of what it leads to and hands that over once the policy allows it.
func (f *FS) mutating(ctx context.Context, p Policy, op fs.Op, name, leadsTo string, do func(target) error) error {
	shown := fs.Display(p.Root, name)
	return f.attempts(ctx, p, op, shown, name, func() error {
		if p.Mode != sandbox.WorkspaceWrite && p.Mode != sandbox.DangerFullAccess {
			return fs.ErrSandbox(op, shown, p.Mode)
		}
		v := newView(p)
		before, err := v.resolve(name)
		if err != nil {
			return err
		}
		if err := f.locks.lock(ctx, before.host); err != nil {
			return err
		}
		defer f.locks.unlock(before.host)
		// While this waited the path may have come to mean something else.
		loc, err := v.resolve(name)
		if err != nil {
			return err
		}
		if loc.host != before.host {
			return errMoved
		}
		if leadsTo != "" && loc.view != leadsTo {
			return fs.ErrElsewhere(op, shown)
		}
		root, below, err := v.writable(loc)
		if errors.Is(err, errDenied) {
			return fs.ErrSandbox(op, shown, p.Mode)
		}
		if err != nil {
			return err
		}
		if loc.dir || loc.dirOnly || below == "" {
			return fs.ErrNotRegularFile(op, shown)
		}
		return do(target{v, op, loc, shown, root, below})
	})
}

// within opens the target's parent directory beneath the writable root and hands it over.
func (t target) within(do func(parent *dir, base string) error) error {
	parent, base, err := openParent(t.root, t.below, t.loc.missing > 0)
	if err != nil {
		if t.loc.missing == 0 && errors.Is(err, iofs.ErrNotExist) {
			return errors.Join(errMoved, err)
		}
		return err
	}
	defer parent.close()
	if denied, err := t.view.guarded(t.loc, parent, base); err != nil {
		return err
	} else if denied {
		return fs.ErrSandbox(t.op, t.shown, t.view.Mode)
	}
	return do(parent, base)
}

// publish stages content in the target's directory and gives it the target's name, in place of old if that is set. Strict
// means that only exactly old, or nothing, may be replaced.
func (f *FS) publish(ctx context.Context, t target, parent *dir, base string, old *status, content []byte, strict bool) (out Written, err error) {
	if old != nil {
		if err := parent.mayWrite(base); err != nil {
			return Written{}, err
		}
	}
	s, err := parent.stage(base)
	if err != nil {
		return Written{}, err
	}
	defer func() {
		if left := s.discard(); left != nil && err != nil {
			err = fs.ErrIO(t.op, t.shown, fmt.Sprintf("%s failed (%v) and %v", t.op, err, left))
		}
	}()
	if err := fill(ctx, s.file, content, old); err != nil {
		return Written{}, err
	}
	if f.staged != nil {
		f.staged()
	}
	if ctx.Err() != nil {
		return Written{}, ctx.Err()
	}
	if old == nil {
		err = s.create(base)
		if errors.Is(err, unix.EEXIST) {
			if strict {
				return Written{}, fs.ErrOverwrite(t.shown)
			}
			return Written{}, errMoved
		}
	} else {
		err = f.exchange(t, s, parent, base, *old, strict)
	}
	if err != nil {
		return Written{}, err
	}
	if err := parent.sync(); err != nil {
		return Written{}, err
	}
	now, err := fstat(s.file)
	if err != nil {
		return Written{}, err
	}
	return Written{Path: t.loc.view, Created: old == nil, Version: now.version}, nil
}

// exchange replaces old by the staged content.
func (f *FS) exchange(t target, s *stage, parent *dir, base string, old status, strict bool) error {
	now, err := parent.lstat(base)
	switch {
	case errors.Is(err, iofs.ErrNotExist) && strict, err == nil && strict && now.version != old.version:
		if t.op == fs.Write && err != nil {
			return fs.ErrGone(t.shown)
		}
		return fs.ErrChanged(t.op, t.shown)
	case errors.Is(err, iofs.ErrNotExist), err == nil && !now.regular:
		return errMoved
	case err != nil:
		return err
	}
	return s.replace(base)
}

// fill writes the content, and gives the file the permissions and the owner of old.
func fill(ctx context.Context, f *os.File, content []byte, old *status) error {
	for rest := content; len(rest) > 0; {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		n := min(len(rest), writeChunk)
		if _, err := f.Write(rest[:n]); err != nil {
			return err
		}
		rest = rest[n:]
	}
	if old != nil {
		// Only root may give files away; the group goes where this process is a member of it. An owner that cannot be kept is
		// no reason to refuse: the same holds for every editor that saves this way.
		mine, err := fstat(f)
		if err != nil {
			return err
		}
		if mine.uid != old.uid || mine.gid != old.gid {
			if f.Chown(old.uid, old.gid) != nil {
				_ = f.Chown(-1, old.gid)
			}
		}
		// Writing takes the set-id bits from a file, and so does this.
		if err := ignoreEINTR(func() error { return unix.Fchmod(int(f.Fd()), old.perm&0o1777) }); err != nil {
			return err
		}
	}
	return f.Sync()
}

// MakeTemp makes the temp directory of a session below the deployment's, unless it is there, and returns its path. A directory
// that this user does not own is an error.
func MakeTemp(tempDir, session string) (string, error) {
	dir, err := sandbox.SessionTemp(tempDir, session)
	if err != nil {
		return "", fmt.Errorf("session temp directory: %w", err)
	}
	if err := os.MkdirAll(path.Dir(dir), 0o700); err != nil {
		return "", fmt.Errorf("session temp directory: %w", err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, iofs.ErrExist) {
		return "", fmt.Errorf("session temp directory: %w", err)
	}
	st, err := lstatHost(dir)
	if err != nil {
		return "", fmt.Errorf("session temp directory %s: %w", dir, err)
	}
	if !st.folder || st.uid != os.Geteuid() {
		return "", fmt.Errorf("session temp directory %s is not a directory of this user", dir)
	}
	return dir, nil
}

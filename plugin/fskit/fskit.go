//go:build unix

// Package fskit is what providers of the fs capability share: the fence, and the file operations on real disks.
//
// An operation names a path as a model spells it. The path is walked component by component, in the world a confined command
// would see (/tmp is the session's temp directory there), to its canonical form. For a mutation the policy then decides
// on that form and names the writable root; the root is opened, the parent directory is opened beneath it without
// following any link, and everything after happens relative to that descriptor. A link that appears meanwhile makes the
// kernel refuse, and the walk starts anew: what was checked is what is changed.
//
// Files are replaced as a whole: the new content is staged beside the target, synced and renamed over it, so that readers
// see the old or the new file and a crash leaves one of the two. A file with several hard links loses the one that was
// written through; the others keep the old content.
package fskit

import (
	"context"
	"errors"
	"fmt"
	iofs "io/fs"
	"strings"
	"syscall"

	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/fs"
	"github.com/cordon-host/cordon/capability/sandbox"
)

// maxAttempts bounds how often a walk starts anew because a directory on the way changed. A swap that is lost that often
// is somebody's loop.
const maxAttempts = 32

// DefaultMaxEditBytes is the size of the largest file that is edited, in bytes: old and new text are held in memory.
const DefaultMaxEditBytes = 32 << 20

// Policy is what one call may do, and the world it does it in.
type Policy struct {
	// Mode decides. In danger-full-access nothing below but Root applies.
	Mode sandbox.Mode
	// Root is the workspace root, absolute; relative paths start there. In a confined mode it must be canonical: one that is
	// not may be a link that somebody put in the place of what the policy meant.
	Root string
	// Temp is the directory that /tmp and /var/tmp stand for; empty for a call that has none. It must exist.
	Temp string
	// Protected are files and directories, with everything below, that no confined call changes, whether they exist or not.
	Protected []string
	// Hidden are directories that no confined call reads or changes.
	Hidden []string
}

// FS works on the file systems of this host. It may be used by many goroutines; mutations of one file wait for each other,
// first come, first served.
type FS struct {
	// MaxEditBytes is the size of the largest file that Edit takes; 0 for DefaultMaxEditBytes.
	MaxEditBytes int64

	locks lockTable

	// staged, in tests, is called between the staging of new content and its publication.
	staged func()
}

// Info is what Stat tells.
type Info struct {
	Path    string // canonical
	Kind    string // file, directory or other
	Size    int64
	Version string // changes whenever the file does
	Mode    uint32 // permission bits
}

// Entry is one name in a directory.
type Entry struct {
	Name string
	Kind string // of what a link leads to; other when that is nothing
}

// Kinds of an Info and an Entry.
const (
	KindFile      = "file"
	KindDirectory = "directory"
	KindOther     = "other"
)

// Precondition is what must hold at the moment of a mutation.
type Precondition struct {
	MustNotExist bool
	Version      string // empty: any
	LeadsTo      string // canonical path, see Resolve; empty: any
}

// Written is what a mutation did.
type Written struct {
	Path         string // canonical
	Created      bool
	Version      string
	Replacements int64 // of an edit
}

// Resolve tells where a path leads: its canonical form, and whether something is there. What does not exist is named as it
// would be made. It asks no policy beyond what the mode makes of places.
func (f *FS) Resolve(ctx context.Context, p Policy, path string) (canonical string, exists bool, err error) {
	err = f.attempts(ctx, p, fs.Resolve, fs.Display(p.Root, path), path, func() error {
		loc, err := newView(p).resolve(path)
		canonical, exists = loc.view, loc.missing == 0
		return err
	})
	return canonical, exists, err
}

// Stat tells what a path leads to.
func (f *FS) Stat(ctx context.Context, p Policy, path string) (Info, error) {
	var out Info
	err := f.reading(ctx, p, fs.Stat, path, func(loc location, parent *dir, name string) error {
		st, err := parent.lstat(name)
		if err != nil {
			return err
		}
		if st.link {
			return errMoved
		}
		out = Info{Path: loc.view, Kind: st.kind(), Size: st.size, Version: st.version, Mode: st.perm}
		return nil
	})
	return out, err
}

// errMoved is for a path that is not any more what it was when it was walked.
var errMoved = errors.New("path changed while it was used")

// reading walks a path, checks that it may be read and hands over its parent directory and its last name.
func (f *FS) reading(ctx context.Context, p Policy, op fs.Op, path string, do func(loc location, parent *dir, name string) error) error {
	shown := fs.Display(p.Root, path)
	p.Protected = nil // from changes only
	return f.attempts(ctx, p, op, shown, path, func() error {
		v := newView(p)
		loc, err := v.resolve(path)
		if err != nil {
			return err
		}
		if !v.readable(loc) {
			return fs.ErrSandbox(op, shown, p.Mode)
		}
		if loc.missing > 0 || loc.host == "" {
			return iofs.ErrNotExist
		}
		parent, name, err := openParent("/", strings.TrimPrefix(loc.host, "/"), false)
		if err != nil {
			return err
		}
		defer parent.close()
		if denied, err := v.guarded(loc, parent, name); err != nil {
			return err
		} else if denied {
			return fs.ErrSandbox(op, shown, p.Mode)
		}
		return do(loc, parent, name)
	})
}

// attempts runs do until it does not meet a change, and makes its error a fault of the capability.
func (f *FS) attempts(ctx context.Context, p Policy, op fs.Op, shown, path string, do func() error) error {
	if strings.TrimSpace(path) == "" {
		return fs.ErrEmptyPath()
	}
	if strings.ContainsRune(path, 0) {
		return fs.ErrIO(op, shown, "a path has no NUL character in it")
	}
	if c := sandbox.CanonicalPath(p.Root); p.Mode.Confined() && (c != p.Root || !sandbox.Contains("/", c)) {
		return fs.ErrIO(op, shown, fmt.Sprintf("the workspace root %q is not a canonical path", p.Root))
	}
	for range maxAttempts {
		if ctx.Err() != nil {
			return fs.ErrAborted(op)
		}
		err := do()
		if err == nil {
			return nil
		}
		if moved(err) {
			continue
		}
		return asFault(ctx, op, shown, err)
	}
	return fs.ErrIO(op, shown, "a directory on the way kept changing; try again")
}

// moved reports whether an error says that a walk is out of date.
func moved(err error) bool { return errors.Is(err, errMoved) }

// asFault gives an error of the operating system its place in the capability's vocabulary.
func asFault(ctx context.Context, op fs.Op, shown string, err error) error {
	var errno syscall.Errno
	switch {
	case ctx.Err() != nil:
		return fs.ErrAborted(op)
	case fault.Reason(err) != "":
		return err
	case errors.Is(err, errNotDirectory), errors.Is(err, syscall.ENOTDIR):
		return fs.ErrParent(shown)
	case errors.Is(err, iofs.ErrNotExist):
		return fs.ErrNotFound(op, shown)
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		return fs.ErrPermission(op, shown)
	case errors.As(err, &errno):
		return fs.ErrIO(op, shown, errno.Error())
	}
	return fs.ErrIO(op, shown, err.Error())
}

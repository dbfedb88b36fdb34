package host

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cordon-host/cordon/host/compose"
	"github.com/cordon-host/cordon/host/lock"
	"github.com/cordon-host/cordon/host/trust"
)

// LockError says that a composition has what its lock file does not accept. Nothing of it was started.
type LockError struct{ Diagnostics compose.Diagnostics }

func (e *LockError) Error() string { return (&CompositionError{e.Diagnostics}).Error() }

// Tier is how a row's code came to be here.
type Tier string

const (
	BuiltIn     Tier = "built-in"    // a part of the host
	Locked      Tier = "locked"      // exactly what the lock file accepts
	Development Tier = "development" // anything else: nobody has accepted this build
)

// checker holds a composition against its lock file.
func (s *source) checker() lock.Checker {
	return lock.Checker{File: s.lock, Path: lock.Path(s.plan), Plan: s.plan, Accept: trust.Command("lock", s.plan.Path)}
}

// lockedPrograms refuses executables that the lock file does not accept.
func (c *composition) lockedPrograms() error {
	if diags := c.checker().Programs(c.programs()); diags.HasErrors() {
		return &LockError{diags}
	}
	return nil
}

// lockedInterfaces refuses manifests that the lock file does not accept.
func (c *composition) lockedInterfaces() error {
	all := map[string]lock.Interface{}
	for id, m := range c.manifests {
		i, err := lock.Describe(m)
		if err != nil {
			return err
		}
		all[id] = i
	}
	if diags := c.checker().Interfaces(all); diags.HasErrors() {
		return &LockError{diags}
	}
	return nil
}

// programs are what the rows run.
func (c *composition) programs() map[string]lock.Program {
	out := map[string]lock.Program{}
	for id, exe := range c.executables {
		out[id] = c.program(id, exe.digest)
	}
	return out
}

func (c *composition) program(id, digest string) lock.Program {
	p := lock.Program{Executable: digest}
	if in := c.inputs[id]; in != nil {
		p.Built.Go, p.Built.Platform = in.Compiler()
	}
	return p
}

// accepted is the composition as a lock file has it. A disabled row runs nothing, and may name what is not there: what was accepted for
// it stays.
func (c *composition) accepted() (*lock.File, error) {
	next := &lock.File{Entries: map[string]*lock.Entry{}}
	for _, row := range c.plan.Entries {
		exe, runs := c.executables[row.ID]
		if !runs {
			if c.lock != nil && c.lock.Entries[row.ID] != nil {
				next.Entries[row.ID] = c.lock.Entries[row.ID]
			}
			continue
		}
		i, err := lock.Describe(c.manifests[row.ID])
		if err != nil {
			return nil, err
		}
		next.Entries[row.ID] = &lock.Entry{Program: c.program(row.ID, exe.digest), Interface: i}
	}
	return next, nil
}

// tier says how an executable of a row came to be here. It is worked out each time it is asked for: a record of it could be wrong.
func (c *composition) tier(row *compose.Entry, digest string) Tier {
	if c.lock != nil && c.lock.Entries[row.ID] != nil && c.lock.Entries[row.ID].Executable == digest {
		return Locked
	}
	return Development
}

// tier says how the code of a generation came to be here.
func (r runnable) tier() Tier {
	if r.row == nil {
		return BuiltIn
	}
	return r.composition.tier(r.row, r.digest)
}

// Lock is a lock file that could be written.
type Lock struct {
	Path    string
	Changes []lock.Change // what would be accepted that is not yet, and no longer accepted that is

	text   []byte
	tree   *trust.Tree
	store  *trust.Store
	before string // the digest of the lock file there is; empty for none
}

// PrepareLock finds out what accepting a composition as it is now would change in its lock file. It writes nothing.
func PrepareLock(ctx context.Context, o Options) (*Lock, error) {
	h, err := prepare(o)
	if err != nil {
		return nil, err
	}
	c, err := h.load(ctx)
	if err != nil {
		return nil, err
	}
	next, err := c.accepted()
	if err != nil {
		return nil, err
	}
	l := &Lock{Path: lock.Path(c.plan), Changes: lock.Diff(c.lock, next), tree: c.tree, store: trust.Open(h.layout.TrustDir)}
	if l.text, err = next.Bytes(); err != nil {
		return nil, err
	}
	for _, f := range c.tree.Files() {
		if f.Path == l.Path {
			l.before = f.SHA256
		}
	}
	return l, nil
}

// Write replaces the lock file, in one step, and records that the tree is trusted with it: whoever accepts this code trusted all of
// the rest a moment ago. A lock file that changed since [PrepareLock] is left as it is.
func (l *Lock) Write() error {
	_, now, _ := lock.Read(l.Path)
	if now != l.before {
		return &EnvironmentError{fmt.Errorf("%s changed meanwhile; look again", l.Path)}
	}
	if err := replaceFile(l.Path, l.text); err != nil {
		return &EnvironmentError{fmt.Errorf("lock file: %w", err)}
	}
	sum := sha256.Sum256(l.text)
	if err := l.store.Trust(l.tree.With(trust.File{Path: l.Path, SHA256: hex.EncodeToString(sum[:])})); err != nil {
		return &EnvironmentError{fmt.Errorf("trust: %w", err)}
	}
	return nil
}

// replaceFile is writeFile for a file of the tree: it keeps the mode that files there have, and it is on disk when it returns.
func replaceFile(path string, data []byte) error {
	mode := os.FileMode(0o644)
	if info, err := os.Lstat(path); err == nil {
		mode = info.Mode().Perm()
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Chmod(mode), f.Sync(), f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

// Package trust decides whether the code of a composition may run here at all.
//
// A compose file in a directory nobody agreed to is data: it is read, never built, executed or asked to describe
// itself. Agreement is given per compose file, to everything that leads to execution as it is at that moment: the file
// itself, the sources of its packages, its executables. It is kept outside the tree, as direnv does, so that the tree
// cannot vouch for itself, and it ends with the first byte that changes.
//
// The steps are: compose.Load reads the file, [build.Cache.Inputs] lists what its packages would be built from,
// [Survey] takes the digests of all of it, [Store.Check] compares them with what was agreed to. Only then is anything
// built or copied, and only if it still has those digests: [build.Cache.BuildAll] and [Tree.Same] see to that.
package trust

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Store keeps what was agreed to: one file per compose file, in a directory of its own.
type Store struct{ dir string }

// Open is the store in dir. Its methods refuse a directory or a file that is not the caller's or that others can
// write to; [Store.Trust] makes the directory if it is missing.
func Open(dir string) *Store { return &Store{dir} }

// record is one file of the store.
type record struct {
	Format int       `json:"format"`
	Path   string    `json:"path"` // of the compose file
	Digest string    `json:"digest"`
	At     time.Time `json:"at"`
	Files  []File    `json:"files"`
}

const recordFormat = 1

// maxRecord bounds, in bytes, what is read of a record: a hundred thousand files of long names.
const maxRecord = 64 << 20

func (s *Store) path(compose string) string {
	sum := sha256.Sum256([]byte(compose))
	return filepath.Join(s.dir, hex.EncodeToString(sum[:])+".json")
}

// Trust records that t may run, instead of whatever was agreed to for its compose file before.
func (s *Store) Trust(t *Tree) error {
	if err := makePrivate(s.dir); err != nil {
		return fmt.Errorf("trust store: %w", err)
	}
	data, err := json.MarshalIndent(record{recordFormat, t.Path(), t.Digest(), time.Now().UTC().Truncate(time.Second), t.files}, "", " ")
	if err != nil {
		return err
	}
	tmp, err := os.CreateTemp(s.dir, ".new-") // 0600
	if err != nil {
		return fmt.Errorf("trust store: %w", err)
	}
	_, err = tmp.Write(append(data, '\n'))
	err = errors.Join(err, tmp.Sync(), tmp.Close())
	if err == nil {
		err = os.Rename(tmp.Name(), s.path(t.Path()))
	}
	if err != nil {
		os.Remove(tmp.Name())
		return fmt.Errorf("trust store: %w", err)
	}
	return nil
}

// Forget takes back the agreement to a compose file, by its canonical path. It is no error if there was none.
func (s *Store) Forget(compose string) error {
	if err := os.Remove(s.path(compose)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("trust store: %w", err)
	}
	return nil
}

// Check is nil if exactly t was agreed to, else an [*UntrustedError], or what kept the store from answering.
func (s *Store) Check(t *Tree) error {
	err := private(s.dir)
	var r *record
	if err == nil {
		r, err = s.read(t.Path())
	}
	if errors.Is(err, fs.ErrNotExist) {
		return &UntrustedError{Path: t.Path(), Reason: NeverTrusted}
	}
	if err != nil {
		return fmt.Errorf("trust store: %w", err)
	}
	if r.Digest == t.Digest() {
		return nil
	}
	u := &UntrustedError{Path: t.Path(), Reason: Changed}
	old := map[string]string{}
	for _, f := range r.Files {
		old[f.Path] = f.SHA256
	}
	for _, f := range t.files {
		switch sum, known := old[f.Path]; {
		case !known:
			u.Appeared = append(u.Appeared, f.Path)
		case sum != f.SHA256:
			u.Changed = append(u.Changed, f.Path)
		}
		delete(old, f.Path)
	}
	for path := range old {
		u.Vanished = append(u.Vanished, path)
	}
	slices.Sort(u.Vanished)
	return u
}

// read is the record of a compose file, if nobody else can have written it.
func (s *Store) read(compose string) (*record, error) {
	path := s.path(compose)
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if err := ownedAlone(path, info); err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file; remove it and run  cordon trust  again", path)
	}
	var r record
	if err := json.NewDecoder(io.LimitReader(f, maxRecord)).Decode(&r); err != nil {
		return nil, fmt.Errorf("%s cannot be read: %w; remove it and run  cordon trust  again", path, err)
	}
	if r.Format != recordFormat || r.Path != compose || r.Digest != digest(r.Path, r.Files) {
		return nil, fmt.Errorf("%s is not a record of this cordon; remove it and run  cordon trust  again", path)
	}
	return &r, nil
}

// Reason is why something is not trusted.
type Reason string

const (
	NeverTrusted Reason = "never trusted"
	Changed      Reason = "changed"
)

// UntrustedError says that a composition may not run, and what would change that. All paths are absolute.
type UntrustedError struct {
	Path     string // of the compose file
	Reason   Reason
	Changed  []string // other content than was agreed to
	Appeared []string // not there then
	Vanished []string // not there now
}

// maxNamed is how many files an error names of each kind.
const maxNamed = 10

// Command is what a person runs, having looked, to agree.
func (e *UntrustedError) Command() string { return Command("trust", e.Path) }

// Command is a command of the command line about a compose file, to be pasted into a POSIX shell.
func Command(verb, composePath string) string {
	return "cordon " + verb + " -f " + shellWord(composePath)
}

func (e *UntrustedError) Error() string {
	var b strings.Builder
	if e.Reason == NeverTrusted {
		fmt.Fprintf(&b, "%s is not trusted: nothing of it is built or run until somebody agrees\n", e.Path)
	} else {
		fmt.Fprintf(&b, "%s is not trusted any more: what leads to execution has changed\n", e.Path)
		dir := filepath.Dir(e.Path)
		name := func(word string, paths []string) {
			for i, p := range paths {
				if i == maxNamed {
					fmt.Fprintf(&b, "  %s: %d more\n", word, len(paths)-i)
					return
				}
				if rel, err := filepath.Rel(dir, p); err == nil && filepath.IsLocal(rel) {
					p = rel
				}
				fmt.Fprintf(&b, "  %s: %s\n", word, p)
			}
		}
		name("changed", e.Changed)
		name("new", e.Appeared)
		name("gone", e.Vanished)
	}
	fmt.Fprintf(&b, "hint: read it, then run  %s", e.Command())
	return b.String()
}

// shellWord is s as one word of a POSIX shell.
func shellWord(s string) string {
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("/._-+:@%", r)
	}
	if s != "" && strings.IndexFunc(s, func(r rune) bool { return !plain(r) }) < 0 {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

var _ error = (*UntrustedError)(nil)

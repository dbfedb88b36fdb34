package trust

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// Layout is where a deployment keeps what must never be inside its own tree.
type Layout struct {
	// ID names the deployment: 16 hex digits that stand for the canonical path of its compose file.
	ID string
	// StateDir is the deployment's own state: sessions, logs, the rows' private directories.
	StateDir string
	// RunDir holds sockets and login codes of the running host.
	RunDir string
	// TrustDir and CacheDir are shared by all deployments of the user: what was agreed to, and what was built.
	TrustDir, CacheDir string

	base, runBase string
}

// Names below the directory of all deployments.
const (
	trustName = "trust"
	cacheName = "cache"
)

// maxSocketPath is how long the path of a socket may be on Linux, without the byte that ends it.
const maxSocketPath = 107

// socketRoom is what is kept free below RunDir for the names of sockets.
const socketRoom = 48

// LayoutOf finds the places of the deployment of a compose file and makes those that are missing, each open to its
// owner alone; what is there and is not so is refused. state names another directory than $XDG_STATE_HOME/cordon for
// everything that lasts; empty for that one.
func LayoutOf(composePath, state string) (Layout, error) {
	l, err := locate(composePath, state)
	if err != nil {
		return Layout{}, err
	}
	for _, dir := range []string{l.base, l.StateDir, l.TrustDir, l.CacheDir, l.runBase, l.RunDir} {
		if err := makePrivate(dir); err != nil {
			return Layout{}, err
		}
	}
	return *l, nil
}

func locate(composePath, state string) (*Layout, error) {
	compose, err := filepath.Abs(composePath)
	if err == nil {
		compose, err = filepath.EvalSymlinks(compose)
	}
	if err != nil {
		return nil, err
	}
	base := state
	if base == "" {
		if base, err = stateHome(); err != nil {
			return nil, err
		}
	}
	if base, err = resolve(base); err != nil {
		return nil, err
	}
	tree := filepath.Dir(compose)
	if within(base, tree) {
		return nil, fmt.Errorf("state directory %s is inside the composition's own tree %s, where what is confined could reach it; name another with --state", base, tree)
	}
	l := &Layout{ID: id(compose), TrustDir: filepath.Join(base, trustName), CacheDir: filepath.Join(base, cacheName), base: base}
	l.StateDir = filepath.Join(base, l.ID)
	// Two hosts with separate states do not share sockets either.
	run := l.ID
	if state != "" {
		run = id(compose + "\x00" + base)
	}
	if l.runBase, err = runBase(run); err != nil {
		return nil, err
	}
	l.RunDir = filepath.Join(l.runBase, run)
	if len(l.RunDir)+1+socketRoom > maxSocketPath {
		return nil, fmt.Errorf("run directory %s: path is too long for a socket", l.RunDir)
	}
	if within(l.RunDir, tree) {
		return nil, fmt.Errorf("run directory %s is inside the composition's own tree %s; set XDG_RUNTIME_DIR to a directory outside", l.RunDir, tree)
	}
	return l, nil
}

// Hidden are the directories no confined process may see.
func (l Layout) Hidden() []string { return []string{l.base, l.runBase} }

func id(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:8])
}

// stateHome follows the XDG base directory specification, which has relative values ignored.
func stateHome() (string, error) {
	if dir := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "cordon"), nil
	}
	home, err := os.UserHomeDir()
	if err != nil || !filepath.IsAbs(home) {
		return "", errors.New("no place for state: HOME is not set; set it, or name a place with --state")
	}
	return filepath.Join(home, ".local", "state", "cordon"), nil
}

// runBase is $XDG_RUNTIME_DIR/cordon if that can be used for a socket, else a short directory below /tmp.
func runBase(run string) (string, error) {
	if dir := os.Getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(dir) && private(filepath.Clean(dir)) == nil {
		base := filepath.Join(dir, "cordon")
		if len(filepath.Join(base, run))+1+socketRoom <= maxSocketPath {
			return resolve(base)
		}
	}
	base := fmt.Sprintf("/tmp/cordon-%d", os.Geteuid())
	// Anybody can make a name below /tmp. One that is there already must be ours.
	if err := private(base); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("run directory: %w", err)
	}
	return base, nil
}

// resolve is the canonical form of a path of which the last elements may not exist.
func resolve(path string) (string, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	var rest []string
	for p := path; ; p = filepath.Dir(p) {
		real, err := filepath.EvalSymlinks(p)
		if err == nil {
			return filepath.Join(append([]string{real}, rest...)...), nil
		}
		if !errors.Is(err, fs.ErrNotExist) || p == filepath.Dir(p) {
			return "", err
		}
		rest = append([]string{filepath.Base(p)}, rest...)
	}
}

// makePrivate makes a directory 0700, its parents too, or finds that it is private already.
func makePrivate(dir string) error {
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return private(dir)
}

// private refuses a directory that is not one, not the caller's, or open to others. A symbolic link is no directory.
func private(dir string) error {
	info, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return fmt.Errorf("%s is not a directory; remove it or name another place", dir)
	}
	if err := ownedAlone(dir, info); err != nil {
		return err
	}
	if info.Mode().Perm()&0o077 != 0 {
		return fmt.Errorf("%s is open to others (mode %04o); chmod 700 it once you know that nobody changed anything in it", dir, info.Mode().Perm())
	}
	return nil
}

// ownedAlone refuses what is not the caller's or what others can write to.
func ownedAlone(path string, info fs.FileInfo) error {
	st, ok := info.Sys().(*syscall.Stat_t)
	switch {
	case !ok || int(st.Uid) != os.Geteuid():
		return fmt.Errorf("%s belongs to another user; remove it or name another place", path)
	case info.Mode().Perm()&0o022 != 0:
		return fmt.Errorf("%s can be written by others (mode %04o); chmod 700 it once you know that nobody changed it", path, info.Mode().Perm())
	}
	return nil
}

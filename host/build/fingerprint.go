package build

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// stat is what tells that a file has not changed: a write moves the change time, which no program can set back.
type stat struct {
	Dev, Ino     uint64
	Size         int64
	Mtime, Ctime int64 // nanoseconds since the epoch
}

func statOf(path string) (stat, error) {
	info, err := os.Stat(path)
	if err != nil {
		return stat{}, err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return stat{}, fmt.Errorf("%s: no file status", path)
	}
	mtime, ctime := times(st)
	return stat{uint64(st.Dev), st.Ino, st.Size, mtime.Nano(), ctime.Nano()}, nil
}

// racy is how old a change must be for its time to prove anything: file systems count in steps, and two changes
// within one step look the same. Two seconds is the coarsest step in use (FAT).
const racy = int64(2 * time.Second)

func now() int64 { return time.Now().UnixNano() }

// fingerprint is the index file of one package: what its inputs were and how to see that they still are.
type fingerprint struct {
	Format    int        `json:"format"`
	Tool      *toolchain `json:"tool"`
	Inputs    *Inputs    `json:"inputs"`
	Vendored  bool       `json:"vendored"`
	FileStats []stat     `json:"fileStats"` // of Inputs.Files
	Dirs      []dirState `json:"dirs"`
	Taken     int64      `json:"taken"` // nanoseconds since the epoch, before anything was read
}

type dirState struct {
	Path  string `json:"path"`
	Stat  stat   `json:"stat"`
	Names string `json:"names"` // digest of the listing
}

const fingerprintFormat = 1

// maxDirs bounds how many directories a fingerprint watches; a package that embeds more is listed anew each time.
const maxDirs = 10_000

func (c *Cache) indexPath(dir string) string {
	sum := sha256.Sum256([]byte(dir))
	return filepath.Join(c.dir, indexDir, hex.EncodeToString(sum[:])+".json")
}

// remember stores how to find in again. It fails only if the cache does.
func (c *Cache) remember(in *Inputs, from *collection, taken int64) error {
	if len(from.dirs) > maxDirs {
		return nil
	}
	f := fingerprint{Format: fingerprintFormat, Tool: in.tool, Inputs: in, Vendored: in.vendored, Taken: taken}
	for _, file := range in.Files {
		st, err := statOf(file.Path)
		if err != nil {
			return nil // gone again: whoever looks next lists anew
		}
		f.FileStats = append(f.FileStats, st)
	}
	for dir := range from.dirs {
		d, err := dirStateOf(dir)
		if err != nil {
			return nil
		}
		if d.Stat.Ctime >= taken-racy {
			return nil // perhaps changed after the go command looked: its listing would vouch for files nobody listed
		}
		f.Dirs = append(f.Dirs, d)
	}
	slices.SortFunc(f.Dirs, func(a, b dirState) int { return strings.Compare(a.Path, b.Path) })
	return c.store(&f)
}

func (c *Cache) store(f *fingerprint) error {
	data, err := json.Marshal(f)
	if err != nil {
		return err
	}
	return c.writeFile(c.indexPath(f.Inputs.Dir), data)
}

// writeFile replaces a file of the cache in one step.
func (c *Cache) writeFile(path string, data []byte) error {
	tmp, err := os.CreateTemp(filepath.Join(c.dir, tmpDir), "file-")
	if err != nil {
		return err
	}
	_, err = tmp.Write(data)
	err = errors.Join(err, tmp.Close())
	if err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		os.Remove(tmp.Name())
	}
	return err
}

func dirStateOf(dir string) (dirState, error) {
	// The status first: a change after it shows in the next one.
	st, err := statOf(dir)
	if err != nil {
		return dirState{}, err
	}
	names, err := listing(dir)
	return dirState{dir, st, names}, err
}

// listing is a digest of the names and kinds of what a directory holds.
func listing(dir string) (string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return "", err
	}
	h := sha256.New()
	for _, e := range entries {
		fmt.Fprintf(h, "%q %d\n", e.Name(), e.Type()&fs.ModeType)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// remembered is the inputs of a package as they were found before, nil unless nothing they depend on has changed.
func (c *Cache) remembered(dir string) *Inputs {
	data, err := os.ReadFile(c.indexPath(dir))
	if err != nil {
		return nil
	}
	var f fingerprint
	if err := json.Unmarshal(data, &f); err != nil || f.Format != fingerprintFormat || f.Inputs == nil || f.Tool == nil ||
		f.Inputs.Dir != dir || len(f.FileStats) != len(f.Inputs.Files) || !f.Tool.current() {
		return nil
	}
	taken, refreshed := now(), false
	for i, file := range f.Inputs.Files {
		st, err := statOf(file.Path)
		if err != nil {
			return nil
		}
		if st == f.FileStats[i] && st.Ctime < f.Taken-racy {
			continue
		}
		if sum, err := Digest(file.Path); err != nil || sum != file.SHA256 {
			return nil
		}
		f.FileStats[i], refreshed = st, true
	}
	for i, d := range f.Dirs {
		st, err := statOf(d.Path)
		if err != nil {
			return nil
		}
		if st == d.Stat && st.Ctime < f.Taken-racy {
			continue
		}
		if names, err := listing(d.Path); err != nil || names != d.Names {
			return nil
		}
		f.Dirs[i].Stat, refreshed = st, true
	}
	f.Inputs.tool, f.Inputs.vendored = f.Tool, f.Vendored
	if refreshed {
		f.Taken = taken
		// The answer stands without it; the next one is only slower.
		_ = c.store(&f)
	}
	return f.Inputs
}

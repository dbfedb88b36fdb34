package trust

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cordon-host/cordon/host/build"
	"github.com/cordon-host/cordon/host/compose"
	"github.com/cordon-host/cordon/host/lock"
)

// File is one file that leads to execution.
type File struct {
	Path   string `json:"path"`   // absolute
	SHA256 string `json:"sha256"` // hex
}

// Tree is everything that leads to execution under one compose file, as it was when it was looked at.
type Tree struct {
	plan   *compose.Plan
	inputs map[string]*build.Inputs
	files  []File // sorted by path, each once
}

// Survey takes the digests of everything that leads to execution under a plan: its files, the inputs of the rows that
// name packages (by id, as [build.Cache.Inputs] lists them), the executables of the other rows. Disabled rows run
// nothing and are left out. Others are files that were read besides, such as the lock. It only reads.
func Survey(plan *compose.Plan, inputs map[string]*build.Inputs, others ...File) (*Tree, error) {
	t := &Tree{plan: plan, inputs: inputs}
	files := map[string]string{}
	for _, f := range plan.Files {
		files[f.Path] = f.SHA256
	}
	for _, f := range others {
		files[f.Path] = f.SHA256
	}
	for _, e := range plan.Entries {
		in := inputs[e.ID]
		switch {
		case e.Disabled:
		case e.Kind == compose.Package && in != nil:
			for _, f := range in.Files {
				files[f.Path] = f.SHA256
			}
		case e.Kind == compose.Package || e.Target == "":
			return nil, fmt.Errorf("row %q: nothing is known of its plugin", e.ID)
		default:
			sum, err := build.Digest(e.Target)
			if err != nil {
				return nil, fmt.Errorf("row %q: %w", e.ID, err)
			}
			files[e.Target] = sum
		}
	}
	for path, sum := range files {
		t.files = append(t.files, File{path, sum})
	}
	t.sort()
	return t, nil
}

// With is the tree with one file as it is now, and all others as they were when it was looked at.
func (t *Tree) With(f File) *Tree {
	out := &Tree{plan: t.plan, inputs: t.inputs}
	for _, old := range t.files {
		if old.Path != f.Path {
			out.files = append(out.files, old)
		}
	}
	out.files = append(out.files, f)
	out.sort()
	return out
}

func (t *Tree) sort() {
	slices.SortFunc(t.files, func(a, b File) int { return strings.Compare(a.Path, b.Path) })
}

// Path is the canonical path of the compose file.
func (t *Tree) Path() string { return t.plan.Path }

// Len is how many files lead to execution.
func (t *Tree) Len() int { return len(t.files) }

// Files are the files that lead to execution, sorted by path.
func (t *Tree) Files() []File { return slices.Clone(t.files) }

// Digest stands for all of them.
func (t *Tree) Digest() string { return digest(t.plan.Path, t.files) }

func digest(compose string, files []File) string {
	h := sha256.New()
	fmt.Fprintf(h, "cordon trust 1\n%q\n", compose)
	for _, f := range files {
		fmt.Fprintf(h, "%s %q\n", f.SHA256, f.Path)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// Same is nil if the file at path had that digest when the tree was looked at. Whoever makes a copy of an executable to
// run compares with it: the tree may have changed since.
func (t *Tree) Same(path, sha256 string) error {
	i, found := slices.BinarySearchFunc(t.files, path, func(f File, p string) int { return strings.Compare(f.Path, p) })
	if !found {
		return fmt.Errorf("%s is not part of what was looked at", path)
	}
	if t.files[i].SHA256 != sha256 {
		return fmt.Errorf("%s changed while the composition was loaded; try again", path)
	}
	return nil
}

// Protected are the files and directories that lead to execution and must therefore be read-only in every sandbox:
// compose files and lock, the directories of packages, what shapes their modules, executables, and where Go keeps itself
// and its caches. Some names may not exist yet; making them would matter as much as changing them. The paths are
// absolute, sorted, and none is below another.
func (t *Tree) Protected() []string {
	var paths []string
	add := func(list ...string) {
		for _, p := range list {
			if p == "" {
				continue
			}
			paths = append(paths, p)
			// What a link points to is what is read.
			if real, err := filepath.EvalSymlinks(p); err == nil && real != p {
				paths = append(paths, real)
			}
		}
	}
	for _, f := range t.plan.Files {
		add(f.Path)
	}
	add(lock.Path(t.plan))
	for _, in := range t.inputs {
		add(in.Packages...)
		add(in.Toolchain...)
		for _, f := range in.Files {
			add(f.Path)
		}
		for _, root := range in.Modules {
			for _, name := range []string{"go.mod", "go.sum", "vendor"} {
				add(filepath.Join(root, name))
			}
			if work := filepath.Join(root, "go.work"); exists(work) {
				add(work)
			}
		}
	}
	for _, e := range t.plan.Entries {
		if !e.Disabled && e.Kind != compose.Package {
			add(e.Target)
		}
	}
	slices.Sort(paths)
	var out []string
	for _, p := range paths {
		if !slices.ContainsFunc(out, func(q string) bool { return within(p, q) }) {
			out = append(out, p)
		}
	}
	return out
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// within reports whether path is dir or below it; both are clean and absolute.
func within(path, dir string) bool {
	return path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
}

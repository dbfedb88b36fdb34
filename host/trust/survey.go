package trust

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/cordon-host/cordon/host/build"
	"github.com/cordon-host/cordon/host/compose"
)

// LockName is the name of the lock file beside a compose file.
const LockName = "compose.lock"

// Survey is what a plan would run, looked at but not yet built.
type Survey struct {
	Plan     *compose.Plan
	Evidence *Evidence
	// Inputs are those of the enabled rows that name a package, by id.
	Inputs map[string]*build.Inputs
	// Staged are private copies of the executables the other enabled rows name, by id.
	Staged map[string]*build.Binary

	cache *build.Cache
}

// Look finds everything that leads to execution under a plan. It reads and copies; nothing is built and nothing of
// the tree is executed. Diagnostics say which rows cannot be run; the evidence is incomplete then and must not be
// agreed to.
func Look(ctx context.Context, plan *compose.Plan, cache *build.Cache) (*Survey, compose.Diagnostics, error) {
	s := &Survey{Plan: plan, Inputs: map[string]*build.Inputs{}, Staged: map[string]*build.Binary{}, cache: cache}
	type found struct {
		in     *build.Inputs
		binary *build.Binary
		err    error
	}
	finds := make([]found, len(plan.Entries))
	// The go command runs once per package at worst; more of them than processors only get in each other's way.
	slots := make(chan struct{}, runtime.GOMAXPROCS(0))
	var all sync.WaitGroup
	for i, e := range plan.Entries {
		if e.Disabled || e.Target == "" {
			continue
		}
		all.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			if e.Kind == compose.Package {
				finds[i].in, finds[i].err = cache.Inputs(ctx, e.Target)
			} else {
				finds[i].binary, finds[i].err = cache.Stage(e.Target)
			}
		})
	}
	all.Wait()
	if err := ctx.Err(); err != nil {
		return nil, nil, err
	}
	var diags compose.Diagnostics
	files := map[string]string{}
	for _, f := range plan.Files {
		files[f.Path] = f.SHA256
	}
	for i, e := range plan.Entries {
		f := finds[i]
		switch {
		case f.err != nil:
			diags = append(diags, diagnose(plan, e, f.err))
		case f.in != nil:
			s.Inputs[e.ID] = f.in
			for _, file := range f.in.Files {
				files[file.Path] = file.SHA256
			}
		case f.binary != nil:
			s.Staged[e.ID] = f.binary
			files[e.Target] = f.binary.SHA256
		}
	}
	s.Evidence = &Evidence{Path: plan.Path}
	for path, sum := range files {
		s.Evidence.Files = append(s.Evidence.Files, File{path, sum})
	}
	slices.SortFunc(s.Evidence.Files, func(a, b File) int { return strings.Compare(a.Path, b.Path) })
	return s, diags, nil
}

// Programs is what the enabled rows run, by id: packages are compiled, from exactly the sources that were looked at,
// executables are the copies made then. Call it only after [Store.Check].
func (s *Survey) Programs(ctx context.Context) (map[string]*build.Binary, compose.Diagnostics, error) {
	programs := map[string]*build.Binary{}
	var ids []string
	var ins []*build.Inputs
	for _, e := range s.Plan.Entries {
		if in := s.Inputs[e.ID]; in != nil {
			ids, ins = append(ids, e.ID), append(ins, in)
		}
		if b := s.Staged[e.ID]; b != nil {
			programs[e.ID] = b
		}
	}
	var diags compose.Diagnostics
	for i, r := range s.cache.BuildAll(ctx, ins) {
		if r.Err != nil {
			diags = append(diags, diagnose(s.Plan, s.Plan.Entry(ids[i]), r.Err))
			continue
		}
		programs[ids[i]] = r.Binary
	}
	if err := ctx.Err(); err != nil {
		return nil, nil, err
	}
	return programs, diags, nil
}

// diagnose places what kept a row's program from being made at the row.
func diagnose(plan *compose.Plan, e *compose.Entry, err error) *compose.Diagnostic {
	var failed *build.Error
	if !errors.As(err, &failed) {
		return plan.Diagnose(e, "use", compose.CodeBuild, "plugin of %q cannot be made ready: %v", e.ID, err)
	}
	d := plan.Diagnose(e, "use", compose.CodeBuild, "plugin of %q does not build", e.ID)
	d.Notes = strings.Split(failed.Output, "\n")
	if failed.Hint != "" {
		d.Hints = []string{failed.Hint}
	}
	return d
}

// Protected are the files and directories that lead to execution and must therefore be read-only in every sandbox:
// compose files and lock, the directories of packages, what shapes their modules, executables, and where Go keeps itself
// and its caches. Some names may not exist yet; making them would matter as much as changing them. The paths are
// absolute, sorted, and none is below another.
func (s *Survey) Protected() []string {
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
	for _, f := range s.Plan.Files {
		add(f.Path)
	}
	add(filepath.Join(s.Plan.Dir, LockName))
	for _, in := range s.Inputs {
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
	for _, e := range s.Plan.Entries {
		if s.Staged[e.ID] != nil {
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

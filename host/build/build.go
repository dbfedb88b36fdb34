package build

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// ChangedError says that files were changed between the listing of a plugin's inputs and its build. What was decided
// about the inputs does not hold any more; list them again.
type ChangedError struct {
	Dir   string   // of the package
	Files []string // absolute
}

func (e *ChangedError) Error() string {
	return fmt.Sprintf("plugin in %s: sources changed while it was built: %s; try again", e.Dir, strings.Join(e.Files, ", "))
}

// Result is what became of one package.
type Result struct {
	Inputs *Inputs
	Binary *Binary // nil if Err is set
	Err    error   // an *Error, a *ChangedError, or what the machine failed with
}

// The files of a finished build.
const (
	programName = "plugin"
	digestName  = "sha256"
)

// Build compiles one package; see [Cache.BuildAll].
func (c *Cache) Build(ctx context.Context, in *Inputs) (*Binary, error) {
	r := c.BuildAll(ctx, []*Inputs{in})[0]
	return r.Binary, r.Err
}

// BuildAll compiles packages, those of one module in one go. What has been compiled before from the same inputs by the
// same compiler is returned without running it. There is one result for each of ins, in their order.
//
// The compiler sees a private copy of the inputs, made while their digests are taken once more: what does not match
// in is not built but a [ChangedError].
func (c *Cache) BuildAll(ctx context.Context, ins []*Inputs) []Result {
	results := make([]Result, len(ins))
	modules := map[string][]int{}
	var order []string
	for i, in := range ins {
		results[i].Inputs = in
		if results[i].Binary = c.built(in); results[i].Binary != nil {
			continue
		}
		if modules[in.Root] == nil {
			order = append(order, in.Root)
		}
		modules[in.Root] = append(modules[in.Root], i)
	}
	for _, root := range order {
		c.buildModule(ctx, root, modules[root], results)
	}
	return results
}

// built is the finished build of in, nil if there is none.
func (c *Cache) built(in *Inputs) *Binary {
	dir := filepath.Join(c.dir, binDir, in.key())
	sum, err := os.ReadFile(filepath.Join(dir, digestName))
	if err != nil || len(sum) != 2*sha256.Size {
		return nil
	}
	b := &Binary{filepath.Join(dir, programName), string(sum)}
	if inUse.hold(b.Path) != nil {
		return nil
	}
	return b
}

// buildModule builds the packages of one module, which are those of results at the given indexes.
func (c *Cache) buildModule(ctx context.Context, root string, indexes []int, results []Result) {
	fail := func(err error) {
		for _, i := range indexes {
			if results[i].Binary == nil && results[i].Err == nil {
				results[i].Err = err
			}
		}
	}
	sum := sha256.Sum256([]byte(root))
	unlock, err := c.lock(ctx, hex.EncodeToString(sum[:]))
	if err != nil {
		fail(err)
		return
	}
	defer unlock()
	// Another process may have built it while this one waited.
	var todo []*Inputs
	for _, i := range indexes {
		if results[i].Binary = c.built(results[i].Inputs); results[i].Binary == nil {
			todo = append(todo, results[i].Inputs)
		}
	}
	if len(todo) == 0 {
		return
	}
	made, err := c.compile(ctx, todo)
	if err != nil && len(todo) > 1 && ctx.Err() == nil {
		// One at a time tells which of them it is; what compiled before comes out of Go's own cache.
		for _, i := range indexes {
			if results[i].Binary != nil {
				continue
			}
			one, err := c.compile(ctx, []*Inputs{results[i].Inputs})
			if err != nil {
				results[i].Err = err
				continue
			}
			results[i].Binary = one[0]
		}
		return
	}
	if err != nil {
		fail(err)
		return
	}
	for _, i := range indexes {
		if results[i].Binary == nil {
			results[i].Binary = made[slices.Index(todo, results[i].Inputs)]
		}
	}
}

// compile builds packages of one module from a private copy of their inputs.
func (c *Cache) compile(ctx context.Context, ins []*Inputs) ([]*Binary, error) {
	work, err := os.MkdirTemp(filepath.Join(c.dir, tmpDir), "build-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(work)
	snapshot := filepath.Join(work, "src")
	if err := copyInputs(snapshot, ins); err != nil {
		return nil, err
	}
	first := ins[0]
	base := filepath.Join(snapshot, first.Root)
	out := filepath.Join(work, "out")
	if err := os.Mkdir(out, 0o700); err != nil {
		return nil, err
	}
	// Errors name the files of the tree, not of the copy.
	rename := strings.NewReplacer(snapshot, "")
	if len(ins) > 1 && distinctNames(ins) {
		// A directory as output takes several programs, named after their packages.
		args := append([]string{"build", "-o", out + string(filepath.Separator)}, first.flags()...)
		for _, in := range ins {
			args = append(args, in.Package)
		}
		if _, err := c.run(ctx, first.tool, base, args...); err != nil {
			return nil, failed(first, err, rename)
		}
	} else {
		for i, in := range ins {
			args := append([]string{"build", "-o", filepath.Join(out, outName(ins, i))}, in.flags()...)
			if _, err := c.run(ctx, in.tool, base, append(args, in.Package)...); err != nil {
				return nil, failed(in, err, rename)
			}
		}
	}
	binaries := make([]*Binary, len(ins))
	for i, in := range ins {
		if binaries[i], err = c.install(work, filepath.Join(out, outName(ins, i)), in); err != nil {
			return nil, err
		}
	}
	return binaries, nil
}

// outName is the file the i-th program is linked to.
func outName(ins []*Inputs, i int) string {
	if len(ins) > 1 && distinctNames(ins) {
		return programOf(ins[i])
	}
	return fmt.Sprintf("%s-%d", programName, i)
}

// programOf is the name the go command gives a program: the last element of the package's path, or the one before
// where that is a version suffix.
func programOf(in *Inputs) string {
	elements := strings.Split(in.Package, "/")
	name := elements[len(elements)-1]
	if len(elements) > 1 && len(name) > 1 && name[0] == 'v' && strings.Trim(name[1:], "0123456789") == "" && name != "v0" && name != "v1" {
		name = elements[len(elements)-2]
	}
	return name
}

func distinctNames(ins []*Inputs) bool {
	seen := map[string]bool{}
	for _, in := range ins {
		name := programOf(in)
		if seen[name] {
			return false
		}
		seen[name] = true
	}
	return true
}

// copyInputs copies the files of packages to the same absolute paths below dir, so that relative paths between modules
// keep their meaning, and compares what was copied with what was listed.
func copyInputs(dir string, ins []*Inputs) error {
	copied := map[string]string{} // digest by path
	for _, in := range ins {
		var changed []string
		for _, f := range in.Files {
			sum, done := copied[f.Path]
			if !done {
				var err error
				if sum, err = copyFile(filepath.Join(dir, f.Path), f.Path); err != nil && !errors.Is(err, os.ErrNotExist) {
					return err
				}
				copied[f.Path] = sum // none for a file that vanished
			}
			if sum != f.SHA256 {
				changed = append(changed, f.Path)
			}
		}
		if len(changed) > 0 {
			return &ChangedError{in.Dir, changed}
		}
	}
	return nil
}

func copyFile(to, from string) (sum string, err error) {
	in, err := openRegular(from)
	if err != nil {
		return "", err
	}
	defer in.Close()
	if err := os.MkdirAll(filepath.Dir(to), 0o700); err != nil {
		return "", err
	}
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return "", err
	}
	h := sha256.New()
	_, err = io.Copy(io.MultiWriter(out, h), in)
	return hex.EncodeToString(h.Sum(nil)), errors.Join(err, out.Close())
}

// install puts a linked program in its place, complete or not at all.
func (c *Cache) install(work, program string, in *Inputs) (*Binary, error) {
	stage, err := os.MkdirTemp(work, "done-")
	if err != nil {
		return nil, err
	}
	linked, err := openRegular(program)
	if err != nil {
		return nil, err
	}
	defer linked.Close()
	syscall.ForkLock.RLock() // as in keep
	tmp, sum, err := c.copy(linked)
	syscall.ForkLock.RUnlock()
	if err != nil {
		return nil, err
	}
	if err := os.Rename(tmp, filepath.Join(stage, programName)); err != nil {
		os.Remove(tmp)
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(stage, digestName), []byte(sum), 0o400); err != nil {
		return nil, err
	}
	dir := filepath.Join(c.dir, binDir, in.key())
	if err := os.RemoveAll(dir); err != nil { // an incomplete one: built has looked
		return nil, err
	}
	if err := os.Rename(stage, dir); err != nil {
		return nil, err
	}
	b := &Binary{filepath.Join(dir, programName), sum}
	if err := inUse.hold(b.Path); err != nil {
		return nil, err
	}
	return b, c.prune(binDir)
}

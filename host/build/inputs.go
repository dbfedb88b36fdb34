package build

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
)

// File is one file with its digest.
type File struct {
	Path   string `json:"path"`   // absolute
	SHA256 string `json:"sha256"` // hex
}

// Inputs is every local file that leads to the binary of one Go main package: the sources of its own module and of
// modules replaced by a directory, embedded files, go.mod and go.sum, vendored sources. What comes from the module
// cache is not listed: go.sum stands for it.
type Inputs struct {
	// Dir is the canonical directory of the package, Root that of its module, Package the import path.
	Dir, Root, Package string
	// Files are sorted by path.
	Files []File
	// Packages are the directories of the local packages, sorted.
	Packages []string
	// Modules are the roots of the modules that local packages belong to, Root among them, sorted.
	Modules []string
	// Digest stands for the files' names, relative to Root, and contents.
	Digest string
	// Toolchain are the directories outside the tree that lead to the binary too: those of Go itself, of the module cache
	// and of the build cache.
	Toolchain []string

	vendored bool
	tool     *toolchain
}

// buildFlags are those of every build. The binary must depend on nothing but the inputs: not on where they are
// (trimpath), not on version control, whose configuration can run programs (buildvcs), not on a profile lying beside
// them (pgo). Without symbol tables it links faster; traces of panics do not need them.
var buildFlags = []string{"-trimpath", "-buildvcs=false", "-pgo=off", "-ldflags=-s -w"}

// Listing is what became of one package that was to be listed.
type Listing struct {
	Inputs *Inputs // nil if Err is set
	Err    error   // an *Error, or what the machine failed with
}

// Inputs lists what leads to the binary of the Go main package in dir. It reads; nothing of the tree is executed. What
// was found before is used again as long as no file and no directory it came from has changed.
func (c *Cache) Inputs(ctx context.Context, dir string) (*Inputs, error) {
	l := c.InputsAll(ctx, []string{dir})[0]
	return l.Inputs, l.Err
}

// InputsAll is [Cache.Inputs] for several packages, those of one module in one go. There is one listing for each of
// dirs, in their order.
func (c *Cache) InputsAll(ctx context.Context, dirs []string) []Listing {
	out := make([]Listing, len(dirs))
	modules := map[string][]int{}
	canonical := make([]string, len(dirs))
	var order []string
	for i, dir := range dirs {
		dir, err := filepath.Abs(dir)
		if err == nil {
			dir, err = filepath.EvalSymlinks(dir)
		}
		if err != nil {
			out[i].Err = err
			continue
		}
		if out[i].Inputs = c.remembered(dir); out[i].Inputs != nil {
			continue
		}
		root, err := moduleRoot(dir)
		if err != nil {
			out[i].Err = err
			continue
		}
		if modules[root] == nil {
			order = append(order, root)
		}
		modules[root] = append(modules[root], i)
		canonical[i] = dir
	}
	for _, root := range order {
		var todo []string
		for _, i := range modules[root] {
			todo = append(todo, canonical[i])
		}
		found, err := c.list(ctx, root, todo)
		for n, i := range modules[root] {
			switch {
			case err == nil:
				out[i] = found[n]
			case len(todo) == 1 || ctx.Err() != nil:
				out[i].Err = err
			default:
				// One at a time tells which of them it is.
				one, err := c.list(ctx, root, todo[n:n+1])
				if err != nil {
					one = []Listing{{Err: err}}
				}
				out[i] = one[0]
			}
		}
	}
	return out
}

// list asks the go command about packages of one module.
func (c *Cache) list(ctx context.Context, root string, dirs []string) ([]Listing, error) {
	tool, err := c.toolchain(ctx)
	if err != nil {
		return nil, err
	}
	taken := now()
	first := &Inputs{Dir: dirs[0], Root: root, tool: tool}
	shared, err := c.module(ctx, first)
	if err != nil {
		return nil, err
	}
	args := append([]string{"list", "-deps", "-json=" + listFields}, first.flags()...)
	for _, dir := range dirs {
		rel, err := filepath.Rel(root, dir)
		if err != nil {
			return nil, err
		}
		args = append(args, "."+string(filepath.Separator)+rel)
	}
	out, err := c.run(ctx, tool, root, args...)
	if err != nil {
		return nil, failed(first, err, nil)
	}
	packages := map[string]*goPackage{}
	mains := map[string]*goPackage{} // by directory
	dec := json.NewDecoder(bytes.NewReader(out))
	for {
		p := new(goPackage)
		if err := dec.Decode(p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, fmt.Errorf("go list in %s: %w", root, err)
		}
		packages[p.ImportPath] = p
		if p.Name == "main" {
			mains[p.Dir] = p
		}
	}
	found := make([]Listing, len(dirs))
	for i, dir := range dirs {
		in := &Inputs{Dir: dir, Root: root, vendored: first.vendored, tool: tool, Toolchain: tool.dirs()}
		found[i] = Listing{Inputs: in}
		if err := c.assemble(in, mains[dir], packages, shared, taken); err != nil {
			found[i] = Listing{Err: err}
		}
	}
	return found, nil
}

// assemble fills in from what the go command told.
func (c *Cache) assemble(in *Inputs, main *goPackage, packages map[string]*goPackage, shared []string, taken int64) error {
	if main == nil {
		return &Error{Dir: in.Dir, Output: "package is not main", Hint: "a plugin is a program: package main"}
	}
	in.Package = main.ImportPath
	collect := &collection{in: in, paths: map[string]bool{}, dirs: map[string]bool{in.Root: true}}
	for _, path := range shared {
		collect.add(path)
	}
	for _, path := range append([]string{main.ImportPath}, main.Deps...) {
		p := packages[path]
		if p == nil {
			return fmt.Errorf("go list in %s: nothing about package %s", in.Dir, path)
		}
		if err := collect.goPackage(p); err != nil {
			return err
		}
	}
	if err := collect.finish(); err != nil {
		return err
	}
	return c.remember(in, collect, taken)
}

// flags are the flags list and build share.
func (in *Inputs) flags() []string {
	mod := "-mod=readonly"
	if in.vendored {
		mod = "-mod=vendor"
	}
	return append([]string{mod}, buildFlags...)
}

// fileFields are the lists of files of a package that reach its binary. cgo is off, so that the files of other
// compilers are not built; a header may still be included by assembly.
type fileFields struct {
	GoFiles, SFiles, HFiles, SysoFiles, EmbedFiles []string
}

type goPackage struct {
	Dir, ImportPath, Name string
	Standard              bool
	Deps                  []string // import paths, of everything the package leads to
	EmbedPatterns         []string
	Module                *struct{ Dir, GoMod string }
	fileFields
}

const listFields = "Dir,ImportPath,Name,Standard,Deps,EmbedPatterns,Module,GoFiles,SFiles,HFiles,SysoFiles,EmbedFiles"

// collection gathers files, and the directories whose listing decides which files there are.
type collection struct {
	in    *Inputs
	paths map[string]bool
	dirs  map[string]bool
}

func (c *collection) add(path string) { c.paths[path] = true }

func (c *collection) goPackage(p *goPackage) error {
	if p.Standard || within(p.Dir, c.in.tool.ModCache) {
		return nil
	}
	root := c.in.Root
	if p.Module != nil && p.Module.Dir != "" && !within(p.Dir, c.in.Root) {
		root = p.Module.Dir
	}
	c.in.Packages = append(c.in.Packages, p.Dir)
	c.in.Modules = append(c.in.Modules, root)
	for _, list := range [][]string{p.GoFiles, p.SFiles, p.HFiles, p.SysoFiles, p.EmbedFiles} {
		for _, name := range list {
			c.add(filepath.Join(p.Dir, name))
		}
	}
	for _, name := range slices.Concat(p.SFiles, p.HFiles) {
		if err := c.includes(p.Dir, filepath.Join(p.Dir, name)); err != nil {
			return err
		}
	}
	// A go.mod that appears between the package and its root takes the package out of the module.
	for d := p.Dir; ; d = filepath.Dir(d) {
		c.dirs[d] = true
		if d == root || d == filepath.Dir(d) {
			break
		}
	}
	if len(p.EmbedPatterns) > 0 {
		return filepath.WalkDir(p.Dir, func(path string, e fs.DirEntry, err error) error {
			if err == nil && e.IsDir() {
				c.dirs[path] = true
			}
			return err
		})
	}
	return nil
}

// asmInclude finds the headers assembly includes, which go list does not tell.
var asmInclude = regexp.MustCompile(`^\s*#\s*include\s+"([^"]+)"`)

func (c *collection) includes(dir, path string) error {
	f, err := openRegular(path)
	if err != nil {
		return err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		m := asmInclude.FindSubmatch(lines.Bytes())
		if m == nil {
			continue
		}
		header := string(m[1])
		if !filepath.IsAbs(header) {
			header = filepath.Join(dir, header)
		}
		info, err := os.Stat(header)
		// What is not there comes with Go (textflag.h), or the build fails.
		if err != nil || !info.Mode().IsRegular() || c.paths[header] {
			continue
		}
		c.add(header)
		if err := c.includes(dir, header); err != nil {
			return err
		}
	}
	return lines.Err()
}

// module lists the files that shape the module graph for all packages of a module: its own go.mod and go.sum, the list
// of what is vendored, and the go.mod of every module that is replaced by a directory, whether a package of it is used
// or not. It finds out whether the module is vendored.
func (c *Cache) module(ctx context.Context, in *Inputs) ([]string, error) {
	files := []string{filepath.Join(in.Root, "go.mod")}
	if sum := filepath.Join(in.Root, "go.sum"); exists(sum) {
		files = append(files, sum)
	}
	if list := filepath.Join(in.Root, "vendor", "modules.txt"); exists(list) {
		in.vendored = true
		files = append(files, list)
	}
	out, err := c.run(ctx, in.tool, in.Root, "mod", "edit", "-json")
	if err != nil {
		return nil, failed(in, err, nil)
	}
	var mod struct {
		Replace []struct {
			New struct{ Path, Version string }
		}
	}
	if err := json.Unmarshal(out, &mod); err != nil {
		return nil, fmt.Errorf("go mod edit in %s: %w", in.Root, err)
	}
	for _, r := range mod.Replace {
		switch path := r.New.Path; {
		case r.New.Version != "":
		case filepath.IsAbs(path):
			return nil, &Error{Dir: in.Dir, Output: fmt.Sprintf("go.mod replaces a module by the absolute path %s", path),
				Hint: "write it relative to the directory of go.mod: builds run in a private copy of the tree"}
		default:
			files = append(files, filepath.Join(in.Root, path, "go.mod"))
		}
	}
	return files, nil
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

func (c *collection) finish() error {
	in := c.in
	slices.Sort(in.Packages)
	in.Packages = slices.Compact(in.Packages)
	slices.Sort(in.Modules)
	in.Modules = slices.Compact(in.Modules)
	for path := range c.paths {
		sum, err := Digest(path)
		if err != nil {
			return err
		}
		in.Files = append(in.Files, File{path, sum})
	}
	slices.SortFunc(in.Files, func(a, b File) int { return strings.Compare(a.Path, b.Path) })
	in.Digest = in.digest(in.Files)
	return nil
}

// digest stands for files: their names relative to the module and their contents.
func (in *Inputs) digest(files []File) string {
	h := sha256.New()
	pkg, _ := filepath.Rel(in.Root, in.Dir)
	fmt.Fprintf(h, "cordon build inputs 1\n%s/%s\n%q\n%q\n", runtime.GOOS, runtime.GOARCH, in.flags(), filepath.ToSlash(pkg))
	for _, f := range files {
		rel, err := filepath.Rel(in.Root, f.Path)
		if err != nil {
			rel = f.Path
		}
		fmt.Fprintf(h, "%s %q\n", f.SHA256, filepath.ToSlash(rel))
	}
	return hex.EncodeToString(h.Sum(nil))
}

// key names the result: it depends on the inputs and on the compiler.
func (in *Inputs) key() string {
	sum := sha256.Sum256([]byte(in.Digest + "\n" + in.tool.Version))
	return hex.EncodeToString(sum[:])
}

// Compiler is the version of the Go that compiles the inputs, and the platform it compiles for. The same inputs make the same
// binary, to the byte, with the same compiler.
func (in *Inputs) Compiler() (version, platform string) {
	return in.tool.Version, runtime.GOOS + "/" + runtime.GOARCH
}

func moduleRoot(dir string) (string, error) {
	for d := dir; ; d = filepath.Dir(d) {
		if info, err := os.Stat(filepath.Join(d, "go.mod")); err == nil && info.Mode().IsRegular() {
			return d, nil
		}
		if d == filepath.Dir(d) {
			return "", &Error{Dir: dir, Output: "directory is in no Go module", Hint: "run  go mod init  in it"}
		}
	}
}

// within reports whether path is dir or below it.
func within(path, dir string) bool {
	return dir != "" && (path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/"))
}

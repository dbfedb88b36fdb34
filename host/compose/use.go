package compose

import (
	"errors"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"gopkg.in/yaml.v3"
)

// PluginPathVariable names the directories, separated as in PATH, in which bare names are looked for, before the
// directory of the cordon binary itself.
const PluginPathVariable = "CORDON_PLUGIN_PATH"

// use resolves what a row runs. A disabled row may name what is not there.
func (l *loader) use(n *yaml.Node, e *Entry) {
	text, ok := l.text(n, "use")
	if !ok {
		return
	}
	e.Use = text
	if text == "" {
		l.fail(n, CodeBadValue, "use is empty").hint("a directory with a Go main package, a path to an executable, or the name of a plugin")
		return
	}
	if !strings.ContainsRune(text, '/') && text != "." && text != ".." {
		e.Kind = Named
		l.named(n, e)
		return
	}
	path := text
	if !filepath.IsAbs(path) {
		path = filepath.Join(l.plan.Dir, path)
	}
	real, err := filepath.EvalSymlinks(path)
	var info os.FileInfo
	if err == nil {
		info, err = os.Stat(real)
	}
	if err == nil && info.IsDir() {
		e.Kind = Package
	} else {
		e.Kind = Executable
	}
	if e.Disabled && err != nil {
		return
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		d := l.fail(n, CodePluginMissing, "plugin %q does not exist", text)
		if best := l.neighbour(path); best != "" {
			d.hint("did you mean %q?", strings.TrimSuffix(text, filepath.Base(text))+best)
		} else {
			d.hint("paths are relative to the directory of the compose file")
		}
	case err != nil:
		var pe *fs.PathError
		if errors.As(err, &pe) {
			err = pe.Err
		}
		l.fail(n, CodePluginMissing, "plugin %q cannot be read: %v", text, err)
	case info.IsDir():
		if l.mainPackage(n, real, e) {
			e.Target = real
		}
	default:
		if l.executable(n, info, text, e) {
			e.Target = real
		}
	}
}

// neighbour is the name beside path that it is probably a misspelling of.
func (l *loader) neighbour(path string) string {
	if l.more {
		return ""
	}
	return closest(filepath.Base(path), namesIn(filepath.Dir(path)))
}

func (l *loader) named(n *yaml.Node, e *Entry) {
	var dirs []string
	list, _ := l.env(PluginPathVariable)
	for _, d := range filepath.SplitList(list) {
		// A relative directory would make what runs depend on where cordon was started.
		if filepath.IsAbs(d) {
			dirs = append(dirs, d)
		}
	}
	if self, err := os.Executable(); err == nil {
		if self, err = filepath.EvalSymlinks(self); err == nil {
			dirs = append(dirs, filepath.Dir(self))
		}
	}
	var near []string
	for _, d := range dirs {
		real, err := filepath.EvalSymlinks(filepath.Join(d, e.Use))
		if err != nil {
			near = append(near, namesIn(d)...)
			continue
		}
		info, err := os.Stat(real)
		if err != nil || info.IsDir() {
			continue
		}
		if e.Disabled || l.executable(n, info, e.Use, e) {
			e.Target = real
		}
		return
	}
	if e.Disabled {
		return
	}
	d := l.fail(n, CodePluginMissing, "no plugin %q on the plugin path", e.Use)
	for _, dir := range dirs {
		d.note("looked in %s", dir)
	}
	switch _, err := os.Stat(filepath.Join(l.plan.Dir, e.Use)); {
	case err == nil:
		d.hint("for what is beside the compose file write ./%s", e.Use)
	default:
		if best := closest(e.Use, near); best != "" {
			d.hint("did you mean %q?", best)
		} else {
			d.hint("name a path, or put the directory of the plugin into %s", PluginPathVariable)
		}
	}
}

func (l *loader) executable(n *yaml.Node, info os.FileInfo, text string, e *Entry) bool {
	switch {
	case e.Disabled:
	case !info.Mode().IsRegular():
		l.fail(n, CodePluginNotExecutable, "plugin %q is not a regular file", text)
		return false
	case info.Mode()&0o111 == 0:
		d := l.fail(n, CodePluginNotExecutable, "plugin %q is not executable", text)
		if strings.HasSuffix(text, ".go") {
			d.hint("name the directory of the main package")
		} else {
			d.hint("chmod +x %s", text)
		}
		return false
	}
	return true
}

// maxGoFile bounds, in bytes, what is read of a Go file to find its package clause.
const maxGoFile = 16 << 20

// mainPackage reports whether dir has a Go main package inside a module. Only package clauses are read; whether it
// builds is seen when it is built.
func (l *loader) mainPackage(n *yaml.Node, dir string, e *Entry) bool {
	if e.Disabled {
		return true
	}
	var packages []string
	for _, name := range namesIn(dir) {
		if filepath.Ext(name) != ".go" || strings.HasSuffix(name, "_test.go") || strings.HasPrefix(name, "_") || strings.HasPrefix(name, ".") {
			continue
		}
		text, err := readLimited(filepath.Join(dir, name), maxGoFile)
		if err != nil {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, text, parser.PackageClauseOnly)
		if err != nil || f.Name == nil {
			// The compiler says it better, with the place.
			packages = append(packages, "main")
			continue
		}
		packages = append(packages, f.Name.Name)
	}
	switch {
	case len(packages) == 0:
		l.fail(n, CodeNotMainPackage, "%q has no Go files", e.Use).hint("name a directory with a main package, or an executable")
		return false
	case !slices.Contains(packages, "main"):
		l.fail(n, CodeNotMainPackage, "%q is package %s, not main", e.Use, packages[0]).hint("a plugin is a program: package main, with  func main() { plugin.Main(Plugin) }")
		return false
	}
	for d := dir; ; d = filepath.Dir(d) {
		if info, err := os.Stat(filepath.Join(d, "go.mod")); err == nil && info.Mode().IsRegular() {
			return true
		}
		if d == filepath.Dir(d) {
			l.fail(n, CodeNotMainPackage, "%q is in no Go module", e.Use).hint("run  go mod init  in it")
			return false
		}
	}
}

// namesIn are the names in a directory, none if it cannot be read.
func namesIn(dir string) []string {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names
}

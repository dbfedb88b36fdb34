package build

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
	"unicode"
)

// ErrNoGo says that a plugin is to be built and Go is not installed.
var ErrNoGo = errors.New("go is not on PATH; install Go, or name built executables instead of packages")

// toolchain is the go command and where it keeps things.
type toolchain struct {
	Go      string `json:"go"` // the command
	Version string `json:"version"`
	Root    string `json:"root"`
	// Stats tell whether it is still the same: those of the command and of the file that names its version.
	Stats [2]stat `json:"stats"`

	ModCache string `json:"modCache"`
	Cache    string `json:"cache"`
	Path     string `json:"path"`
}

func (t *toolchain) dirs() []string { return []string{t.Root, t.ModCache, t.Cache} }

func (t *toolchain) stats() ([2]stat, error) {
	command, err := statOf(t.Go)
	if err != nil {
		return [2]stat{}, err
	}
	version, err := statOf(filepath.Join(t.Root, "VERSION"))
	if err != nil {
		version = stat{} // a Go built from source has none
	}
	return [2]stat{command, version}, nil
}

// current reports whether nothing about the toolchain has changed since it was looked at.
func (t *toolchain) current() bool {
	now, err := t.stats()
	return err == nil && now == t.Stats
}

// goEnv are the variables that may say where the person's Go keeps its caches. Nothing else of the environment reaches
// the go command.
var goEnv = []string{"HOME", "XDG_CACHE_HOME", "GOCACHE", "GOMODCACHE", "GOPATH", "GOROOT"}

func (c *Cache) toolchain(ctx context.Context) (*toolchain, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.tool != nil && c.tool.current() {
		return c.tool, nil
	}
	command, err := exec.LookPath("go")
	if err == nil {
		command, err = filepath.Abs(command)
	}
	if err != nil {
		return nil, ErrNoGo
	}
	// Asked in a directory of our own, with the person's settings (go env -w), which may move the caches.
	cmd := exec.CommandContext(ctx, command, "env", "-json", "GOVERSION", "GOROOT", "GOMODCACHE", "GOCACHE", "GOPATH")
	cmd.Dir = c.dir
	cmd.Env = []string{"PATH=" + filepath.Dir(command), "GOTOOLCHAIN=local", "GOFLAGS=", "GOWORK=off"}
	for _, name := range append(goEnv, "XDG_CONFIG_HOME") {
		if v, ok := os.LookupEnv(name); ok {
			cmd.Env = append(cmd.Env, name+"="+v)
		}
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go env: %w: %s", err, strings.TrimSpace(stderr.String()))
	}
	var env struct{ GOVERSION, GOROOT, GOMODCACHE, GOCACHE, GOPATH string }
	if err := json.Unmarshal(out, &env); err != nil {
		return nil, fmt.Errorf("go env: %w", err)
	}
	t := &toolchain{Go: command, Version: env.GOVERSION, Root: env.GOROOT, ModCache: env.GOMODCACHE, Cache: env.GOCACHE, Path: env.GOPATH}
	if t.Stats, err = t.stats(); err != nil {
		return nil, err
	}
	c.tool = t
	return t, nil
}

// killDelay is how long a cancelled go command gets to end its compilers before its pipes are closed.
const killDelay = 2 * time.Second

// run runs the go command in dir and returns its standard output.
func (c *Cache) run(ctx context.Context, t *toolchain, dir string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, t.Go, args...)
	cmd.Dir = dir
	// No HOME: all the go command would want of it is named, but for its telemetry, which it then does without.
	cmd.Env = []string{
		"PATH=" + filepath.Dir(t.Go),
		"TMPDIR=" + filepath.Join(c.dir, tmpDir),
		"LC_ALL=C",
		"GOCACHE=" + t.Cache, "GOMODCACHE=" + t.ModCache, "GOPATH=" + t.Path, "GOROOT=" + t.Root,
		"GOENV=off", "GOFLAGS=", "GOWORK=off", "GO111MODULE=on", "GOTOOLCHAIN=local", "CGO_ENABLED=0",
		"GOPROXY=off", "GOSUMDB=off", "GOVCS=*:off", "PWD=" + dir,
	}
	// The go command starts compilers: they end with it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = killDelay
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return nil, fmt.Errorf("go %s: %w", args[0], ctx.Err())
		}
		return nil, &goError{args[0], err, stderr.String()}
	}
	return stdout.Bytes(), nil
}

// goError is a go command that did not succeed.
type goError struct {
	verb   string
	err    error
	stderr string
}

func (e *goError) Error() string { return fmt.Sprintf("go %s: %v: %s", e.verb, e.err, e.stderr) }

// Error says that a plugin does not build. Output is what the compiler said, with paths as they are in the tree.
type Error struct {
	Dir    string // of the package
	Output string
	Hint   string // what to do, where that is known
}

func (e *Error) Error() string {
	text := fmt.Sprintf("plugin in %s does not build:\n%s", e.Dir, e.Output)
	if e.Hint != "" {
		text += "\nhint: " + e.Hint
	}
	return text
}

// maxOutput is how many lines of the compiler's are passed on: the first errors explain the others.
const maxOutput = 40

// failed turns a failed go command into an Error; other errors stay as they are.
func failed(in *Inputs, err error, rename *strings.Replacer) error {
	var g *goError
	if !errors.As(err, &g) {
		return err
	}
	text := g.stderr
	if rename != nil {
		text = rename.Replace(text)
	}
	var lines []string
	for line := range strings.Lines(text) {
		line = strings.TrimRightFunc(strings.Map(printable, line), unicode.IsSpace)
		if line == "" {
			continue
		}
		if lines = append(lines, line); len(lines) == maxOutput {
			lines = append(lines, "…")
			break
		}
	}
	e := &Error{Dir: in.Dir, Output: strings.Join(lines, "\n")}
	if e.Output == "" {
		e.Output = g.err.Error()
	}
	switch {
	case strings.Contains(text, "GOPROXY=off"), strings.Contains(text, "cannot find module providing"):
		e.Hint = fmt.Sprintf("modules are not fetched while building; run  go mod download  in %s", in.Root)
	case strings.Contains(text, "go.sum"), strings.Contains(text, "updates to go.mod needed"):
		e.Hint = fmt.Sprintf("run  go mod tidy  in %s", in.Root)
	case strings.Contains(text, "inconsistent vendoring"):
		e.Hint = fmt.Sprintf("run  go mod vendor  in %s", in.Root)
	case strings.Contains(text, "GOTOOLCHAIN=local"):
		e.Hint = "the module wants a newer Go than the one on PATH; install it"
	case strings.Contains(text, "build constraints exclude all Go files"):
		e.Hint = "plugins are built without cgo"
	}
	return e
}

// printable drops what would speak to a terminal.
func printable(r rune) rune {
	switch {
	case r == '\t':
		return ' '
	case r == '\n' || unicode.IsPrint(r):
		return r
	}
	return -1
}

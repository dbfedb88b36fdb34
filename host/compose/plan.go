// Package compose turns a compose file into a checked plan.
//
// There are two steps. [Load] reads the file: YAML, the format, variables, where each plugin is. It starts, builds and
// describes nothing. [Check] is given the manifests of the plugins and decides whether the whole holds together: each
// row's config against the schema of its plugin, and the graph of needs and offers. Both find everything they can in
// one pass and say all of it at once, each with its place; what cannot be decided because of an earlier mistake is left
// unsaid instead of guessed.
//
// No message repeats a value of config or env: either may be a secret. Snippets show those values only where the
// plugin's schema describes them and does not mark them writeOnly.
package compose

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"gopkg.in/yaml.v3"
)

// FileVersion is the version of the file format this package reads.
const FileVersion = 1

// FileName is the name a compose file is looked for.
const FileName = "compose.yml"

// Plan is what a compose file says, resolved.
type Plan struct {
	// Path is the canonical path of the compose file, Dir its directory.
	Path, Dir string
	// Files are all files the plan was read from, the compose file first.
	Files   []File
	Session Session
	// Entries are the rows that name a plugin, in the order of the file, disabled ones included. Groups are resolved into
	// what they mean for their rows.
	Entries []*Entry

	sources map[string]*source // by name
	// hidden are the values no snippet may show before a schema describes them.
	hidden []*yaml.Node
}

// File is one file a plan was read from, with the digest of exactly the bytes that were read.
type File struct {
	Path   string // canonical
	SHA256 string // hex
}

// Session is where the host keeps sessions.
type Session struct {
	// Store is sqlite: (in the state directory), sqlite:PATH or a postgres:// URL, which may hold a password.
	Store string
	Place Position
}

// Kind is what a row's use names.
type Kind string

const (
	// Package is a directory with a Go main package, built on demand.
	Package Kind = "package"
	// Executable is a path to an executable file.
	Executable Kind = "executable"
	// Named is a bare name that was found on the plugin path.
	Named Kind = "named"
)

// Answers is how much a row's answers to approval requests are worth.
type Answers string

const (
	// AnswersNone may reject or delegate, never allow.
	AnswersNone   Answers = ""
	AnswersClient Answers = "client"
	AnswersHuman  Answers = "human"
)

// Entry is one row of the file that names a plugin.
type Entry struct {
	ID string
	// Use is what the row says; Target the canonical path it resolves to, empty if it does not (which [Load] reports, but
	// for a disabled row).
	Use    string
	Kind   Kind
	Target string
	// Config is one JSON object with all variables replaced. Defaults are the plugin's own affair.
	Config json.RawMessage
	// Isolate maps a capability to the label of the realm it is looked up in and provided to, the row's own and those of
	// its groups, the innermost winning. A capability that is missing is that of the root realm. Labels that begin with @
	// are private to the row or group named after it; no label in a file can begin so.
	Isolate  map[string]string
	Disabled bool
	// Required is false for a row that may fail without stopping the boot.
	Required bool
	// Env is what reaches the process beside the host's own allow-list.
	Env      map[string]string
	Limits   Limits
	Answers  Answers
	Timeouts Timeouts
	// Unconfined lets a plugin that asks for it run outside the confinement of plugins.
	Unconfined bool
	// Groups are the ids of the groups the row is in, outermost first.
	Groups []string
	Place  Position

	src   *source
	row   *yaml.Node            // the mapping
	keys  map[string]field      // its keys
	nodes map[string]configNode // the config's nodes by JSON pointer
	// broken says that the config could not be read whole, which has been reported.
	broken bool
}

// Limits bound a plugin's process. Zero means no limit.
type Limits struct {
	Memory int64 // bytes
	Pids   int
}

// Timeouts bound a generation's steps. Zero means the host's default.
type Timeouts struct {
	Start time.Duration // from the start of the process to its activation
	Drain time.Duration // until calls in flight are given up
	Beat  time.Duration // for which the plugin may leave the host's beats unanswered
}

// RootRealm is the label of the realm of everything that is not isolated.
const RootRealm = ""

// Realm is the label of the realm in which e looks up and provides capability.
func (e *Entry) Realm(capability string) string { return e.Isolate[capability] }

// Entry is the row with that id, nil if there is none.
func (p *Plan) Entry(id string) *Entry {
	i := slices.IndexFunc(p.Entries, func(e *Entry) bool { return e.ID == id })
	if i < 0 {
		return nil
	}
	return p.Entries[i]
}

// Diagnose makes a diagnostic about a row, placed at one of its keys ("use", "limits", …; the row itself if it has no
// such key). It is for mistakes found outside this package, such as a plugin that does not build.
func (p *Plan) Diagnose(e *Entry, key string, code Code, format string, args ...any) *Diagnostic {
	n := e.row
	if f, ok := e.keys[key]; ok {
		n = f.value
	}
	d := &Diagnostic{Code: code, Severity: Error, Entry: e.ID, Message: fmt.Sprintf(format, args...)}
	d.at(e.src, n)
	e.src.locate(d, p.masks(nil)[e.src])
	return d
}

// Find is the path of the compose file for dir: the nearest compose.yml in dir or above.
func Find(dir string) (string, error) {
	start, err := canonical(dir)
	if err != nil {
		return "", err
	}
	for d := start; ; d = filepath.Dir(d) {
		path := filepath.Join(d, FileName)
		switch _, err := os.Stat(path); {
		case err == nil:
			return path, nil
		case !errors.Is(err, fs.ErrNotExist):
			return "", err
		case d == filepath.Dir(d):
			return "", &NotFoundError{Dir: start}
		}
	}
}

// NotFoundError says that no compose file is in a directory or above it.
type NotFoundError struct{ Dir string }

func (e *NotFoundError) Error() string {
	return fmt.Sprintf("no %s in %s or above it; name one with -f", FileName, e.Dir)
}

func (e *NotFoundError) Is(target error) bool { return target == fs.ErrNotExist }

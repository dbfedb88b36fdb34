package compose

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
)

// Severity says whether a diagnostic stops the composition.
type Severity string

const (
	Error   Severity = "error"
	Warning Severity = "warning"
)

// Code names one kind of mistake. Codes are stable; docs/diagnostics.md lists each with its cause and cure.
type Code string

// Reading the file. A diagnostic of this group about a file mostly is the only one for it.
const (
	CodeUnreadable  Code = "C001" // cannot be opened or read
	CodeTooLarge    Code = "C002" // more than MaxFileSize bytes
	CodeEncoding    Code = "C003" // not UTF-8
	CodeBOM         Code = "C004" // begins with a byte order mark
	CodeLineEnd     Code = "C005" // has carriage returns
	CodeSyntax      Code = "C006" // not YAML
	CodeDocuments   Code = "C007" // empty, or more than one document
	CodeTooDeep     Code = "C008" // nested deeper than MaxDepth
	CodeAlias       Code = "C009" // aliases that contain themselves or expand to more than MaxNodes
	CodeMergeKey    Code = "C010" // a << merge key
	CodeUnknownTag  Code = "C011" // a YAML tag the format has no use for
	CodeForeignFile Code = "C012" // a compose.yml of another program
	CodeTooMany     Code = "C013" // more mistakes, or more rows, than are looked at
)

// The file's own format.
const (
	CodeUnknownKey    Code = "C101"
	CodeDuplicateKey  Code = "C102"
	CodeKeyType       Code = "C103"
	CodeType          Code = "C104"
	CodeMissingKey    Code = "C105"
	CodeVersion       Code = "C106"
	CodeBadID         Code = "C107"
	CodeDuplicateID   Code = "C108"
	CodeUseAndPlugins Code = "C109"
	CodeMisplacedKey  Code = "C110"
	CodeUnsupported   Code = "C111"
	CodeBadValue      Code = "C112"
	CodeInterpolation Code = "C113"
	CodeUnsetVariable Code = "C114"
	CodeNotVariable   Code = "C115"
)

// The plugins the file names.
const (
	CodePluginMissing       Code = "C201"
	CodePluginNotExecutable Code = "C202"
	CodeNotMainPackage      Code = "C203"
	CodeBuild               Code = "C204"
	CodeDescribe            Code = "C205"
)

// Plugin manifests and config.
const (
	CodeConfig  Code = "C301"
	CodeSchema  Code = "C302"
	CodeKernel  Code = "C303"
	CodeAnswers Code = "C304"
)

// The graph of the composition.
const (
	CodeUnmetNeed      Code = "C401"
	CodeTwoProviders   Code = "C402"
	CodeCycle          Code = "C403"
	CodeToolTwice      Code = "C404"
	CodeNoPolicy       Code = "C405"
	CodeReservedPrefix Code = "C406"
	CodeUnknownEvent   Code = "C407"
	CodeContract       Code = "C408"
	CodeEventTwice     Code = "C409"
	CodeIdleIsolate    Code = "C410"
	CodeUnconfined     Code = "C411"
)

// The lock file; see package lock.
const (
	CodeLockFile      Code = "C501"
	CodeNotLocked     Code = "C502"
	CodeLockDigest    Code = "C503"
	CodeLockInterface Code = "C504"
)

// What this machine cannot do of it.
const (
	CodeLimits Code = "C601"
)

// Position is a place in a file: its name as it was given to [Load], line and column counted from 1, columns in
// characters. The zero Position is no place at all.
type Position struct {
	File   string `json:"file"`
	Line   int    `json:"line"`
	Column int    `json:"column"`
}

func (p Position) String() string {
	if p.Line == 0 {
		return p.File
	}
	return fmt.Sprintf("%s:%d:%d", p.File, p.Line, p.Column)
}

// Related is a second place a diagnostic speaks of.
type Related struct {
	Place   Position `json:"place"`
	Message string   `json:"message"`
}

// Diagnostic is one mistake in a composition.
type Diagnostic struct {
	Code     Code     `json:"code"`
	Severity Severity `json:"severity"`
	// Message is lower case without a full stop and never holds a config value.
	Message string   `json:"message"`
	Place   Position `json:"place"`
	// Entry is the id of the row, where there is one.
	Entry string `json:"entry,omitempty"`
	// Snippet is the line at Place, with the values of config and env that may be secrets replaced.
	Snippet string `json:"snippet,omitempty"`
	// Caret is where Snippet is to be underlined: the first character, counted from 0, and how many.
	Caret [2]int `json:"caret"`
	// Notes are further lines of explanation, for example the output of a compiler.
	Notes   []string  `json:"notes,omitempty"`
	Related []Related `json:"related,omitempty"`
	// Hints say what to do.
	Hints []string `json:"hints,omitempty"`

	span span // what to underline, in the source
}

func (d *Diagnostic) Error() string {
	return fmt.Sprintf("%s: %s %s: %s", d.Place, d.Severity, d.Code, d.Message)
}

// Diagnostics is everything found in one pass, in the order of the places.
type Diagnostics []*Diagnostic

// Join is all of lists as one, in the order of the places.
func Join(lists ...Diagnostics) Diagnostics {
	all := slices.Concat(lists...)
	all.sort()
	return all
}

// Err is nil if nothing in ds stops the composition, else ds as an error whose text is that of [Diagnostics.Text].
func (ds Diagnostics) Err() error {
	if !ds.HasErrors() {
		return nil
	}
	return &InvalidError{ds}
}

// InvalidError says that a composition cannot be used. It carries every diagnostic, warnings included.
type InvalidError struct{ Diagnostics Diagnostics }

func (e *InvalidError) Error() string {
	var b strings.Builder
	e.Diagnostics.Text(&b)
	return strings.TrimSuffix(b.String(), "\n")
}

// HasErrors reports whether any diagnostic stops the composition.
func (ds Diagnostics) HasErrors() bool {
	return slices.ContainsFunc(ds, func(d *Diagnostic) bool { return d.Severity == Error })
}

// Text writes ds for people: for each its place, code and message, the line with what is meant underlined, and what
// to do about it.
func (ds Diagnostics) Text(w io.Writer) error {
	for _, d := range ds {
		if err := d.text(w); err != nil {
			return err
		}
	}
	return nil
}

// JSON writes ds as one JSON array.
func (ds Diagnostics) JSON(w io.Writer) error {
	if ds == nil {
		ds = Diagnostics{}
	}
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	return enc.Encode([]*Diagnostic(ds))
}

func (ds Diagnostics) sort() {
	slices.SortStableFunc(ds, func(a, b *Diagnostic) int {
		if a.Place.File != b.Place.File {
			return strings.Compare(a.Place.File, b.Place.File)
		}
		if a.Place.Line != b.Place.Line {
			return a.Place.Line - b.Place.Line
		}
		if a.Place.Column != b.Place.Column {
			return a.Place.Column - b.Place.Column
		}
		return strings.Compare(string(a.Code), string(b.Code))
	})
}

// lineNumberWidth is the width of the gutter: compositions rarely pass ten thousand lines.
const lineNumberWidth = 5

func (d *Diagnostic) text(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s %s: %s\n", d.Place, d.Severity, d.Code, d.Message)
	if d.Snippet != "" {
		fmt.Fprintf(&b, "%*d | %s\n", lineNumberWidth, d.Place.Line, d.Snippet)
		fmt.Fprintf(&b, "%*s | %s%s\n", lineNumberWidth, "", strings.Repeat(" ", d.Caret[0]), strings.Repeat("^", max(d.Caret[1], 1)))
	}
	line := func(text string) {
		for i, l := range strings.Split(text, "\n") {
			lead := "="
			if i > 0 {
				lead = " "
			}
			fmt.Fprintf(&b, "%*s %s %s\n", lineNumberWidth, "", lead, l)
		}
	}
	for _, n := range d.Notes {
		line(n)
	}
	for _, r := range d.Related {
		if r.Place.Line == 0 {
			line(r.Message)
			continue
		}
		line(fmt.Sprintf("%s (%s)", r.Message, r.Place))
	}
	for _, h := range d.Hints {
		line("hint: " + h)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

package compose

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"gopkg.in/yaml.v3"
)

// MaxDepth is how deep a file may nest: far more than a person writes, far less than what exhausts a stack.
const MaxDepth = 64

// MaxNodes is how many YAML nodes a file may have with all its aliases followed.
const MaxNodes = 100_000

// maxExpanded is how many bytes of text a file may have with all its aliases followed, and again with its variables
// replaced.
const maxExpanded = 4 * MaxFileSize

// maxRows is how many rows a file may have; for each one something is looked up on the disk.
const maxRows = 1000

// maxDiagnostics is how many mistakes are reported: nobody reads more, and a hostile file could make any number.
const maxDiagnostics = 200

// maxTimeout bounds the timeouts a row may ask for: beyond a day it is a mistake of the unit.
const maxTimeout = 24 * time.Hour

// maxID keeps paths that carry an id below the limit of file names and socket addresses.
const maxID = 40

var (
	idPattern         = regexp.MustCompile(`^[a-z][a-z0-9-]*$`)
	capabilityPattern = regexp.MustCompile(`^[a-z][a-z0-9-]*(\.[a-z][a-z0-9-]*)*$`)
	envPattern        = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
	memoryPattern     = regexp.MustCompile(`^([0-9]+)(Ki|Mi|Gi|Ti)?$`)
)

// Load reads a compose file. It builds, starts and describes nothing; besides the file itself it only looks at where
// the rows' plugins are. The plan holds what could be read, also if there are errors; it is nil only if nothing could.
// env looks up a variable, as [os.LookupEnv] does.
func Load(path string, env func(string) (string, bool)) (*Plan, Diagnostics) {
	l := &loader{env: env, rows: map[string]*yaml.Node{}, active: map[*yaml.Node]bool{}, vetted: map[*yaml.Node]bool{}, bad: map[*yaml.Node]bool{}}
	src, data, d := readSource(path)
	l.src = src
	if d != nil {
		src.locate(d, nil)
		return nil, Diagnostics{d}
	}
	root, d := parse(src, data)
	if d != nil {
		src.locate(d, nil)
		return nil, Diagnostics{d}
	}
	l.plan = &Plan{
		Path: src.path, Dir: filepath.Dir(src.path),
		Files:   []File{{src.path, src.sha256}},
		Session: Session{Store: defaultStore},
		sources: map[string]*source{src.name: src},
	}
	if !l.vet(root, 0) {
		// A file that must not be walked cannot be masked either.
		src.opaque = true
		l.finish(nil)
		return nil, l.diags
	}
	l.file(root)
	l.finish(l.plan.masks(nil))
	return l.plan, l.diags
}

// defaultStore is SQLite in the state directory.
const defaultStore = "sqlite:"

type loader struct {
	collector
	env  func(string) (string, bool)
	src  *source
	plan *Plan
	rows map[string]*yaml.Node // the id node of each row

	budget int // nodes visited
	size   int // bytes of text in them
	grown  int // bytes of text with variables replaced
	count  int // rows
	// bad are the nodes with a mistake of YAML's own in them, which the value read from them therefore lacks.
	bad    map[*yaml.Node]bool
	active map[*yaml.Node]bool
	vetted map[*yaml.Node]bool
}

// collector gathers diagnostics whose snippets are made at the end, when it is known what they may show.
type collector struct {
	diags Diagnostics
	froms []*source
	more  bool // there were more than are kept
}

// full reports whether further diagnostics would not be kept.
func (c *collector) full() bool { return len(c.diags) >= maxDiagnostics }

func (c *collector) report(src *source, n *yaml.Node, severity Severity, code Code, format string, args ...any) *Diagnostic {
	d := &Diagnostic{Code: code, Severity: severity, Message: fmt.Sprintf(format, args...)}
	if c.full() {
		c.more = true
		return d
	}
	d.at(src, n)
	c.diags, c.froms = append(c.diags, d), append(c.froms, src)
	return d
}

func (c *collector) finish(masks map[*source][]span) {
	for i, d := range c.diags {
		c.froms[i].locate(d, masks[c.froms[i]])
	}
	if c.more {
		c.diags = append(c.diags, &Diagnostic{Code: CodeTooMany, Severity: Error, Place: Position{File: c.froms[0].name},
			Message: fmt.Sprintf("file has more than %d mistakes; the others are not shown", maxDiagnostics)})
	}
	c.diags.sort()
}

func (d *Diagnostic) at(src *source, n *yaml.Node) {
	d.span = src.spanOf(n)
	if d.span.line > len(src.lines) { // what is left out at the end of a file is placed after it
		last := len(src.lines)
		d.span = span{last, src.lineLen(last) + 1, last, src.lineLen(last) + 2}
	}
	d.Place = Position{src.name, d.span.line, d.span.col}
}

func (l *loader) fail(n *yaml.Node, code Code, format string, args ...any) *Diagnostic {
	return l.report(l.src, n, Error, code, format, args...)
}

func (d *Diagnostic) hint(format string, args ...any) *Diagnostic {
	d.Hints = append(d.Hints, fmt.Sprintf(format, args...))
	return d
}

func (d *Diagnostic) note(format string, args ...any) *Diagnostic {
	d.Notes = append(d.Notes, fmt.Sprintf(format, args...))
	return d
}

func (d *Diagnostic) related(place Position, format string, args ...any) *Diagnostic {
	d.Related = append(d.Related, Related{place, fmt.Sprintf(format, args...)})
	return d
}

// syntaxLine finds the line in an error text of yaml.v3, which is all it tells about the place.
var syntaxLine = regexp.MustCompile(`^yaml: (?:line (\d+): )?(.*)$`)

// parse is the one document in data. A file that is not YAML yields one diagnostic and nothing else, because whatever
// follows the mistake would be guessed.
func parse(src *source, data []byte) (root *yaml.Node, diag *Diagnostic) {
	fail := func(code Code, line, col int, format string, args ...any) *Diagnostic {
		return &Diagnostic{Code: code, Severity: Error, Message: fmt.Sprintf(format, args...),
			Place: Position{src.name, line, col}, span: span{line, col, line, src.lineLen(line) + 1}}
	}
	// The parser's own mistakes must not take the host down with it.
	defer func() {
		if r := recover(); r != nil {
			src.opaque = true
			root, diag = nil, fail(CodeSyntax, 1, 1, "file cannot be parsed as YAML")
		}
	}()
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc yaml.Node
	err := dec.Decode(&doc)
	if errors.Is(err, io.EOF) {
		return nil, fail(CodeDocuments, 1, 1, "file is empty").hint("a composition begins with  cordon: %d", FileVersion)
	}
	if err != nil {
		src.opaque = true
		return nil, src.syntax(err, fail)
	}
	var second yaml.Node
	switch err := dec.Decode(&second); {
	case errors.Is(err, io.EOF):
	case err != nil:
		src.opaque = true
		return nil, src.syntax(err, fail)
	default:
		line, col := second.Line, second.Column
		return nil, fail(CodeDocuments, line, col, "file has more than one YAML document").hint("remove the --- line and what follows")
	}
	if doc.Kind != yaml.DocumentNode || len(doc.Content) != 1 || doc.Content[0].Kind == yaml.ScalarNode && doc.Content[0].Value == "" {
		return nil, fail(CodeDocuments, 1, 1, "file is empty").hint("a composition begins with  cordon: %d", FileVersion)
	}
	return doc.Content[0], nil
}

// parserMessages are those for which yaml.v3 counts lines from 0, and names the line where the broken collection begins.
var parserMessages = []string{
	"did not find expected key", "did not find expected node content", "did not find expected '-' indicator",
	"did not find expected ',' or ']'", "did not find expected ',' or '}'", "did not find expected <document start>",
}

// unknownAnchor finds the name in an error that comes without a line.
var unknownAnchor = regexp.MustCompile(`^unknown anchor '(.*)' referenced$`)

func (s *source) syntax(err error, fail func(Code, int, int, string, ...any) *Diagnostic) *Diagnostic {
	line, message := 1, "cannot be parsed"
	if m := syntaxLine.FindStringSubmatch(err.Error()); m != nil {
		if n, err := strconv.Atoi(m[1]); err == nil {
			line = n
		}
		message = m[2]
	}
	began := slices.Contains(parserMessages, message)
	if began {
		line++
	}
	line = min(max(line, 1), len(s.lines))
	for line > 1 && strings.TrimSpace(string(s.lines[line-1])) == "" {
		line-- // the end of the file
	}
	if m := unknownAnchor.FindStringSubmatch(message); m != nil {
		for l, text := range s.lines {
			if i := indexRunes(text, "*"+m[1]); i >= 0 {
				d := fail(CodeSyntax, l+1, i+1, "alias %q stands for nothing", m[1])
				d.span.endCol = i + 2 + utf8.RuneCountInString(m[1])
				return d.hint("an anchor &%s must come before it", m[1])
			}
		}
	}
	// A tab in the indentation is the commonest cause, and the parser reports it in many ways, often a line off.
	for l := max(1, line-1); l <= min(len(s.lines), line+1); l++ {
		text := string(s.lines[l-1])
		lead := text[:len(text)-len(strings.TrimLeft(text, " \t"))]
		if i := strings.IndexByte(lead, '\t'); i >= 0 && strings.TrimSpace(text) != "" {
			d := fail(CodeSyntax, l, i+1, "a tab in the indentation")
			d.span.endCol = i + 2
			return d.hint("YAML indents with spaces only")
		}
	}
	text := string(s.lines[line-1])
	col := utf8.RuneCountInString(text) - utf8.RuneCountInString(strings.TrimLeft(text, " ")) + 1
	if began {
		message += " in what begins here"
	}
	d := fail(CodeSyntax, line, col, "not YAML: %s", message)
	switch {
	case strings.Contains(message, "mapping values are not allowed"):
		d.hint("quote a value that has a colon followed by a space, or that ends in a colon")
	case strings.Contains(text, "${") && strings.ContainsAny(text, "{["):
		d.hint("inside { } and [ ] quote variables: \"${NAME}\", or write $NAME")
	}
	return d
}

// knownTags are the types of JSON, with the one YAML adds to plain text that looks like a date.
var knownTags = []string{"!!str", "!!int", "!!float", "!!bool", "!!null", "!!map", "!!seq", "!!timestamp"}

// vet reports everything about YAML itself below n and whether it is safe to walk with aliases followed. Each node is
// reported on once, however many aliases lead to it.
func (l *loader) vet(n *yaml.Node, depth int) bool {
	if l.budget++; l.budget > MaxNodes {
		l.fail(n, CodeAlias, "file has more than %d values with its aliases followed", MaxNodes).hint("write out what the aliases stand for")
		return false
	}
	if l.size += len(n.Value); l.size > maxExpanded {
		l.fail(n, CodeAlias, "file has more than %d bytes of text with its aliases followed", maxExpanded).hint("write out what the aliases stand for")
		return false
	}
	if depth > MaxDepth {
		l.fail(n, CodeTooDeep, "nested deeper than %d levels", MaxDepth)
		return false
	}
	if n.Kind == yaml.AliasNode {
		if l.active[n.Alias] {
			l.fail(n, CodeAlias, "alias %q contains itself", n.Value)
			return false
		}
		return l.vet(n.Alias, depth)
	}
	first := !l.vetted[n]
	l.vetted[n] = true
	if tag := n.ShortTag(); first && !slices.Contains(knownTags, tag) && !(n.Kind == yaml.ScalarNode && tag == "!!merge") {
		l.bad[n] = true
		l.fail(n, CodeUnknownTag, "tag %s is not supported", tag).hint("a value is a mapping, a list, a string, a number, true, false or null")
	}
	l.active[n] = true
	defer delete(l.active, n)
	if n.Kind == yaml.MappingNode {
		seen := map[string]*yaml.Node{}
		for i := 0; i+1 < len(n.Content) && first; i += 2 {
			k := n.Content[i]
			switch key, ok := keyText(k); {
			case k.Kind == yaml.ScalarNode && k.ShortTag() == "!!merge":
				l.bad[n] = true
				l.fail(k, CodeMergeKey, "merge keys are not supported").hint("write the keys out, or use an alias for the whole value")
			case !ok:
				l.bad[n] = true
				l.plan.hide(n.Content[i+1])
				d := l.fail(k, CodeKeyType, "key is not a string")
				if k.Kind == yaml.ScalarNode {
					d.hint("quote it")
				}
			case seen[key] != nil:
				if !slices.Contains(plainKeys, key) {
					l.plan.hide(n.Content[i+1])
				}
				l.fail(k, CodeDuplicateKey, "duplicate key %q", key).related(Position{l.src.name, seen[key].Line, seen[key].Column}, "first here")
			default:
				seen[key] = k
			}
		}
	}
	for i, c := range n.Content {
		if n.Kind == yaml.MappingNode && i%2 == 0 {
			l.budget++
			continue
		}
		if !l.vet(c, depth+1) {
			return false
		}
	}
	return true
}

// keyText is the text of a key that is a plain string.
func keyText(n *yaml.Node) (string, bool) {
	n = deref(n)
	return n.Value, n.Kind == yaml.ScalarNode && n.ShortTag() == "!!str"
}

func deref(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

// field is one key of a mapping with its value.
type field struct{ key, value *yaml.Node }

// fields are the keys of a mapping in order, each name once; vet has reported the others.
func fields(n *yaml.Node) (names []string, all map[string]field) {
	all = map[string]field{}
	n = deref(n)
	for i := 0; i+1 < len(n.Content); i += 2 {
		name, ok := keyText(n.Content[i])
		if _, again := all[name]; !ok || again {
			continue
		}
		names = append(names, name)
		all[name] = field{n.Content[i], n.Content[i+1]}
	}
	return names, all
}

// mapping is the fields of n, whose keys must be among known. Of an unknown key that is probably a misspelt known one,
// the latter is reported back in meant, so that it is not said to be missing too.
func (l *loader) mapping(n *yaml.Node, what string, known ...string) (all map[string]field, meant map[string]bool, ok bool) {
	if deref(n).Kind != yaml.MappingNode {
		l.wrongType(n, what, "mapping")
		return nil, nil, false
	}
	names, all := fields(n)
	meant = map[string]bool{}
	for _, name := range names {
		if slices.Contains(known, name) {
			continue
		}
		d := l.fail(all[name].key, CodeUnknownKey, "unknown key %q in %s", name, what)
		var best string
		if !l.more {
			best = closest(name, known)
		}
		if !slices.Contains(plainKeys, best) {
			l.plan.hide(all[name].value)
		}
		if best != "" {
			d.hint("did you mean %q?", best)
			meant[best] = true
		} else {
			d.hint("known keys: %s", strings.Join(known, ", "))
		}
	}
	return all, meant, true
}

func (l *loader) wrongType(n *yaml.Node, what, want string) *Diagnostic {
	return l.fail(n, CodeType, "%s: got %s, want %s", what, typeName(n), want)
}

// typeName names the JSON type of a node as it is written.
func typeName(n *yaml.Node) string {
	switch n = deref(n); n.Kind {
	case yaml.MappingNode:
		return "mapping"
	case yaml.SequenceNode:
		return "list"
	}
	return tagName(n.ShortTag())
}

func tagName(tag string) string {
	switch tag {
	case "!!int", "!!float":
		return "number"
	case "!!bool":
		return "boolean"
	case "!!null":
		return "null"
	}
	return "string"
}

// scalar is the tag and text of a scalar with its variables replaced. A plain scalar is read again after that, so that
// disabled: ${CI:-false} is a boolean; a quoted one stays a string.
func (l *loader) scalar(n *yaml.Node) (tag, text string, ok bool) {
	v := deref(n)
	if v.Kind != yaml.ScalarNode {
		return "", "", false
	}
	tag, text = v.ShortTag(), v.Value
	if !strings.Contains(text, "$") {
		return tag, text, true
	}
	text, errs := interpolate(text, l.env)
	for _, e := range errs {
		l.interpolation(n, e)
	}
	if len(errs) > 0 {
		return "", "", false
	}
	if l.grown += len(text); l.grown > maxExpanded {
		l.fail(n, CodeInterpolation, "file has more than %d bytes of text with its variables replaced", maxExpanded)
		return "", "", false
	}
	if tag == "!!str" && v.Style == 0 {
		tag = plainTag(text)
	}
	return tag, text, true
}

// plainTag is the type of a text as a plain scalar.
func plainTag(text string) string {
	tag := (&yaml.Node{Kind: yaml.ScalarNode, Value: text}).ShortTag()
	if tag == "!!merge" {
		return "!!str"
	}
	return tag
}

// typed is scalar for a field of the format that is no string. There a variable may be quoted, because inside { } it must
// be.
func (l *loader) typed(n *yaml.Node) (tag, text string, ok bool) {
	tag, text, ok = l.scalar(n)
	if ok && tag == "!!str" && strings.Contains(deref(n).Value, "$") {
		tag = plainTag(text)
	}
	return tag, text, ok
}

// interpolation reports a mistake at its place inside a scalar, or at the scalar where it cannot be told.
func (l *loader) interpolation(n *yaml.Node, e interpolationError) {
	d := l.fail(n, e.code, "%s", e.message).hint("%s", e.hint)
	if l.more {
		return
	}
	v := deref(n)
	expr := []rune(v.Value[e.offset:min(e.offset+e.length, len(v.Value))])
	nth := strings.Count(v.Value[:e.offset], string(expr))
	sp := l.src.spanOf(v)
	for line, col := sp.line, sp.col; line < sp.endLine || line == sp.endLine && col < sp.endCol; line, col = l.src.next(line, col) {
		if line > len(l.src.lines) || col > l.src.lineLen(line) || !slices.Equal(l.src.lines[line-1][col-1:min(col-1+len(expr), l.src.lineLen(line))], expr) {
			continue
		}
		if nth--; nth < 0 {
			d.Place.Line, d.Place.Column = line, col
			d.span = span{line, col, line, col + len(expr)}
			return
		}
	}
}

// literal is the text of a scalar that may not hold variables: what a row is and how far it is trusted is decided by the
// file, which people agree to, never by the environment.
func (l *loader) literal(n *yaml.Node, what string) (tag, text string, ok bool) {
	v := deref(n)
	if v.Kind != yaml.ScalarNode {
		return "", "", false
	}
	if strings.Contains(v.Value, "$") {
		l.fail(n, CodeNotVariable, "%s may not hold a variable", what).hint("write the value itself")
		return "", "", false
	}
	return v.ShortTag(), v.Value, true
}

// text reads a string field.
func (l *loader) text(n *yaml.Node, what string) (string, bool) {
	before := len(l.diags)
	tag, text, ok := l.scalar(n)
	switch {
	case !ok && len(l.diags) == before:
		l.wrongType(n, what, "string")
		return "", false
	case !ok:
		return "", false
	case tag != "!!str" && tag != "!!timestamp":
		l.fail(n, CodeType, "%s: got %s, want string", what, tagName(tag)).hint("quote it")
		return "", false
	}
	return text, true
}

// literalText reads a string field that may not hold variables.
func (l *loader) literalText(n *yaml.Node, what string) (string, bool) {
	before := len(l.diags)
	tag, text, ok := l.literal(n, what)
	if !ok {
		if len(l.diags) == before {
			l.wrongType(n, what, "string")
		}
		return "", false
	}
	if tag != "!!str" && tag != "!!timestamp" {
		l.fail(n, CodeType, "%s: got %s, want string", what, tagName(tag)).hint("quote it")
		return "", false
	}
	return text, true
}

func (l *loader) boolean(n *yaml.Node, what string) (value, ok bool) {
	before := len(l.diags)
	tag, text, ok := l.typed(n)
	if !ok {
		if len(l.diags) == before {
			l.wrongType(n, what, "boolean")
		}
		return false, false
	}
	if tag != "!!bool" {
		d := l.fail(n, CodeType, "%s: got %s, want boolean", what, tagName(tag))
		if deref(n).Style != 0 {
			d.hint("write it without quotes")
		} else {
			d.hint("write true or false")
		}
		return false, false
	}
	return strings.EqualFold(text, "true"), true
}

func (l *loader) file(root *yaml.Node) {
	if deref(root).Kind != yaml.MappingNode {
		l.wrongType(root, "file", "mapping").hint("a composition begins with  cordon: %d", FileVersion)
		return
	}
	if _, all := fields(root); all["cordon"].key == nil && all["services"].key != nil {
		l.fail(all["services"].key, CodeForeignFile, "file is a compose file of another program").hint("name the composition with -f, or put it into a directory of its own")
		return
	}
	all, meant, _ := l.mapping(root, "the file", "cordon", "session", "plugins", "include", "patches")
	if f, ok := all["cordon"]; ok {
		l.version(f.value)
	} else if !meant["cordon"] {
		l.fail(root, CodeMissingKey, "key %q is missing", "cordon").hint("write  cordon: %d  on the first line", FileVersion)
	}
	for _, key := range []string{"include", "patches"} {
		if f, ok := all[key]; ok {
			l.fail(f.key, CodeUnsupported, "%q is not supported by this version of cordon", key).hint("write the rows into this file")
		}
	}
	if f, ok := all["session"]; ok {
		l.session(f.value)
	}
	f, ok := all["plugins"]
	if !ok {
		if !meant["plugins"] {
			l.fail(root, CodeMissingKey, "key %q is missing", "plugins").hint("list the plugins to run")
		}
		return
	}
	l.list(f.value, group{})
}

func (l *loader) version(n *yaml.Node) {
	before := len(l.diags)
	tag, text, ok := l.literal(n, "cordon")
	switch {
	case !ok && len(l.diags) == before, ok && tag != "!!int":
		l.wrongType(n, "cordon", "number").hint("write  cordon: %d", FileVersion)
	case ok && text != strconv.Itoa(FileVersion):
		l.fail(n, CodeVersion, "file format %s is not known", text).hint("this cordon reads version %d; a newer file needs a newer cordon", FileVersion)
	}
}

func (l *loader) session(n *yaml.Node) {
	all, _, ok := l.mapping(n, "session", "store")
	if !ok {
		return
	}
	f, ok := all["store"]
	if !ok {
		return
	}
	l.plan.Session.Place = Position{l.src.name, f.value.Line, f.value.Column}
	l.plan.hide(f.value) // it may hold a password
	store, ok := l.text(f.value, "session.store")
	if !ok {
		return
	}
	if !strings.HasPrefix(store, "sqlite:") && !strings.HasPrefix(store, "postgres://") && !strings.HasPrefix(store, "postgresql://") {
		l.fail(f.value, CodeBadValue, "session.store: no such kind of store").hint(`known are "sqlite:" (in the state directory), "sqlite:PATH" and "postgres://…"`)
		return
	}
	l.plan.Session.Store = store
}

// group is what the groups around a row say about it.
type group struct {
	path     []string
	isolate  map[string]string
	disabled bool
}

func (l *loader) list(n *yaml.Node, g group) {
	v := deref(n)
	if v.Kind != yaml.SequenceNode {
		l.wrongType(n, "plugins", "list").hint("begin each row with  - id:")
		return
	}
	for _, row := range v.Content {
		l.row(row, g)
	}
}

var (
	entryKeys = []string{"id", "use", "config", "disabled", "required", "isolate", "intercept", "env", "limits", "answers", "timeouts", "unconfined", "plugins"}
	// groupKeys are those a group shares with an entry.
	groupKeys = []string{"id", "plugins", "disabled", "isolate", "intercept"}
)

func (l *loader) row(n *yaml.Node, g group) {
	if l.count++; l.count > maxRows {
		if l.count == maxRows+1 {
			l.fail(n, CodeTooMany, "file has more than %d rows", maxRows)
		}
		return
	}
	all, meant, ok := l.mapping(n, "a row", entryKeys...)
	if !ok {
		return
	}
	for _, key := range []string{"config", "env", "intercept"} {
		if f, ok := all[key]; ok {
			l.plan.hide(f.value)
		}
	}
	e := &Entry{
		Isolate: maps.Clone(g.isolate), Disabled: g.disabled, Required: true, Config: []byte("{}"),
		Groups: slices.Clone(g.path), Place: Position{l.src.name, n.Line, n.Column},
		src: l.src, row: n, keys: all,
	}
	if e.Isolate == nil {
		e.Isolate = map[string]string{}
	}
	if f, ok := all["id"]; ok {
		e.ID = l.id(f.value)
	} else if !meant["id"] {
		l.fail(n, CodeMissingKey, "row has no %q", "id").hint("the id names the row in logs, sessions and commands")
	}
	if f, ok := all["disabled"]; ok {
		own, _ := l.boolean(f.value, "disabled")
		e.Disabled = e.Disabled || own
	}
	if f, ok := all["intercept"]; ok {
		l.fail(f.key, CodeUnsupported, "%q is not supported by this version of cordon", "intercept").hint("give the plugin its settings in config")
	}
	if f, ok := all["isolate"]; ok {
		l.isolate(f.value, e)
	}
	use, isEntry := all["use"]
	children, isGroup := all["plugins"]
	switch {
	case isEntry && isGroup:
		l.fail(children.key, CodeUseAndPlugins, "row has both %q and %q", "use", "plugins").
			related(Position{l.src.name, use.key.Line, use.key.Column}, "%q is here", "use").
			hint("a row is a plugin or a group; put the group into a row of its own")
	case isGroup:
		for _, key := range entryKeys {
			if f, ok := all[key]; ok && !slices.Contains(groupKeys, key) {
				l.fail(f.key, CodeMisplacedKey, "a group has no %q", key).hint("give it to the rows of the group")
			}
		}
	case !isEntry && !meant["use"] && !meant["plugins"]:
		l.fail(n, CodeMissingKey, "row has neither %q nor %q", "use", "plugins").hint("use: names the plugin; plugins: makes the row a group")
	}
	if isGroup {
		l.list(children.value, group{path: append(e.Groups, e.ID), isolate: e.Isolate, disabled: e.Disabled})
		if !isEntry {
			return
		}
	}
	if isEntry {
		l.use(use.value, e)
	}
	if f, ok := all["required"]; ok {
		if v, ok := l.boolean(f.value, "required"); ok {
			e.Required = v
		}
	}
	if f, ok := all["config"]; ok {
		l.config(f.value, e)
	}
	if f, ok := all["env"]; ok {
		l.environment(f.value, e)
	}
	if f, ok := all["limits"]; ok {
		l.limits(f.value, e)
	}
	if f, ok := all["timeouts"]; ok {
		l.timeouts(f.value, e)
	}
	if f, ok := all["answers"]; ok {
		l.answers(f.value, e)
	}
	if f, ok := all["unconfined"]; ok {
		l.unconfined(f.value, e)
	}
	l.plan.Entries = append(l.plan.Entries, e)
}

// ReservedIDs are the names under which the host itself calls and answers. A row of that name could pass for it.
func ReservedIDs() []string { return []string{"host", "inbox", "session"} }

func (l *loader) id(n *yaml.Node) string {
	id, ok := l.literalText(n, "id")
	switch {
	case !ok:
		return ""
	case !idPattern.MatchString(id):
		l.fail(n, CodeBadID, "id %q is not a name", id).hint("lower-case letters, digits and dashes, beginning with a letter")
	case len(id) > maxID:
		l.fail(n, CodeBadID, "id has more than %d characters", maxID).hint("paths of sockets carry it, and those are short")
	case slices.Contains(ReservedIDs(), id):
		l.fail(n, CodeBadID, "id %q is the host's own", id).hint("what the host does itself is logged and trusted under that name")
	case l.rows[id] != nil:
		first := l.rows[id]
		l.fail(n, CodeDuplicateID, "duplicate id %q", id).related(Position{l.src.name, first.Line, first.Column}, "first here").
			hint("groups do not make a name space of their own; all rows of a file share one")
	default:
		l.rows[id] = n
	}
	return id
}

// isolate reads  isolate: [a, b]  (realms of the row's own) or  isolate: {a: label, b: true}.
func (l *loader) isolate(n *yaml.Node, e *Entry) {
	private := "@" + e.ID
	name := func(k *yaml.Node) (string, bool) {
		text, ok := l.literalText(k, "isolate")
		if ok && !capabilityPattern.MatchString(text) {
			l.fail(k, CodeBadValue, "isolate: %q is not the name of a capability", text).hint("lower-case letters, digits and dashes")
			return "", false
		}
		return text, ok
	}
	switch v := deref(n); v.Kind {
	case yaml.SequenceNode:
		seen := map[string]bool{}
		for _, k := range v.Content {
			c, ok := name(k)
			if !ok {
				continue
			}
			if seen[c] {
				l.fail(k, CodeDuplicateKey, "isolate: %q is listed twice", c)
			}
			seen[c] = true
			e.Isolate[c] = private
		}
	case yaml.MappingNode:
		names, all := fields(v)
		for _, key := range names {
			f := all[key]
			c, ok := name(f.key)
			if !ok {
				continue
			}
			before := len(l.diags)
			tag, label, ok := l.literal(f.value, "isolate")
			switch {
			case !ok && len(l.diags) > before:
			case ok && tag == "!!bool" && strings.EqualFold(label, "true"):
				e.Isolate[c] = private
			case ok && tag == "!!str" && idPattern.MatchString(label):
				e.Isolate[c] = label
			case ok && tag == "!!str":
				l.fail(f.value, CodeBadValue, "isolate: %q is not the name of a realm", label).hint("lower-case letters, digits and dashes, beginning with a letter; or true for a realm of the row's own")
			default:
				l.wrongType(f.value, "isolate."+c, "the name of a realm, or true")
			}
		}
	default:
		l.wrongType(n, "isolate", "list of capabilities, or mapping of capability to realm")
	}
}

// reservedEnv are prefixes of variables that belong to the protocol between host and plugin.
var reservedEnv = []string{"CORDON_", "PLUGIN_"}

func (l *loader) environment(n *yaml.Node, e *Entry) {
	v := deref(n)
	if v.Kind != yaml.MappingNode {
		l.wrongType(n, "env", "mapping").hint("write  env: {NAME: \"${NAME}\"}")
		return
	}
	e.Env = map[string]string{}
	names, all := fields(v)
	for _, name := range names {
		f := all[name]
		if !envPattern.MatchString(name) {
			l.fail(f.key, CodeBadValue, "env: %q is not the name of a variable", name).hint("letters, digits and _")
			continue
		}
		if i := slices.IndexFunc(reservedEnv, func(p string) bool { return strings.HasPrefix(name, p) }); i >= 0 {
			l.fail(f.key, CodeBadValue, "env: names that begin with %s belong to cordon", reservedEnv[i]).hint("rename the variable")
			continue
		}
		before := len(l.diags)
		tag, text, ok := l.scalar(f.value)
		switch {
		case !ok && len(l.diags) > before:
		case !ok:
			l.wrongType(f.value, "env."+name, "string")
		case tag == "!!null" && text == "" && !strings.Contains(deref(f.value).Value, "$"):
			l.fail(f.value, CodeType, "env.%s: got null, want string", name).hint("to pass the variable on, write  %s: \"${%s}\"", name, name)
		case strings.ContainsRune(text, 0):
			l.fail(f.value, CodeBadValue, "env.%s: value has a zero byte", name)
		default:
			e.Env[name] = text
		}
	}
}

func (l *loader) limits(n *yaml.Node, e *Entry) {
	all, _, ok := l.mapping(n, "limits", "memory", "pids")
	if !ok {
		return
	}
	if f, ok := all["memory"]; ok {
		before := len(l.diags)
		_, text, ok := l.scalar(f.value)
		m := memoryPattern.FindStringSubmatch(text)
		switch {
		case !ok && len(l.diags) > before:
		case !ok:
			l.wrongType(f.value, "limits.memory", "number of bytes")
		case m == nil:
			l.fail(f.value, CodeBadValue, "limits.memory: not a number of bytes").hint("write a number with Ki, Mi, Gi or Ti, as in 256Mi")
		default:
			unit := map[string]int64{"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}[m[2]]
			count, err := strconv.ParseInt(m[1], 10, 64)
			if err != nil || count == 0 || count > math.MaxInt64/unit {
				l.fail(f.value, CodeBadValue, "limits.memory: out of range").hint("write a number with Ki, Mi, Gi or Ti, as in 256Mi")
				break
			}
			e.Limits.Memory = count * unit
		}
	}
	if f, ok := all["pids"]; ok {
		before := len(l.diags)
		tag, text, ok := l.typed(f.value)
		switch {
		case !ok && len(l.diags) > before:
		case !ok || tag != "!!int":
			l.wrongType(f.value, "limits.pids", "number")
		default:
			if e.Limits.Pids, _ = strconv.Atoi(text); e.Limits.Pids < 1 {
				e.Limits.Pids = 0
				l.fail(f.value, CodeBadValue, "limits.pids: out of range").hint("a plugin needs at least one process")
			}
		}
	}
}

func (l *loader) timeouts(n *yaml.Node, e *Entry) {
	all, _, ok := l.mapping(n, "timeouts", "start", "drain", "beat")
	if !ok {
		return
	}
	for key, into := range map[string]*time.Duration{"start": &e.Timeouts.Start, "drain": &e.Timeouts.Drain, "beat": &e.Timeouts.Beat} {
		f, ok := all[key]
		if !ok {
			continue
		}
		before := len(l.diags)
		_, text, ok := l.scalar(f.value)
		if !ok {
			if len(l.diags) == before {
				l.wrongType(f.value, "timeouts."+key, "duration")
			}
			continue
		}
		switch d, err := time.ParseDuration(text); {
		case err != nil:
			l.fail(f.value, CodeBadValue, "timeouts.%s: not a duration", key).hint("write a number with its unit: 500ms, 10s, 2m")
		case d <= 0 || d > maxTimeout:
			l.fail(f.value, CodeBadValue, "timeouts.%s: out of range", key).hint("more than zero, at most %s", maxTimeout)
		default:
			*into = d
		}
	}
}

// unconfined takes the literal alone: no variable of the environment may let a plugin out.
func (l *loader) unconfined(n *yaml.Node, e *Entry) {
	tag, text, ok := l.literal(n, "unconfined")
	switch {
	case !ok:
	case tag != "!!bool":
		l.wrongType(n, "unconfined", "true or false")
	default:
		e.Unconfined = text == "true"
	}
}

func (l *loader) answers(n *yaml.Node, e *Entry) {
	text, ok := l.literalText(n, "answers")
	if !ok {
		return
	}
	switch a := Answers(text); a {
	case AnswersClient, AnswersHuman:
		e.Answers = a
	default:
		l.fail(n, CodeBadValue, "answers: %q is no level", text).hint("client: the agent's own side answers; human: a person does; without it the row may only reject or delegate")
	}
}

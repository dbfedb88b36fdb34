package lock

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"unicode/utf8"

	"gopkg.in/yaml.v3"

	"github.com/cordon-host/cordon/host/compose"
)

// MaxFileSize is the size in bytes beyond which a lock file is not read: a thousand rows have far less.
const MaxFileSize = 1 << 20

// Read reads the lock file at path, and the digest of exactly the bytes that it read. There is none without an error: the file
// is then nil.
func Read(path string) (f *File, digest string, diags compose.Diagnostics) {
	fail := func(format string, args ...any) compose.Diagnostics {
		return compose.Diagnostics{{
			Code: compose.CodeLockFile, Severity: compose.Error, Place: compose.Position{File: path}, Message: fmt.Sprintf(format, args...),
		}}
	}
	// A link could be changed by who cannot change what is protected; a pipe would be waited for.
	in, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, "", nil
	case errors.Is(err, syscall.ELOOP):
		return nil, "", fail("lock file is a symbolic link; put the file itself there")
	case err != nil:
		return nil, "", fail("lock file cannot be read: %v", reason(err))
	}
	defer in.Close()
	info, err := in.Stat()
	if err != nil {
		return nil, "", fail("lock file cannot be read: %v", reason(err))
	}
	if !info.Mode().IsRegular() {
		return nil, "", fail("lock file is not a regular file")
	}
	data, err := io.ReadAll(io.LimitReader(in, MaxFileSize+1))
	if err != nil {
		return nil, "", fail("lock file cannot be read: %v", reason(err))
	}
	f, diags = Parse(path, data)
	sum := sha256.Sum256(data)
	return f, hex.EncodeToString(sum[:]), diags
}

// reason is an error without the path, which its diagnostic has.
func reason(err error) error {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		return pe.Err
	}
	return err
}

// Parse reads the text of a lock file. Everything that is wrong with it is said at once; the file is nil then. name is for the
// places.
func Parse(name string, data []byte) (*File, compose.Diagnostics) {
	p := &parser{name: name}
	f := p.file(data)
	if p.diags.HasErrors() {
		return nil, compose.Join(p.diags)
	}
	return f, nil
}

// maxMistakes is how many mistakes are looked for: the first ones explain the others.
const maxMistakes = 50

type parser struct {
	name  string
	lines []string
	diags compose.Diagnostics
}

// remedy goes with every mistake: nobody is meant to mend the file by hand.
const remedy = "the file is written by cordon lock: take an earlier version of it, or remove it and run  cordon lock"

func (p *parser) fail(line, column, width int, format string, args ...any) {
	if len(p.diags) >= maxMistakes {
		return
	}
	d := &compose.Diagnostic{
		Code: compose.CodeLockFile, Severity: compose.Error, Place: compose.Position{File: p.name, Line: line, Column: column},
		Message: "lock file: " + fmt.Sprintf(format, args...), Hints: []string{remedy},
	}
	if line >= 1 && line <= len(p.lines) {
		d.Snippet, d.Caret = printable(p.lines[line-1]), [2]int{max(column-1, 0), max(width, 1)}
	}
	p.diags = append(p.diags, d)
}

// maxSnippet is how many characters of a line are quoted.
const maxSnippet = 200

// printable is a line without what would speak to a terminal; every character keeps its column.
func printable(line string) string {
	var b strings.Builder
	n := 0
	for _, r := range line {
		if n++; n > maxSnippet {
			break
		}
		if !strconv.IsPrint(r) {
			r = ' '
		}
		b.WriteRune(r)
	}
	return b.String()
}

func (p *parser) at(n *yaml.Node, format string, args ...any) {
	p.fail(n.Line, n.Column, utf8.RuneCountInString(n.Value), format, args...)
}

// yamlLine is where the parser found a mistake, which it says in its text only.
var yamlLine = regexp.MustCompile(`^yaml: line (\d+): `)

func (p *parser) file(data []byte) *File {
	if len(data) > MaxFileSize {
		p.fail(0, 0, 0, "more than %d bytes", MaxFileSize)
		return nil
	}
	if !utf8.Valid(data) {
		p.fail(0, 0, 0, "not UTF-8")
		return nil
	}
	p.lines = strings.Split(string(data), "\n")
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF):
		p.fail(1, 1, 1, "empty")
		return nil
	case err != nil:
		line, said := 1, err.Error()
		if m := yamlLine.FindStringSubmatch(said); m != nil {
			line, _ = strconv.Atoi(m[1])
			said = said[len(m[0]):]
		}
		p.fail(line, 1, 1, "not YAML: %s", strings.TrimPrefix(said, "yaml: "))
		return nil
	}
	var second yaml.Node
	if err := dec.Decode(&second); !errors.Is(err, io.EOF) {
		line := max(second.Line, 1)
		p.fail(line, 1, 1, "more than one document")
		return nil
	}
	root := doc.Content[0]
	all := p.mapping(root, "the file", "lock", "entries")
	if all == nil {
		return nil
	}
	// The version first: what another one means is not known here.
	if n := p.need(root, all, "lock"); n != nil {
		if v, ok := p.number(n, "lock"); ok && v != Format {
			p.at(n, "format %d is not known; this cordon reads and writes %d", v, Format)
			return nil
		}
	}
	f := &File{Entries: map[string]*Entry{}}
	n := p.need(root, all, "entries")
	if n == nil {
		return nil
	}
	p.pairs(n, "entries", func(key, value *yaml.Node) {
		if !entryID.MatchString(key.Value) {
			p.at(key, "%q is no id of a row", key.Value)
			return
		}
		f.Entries[key.Value] = p.entry(key, value)
	})
	return f
}

// entryID is what the ids of rows are; see package compose.
var entryID = regexp.MustCompile(`^[a-z][a-z0-9-]{0,39}$`)

// serviceName is the full name of a gRPC service.
var serviceName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$`)

// hexDigest is what a sha256 looks like.
var hexDigest = regexp.MustCompile(`^[0-9a-f]{64}$`)

func (p *parser) entry(key, n *yaml.Node) *Entry {
	e := &Entry{place: p.place(key), places: map[string]compose.Position{}}
	all := p.mapping(n, "entry "+key.Value, "executable", "built", "manifest", "version", "kernel", "services")
	if all == nil {
		return e
	}
	if v := p.need(n, all, "executable"); v != nil {
		e.Executable, e.places["executable"] = p.digest(v, "executable"), p.place(v)
	}
	if v := all["built"]; v != nil {
		built := p.mapping(v, "built", "go", "platform")
		if w := p.need(v, built, "go"); w != nil {
			e.Built.Go, e.places["built.go"] = p.word(w, "built.go"), p.place(w)
		}
		if w := p.need(v, built, "platform"); w != nil {
			e.Built.Platform, e.places["built.platform"] = p.word(w, "built.platform"), p.place(w)
		}
	}
	if v := p.need(n, all, "manifest"); v != nil {
		e.Manifest, e.places["manifest"] = p.digest(v, "manifest"), p.place(v)
	}
	if v := p.need(n, all, "version"); v != nil {
		e.Version, e.places["version"] = p.text(v, "version"), p.place(v)
	}
	if v := p.need(n, all, "kernel"); v != nil {
		e.Kernel, _ = p.number(v, "kernel")
		e.places["kernel"] = p.place(v)
	}
	if v := all["services"]; v != nil {
		e.Services = map[string]string{}
		p.pairs(v, "services", func(key, value *yaml.Node) {
			if !serviceName.MatchString(key.Value) {
				p.at(key, "%q is no name of a service", key.Value)
				return
			}
			e.places[servicePrefix+key.Value] = p.place(value)
			if p.scalar(value, "services."+key.Value) && value.Value == noDescriptors {
				e.Services[key.Value] = ""
				return
			}
			e.Services[key.Value] = p.digest(value, "services."+key.Value)
		})
	}
	return e
}

func (p *parser) place(n *yaml.Node) compose.Position {
	return compose.Position{File: p.name, Line: n.Line, Column: n.Column}
}

// pairs calls fn for each key of a mapping, once per key.
func (p *parser) pairs(n *yaml.Node, what string, fn func(key, value *yaml.Node)) bool {
	if n.Kind != yaml.MappingNode || n.Anchor != "" || n.ShortTag() != "!!map" {
		p.at(n, "%s is not a mapping", what)
		return false
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key := n.Content[i]
		switch {
		case key.Kind != yaml.ScalarNode || key.Anchor != "" || key.ShortTag() != "!!str":
			p.at(key, "a key of %s is not a string", what)
		case seen[key.Value]:
			p.at(key, "key %q appears twice in %s", key.Value, what)
		default:
			seen[key.Value] = true
			fn(key, n.Content[i+1])
		}
	}
	return true
}

// mapping is the values of a mapping that has no other keys than these; nil if it is not one.
func (p *parser) mapping(n *yaml.Node, what string, keys ...string) map[string]*yaml.Node {
	out := map[string]*yaml.Node{}
	ok := p.pairs(n, what, func(key, value *yaml.Node) {
		for _, k := range keys {
			if k == key.Value {
				out[k] = value
				return
			}
		}
		p.at(key, "unknown key %q in %s", key.Value, what)
	})
	if !ok {
		return nil
	}
	return out
}

// need is a value that must be there. A mapping that is none has been reported.
func (p *parser) need(n *yaml.Node, all map[string]*yaml.Node, key string) *yaml.Node {
	v := all[key]
	if v == nil && all != nil {
		p.fail(n.Line, n.Column, 1, "key %q is missing", key)
	}
	return v
}

// scalar holds that a value is a plain one, neither an alias nor tagged.
func (p *parser) scalar(n *yaml.Node, what string) bool {
	if n.Kind == yaml.ScalarNode && n.Anchor == "" && n.Style&yaml.TaggedStyle == 0 {
		return true
	}
	p.at(n, "%s is not a plain value", what)
	return false
}

func (p *parser) text(n *yaml.Node, what string) string {
	if !p.scalar(n, what) {
		return ""
	}
	if n.ShortTag() != "!!str" {
		p.at(n, "%s is not a string", what)
		return ""
	}
	return n.Value
}

func (p *parser) word(n *yaml.Node, what string) string {
	s := p.text(n, what)
	if s == "" && n.Kind == yaml.ScalarNode && n.ShortTag() == "!!str" {
		p.at(n, "%s is empty", what)
	}
	return s
}

func (p *parser) number(n *yaml.Node, what string) (uint32, bool) {
	if !p.scalar(n, what) {
		return 0, false
	}
	v, err := strconv.ParseUint(n.Value, 10, 32)
	if n.ShortTag() != "!!int" || err != nil || strconv.FormatUint(v, 10) != n.Value {
		p.at(n, "%s is not a number", what)
		return 0, false
	}
	return uint32(v), true
}

func (p *parser) digest(n *yaml.Node, what string) string {
	s := p.text(n, what)
	if s == "" {
		if n.Kind == yaml.ScalarNode && n.Value == "" {
			p.at(n, "%s is not a digest: want %s and 64 hexadecimal digits", what, prefix)
		}
		return ""
	}
	sum, ok := strings.CutPrefix(s, prefix)
	if !ok || !hexDigest.MatchString(sum) {
		p.at(n, "%s is not a digest: want %s and 64 hexadecimal digits", what, prefix)
		return ""
	}
	return sum
}

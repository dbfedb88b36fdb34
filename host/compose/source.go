package compose

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"gopkg.in/yaml.v3"
)

// MaxFileSize is the size in bytes beyond which a file is not read: a composition is written by hand, and a limit
// keeps a hostile one from costing more than a refusal.
const MaxFileSize = 1 << 20

// span is a stretch of a source, half open, lines and columns counted from 1 in characters.
type span struct{ line, col, endLine, endCol int }

func (s span) contains(line, col int) bool {
	afterStart := line > s.line || line == s.line && col >= s.col
	beforeEnd := line < s.endLine || line == s.endLine && col < s.endCol
	return afterStart && beforeEnd
}

// source is a file as it was read.
type source struct {
	name   string // as the caller names it
	path   string // canonical
	sha256 string
	lines  [][]rune
	// opaque is set for a file that is not YAML: nobody can say which of its text belongs to a config, so that snippets
	// show only what certainly does not.
	opaque bool
}

// readSource reads a file that can be YAML at all. The digest is that of the bytes it returns.
func readSource(name string) (*source, []byte, *Diagnostic) {
	src := &source{name: name}
	fail := func(code Code, line, col int, format string, args ...any) *Diagnostic {
		return &Diagnostic{Code: code, Severity: Error, Message: fmt.Sprintf(format, args...),
			Place: Position{File: name, Line: line, Column: col}, span: span{line, col, line, col + 1}}
	}
	path, err := canonical(name)
	if err != nil {
		return src, nil, unreadable(name, err)
	}
	src.path = path
	data, err := readLimited(path, MaxFileSize)
	switch {
	case errors.Is(err, errTooLarge):
		d := fail(CodeTooLarge, 0, 0, "file has more than %d bytes", MaxFileSize)
		d.Hints = []string{"a composition is written by hand; keep data in files of its own and name them in config"}
		return src, nil, d
	case err != nil:
		return src, nil, unreadable(name, err)
	}
	sum := sha256.Sum256(data)
	src.sha256 = hex.EncodeToString(sum[:])
	if bytes.HasPrefix(data, []byte("\xef\xbb\xbf")) {
		d := fail(CodeBOM, 1, 1, "file begins with a byte order mark")
		d.Hints = []string{"save it as UTF-8 without BOM"}
		return src, nil, d
	}
	if !utf8.Valid(data) {
		line, col := 1, 1
		for rest := data; len(rest) > 0; {
			r, n := utf8.DecodeRune(rest)
			if r == utf8.RuneError && n == 1 {
				break
			}
			if col++; r == '\n' {
				line, col = line+1, 1
			}
			rest = rest[n:]
		}
		d := fail(CodeEncoding, line, col, "file is not UTF-8")
		if bytes.HasPrefix(data, []byte("\xff\xfe")) || bytes.HasPrefix(data, []byte("\xfe\xff")) {
			d.Message = "file is UTF-16, not UTF-8"
		}
		d.Hints = []string{"save it as UTF-8"}
		return src, nil, d
	}
	for l := range strings.SplitSeq(string(data), "\n") {
		src.lines = append(src.lines, []rune(l))
	}
	for i, l := range src.lines {
		if j := slices.Index(l, '\r'); j >= 0 {
			d := fail(CodeLineEnd, i+1, j+1, "line ends in a carriage return")
			d.Hints = []string{"save the file with Unix line ends (LF)"}
			src.lines, src.opaque = nil, true
			return src, nil, d
		}
	}
	return src, data, nil
}

func unreadable(name string, err error) *Diagnostic {
	d := &Diagnostic{Code: CodeUnreadable, Severity: Error, Place: Position{File: name}}
	var pe *fs.PathError
	if errors.As(err, &pe) {
		err = pe.Err
	}
	d.Message = fmt.Sprintf("file cannot be read: %v", err)
	if errors.Is(err, fs.ErrNotExist) {
		d.Hints = []string{"name the file with -f, or run cordon below the directory that has a compose.yml"}
	}
	return d
}

var errTooLarge = errors.New("too large")

func readLimited(path string, limit int64) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|nonblock, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, errors.New("not a regular file")
	}
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(data)) > limit {
		return nil, errTooLarge
	}
	return data, nil
}

// canonical is the absolute path without symbolic links.
func canonical(path string) (string, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	return filepath.EvalSymlinks(abs)
}

// at is the character at a place, 0 outside the file.
func (s *source) at(line, col int) rune {
	if line < 1 || line > len(s.lines) || col < 1 || col > len(s.lines[line-1]) {
		return 0
	}
	return s.lines[line-1][col-1]
}

func (s *source) lineLen(line int) int {
	if line < 1 || line > len(s.lines) {
		return 0
	}
	return len(s.lines[line-1])
}

// next is the place after line:col, going over the ends of lines.
func (s *source) next(line, col int) (int, int) {
	if col < s.lineLen(line) {
		return line, col + 1
	}
	return line + 1, 1
}

// spanOf is the stretch a node takes. yaml.v3 tells only where a node begins; for a scalar the end follows from its
// style, for a collection only the first character is meant.
func (s *source) spanOf(n *yaml.Node) span {
	line, col := n.Line, n.Column
	switch n.Kind {
	case yaml.AliasNode:
		return span{line, col, line, col + 1 + utf8.RuneCountInString(n.Value)}
	case yaml.ScalarNode:
	default:
		return span{line, col, line, col + 1}
	}
	// An anchor or a tag in front of the value belongs to the node.
	vl, vc := line, col
	for r := s.at(vl, vc); r == '&' || r == '!'; r = s.at(vl, vc) {
		for vc <= s.lineLen(vl) && !unicode.IsSpace(s.at(vl, vc)) {
			vc++
		}
		for vl <= len(s.lines) && (vc > s.lineLen(vl) || unicode.IsSpace(s.at(vl, vc))) {
			vl, vc = s.next(vl, vc)
		}
	}
	endOfLine := span{line, col, line, max(s.lineLen(line)+1, col+1)}
	switch {
	case n.Style&(yaml.DoubleQuotedStyle|yaml.SingleQuotedStyle) != 0:
		quote := '\''
		if n.Style&yaml.DoubleQuotedStyle != 0 {
			quote = '"'
		}
		if s.at(vl, vc) != quote {
			return endOfLine
		}
		l, c := s.next(vl, vc)
		for l <= len(s.lines) {
			r := s.at(l, c)
			switch {
			case quote == '"' && r == '\\' && c < s.lineLen(l):
				c++
			case r == quote && quote == '\'' && s.at(l, c+1) == '\'':
				c++
			case r == quote:
				return span{line, col, l, c + 1}
			}
			l, c = s.next(l, c)
		}
		return span{line, col, len(s.lines), s.lineLen(len(s.lines)) + 1}
	case n.Style&(yaml.LiteralStyle|yaml.FoldedStyle) != 0:
		return span{line, col, s.blockEnd(vl, vc), 1}
	}
	// A plain scalar has no escapes: it ends where its last visible character is found.
	l, c := vl, vc
	el, ec := vl, vc
	for _, r := range n.Value {
		if unicode.IsSpace(r) {
			continue
		}
		for l <= len(s.lines) && (c > s.lineLen(l) || unicode.IsSpace(s.at(l, c))) {
			l, c = s.next(l, c)
		}
		if s.at(l, c) != r {
			return endOfLine
		}
		el, ec = l, c+1
		l, c = s.next(l, c)
	}
	if el == line && ec <= col {
		ec = col + 1
	}
	return span{line, col, el, ec}
}

// blockEnd is the line after a block scalar whose header begins at line:col.
func (s *source) blockEnd(line, col int) int {
	indent := func(l int) (int, bool) {
		for i, r := range s.lines[l-1] {
			if r != ' ' {
				return i, true
			}
		}
		return 0, false
	}
	own, _ := indent(line)
	least := own + 1
	header := string(s.lines[line-1][min(col-1, len(s.lines[line-1])):])
	explicit := len(header) > 1 && strings.ContainsAny(header[1:min(3, len(header))], "123456789")
	for l := line + 1; l <= len(s.lines); l++ {
		have, text := indent(l)
		if !text {
			continue
		}
		if have < least {
			return l
		}
		if !explicit {
			least, explicit = have, true
		}
	}
	return len(s.lines) + 1
}

// maxSnippet is how many characters of a long line a snippet keeps.
const maxSnippet = 120

const maskText = "<redacted>"

// locate fills the snippet of d from what it is to underline, showing nothing of the masked stretches.
func (s *source) locate(d *Diagnostic, masked []span) {
	sp := d.span
	if sp.line < 1 || sp.line > len(s.lines) {
		return
	}
	line := s.lines[sp.line-1]
	if s.opaque {
		line = structural(line)
	}
	// Of a long line, only what is around the place.
	first := 0
	if sp.col > maxSnippet*3/4 {
		first = min(sp.col-maxSnippet/2, len(line))
	}
	window := line[first:min(len(line), first+maxSnippet)]
	masked = slices.DeleteFunc(slices.Clone(masked), func(m span) bool {
		return m.line > sp.line || m.line == sp.line && m.col > first+len(window) ||
			m.endLine < sp.line || m.endLine == sp.line && m.endCol <= first+1
	})
	// from[i] and to[i] are where character i of the window begins and ends in the snippet. All characters of a masked
	// stretch share the word that stands for it, whose length tells nothing.
	var out []rune
	if first > 0 {
		out = []rune("… ")
	}
	from, to := make([]int, len(window)), make([]int, len(window))
	last := -1 // the mask the previous character belongs to
	for i, r := range window {
		mask := slices.IndexFunc(masked, func(m span) bool { return m.contains(sp.line, first+i+1) })
		switch {
		case mask >= 0 && mask == last:
			from[i], to[i] = from[i-1], to[i-1]
			continue
		case mask >= 0:
			from[i] = len(out)
			out = append(out, []rune(maskText)...)
		case !unicode.IsPrint(r): // a tab, or something that would speak to the terminal
			from[i] = len(out)
			out = append(out, ' ')
		default:
			from[i] = len(out)
			out = append(out, r)
		}
		to[i], last = len(out), mask
	}
	start, end := len(out), len(out)+1
	if at := sp.col - 1 - first; at < len(window) {
		start = from[at]
		upTo := len(window)
		if sp.endLine == sp.line {
			upTo = min(max(sp.endCol-1-first, at+1), len(window))
		}
		end = to[upTo-1]
	}
	out = []rune(strings.TrimRight(string(out), " "))
	if len(out) == 0 {
		return
	}
	if first+len(window) < len(line) {
		out = append(out, []rune(" …")...)
	}
	d.Snippet, d.Caret = string(out), [2]int{start, max(1, end-start)}
}

// indexRunes is where word begins in text; -1 if it does not occur.
func indexRunes(text []rune, word string) int {
	w := []rune(word)
	for i := 0; i+len(w) <= len(text); i++ {
		if slices.Equal(text[i:i+len(w)], w) {
			return i
		}
	}
	return -1
}

// structural is what may be shown of a line of a file that is not YAML, where it cannot be known which values belong to
// a config: the key it begins with, and the value too if the key is one of the format's own plain ones.
func structural(line []rune) []rune {
	text := string(line)
	body := strings.TrimLeft(text, " \t-")
	lead := text[:len(text)-len(body)]
	if strings.HasPrefix(body, "#") || body == "" {
		return line
	}
	key, value, ok := strings.Cut(body, ":")
	if !ok || strings.ContainsAny(key, " \"'{}[],&*!|>%@`") {
		return []rune(lead + maskText)
	}
	if strings.TrimSpace(value) == "" || slices.Contains(plainKeys, key) && !strings.ContainsAny(value, "{[") {
		return line
	}
	return []rune(lead + key + ": " + maskText)
}

// plainKeys are keys of the format that never hold a secret.
var plainKeys = []string{"cordon", "id", "use", "disabled", "required", "answers", "memory", "pids", "start", "drain"}

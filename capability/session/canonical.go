package session

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// MaxData is the largest event payload in bytes, in canonical form. A tool result that is larger belongs in a file that the
// event names; the log is loaded whole when a session is opened.
const MaxData = 16 << 20

// maxDepth bounds the nesting of a payload, so that no reader of the log needs a deep stack.
const maxDepth = 512

// A DataError says why bytes cannot be the payload of an event.
type DataError struct {
	Offset int // of the first byte that is wrong
	Reason string
}

func (e *DataError) Error() string {
	return fmt.Sprintf("event data is not losslessly JSON: byte %d: %s", e.Offset, e.Reason)
}

// A SizeError says that a payload is larger than MaxData.
type SizeError struct {
	Type      string
	Size, Max int // bytes
}

func (e *SizeError) Error() string {
	return fmt.Sprintf("event %q carries %d bytes of data, the limit is %d: store large output elsewhere and name it in the event", e.Type, e.Size, e.Max)
}

// Canonical checks that data is one JSON object which every reader understands alike, and returns the bytes that are stored
// and hashed: the same tokens without white space between them, with <, >, &, U+2028 and U+2029 inside strings escaped.
//
// Refused are, beyond what JSON itself forbids: a key twice in one object (in the outermost one also when only the case differs)
// and a lone surrogate or invalid UTF-8, since two readers would see two different events; a number that overflows a float64;
// negative zero. Numbers keep their digits.
//
// The escapes make the result a fixed point of encoding/json, which escapes these characters whenever it copies a RawMessage:
// an event can be marshalled as part of anything and still verifies.
func Canonical(data []byte) (json.RawMessage, error) {
	c := canon{in: data, out: make([]byte, 0, len(data))}
	c.space()
	if c.pos >= len(c.in) || c.in[c.pos] != '{' {
		return nil, c.fail("an object was expected")
	}
	if err := c.value(0); err != nil {
		return nil, err
	}
	c.space()
	if c.pos != len(c.in) {
		return nil, c.fail("nothing may follow the object")
	}
	return c.out, nil
}

type canon struct {
	in, out []byte
	pos     int
}

func (c *canon) fail(reason string) error { return &DataError{Offset: c.pos, Reason: reason} }

func (c *canon) space() {
	for c.pos < len(c.in) {
		switch c.in[c.pos] {
		case ' ', '\t', '\n', '\r':
			c.pos++
		default:
			return
		}
	}
}

// next is the next byte after white space; 0 at the end, which is no token.
func (c *canon) next() byte {
	c.space()
	if c.pos < len(c.in) {
		return c.in[c.pos]
	}
	return 0
}

// take copies the next byte to the output.
func (c *canon) take() {
	c.out = append(c.out, c.in[c.pos])
	c.pos++
}

func (c *canon) value(depth int) error {
	if depth > maxDepth {
		return c.fail(fmt.Sprintf("nested deeper than %d", maxDepth))
	}
	switch b := c.next(); {
	case b == '{':
		return c.object(depth)
	case b == '[':
		return c.array(depth)
	case b == '"':
		return c.string()
	case b == '-' || '0' <= b && b <= '9':
		return c.number()
	case b == 't':
		return c.literal("true")
	case b == 'f':
		return c.literal("false")
	case b == 'n':
		return c.literal("null")
	}
	return c.fail("a value was expected")
}

func (c *canon) object(depth int) error {
	c.take()
	if c.next() == '}' {
		c.take()
		return nil
	}
	var seen keys
	for {
		if c.next() != '"' {
			return c.fail("a key was expected")
		}
		at, from := c.pos, len(c.out)
		if err := c.string(); err != nil {
			return err
		}
		key, err := unquote(c.out[from:])
		if err != nil {
			return c.fail(err.Error())
		}
		// Some readers, encoding/json among them, take the members they know whatever their case.
		if depth == 0 {
			key = fold(key)
		}
		if !seen.add(key) {
			c.pos = at
			return c.fail(fmt.Sprintf("key %s twice in one object", c.out[from:]))
		}
		if c.next() != ':' {
			return c.fail("a colon was expected")
		}
		c.take()
		if err := c.value(depth + 1); err != nil {
			return err
		}
		switch c.next() {
		case ',':
			c.take()
		case '}':
			c.take()
			return nil
		default:
			return c.fail("a comma or the end of the object was expected")
		}
	}
}

func (c *canon) array(depth int) error {
	c.take()
	if c.next() == ']' {
		c.take()
		return nil
	}
	for {
		if err := c.value(depth + 1); err != nil {
			return err
		}
		switch c.next() {
		case ',':
			c.take()
		case ']':
			c.take()
			return nil
		default:
			return c.fail("a comma or the end of the array was expected")
		}
	}
}

func (c *canon) string() error {
	const hex = "0123456789abcdef"
	c.take()
	for c.pos < len(c.in) {
		b := c.in[c.pos]
		switch {
		case b == '"':
			c.take()
			return nil
		case b == '\\':
			if err := c.escape(); err != nil {
				return err
			}
		case b < 0x20:
			return c.fail("a control character in a string must be escaped")
		case b == '<' || b == '>' || b == '&':
			c.out = append(c.out, '\\', 'u', '0', '0', hex[b>>4], hex[b&15])
			c.pos++
		case b < utf8.RuneSelf:
			c.take()
		default:
			r, n := utf8.DecodeRune(c.in[c.pos:])
			if r == utf8.RuneError && n == 1 {
				return c.fail("invalid UTF-8")
			}
			if r == '\u2028' || r == '\u2029' {
				c.out = append(c.out, '\\', 'u', '2', '0', '2', hex[r&15])
			} else {
				c.out = append(c.out, c.in[c.pos:c.pos+n]...)
			}
			c.pos += n
		}
	}
	return c.fail("the string does not end")
}

func (c *canon) escape() error {
	if c.pos+1 >= len(c.in) {
		return c.fail("the string does not end")
	}
	switch c.in[c.pos+1] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		c.take()
		c.take()
		return nil
	case 'u':
	default:
		return c.fail("unknown escape")
	}
	r, ok := c.unit(c.pos)
	if !ok {
		return c.fail("four hexadecimal digits were expected after \\u")
	}
	size := 6
	switch {
	case 0xDC00 <= r && r <= 0xDFFF:
		return c.fail("a lone surrogate")
	case 0xD800 <= r && r <= 0xDBFF:
		low, ok := c.unit(c.pos + 6)
		if !ok || low < 0xDC00 || low > 0xDFFF {
			return c.fail("a lone surrogate")
		}
		size = 12
	}
	c.out = append(c.out, c.in[c.pos:c.pos+size]...)
	c.pos += size
	return nil
}

// unit is the UTF-16 code unit of the \uXXXX escape at offset at.
func (c *canon) unit(at int) (rune, bool) {
	if at+6 > len(c.in) || c.in[at] != '\\' || c.in[at+1] != 'u' {
		return 0, false
	}
	var r rune
	for _, b := range c.in[at+2 : at+6] {
		switch {
		case '0' <= b && b <= '9':
			r = r<<4 | rune(b-'0')
		case 'a' <= b && b <= 'f':
			r = r<<4 | rune(b-'a'+10)
		case 'A' <= b && b <= 'F':
			r = r<<4 | rune(b-'A'+10)
		default:
			return 0, false
		}
	}
	return r, true
}

func (c *canon) number() error {
	start := c.pos
	digits := func() bool {
		from := c.pos
		for c.pos < len(c.in) && '0' <= c.in[c.pos] && c.in[c.pos] <= '9' {
			c.pos++
		}
		return c.pos > from
	}
	at := func(set string) bool {
		for i := range len(set) {
			if c.pos < len(c.in) && c.in[c.pos] == set[i] {
				c.pos++
				return true
			}
		}
		return false
	}
	at("-")
	if !at("0") && !digits() {
		return c.fail("a digit was expected")
	}
	if at(".") && !digits() {
		return c.fail("a digit was expected after the point")
	}
	if at("eE") {
		at("+-")
		if !digits() {
			return c.fail("a digit was expected in the exponent")
		}
	}
	text := string(c.in[start:c.pos])
	f, err := strconv.ParseFloat(text, 64)
	switch {
	case err != nil:
		c.pos = start
		return c.fail("the number is too large for a float64")
	case f == 0 && math.Signbit(f):
		c.pos = start
		return c.fail("negative zero is not kept by every reader")
	}
	c.out = append(c.out, text...)
	return nil
}

func (c *canon) literal(word string) error {
	if len(c.in)-c.pos < len(word) || string(c.in[c.pos:c.pos+len(word)]) != word {
		return c.fail("a value was expected")
	}
	c.out = append(c.out, word...)
	c.pos += len(word)
	return nil
}

// keys is the set of keys of one object: a slice while it is small, as nearly every payload is, a map beyond.
type keys struct {
	few  []string
	many map[string]bool
}

func (k *keys) add(key string) bool {
	const small = 16
	if k.many != nil {
		if k.many[key] {
			return false
		}
		k.many[key] = true
		return true
	}
	for _, have := range k.few {
		if have == key {
			return false
		}
	}
	k.few = append(k.few, key)
	if len(k.few) > small {
		k.many = make(map[string]bool, 2*small)
		for _, have := range k.few {
			k.many[have] = true
		}
	}
	return true
}

// fold is the same for keys that differ in case only.
func fold(key string) string {
	return strings.Map(func(r rune) rune {
		for {
			next := unicode.SimpleFold(r)
			if next <= r {
				return next // the smallest of those that fold together
			}
			r = next
		}
	}, key)
}

// unquote is the text of a JSON string that was already found to be well formed.
func unquote(quoted []byte) (string, error) {
	if bytes.IndexByte(quoted, '\\') >= 0 {
		var s string
		err := json.Unmarshal(quoted, &s)
		return s, err
	}
	return string(quoted[1 : len(quoted)-1]), nil
}

// member is the text of a top-level member of a canonical object; empty when there is none or it is no string. It reads the
// object up to the member only: a fold of a long log spends its time here.
func member(data []byte, key string) string {
	pos := 1
	for pos < len(data) && data[pos] == '"' {
		end := pos + stringEnd(data[pos:])
		if end >= len(data) || data[end] != ':' {
			return ""
		}
		name, err := unquote(data[pos:end])
		value := end + 1
		pos = value + valueEnd(data[value:])
		if err == nil && name == key {
			if pos-value < 2 || data[value] != '"' || data[pos-1] != '"' {
				return ""
			}
			text, err := unquote(data[value:pos])
			if err != nil {
				return ""
			}
			return text
		}
		pos++ // the comma
	}
	return ""
}

// stringEnd is the length of the JSON string that data begins with, or of data when it does not end.
func stringEnd(data []byte) int {
	for i := 1; i < len(data); i++ {
		switch data[i] {
		case '\\':
			i++
		case '"':
			return i + 1
		}
	}
	return len(data)
}

// valueEnd is the length of the JSON value that data begins with, or of data when it does not end.
func valueEnd(data []byte) int {
	depth := 0
	for i := 0; i < len(data); i++ {
		switch data[i] {
		case '"':
			i += stringEnd(data[i:]) - 1
		case '{', '[':
			depth++
		case '}', ']':
			if depth == 0 {
				return i
			}
			depth--
		case ',':
			if depth == 0 {
				return i
			}
		}
	}
	return len(data)
}

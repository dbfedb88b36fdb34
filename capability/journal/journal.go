// Package journal is what host and plugins agree on about log records: the names of levels, how long a record may be, and how
// structured attributes become the JSON object that travels.
package journal

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"time"
	"unicode/utf8"
)

// LevelTrace is below debug, for records of single steps.
const LevelTrace = slog.LevelDebug - 4

// MaxRecord bounds message and attributes of one record together, in bytes. What is longer is cut and marked.
const MaxRecord = 1 << 20

// maxCutAttributes is what is kept of attributes that do not fit: an object cannot be cut in the middle.
const maxCutAttributes = 4 << 10

// Levels are the names of the levels, from the one that says most.
var Levels = []string{"trace", "debug", "info", "warn", "error"}

// LevelName names a level, or the one below a level between two.
func LevelName(l slog.Level) string {
	switch {
	case l < slog.LevelDebug:
		return "trace"
	case l < slog.LevelInfo:
		return "debug"
	case l < slog.LevelWarn:
		return "info"
	case l < slog.LevelError:
		return "warn"
	}
	return "error"
}

// ParseLevel is the inverse of LevelName.
func ParseLevel(name string) (slog.Level, error) {
	switch strings.ToLower(name) {
	case "trace":
		return LevelTrace, nil
	case "debug":
		return slog.LevelDebug, nil
	case "info":
		return slog.LevelInfo, nil
	case "warn":
		return slog.LevelWarn, nil
	case "error":
		return slog.LevelError, nil
	}
	return 0, fmt.Errorf("log level must be one of %s, got %q", strings.Join(Levels, ", "), name)
}

// Scope is what a slog.Handler was given by WithAttrs and WithGroup. Its zero value is empty.
type Scope struct{ steps []step }

type step struct {
	group string // or:
	attrs []slog.Attr
}

// Attrs is the scope with more attributes.
func (s Scope) Attrs(attrs []slog.Attr) Scope {
	if len(attrs) == 0 {
		return s
	}
	return Scope{append(s.steps[:len(s.steps):len(s.steps)], step{attrs: attrs})}
}

// Group is the scope with another group open.
func (s Scope) Group(name string) Scope {
	if name == "" {
		return s
	}
	return Scope{append(s.steps[:len(s.steps):len(s.steps)], step{group: name})}
}

// Grouped reports whether a group is open.
func (s Scope) Grouped() bool {
	for _, st := range s.steps {
		if st.group != "" {
			return true
		}
	}
	return false
}

// empty is how slog's JSON handler begins a record of level info with neither time nor message.
const empty = `{"level":"INFO","msg":""`

// JSON is the attributes of a record within the scope as a JSON object, with groups as objects; nil if there are none. It says what
// slog's own JSON handler would.
func (s Scope) JSON(r slog.Record) json.RawMessage {
	if len(s.steps) == 0 && r.NumAttrs() == 0 {
		return nil
	}
	bare := slog.NewRecord(time.Time{}, slog.LevelInfo, "", 0)
	r.Attrs(func(a slog.Attr) bool {
		bare.AddAttrs(a)
		return true
	})
	var b bytes.Buffer
	var h slog.Handler = slog.NewJSONHandler(&b, nil)
	for _, st := range s.steps {
		if st.group != "" {
			h = h.WithGroup(st.group)
		} else {
			h = h.WithAttrs(st.attrs)
		}
	}
	if err := h.Handle(context.Background(), bare); err != nil {
		return nil // a buffer takes everything
	}
	rest, ok := bytes.CutPrefix(bytes.TrimSpace(b.Bytes()), []byte(empty))
	rest, comma := bytes.CutPrefix(rest, []byte(","))
	if !ok || !comma {
		return nil
	}
	return append([]byte("{"), rest...)
}

// Cut makes message and attributes fit into one record, and valid UTF-8, and reports whether anything had to go.
func Cut(message string, attributes []byte) (string, []byte, bool) {
	message = strings.ToValidUTF8(message, "\uFFFD")
	cut := false
	if len(message) > MaxRecord {
		message, cut = Head(message, MaxRecord), true
	}
	if len(message)+len(attributes) > MaxRecord && len(attributes) > maxCutAttributes {
		head, err := json.Marshal(map[string]string{"cut": Head(string(attributes), maxCutAttributes)})
		if err != nil {
			head = nil // a map of strings has no error
		}
		attributes, cut = head, true
	}
	return message, attributes, cut
}

// Head is the beginning of text, at most n bytes of it, ending with a whole character.
func Head(text string, n int) string {
	if len(text) <= n {
		return text
	}
	for n > 0 && !utf8.RuneStart(text[n]) {
		n--
	}
	return text[:n]
}

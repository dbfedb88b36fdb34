// Package session has the rules of a session log that its host, its readers and its tests share: the event envelope and the
// payloads of the core events, the hash chain, which events may follow which, and what closes a log that a crash left open.
// Everything here is pure: no clock, no randomness, no storage.
//
// A log is a header and a sequence of events. Each event names its turn, 0 when it belongs to none, and several turns may be
// open at once. State is always a fold of the log; State in this package is the fold that says what may come next.
package session

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"hash"
	"path/filepath"
	"strings"
	"time"
	"unicode/utf8"
)

// FormatVersion is the version of headers and events this package writes. A reader refuses a newer one.
const FormatVersion = 1

// Hash is one link of the chain, a SHA-256. Its text form is lower-case hexadecimal.
type Hash [sha256.Size]byte

func (h Hash) String() string { return hex.EncodeToString(h[:]) }

// MarshalText is the hexadecimal form.
func (h Hash) MarshalText() ([]byte, error) { return []byte(h.String()), nil }

// UnmarshalText reads exactly what MarshalText writes.
func (h *Hash) UnmarshalText(text []byte) error {
	if len(text) != 2*len(h) || strings.ToLower(string(text)) != string(text) {
		return fmt.Errorf("hash %q: 64 lower-case hexadecimal digits were expected", text)
	}
	_, err := hex.Decode(h[:], text)
	return err
}

// Header is the immutable part of a session.
type Header struct {
	Version   int
	ID        string
	CreatedAt time.Time // in whole milliseconds
	Cwd       string    // absolute, canonical
	Parent    string    // the id of the session this one is a child of, or empty
}

// Event is one entry of a log.
type Event struct {
	Seq  int64     // from 0, without gaps
	Time time.Time // in whole milliseconds, never before the previous event's
	Type string    // capability/what
	Turn int64     // 0 outside any turn
	Data json.RawMessage
	Prev Hash // Hash of the event before, for the first one the header's
	Hash Hash
}

// validID says whether id may name a session: it is then a file name, a word of a shell and a part of a URL without quoting.
func validID(id string) bool {
	if id == "" || len(id) > 128 {
		return false
	}
	for i := range len(id) {
		switch b := id[i]; {
		case 'a' <= b && b <= 'z', 'A' <= b && b <= 'Z', '0' <= b && b <= '9':
		case i > 0 && (b == '-' || b == '_' || b == '.'):
		default:
			return false
		}
	}
	return true
}

// Validate says what is wrong with a header. It looks at no file system: that Cwd exists and is canonical is for the caller
// who creates the session.
func (h Header) Validate() error {
	switch {
	case h.Version < 1 || h.Version > FormatVersion:
		return &VersionError{ID: h.ID, Version: h.Version}
	case !validID(h.ID):
		return fmt.Errorf("session header id %q: up to 128 letters, digits, '-', '_' and '.' were expected, the first a letter or digit", h.ID)
	case h.Parent != "" && !validID(h.Parent):
		return fmt.Errorf("session header parent %q is no session id", h.Parent)
	case h.Parent == h.ID:
		return fmt.Errorf("session header parent %q is the session itself", h.Parent)
	case !filepath.IsAbs(h.Cwd):
		return fmt.Errorf("session header cwd must be an absolute path, got %q", h.Cwd)
	case filepath.Clean(h.Cwd) != h.Cwd:
		return fmt.Errorf("session header cwd must be canonical, got %q instead of %q", h.Cwd, filepath.Clean(h.Cwd))
	case !utf8.ValidString(h.Cwd):
		return fmt.Errorf("session header is not losslessly JSON-serializable: cwd %q is not UTF-8", h.Cwd)
	case !wholeMilli(h.CreatedAt):
		return fmt.Errorf("session header created %v: whole milliseconds since 1970 were expected", h.CreatedAt)
	}
	return nil
}

// A VersionError is a session written by a newer Cordon.
type VersionError struct {
	ID      string
	Version int
}

func (e *VersionError) Error() string {
	return fmt.Sprintf("session %q has format version %d, this cordon reads up to %d: use the version that wrote it", e.ID, e.Version, FormatVersion)
}

func wholeMilli(t time.Time) bool {
	return t.UnixMilli() >= 0 && t.Equal(time.UnixMilli(t.UnixMilli()))
}

// maxType bounds the name of an event type, in bytes.
const maxType = 128

// ValidType says whether name may be an event type: two or more words of lower-case letters, digits and dashes, joined by
// slashes.
func ValidType(name string) bool {
	if len(name) > maxType || strings.Count(name, "/") == 0 {
		return false
	}
	for word := range strings.SplitSeq(name, "/") {
		if word == "" || word[0] == '-' {
			return false
		}
		for i := range len(word) {
			if b := word[i]; !('a' <= b && b <= 'z' || '0' <= b && b <= '9' || b == '-') {
				return false
			}
		}
	}
	return true
}

// Link is the hash of the header: Prev of the first event.
//
// It is SHA-256 over "cordon session 1\n", then version and creation (ms) as big-endian 64-bit integers, then id, cwd and
// parent, each preceded by its length in bytes as a big-endian 64-bit integer.
func (h Header) Link() Hash {
	d := digest{sha256.New()}
	d.raw("cordon session 1\n")
	d.int(int64(h.Version))
	d.int(h.CreatedAt.UnixMilli())
	d.bytes([]byte(h.ID))
	d.bytes([]byte(h.Cwd))
	d.bytes([]byte(h.Parent))
	return d.sum()
}

// Link is the hash of an event over everything but Hash itself.
//
// It is SHA-256 over "cordon event 1\n", then seq, time (ms since 1970) and turn as big-endian 64-bit integers, then type and
// data, each preceded by its length in bytes as a big-endian 64-bit integer, then the 32 bytes of prev.
func (e Event) Link() Hash {
	d := digest{sha256.New()}
	d.raw("cordon event 1\n")
	d.int(e.Seq)
	d.int(e.Time.UnixMilli())
	d.int(e.Turn)
	d.bytes([]byte(e.Type))
	d.bytes(e.Data)
	d.Write(e.Prev[:])
	return d.sum()
}

type digest struct{ hash.Hash }

func (d digest) raw(s string) { d.Write([]byte(s)) }

func (d digest) int(n int64) {
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], uint64(n))
	d.Write(b[:])
}

func (d digest) bytes(b []byte) {
	d.int(int64(len(b)))
	d.Write(b)
}

func (d digest) sum() (h Hash) {
	d.Sum(h[:0])
	return h
}

// A ChainError names the first event at which a log is not what was written.
type ChainError struct {
	Seq    int64
	Reason string
}

func (e *ChainError) Error() string {
	return fmt.Sprintf("event %d breaks the chain: %s", e.Seq, e.Reason)
}

// Verify proves that events are the log of header from its beginning, unchanged and without a gap. It cannot see that the
// end was cut off: compare the hash of the last event with one kept elsewhere.
func Verify(header Header, events []Event) error {
	return VerifyFrom(0, header.Link(), time.Time{}, events)
}

// VerifyFrom proves that events continue a log whose next sequence number, last hash and last time are given. For the
// beginning of a log these are 0, the header's link and the zero time.
func VerifyFrom(seq int64, prev Hash, last time.Time, events []Event) error {
	for i, e := range events {
		want := seq + int64(i)
		switch {
		case e.Seq != want:
			return &ChainError{Seq: want, Reason: fmt.Sprintf("the event found there has number %d", e.Seq)}
		case e.Prev != prev:
			return &ChainError{Seq: want, Reason: "it does not follow the event before it"}
		case e.Hash != e.Link():
			return &ChainError{Seq: want, Reason: "its hash is not that of its content"}
		case !wholeMilli(e.Time) || e.Time.Before(last):
			return &ChainError{Seq: want, Reason: "its time is before that of the event before it"}
		}
		prev, last = e.Hash, e.Time
	}
	return nil
}

// wire is the JSON form of an event.
type wire struct {
	Seq  *int64          `json:"seq"`
	Time *int64          `json:"time"`
	Type string          `json:"type"`
	Turn int64           `json:"turn"`
	Data json.RawMessage `json:"data"`
	Prev Hash            `json:"prev"`
	Hash Hash            `json:"hash"`
}

// MarshalJSON is one line of an exported log: {"seq","time" (ms),"type","turn","data","prev","hash"}.
func (e Event) MarshalJSON() ([]byte, error) {
	ms := e.Time.UnixMilli()
	return json.Marshal(wire{&e.Seq, &ms, e.Type, e.Turn, e.Data, e.Prev, e.Hash})
}

// UnmarshalJSON reads what MarshalJSON writes and refuses anything else: unknown or doubled keys, data that is not in
// canonical form, a type or a number out of range. It does not check the hash; Verify does.
func (e *Event) UnmarshalJSON(line []byte) error {
	line, err := Canonical(line)
	if err != nil {
		return err
	}
	f, err := object(line)
	if err != nil {
		return err
	}
	for _, key := range []string{"seq", "time", "type", "turn", "data", "prev", "hash"} {
		if f[key] == nil {
			return fmt.Errorf("event: key %q is missing", key)
		}
	}
	if len(f) != 7 {
		return fmt.Errorf("event: keys beyond seq, time, type, turn, data, prev and hash")
	}
	var w wire
	if err := json.Unmarshal(line, &w); err != nil {
		return fmt.Errorf("event: %w", err)
	}
	switch {
	case w.Seq == nil || *w.Seq < 0:
		return fmt.Errorf("event: seq must be a number from 0")
	case w.Time == nil || *w.Time < 0:
		return fmt.Errorf("event %d: time must be milliseconds since 1970", *w.Seq)
	case w.Turn < 0:
		return fmt.Errorf("event %d: turn must be a number from 0", *w.Seq)
	case !ValidType(w.Type):
		return fmt.Errorf("event %d: %q is no event type", *w.Seq, w.Type)
	case len(w.Data) == 0 || w.Data[0] != '{':
		return fmt.Errorf("event %d: data must be an object", *w.Seq)
	case len(w.Data) > MaxData:
		return &SizeError{Type: w.Type, Size: len(w.Data), Max: MaxData}
	}
	data, err := Canonical(w.Data)
	if err != nil {
		return fmt.Errorf("event %d: %w", *w.Seq, err)
	}
	*e = Event{Seq: *w.Seq, Time: time.UnixMilli(*w.Time).UTC(), Type: w.Type, Turn: w.Turn, Data: data, Prev: w.Prev, Hash: w.Hash}
	return nil
}

// object splits a canonical JSON object into its members, by exact key. encoding/json would match the fields of a struct
// whatever their case, and so read an event differently from other readers.
func object(data []byte) (map[string]json.RawMessage, error) {
	var f map[string]json.RawMessage
	if err := json.Unmarshal(data, &f); err != nil {
		return nil, err
	}
	return f, nil
}

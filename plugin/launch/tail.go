package launch

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
)

// Tail keeps the last bytes written to it. Everything that was written goes to a spill file as well, once the first byte
// had to be dropped: private to the user (0600), byte for byte, and given up as a whole if it grows beyond its own limit,
// because half a file would pass for a whole one. It never fails a write: output that cannot be kept must not stop the
// command that writes it.
type Tail struct {
	limit int
	spill Spill

	mu     sync.Mutex
	buf    []byte // the tail is its last limit bytes
	total  int64
	file   *os.File
	lost   bool // the spill was given up
	closed bool
}

// Spill says where a Tail may put the whole output.
type Spill struct {
	Dir   string // must exist and should be 0700; empty: no spill file
	Label string // part of the file's name, e.g. stdout
	Max   int64  // bytes; a longer output has no spill file
}

// Output is what a Tail has.
type Output struct {
	Data      []byte // the last bytes, at most the limit
	Truncated bool   // earlier ones were dropped
	Total     int64  // bytes written
	SpillPath string // the whole output; only when it was truncated and could be kept
}

// NewTail keeps at most limit bytes in memory; limit must be positive.
func NewTail(limit int, spill Spill) (*Tail, error) {
	if limit <= 0 {
		return nil, fmt.Errorf("output limit must be positive, got %d", limit)
	}
	return &Tail{limit: limit, spill: spill}, nil
}

// Write keeps p. It always takes all of it.
func (t *Tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := len(p)
	t.total += int64(n)
	t.write(p)
	if drop := len(t.buf) + len(p) - 2*t.limit; drop > 0 {
		// Compact only when the buffer is twice the limit, so that each byte is moved at most once.
		keep := t.buf[max(0, len(t.buf)-t.limit):]
		t.buf = append(t.buf[:0], keep...)
		p = p[max(0, len(p)-t.limit):]
	}
	t.buf = append(t.buf, p...)
	return n, nil
}

// write copies p to the spill file, making it first when p is what overflows the buffer. Up to then the buffer holds
// everything there was.
func (t *Tail) write(p []byte) {
	if t.closed || t.lost || t.total <= int64(t.limit) {
		return
	}
	if t.spill.Dir == "" || t.total > t.spill.Max {
		t.discard()
		return
	}
	if t.file == nil {
		// CreateTemp opens with O_EXCL and mode 0600.
		f, err := os.CreateTemp(t.spill.Dir, "cordon-output-*-"+t.spill.Label+".log")
		if err != nil {
			t.lost = true
			return
		}
		t.file = f
		if _, err := f.Write(t.buf); err != nil {
			t.discard()
			return
		}
	}
	if _, err := t.file.Write(p); err != nil {
		t.discard()
	}
}

func (t *Tail) discard() {
	t.lost = true
	if t.file != nil {
		t.file.Close()
		os.Remove(t.file.Name())
		t.file = nil
	}
}

// Close ends the spill file. A file that cannot be closed cleanly may miss its end, so it is withheld; the error says so.
// The output stays readable. Closing again does nothing.
func (t *Tail) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil
	}
	t.closed = true
	if t.file == nil {
		return nil
	}
	if err := t.file.Close(); err != nil {
		path := t.file.Name()
		t.file, t.lost = nil, true
		if rm := os.Remove(path); rm != nil && !errors.Is(rm, fs.ErrNotExist) {
			err = errors.Join(err, rm)
		}
		return fmt.Errorf("output file %s withheld: %w", path, err)
	}
	return nil
}

// Output is what is there now. The data is a copy.
func (t *Tail) Output() Output {
	t.mu.Lock()
	defer t.mu.Unlock()
	o := Output{
		Data:      append([]byte(nil), t.buf[max(0, len(t.buf)-t.limit):]...),
		Truncated: t.total > int64(t.limit),
		Total:     t.total,
	}
	if t.file != nil {
		o.SpillPath = t.file.Name()
	}
	return o
}

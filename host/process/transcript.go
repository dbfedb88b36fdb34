package process

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"log/slog"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cordon-host/cordon/capability/journal"
	"github.com/cordon-host/cordon/host/logs"
)

const (
	// maxLine is how much of one line is kept; the rest of it is read and dropped.
	maxLine = journal.MaxRecord
	// stderrTail is how many of the last lines of a plugin's stderr an error quotes, and maxTailLine how much of each.
	stderrTail  = 20
	maxTailLine = 2 << 10
	// maxTrace is how much of a trace is kept. A runtime writes the goroutine that failed first.
	maxTrace = journal.MaxRecord
	// traceIdle ends a trace that its process outlived: nobody writes one in pieces.
	traceIdle = 5 * time.Second
)

// traceStart is how runtimes begin to say why they die. What follows belongs to it.
var traceStart = regexp.MustCompile(`^(panic: |fatal error: |runtime: |unexpected fault address |SIG[A-Z]+: )`)

// transcript is what one process prints. Lines become records; the last ones, and the trace it dies with, are kept for the report of
// its end.
type transcript struct {
	log *logs.Writer

	mu    sync.Mutex
	tail  []string
	trace bytes.Buffer // open while tracing, else the newest one, as long as nothing was said after it
	open  bool
	idle  *time.Timer // runs while open
	ended bool
}

// stdout takes a line that a process printed.
func (t *transcript) stdout(line []byte, truncated bool) {
	if len(line) == 0 {
		return
	}
	t.log.Print(logs.Record{Time: time.Now(), Level: slog.LevelInfo, Stream: logs.StreamStdout, Message: t.log.Redact(string(line)), Truncated: truncated})
}

// stderr takes a line of the process's standard error: a record of a logger that has no stream to the host, the part of a trace, or
// anything else.
func (t *transcript) stderr(line []byte, truncated bool) {
	if r, ok := parseRecord(line, truncated); ok {
		t.log.Print(r)
		return
	}
	text := t.log.Redact(string(line))
	t.mu.Lock()
	if len(line) > 0 {
		if t.tail = append(t.tail, journal.Head(text, maxTailLine)); len(t.tail) > stderrTail {
			t.tail = t.tail[1:]
		}
	}
	if !t.open && !t.ended && traceStart.MatchString(text) {
		t.trace.Reset()
		t.open = true
		t.idle = time.AfterFunc(traceIdle, t.outlived)
	}
	if t.open {
		t.idle.Reset(traceIdle)
		if room := maxTrace - t.trace.Len(); room > 0 {
			t.trace.WriteString(journal.Head(text+"\n", room))
		}
		t.mu.Unlock()
		return
	}
	if len(line) > 0 {
		t.trace.Reset()
	}
	t.mu.Unlock()
	if len(line) > 0 {
		t.log.Print(logs.Record{Time: time.Now(), Level: slog.LevelInfo, Stream: logs.StreamStderr, Message: text, Truncated: truncated})
	}
}

// outlived logs a trace that did not end the process: somebody printed it, or somebody else died.
func (t *transcript) outlived() {
	t.mu.Lock()
	open := t.open && !t.ended
	t.open = false
	text := t.trace.String()
	t.mu.Unlock()
	if open {
		t.log.Print(logs.Record{Time: time.Now(), Level: slog.LevelError, Stream: logs.StreamStderr, Message: strings.TrimRight(text, "\n")})
	}
}

// end closes the transcript and returns the last lines and the trace.
func (t *transcript) end() (tail, trace string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ended = true
	if t.idle != nil {
		t.idle.Stop()
	}
	t.log.Flush()
	return strings.Join(slices.Clone(t.tail), "\n"), t.trace.String()
}

// level finds the level of a record that is too long to be read whole.
var level = regexp.MustCompile(`"@level":"([a-z]+)"`)

// maxLevelSearch is where in a record its level must be found; loggers write it first.
const maxLevelSearch = 4 << 10

// parseRecord reads a record as go-plugin's loggers write them on stderr: a JSON object a line, with @level, @message and @timestamp.
func parseRecord(line []byte, truncated bool) (logs.Record, bool) {
	r := logs.Record{Time: time.Now(), Level: slog.LevelInfo, Stream: logs.StreamLog, Truncated: truncated}
	if !bytes.HasPrefix(line, []byte(`{"@`)) {
		return r, false
	}
	if truncated {
		m := level.FindSubmatch(line[:min(len(line), maxLevelSearch)])
		if m == nil {
			return r, false
		}
		if l, err := journal.ParseLevel(string(m[1])); err == nil {
			r.Level = l
		}
		r.Message = string(line)
		return r, true
	}
	var fields map[string]json.RawMessage
	if json.Unmarshal(line, &fields) != nil {
		return r, false
	}
	text := func(key string) (s string) {
		_ = json.Unmarshal(fields[key], &s) // another type is no text
		delete(fields, key)
		return s
	}
	if l, err := journal.ParseLevel(text("@level")); err == nil {
		r.Level = l
	}
	r.Message = text("@message")
	if at, err := time.Parse("2006-01-02T15:04:05.000000Z07:00", text("@timestamp")); err == nil {
		r.Time = at
	}
	if len(fields) > 0 {
		if raw, err := json.Marshal(fields); err == nil {
			r.Attributes = raw
		}
	}
	return r, true
}

// readLine reads one line of any length, without its end, keeping at most maxLine bytes of it.
func readLine(in *bufio.Reader) (line []byte, truncated bool, err error) {
	for {
		part, err := in.ReadSlice('\n')
		room := maxLine - len(line)
		line = append(line, part[:min(room, len(part))]...)
		truncated = truncated || len(bytes.TrimRight(part, "\r\n")) > room
		if errors.Is(err, bufio.ErrBufferFull) {
			continue
		}
		return bytes.TrimRight(line, "\r\n"), truncated, err
	}
}

// lines is an io.Writer that hands on whole lines, of which it keeps at most maxLine bytes.
type lines struct {
	take func(line []byte, truncated bool)

	mu        sync.Mutex
	part      []byte
	truncated bool
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for chunk := range bytes.Lines(p) {
		text, whole := bytes.CutSuffix(chunk, []byte("\n"))
		room := maxLine - len(l.part)
		l.part = append(l.part, text[:min(room, len(text))]...)
		l.truncated = l.truncated || len(text) > room
		if whole {
			l.flush()
		}
	}
	return len(p), nil
}

// flush hands on what was begun. The lock is held.
func (l *lines) flush() {
	l.take(bytes.TrimRight(l.part, "\r"), l.truncated)
	l.part, l.truncated = nil, false
}

// end hands on a last line without an end.
func (l *lines) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.part) > 0 {
		l.flush()
	}
}

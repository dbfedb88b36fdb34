// Package logs keeps the last records of every entry: what its plugin logged, what its process printed, and what the host has to say
// about it. Whoever asks gets them, and may follow.
//
// Everything here is bounded. A ring per entry holds the last records; what a process writes passes a rate limit first, and
// whatever is dropped is counted in the next record. The values of a row that are secrets are taken out of a record before
// anybody sees it.
package logs

import (
	"context"
	"encoding/json"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
)

// What is kept of one entry: enough to see what led to a crash, and the crash's own trace, and no more than a host with dozens of
// entries has to spare.
const (
	MaxRecords = 2000
	MaxBytes   = 2 << 20
)

// What one entry may write, in the long run and at once. A plugin that says more at debug level is not read by anybody; a burst at
// its start or end is. One record of the largest size must pass.
const (
	RecordsPerSecond = 500
	BurstRecords     = 2000
	BytesPerSecond   = 1 << 20
	BurstBytes       = 4 << 20
)

// Where a record comes from.
const (
	StreamHost   = "host"   // the host, about the entry
	StreamLog    = "log"    // the plugin's logger
	StreamStdout = "stdout" // lines that the process printed
	StreamStderr = "stderr"
)

// Redacted stands for a value that no record may show.
const Redacted = "<redacted>"

// minSecret is how long a value must be to be taken out of records. Shorter ones are words that occur anyway.
const minSecret = 8

// Record is one record of an entry's log.
type Record struct {
	Time       time.Time
	Level      slog.Level
	Entry      string
	Generation uint64 // 0 for what belongs to none
	Stream     string
	Message    string
	Attributes json.RawMessage // an object, or nil
	// Dropped is how many records before this one are missing.
	Dropped uint64
	// Truncated says that the record was longer than a record may be.
	Truncated bool

	seq uint64
}

func (r *Record) size() int { return len(r.Message) + len(r.Attributes) + 128 } // 128: about what the rest takes

// Book is the logs of a host.
type Book struct {
	next   slog.Handler
	lowest atomic.Int64 // of all levels

	mu      sync.Mutex
	seq     uint64
	rings   map[string]*ring
	level   slog.Level            // of entries without one of their own
	levels  map[string]slog.Level // by entry
	changed chan struct{}         // closed and replaced with every record
	leveled chan struct{}         // closed and replaced with every change of a level
}

// ring is the last records of one entry.
type ring struct {
	records []Record
	bytes   int
	evicted uint64 // how many went before records[0]
	redact  *strings.Replacer

	recordRate, byteRate *rate.Limiter
}

// NewBook makes a book whose records go on to next as well. Level is where entries begin.
func NewBook(next slog.Handler, level slog.Level) *Book {
	b := &Book{next: next, level: level, rings: map[string]*ring{}, levels: map[string]slog.Level{},
		changed: make(chan struct{}), leveled: make(chan struct{})}
	b.lowest.Store(int64(level))
	return b
}

// ring is the ring of an entry. The lock is held.
func (b *Book) ring(entry string) *ring {
	r, ok := b.rings[entry]
	if !ok {
		r = &ring{
			recordRate: rate.NewLimiter(RecordsPerSecond, BurstRecords),
			byteRate:   rate.NewLimiter(BytesPerSecond, BurstBytes),
		}
		b.rings[entry] = r
	}
	return r
}

// Known reports whether there is a log of an entry.
func (b *Book) Known(entry string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	_, ok := b.rings[entry]
	return ok
}

// Hide takes these values out of the records of an entry from now on, wherever they occur to the letter: those of its row that are
// secrets. A value of several lines is also looked for line by line, for that is how a process would print it.
func (b *Book) Hide(entry string, secrets []string) {
	r := replacer(secrets)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ring(entry).redact = r
}

// replacer takes secrets out of a text; nil if there are none.
func replacer(secrets []string) *strings.Replacer {
	var all []string
	add := func(s string) {
		if len(s) >= minSecret {
			all = append(all, s)
		}
	}
	for _, s := range secrets {
		add(s)
		for line := range strings.Lines(s) {
			add(strings.TrimSpace(line))
		}
	}
	// As it would stand inside JSON.
	for _, s := range slices.Clone(all) {
		if quoted, err := json.Marshal(s); err == nil {
			add(string(quoted[1 : len(quoted)-1]))
		}
		var b strings.Builder
		enc := json.NewEncoder(&b)
		enc.SetEscapeHTML(false)
		if err := enc.Encode(s); err == nil {
			add(strings.TrimSpace(b.String())[1 : b.Len()-2])
		}
	}
	if len(all) == 0 {
		return nil
	}
	// The longest first: one may be the beginning of another.
	slices.SortFunc(all, func(a, b string) int { return len(b) - len(a) })
	var pairs []string
	for _, s := range slices.Compact(all) {
		pairs = append(pairs, s, Redacted)
	}
	return strings.NewReplacer(pairs...)
}

// redacted is text without the secrets of an entry.
func (b *Book) redacted(entry, text string) string {
	b.mu.Lock()
	r := b.ring(entry).redact
	b.mu.Unlock()
	if r == nil {
		return text
	}
	return r.Replace(text)
}

// Level is the level below which an entry's records are not kept, and a channel that is closed when any level changes.
func (b *Book) Level(entry string) (slog.Level, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.levelOf(entry), b.leveled
}

func (b *Book) levelOf(entry string) slog.Level {
	if l, ok := b.levels[entry]; ok {
		return l
	}
	return b.level
}

// SetLevel changes the level of an entry, or of all without a name.
func (b *Book) SetLevel(entry string, l slog.Level) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if entry == "" {
		b.level = l
		clear(b.levels)
	} else {
		b.levels[entry] = l
	}
	lowest := b.level
	for _, l := range b.levels {
		lowest = min(lowest, l)
	}
	b.lowest.Store(int64(lowest))
	close(b.leveled)
	b.leveled = make(chan struct{})
}

// keep adds a record to its entry's ring, if the level of the entry lets it.
func (b *Book) keep(r Record) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if r.Level < b.levelOf(r.Entry) {
		return false
	}
	ring := b.ring(r.Entry)
	if ring.redact != nil {
		r.Message = ring.redact.Replace(r.Message)
		if r.Attributes = json.RawMessage(ring.redact.Replace(string(r.Attributes))); len(r.Attributes) > 0 && !json.Valid(r.Attributes) {
			r.Attributes = json.RawMessage(`{"attributes":"` + Redacted + `"}`) // the secret was a number
		}
	}
	b.seq++
	r.seq = b.seq
	ring.records = append(ring.records, r)
	ring.bytes += r.size()
	for len(ring.records) > MaxRecords || ring.bytes > MaxBytes && len(ring.records) > 1 {
		ring.bytes -= ring.records[0].size()
		ring.records[0] = Record{} // the array lives on until the next append moves it
		ring.records = ring.records[1:]
		ring.evicted++
	}
	close(b.changed)
	b.changed = make(chan struct{})
	return true
}

// Query says which records somebody wants.
type Query struct {
	Entry  string // empty: of all
	Level  slog.Level
	Tail   int // how many of those there are; negative: all
	Follow bool
}

// Read hands the records that a query asks for to yield, oldest first, and with Follow those that come until ctx ends. Somebody who
// is slower than the log misses records; the next one says how many.
func (b *Book) Read(ctx context.Context, q Query, yield func(Record) error) error {
	seen := map[string]uint64{} // how many records of each entry
	first := true
	for {
		b.mu.Lock()
		var found []Record
		for entry, ring := range b.rings {
			if q.Entry != "" && entry != q.Entry {
				continue
			}
			var missed uint64
			from := seen[entry]
			if from < ring.evicted {
				if !first {
					missed = ring.evicted - from
				}
				from = ring.evicted
			}
			for _, r := range ring.records[from-ring.evicted:] {
				if r.Level >= q.Level {
					r.Dropped += missed
					missed = 0
					found = append(found, r)
				}
			}
			seen[entry] = ring.evicted + uint64(len(ring.records))
		}
		changed := b.changed
		b.mu.Unlock()
		slices.SortFunc(found, func(x, y Record) int {
			if x.seq < y.seq {
				return -1
			}
			return 1
		})
		if first && q.Tail >= 0 && len(found) > q.Tail {
			found = found[len(found)-q.Tail:]
		}
		first = false
		for _, r := range found {
			if err := yield(r); err != nil {
				return err
			}
		}
		if !q.Follow {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
	}
}

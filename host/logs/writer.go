package logs

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/cordon-host/cordon/capability/journal"
)

// Writer is where the records of one generation go.
type Writer struct {
	book       *Book
	entry      string
	generation uint64
	log        *slog.Logger

	recordRate, byteRate *rate.Limiter

	dropped atomic.Uint64 // since the last record that passed
}

// Writer makes the writer of a generation; 0 for a process that is none.
func (b *Book) Writer(entry string, generation uint64) *Writer {
	b.mu.Lock()
	ring := b.ring(entry)
	b.mu.Unlock()
	log := slog.New(b.Handler()).With("entry", entry)
	if generation > 0 {
		log = log.With("generation", generation)
	}
	return &Writer{book: b, entry: entry, generation: generation, log: log, recordRate: ring.recordRate, byteRate: ring.byteRate}
}

// Discard is a writer that keeps nothing.
func Discard() *Writer { return NewBook(slog.DiscardHandler, slog.LevelError+1).Writer("", 0) }

// Log is for what the host has to say about the generation.
func (w *Writer) Log() *slog.Logger { return w.log }

// Level is the level below which nothing is wanted, and a channel that is closed when that may have changed.
func (w *Writer) Level() (slog.Level, <-chan struct{}) { return w.book.Level(w.entry) }

// Redact is text without the secrets of the row.
func (w *Writer) Redact(text string) string { return w.book.redacted(w.entry, text) }

// Print takes a record that cannot wait: what a process prints must be read, or it blocks. What comes too fast is dropped and counted.
func (w *Writer) Print(r Record) {
	if level, _ := w.Level(); r.Level < level {
		return
	}
	now := time.Now()
	if !w.recordRate.AllowN(now, 1) || !w.byteRate.AllowN(now, min(r.size(), BurstBytes)) {
		w.dropped.Add(1)
		return
	}
	w.write(r)
}

// Take takes a record in its time: it waits while the entry writes too fast. Its sender is then held up, and drops and counts
// what it cannot keep. It fails when ctx ends.
func (w *Writer) Take(ctx context.Context, r Record) error {
	if level, _ := w.Level(); r.Level < level {
		return nil
	}
	err := w.recordRate.Wait(ctx)
	if err == nil {
		err = w.byteRate.WaitN(ctx, min(r.size(), BurstBytes))
	}
	if err != nil {
		w.dropped.Add(1)
		return err
	}
	w.write(r)
	return nil
}

// write adds a record that passed the limits.
func (w *Writer) write(r Record) {
	r.Entry, r.Generation = w.entry, w.generation
	r.Dropped += w.dropped.Swap(0)
	var cut bool
	var attributes []byte
	r.Message, attributes, cut = journal.Cut(r.Message, r.Attributes)
	r.Attributes, r.Truncated = attributes, r.Truncated || cut
	if len(r.Attributes) > 0 && !object(r.Attributes) {
		r.Attributes = nil // nobody could read the rest of the line
	}
	if !w.book.keep(r) {
		return
	}
	if !w.book.next.Enabled(context.Background(), r.Level) {
		return
	}
	out := slog.NewRecord(r.Time, r.Level, w.Redact(r.Message), 0)
	out.AddAttrs(slog.String("entry", r.Entry))
	if r.Generation > 0 {
		out.AddAttrs(slog.Uint64("generation", r.Generation))
	}
	out.AddAttrs(slog.String("stream", r.Stream))
	if len(r.Attributes) > 0 {
		// As one value: a plugin's own names must not stand beside the host's.
		out.AddAttrs(slog.String("attributes", w.Redact(string(r.Attributes))))
	}
	if r.Dropped > 0 {
		out.AddAttrs(slog.Uint64("dropped", r.Dropped))
	}
	if r.Truncated {
		out.AddAttrs(slog.Bool("truncated", true))
	}
	_ = w.book.next.Handle(context.Background(), out) // there is nowhere to say that a log cannot be written
}

// object reports whether raw is one JSON object.
func object(raw []byte) bool {
	return bytes.HasPrefix(bytes.TrimSpace(raw), []byte("{")) && json.Valid(raw)
}

// Flush says what was dropped, when no record follows that could.
func (w *Writer) Flush() {
	if w.dropped.Load() > 0 {
		w.write(Record{Time: time.Now(), Level: slog.LevelWarn, Stream: StreamHost, Message: "records were dropped: they came faster than a log may grow"})
	}
}

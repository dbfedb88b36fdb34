package logs_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/cordon-host/cordon/capability/journal"
	"github.com/cordon-host/cordon/host/logs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func read(t *testing.T, b *logs.Book, q logs.Query) (out []logs.Record) {
	t.Helper()
	if err := b.Read(t.Context(), q, func(r logs.Record) error { out = append(out, r); return nil }); err != nil {
		t.Fatal(err)
	}
	return out
}

func messages(all []logs.Record) string {
	var out []string
	for _, r := range all {
		out = append(out, r.Entry+":"+r.Message)
	}
	return strings.Join(out, " ")
}

var all = logs.Query{Level: journal.LevelTrace, Tail: -1}

func info(text string) logs.Record {
	return logs.Record{Time: time.Now(), Level: slog.LevelInfo, Stream: logs.StreamLog, Message: text}
}

// The host's own records go on to its log, and those about an entry are kept with it.
func TestHostRecords(t *testing.T) {
	var text bytes.Buffer
	b := logs.NewBook(slog.NewTextHandler(&text, &slog.HandlerOptions{Level: slog.LevelWarn}), slog.LevelInfo)
	log := slog.New(b.Handler())
	log.Warn("of nobody", "x", 1)
	log.Info("about one", "entry", "a", "generation", uint64(3), "why", errors.New("no"))
	log.With("entry", "b", "k", "v").WithGroup("g").Warn("about another", "entry", "inner")
	log.Debug("too quiet", "entry", "a")
	got := read(t, b, all)
	if messages(got) != "a:about one b:about another" {
		t.Fatalf("records %+v", got)
	}
	if r := got[0]; r.Generation != 3 || string(r.Attributes) != `{"why":"no"}` || r.Stream != logs.StreamHost {
		t.Errorf("record %+v", r)
	}
	if r := got[1]; string(r.Attributes) != `{"k":"v","g":{"entry":"inner"}}` {
		t.Errorf("record %+v: %s", r, r.Attributes)
	}
	if s := text.String(); strings.Contains(s, "about one") || !strings.Contains(s, "of nobody") || !strings.Contains(s, "entry=b k=v g.entry=inner") {
		t.Errorf("the host's log:\n%s", s)
	}
}

func TestPluginRecordsReachTheHostsLog(t *testing.T) {
	var text bytes.Buffer
	b := logs.NewBook(slog.NewTextHandler(&text, nil), slog.LevelInfo)
	r := info("hello\nlevel=ERROR forged")
	r.Attributes = []byte(`{"entry":"forged","n":1}`)
	if err := b.Writer("a", 2).Take(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	if s := text.String(); !strings.Contains(s, `msg="hello\nlevel=ERROR forged" entry=a generation=2 stream=log attributes="{\"entry\":\"forged\",\"n\":1}"`) || strings.Count(s, "\n") != 1 {
		t.Errorf("the host's log:\n%s", s)
	}
}

func TestRingIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := logs.NewBook(slog.DiscardHandler, slog.LevelInfo)
		few, many := b.Writer("few", 1), b.Writer("many", 1)
		few.Print(info("one"))
		for i := range logs.MaxRecords + 10 {
			if err := many.Take(t.Context(), info(fmt.Sprint(i))); err != nil {
				t.Fatal(err)
			}
		}
		got := read(t, b, logs.Query{Entry: "many", Tail: -1})
		if len(got) != logs.MaxRecords || got[0].Message != "10" {
			t.Errorf("%d records, the oldest %q", len(got), got[0].Message)
		}
		if got := read(t, b, logs.Query{Tail: -1}); messages(got[:1]) != "few:one" {
			t.Errorf("one entry's flood displaced another's records")
		}
		// Bytes count too; one record of the largest size always fits.
		for range 10 {
			if err := many.Take(t.Context(), info(strings.Repeat("x", 2*journal.MaxRecord))); err != nil {
				t.Fatal(err)
			}
		}
		size := 0
		got = read(t, b, logs.Query{Entry: "many", Tail: -1})
		for _, r := range got {
			size += len(r.Message)
		}
		if size > logs.MaxBytes || len(got) == 0 || !got[len(got)-1].Truncated || len(got[len(got)-1].Message) != journal.MaxRecord {
			t.Errorf("%d bytes in %d records", size, len(got))
		}
	})
}

// What cannot wait is dropped beyond the rate and counted; what can, waits.
func TestRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := logs.NewBook(slog.DiscardHandler, slog.LevelInfo)
		w := b.Writer("a", 1)
		for range 2 * logs.BurstRecords {
			w.Print(info("x"))
		}
		if n := len(read(t, b, all)); n != logs.BurstRecords {
			t.Errorf("%d records at once", n)
		}
		time.Sleep(time.Second)
		w.Print(info("later"))
		got := read(t, b, logs.Query{Tail: 1})
		if got[0].Message != "later" || got[0].Dropped != logs.BurstRecords {
			t.Errorf("record %+v", got[0])
		}
		// Another generation of the entry does not begin anew.
		w2 := b.Writer("a", 2)
		begin := time.Now()
		for range 2 * logs.RecordsPerSecond {
			if err := w2.Take(t.Context(), info("y")); err != nil {
				t.Fatal(err)
			}
		}
		if d := time.Since(begin); d < 500*time.Millisecond || d > 2*time.Second {
			t.Errorf("a thousand records took %s", d)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		if err := w2.Take(ctx, info("too late")); err == nil {
			t.Error("a record was taken beyond the rate")
		}
		w2.Flush()
		if got := read(t, b, logs.Query{Tail: 1}); got[0].Dropped != 1 || got[0].Level != slog.LevelWarn {
			t.Errorf("record %+v", got[0])
		}
		// What is below the level costs nothing.
		for range 10 * logs.BurstRecords {
			w2.Print(logs.Record{Level: slog.LevelDebug})
		}
		time.Sleep(10 * time.Millisecond)
		w2.Print(info("heard"))
		if got := read(t, b, logs.Query{Tail: 1}); got[0].Message != "heard" || got[0].Dropped != 0 {
			t.Errorf("record %+v", got[0])
		}
	})
}

func TestLevels(t *testing.T) {
	b := logs.NewBook(slog.DiscardHandler, slog.LevelInfo)
	a, other := b.Writer("a", 1), b.Writer("b", 1)
	debug := func(w *logs.Writer) int {
		before := len(read(t, b, all))
		w.Print(logs.Record{Level: slog.LevelDebug, Message: "x"})
		return len(read(t, b, all)) - before
	}
	_, changed := a.Level()
	if debug(a) != 0 {
		t.Error("debug is kept at info")
	}
	b.SetLevel("a", slog.LevelDebug)
	select {
	case <-changed:
	default:
		t.Error("nobody heard of the change")
	}
	if debug(a) != 1 || debug(other) != 0 {
		t.Error("the level of one entry")
	}
	host := slog.New(b.Handler())
	if host.Debug("about a", "entry", "a"); len(read(t, b, logs.Query{Entry: "a", Level: slog.LevelDebug, Tail: -1})) != 2 {
		t.Error("the host's own record about a is missing")
	}
	b.SetLevel("", slog.LevelWarn)
	if l, _ := a.Level(); l != slog.LevelWarn {
		t.Errorf("level %v: one for all is for all", l)
	}
	if host.Enabled(t.Context(), slog.LevelInfo) {
		t.Error("info is wanted")
	}
}

func TestTailLevelAndFollow(t *testing.T) {
	b := logs.NewBook(slog.DiscardHandler, slog.LevelInfo)
	a, other := b.Writer("a", 1), b.Writer("b", 1)
	for i := range 3 {
		a.Print(info(fmt.Sprint("a", i)))
		other.Print(logs.Record{Level: slog.LevelError, Message: fmt.Sprint("b", i)})
	}
	for _, tt := range []struct {
		q    logs.Query
		want string
	}{
		{logs.Query{Tail: -1}, "a:a0 b:b0 a:a1 b:b1 a:a2 b:b2"},
		{logs.Query{Tail: 3}, "b:b1 a:a2 b:b2"},
		{logs.Query{Tail: 0}, ""},
		{logs.Query{Entry: "a", Tail: 2}, "a:a1 a:a2"},
		{logs.Query{Level: slog.LevelError, Tail: 2}, "b:b1 b:b2"},
		{logs.Query{Entry: "nobody", Tail: -1}, ""},
	} {
		if got := messages(read(t, b, tt.q)); got != tt.want {
			t.Errorf("%+v: %s, want %s", tt.q, got, tt.want)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	got := make(chan string, 100)
	ended := make(chan error)
	go func() {
		ended <- b.Read(ctx, logs.Query{Tail: 1, Level: slog.LevelError, Follow: true}, func(r logs.Record) error { got <- r.Message; return nil })
	}()
	if m := <-got; m != "b2" {
		t.Errorf("first %s", m)
	}
	a.Print(info("too quiet"))
	other.Print(logs.Record{Level: slog.LevelError, Message: "b3"})
	if m := <-got; m != "b3" {
		t.Errorf("then %s", m)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// Somebody who reads slower than the log grows is told what is missing.
func TestSlowReaderIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := logs.NewBook(slog.DiscardHandler, slog.LevelInfo)
		w := b.Writer("a", 1)
		ctx, cancel := context.WithCancel(t.Context())
		var kept, dropped uint64
		first := make(chan struct{})
		resume := make(chan struct{})
		go func() {
			_ = b.Read(ctx, logs.Query{Tail: 0, Follow: true}, func(r logs.Record) error {
				if kept == 0 {
					close(first)
					<-resume
				}
				kept++
				dropped += r.Dropped
				return nil
			})
		}()
		synctest.Wait()
		w.Print(info("first"))
		<-first
		for range 3 * logs.MaxRecords {
			if err := w.Take(ctx, info("x")); err != nil {
				t.Fatal(err)
			}
		}
		close(resume)
		synctest.Wait()
		cancel()
		synctest.Wait()
		if kept+dropped != 3*logs.MaxRecords+1 || dropped == 0 {
			t.Errorf("%d read, %d missing of %d", kept, dropped, 3*logs.MaxRecords+1)
		}
	})
}

func TestHide(t *testing.T) {
	b := logs.NewBook(slog.DiscardHandler, slog.LevelInfo)
	b.Hide("a", []string{"hunter2-hunter2", "short", `quo"ted\secret`, "line one of it\nline two of it", "hunter2-hunter2-longer", "12345678"})
	w := b.Writer("a", 1)
	r := info("x hunter2-hunter2 short hunter2-hunter2-longer line two of it")
	attributes, err := json.Marshal(map[string]any{"k": `quo"ted\secret`, "l": "line one of it\nline two of it"})
	if err != nil {
		t.Fatal(err)
	}
	r.Attributes = attributes
	w.Print(r)
	number := info("n")
	number.Attributes = []byte(`{"pin":12345678}`)
	w.Print(number)
	b.Writer("b", 1).Print(info("hunter2-hunter2 is nothing to b"))
	got := read(t, b, all)
	if got[0].Message != "x <redacted> short <redacted> <redacted>" || string(got[0].Attributes) != `{"k":"<redacted>","l":"<redacted>"}` {
		t.Errorf("record %q %s", got[0].Message, got[0].Attributes)
	}
	if !json.Valid(got[1].Attributes) || strings.Contains(string(got[1].Attributes), "12345678") {
		t.Errorf("attributes %s", got[1].Attributes)
	}
	if got[2].Message != "hunter2-hunter2 is nothing to b" {
		t.Errorf("record %q", got[2].Message)
	}
	if w.Redact("hunter2-hunter2") != logs.Redacted {
		t.Error("Redact")
	}
}

func TestAttributesThatAreNoObjectAreDropped(t *testing.T) {
	b := logs.NewBook(slog.DiscardHandler, slog.LevelInfo)
	w := b.Writer("a", 1)
	for _, raw := range []string{`[1]`, `{"a":`, `x`, `{} {}`} {
		r := info("m")
		r.Attributes = []byte(raw)
		w.Print(r)
	}
	for _, r := range read(t, b, all) {
		if r.Attributes != nil {
			t.Errorf("attributes %s", r.Attributes)
		}
	}
}

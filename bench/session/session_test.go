// Package session_test measures the session log against what it stands on: the same rows written with the same SQLite, driver
// and durability, without sessions, hashes and rules. Run it with
//
//	go test -bench . ./bench/session
//
// Each iteration measures both sides one after the other, so that the ratios hold whatever else the machine does.
package session_test

import (
	"database/sql"
	"fmt"
	"log/slog"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	_ "modernc.org/sqlite"

	rules "github.com/cordon-host/cordon/capability/session"
	"github.com/cordon-host/cordon/host/session"
	"github.com/cordon-host/cordon/host/session/store/sqlite"
)

// rawDB is SQLite with the settings of the store.
type rawDB struct {
	db     *sql.DB
	insert *sql.Stmt
}

const rawInsert = "INSERT INTO event (session, seq, time, type, turn, data, hash) VALUES (?, ?, ?, ?, ?, ?, ?)"

func newRaw(b *testing.B) *rawDB {
	db, err := sql.Open("sqlite", "file:"+filepath.Join(b.TempDir(), "raw.db")+"?_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)")
	if err != nil {
		b.Fatal(err)
	}
	db.SetMaxOpenConns(1)
	b.Cleanup(func() { db.Close() })
	if _, err := db.Exec(`CREATE TABLE event (session INTEGER, seq INTEGER, time INTEGER, type TEXT, turn INTEGER, data TEXT, hash BLOB,
		PRIMARY KEY (session, seq)) STRICT, WITHOUT ROWID`); err != nil {
		b.Fatal(err)
	}
	insert, err := db.Prepare(rawInsert)
	if err != nil {
		b.Fatal(err)
	}
	return &rawDB{db, insert}
}

func (r *rawDB) add(b *testing.B, in *sql.Stmt, n, seq int) {
	if _, err := in.Exec(n, seq, 1700000000000, "test/event", 0, payload, hash); err != nil {
		b.Error(err)
	}
}

// A tool call with a short command is about this long.
var (
	payload = `{"turn":1,"callId":"call_0123456789abcdef","name":"bash","arguments":"` + strings.Repeat("x", 120) + `"}`
	hash    = make([]byte, 32)
)

func newLog(b *testing.B, path string) *session.Log {
	store, err := sqlite.Open(b.Context(), path, sqlite.Options{})
	if err != nil {
		b.Fatal(err)
	}
	l, err := session.Open(b.Context(), store, session.Options{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { l.Close() })
	return l
}

func newSession(b *testing.B, l *session.Log) *session.Session {
	s, err := l.Create(b.Context(), session.Spec{Cwd: "/"})
	if err != nil {
		b.Fatal(err)
	}
	return s
}

func add(b *testing.B, s *session.Session) {
	if _, err := s.Append(b.Context(), session.Draft{Type: "test/event", Data: []byte(payload)}); err != nil {
		b.Error(err)
	}
}

// latencies is how long each append took.
type latencies struct {
	mu  sync.Mutex
	all []time.Duration
}

func (l *latencies) time(fn func()) {
	start := time.Now()
	fn()
	took := time.Since(start)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, took)
}

func (l *latencies) report(b *testing.B) {
	slices.Sort(l.all)
	us := func(q float64) float64 { return float64(l.all[int(q*float64(len(l.all)-1))].Nanoseconds()) / 1e3 }
	b.ReportMetric(us(0.5), "p50-µs")
	b.ReportMetric(us(0.99), "p99-µs")
}

func BenchmarkAppend(b *testing.B) {
	const each = 20
	l := newLog(b, filepath.Join(b.TempDir(), "s.db"))
	b.Run("one at a time", func(b *testing.B) {
		raw, s := newRaw(b), newSession(b, l)
		var ours, theirs time.Duration
		var took latencies
		seq := 0
		for b.Loop() {
			start := time.Now()
			for range each {
				raw.add(b, raw.insert, 1, seq)
				seq++
			}
			mid := time.Now()
			for range each {
				took.time(func() { add(b, s) })
			}
			theirs += mid.Sub(start)
			ours += time.Since(mid)
		}
		b.ReportMetric(float64(seq)/ours.Seconds(), "appends/s")
		b.ReportMetric(float64(ours)/float64(theirs), "x-raw")
		took.report(b)
	})
	b.Run("16 sessions at once", func(b *testing.B) {
		const callers = 16
		raw := newRaw(b)
		var sessions []*session.Session
		for range callers {
			sessions = append(sessions, newSession(b, l))
		}
		var ours, separate, batched time.Duration
		var took latencies
		seq := 0
		for b.Loop() {
			// Raw, a transaction for each.
			start := time.Now()
			var wg sync.WaitGroup
			for n := range callers {
				wg.Go(func() {
					for i := range each {
						raw.add(b, raw.insert, n, seq+i)
					}
				})
			}
			wg.Wait()
			separate += time.Since(start)
			seq += each
			// Raw, in the best batches there can be.
			start = time.Now()
			for range each {
				tx, err := raw.db.Begin()
				if err != nil {
					b.Fatal(err)
				}
				in := tx.Stmt(raw.insert)
				for n := range callers {
					raw.add(b, in, n, seq)
				}
				seq++
				if err := tx.Commit(); err != nil {
					b.Fatal(err)
				}
			}
			batched += time.Since(start)
			// Ours.
			start = time.Now()
			for _, s := range sessions {
				wg.Go(func() {
					for range each {
						took.time(func() { add(b, s) })
					}
				})
			}
			wg.Wait()
			ours += time.Since(start)
		}
		b.ReportMetric(float64(seq/2*callers)/ours.Seconds(), "appends/s")
		b.ReportMetric(float64(ours)/float64(separate), "x-raw")
		b.ReportMetric(float64(ours)/float64(batched), "x-raw-batched")
		took.report(b)
	})
	b.Run("16 callers of one session", func(b *testing.B) {
		const callers = 16
		raw, s := newRaw(b), newSession(b, l)
		var ours, theirs time.Duration
		var took latencies
		seq := 0
		for b.Loop() {
			start := time.Now()
			var wg sync.WaitGroup
			for n := range callers {
				wg.Go(func() {
					for i := range each {
						raw.add(b, raw.insert, n, seq+i)
					}
				})
			}
			wg.Wait()
			seq += each
			mid := time.Now()
			for range callers {
				wg.Go(func() {
					for range each {
						took.time(func() { add(b, s) })
					}
				})
			}
			wg.Wait()
			theirs += mid.Sub(start)
			ours += time.Since(mid)
		}
		b.ReportMetric(float64(seq*callers)/ours.Seconds(), "appends/s")
		b.ReportMetric(float64(ours)/float64(theirs), "x-raw")
		took.report(b)
	})
}

// long is a log of n events in turns of four: begin, call, result, end.
func long(b *testing.B, header session.Header, n int) []session.Event {
	state := rules.NewState(header)
	events := make([]session.Event, 0, n)
	for len(events) < n {
		turn := state.NextTurn()
		for _, d := range []rules.Draft{
			{Type: "turn/start", Data: fmt.Appendf(nil, `{"turn":%d}`, turn)},
			{Type: "tool/call", Data: fmt.Appendf(nil, `{"turn":%d,"callId":"c","name":"bash","arguments":"%s"}`, turn, strings.Repeat("x", 120))},
			{Type: "tool/result", Data: fmt.Appendf(nil, `{"turn":%d,"callId":"c","isError":false,"content":[{"type":"text","text":"%s"}]}`, turn, strings.Repeat("y", 300))},
			{Type: "turn/end", Data: fmt.Appendf(nil, `{"turn":%d,"reason":{"kind":"completed"}}`, turn)},
		} {
			d.Turn = turn
			if err := state.Check(d); err != nil {
				b.Fatal(err)
			}
			e := state.Seal(d, time.UnixMilli(1700000000000+state.Next()))
			state.Apply(e)
			events = append(events, e)
		}
	}
	return events
}

var header = session.Header{Version: rules.FormatVersion, ID: "long", CreatedAt: time.UnixMilli(1700000000000).UTC(), Cwd: "/"}

// BenchmarkOpen loads, verifies and folds a session of 10,000 events, against reading its rows.
func BenchmarkOpen(b *testing.B) {
	const n = 10_000
	path := filepath.Join(b.TempDir(), "s.db")
	store, err := sqlite.Open(b.Context(), path, sqlite.Options{})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { store.Close() })
	if err := store.Create(b.Context(), header); err != nil {
		b.Fatal(err)
	}
	if err := store.Append(b.Context(), header.ID, 0, long(b, header, n)); err != nil {
		b.Fatal(err)
	}
	db, err := sql.Open("sqlite", "file:"+path)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { db.Close() })
	var pages, pageSize int
	if err := db.QueryRow("PRAGMA page_count").Scan(&pages); err != nil {
		b.Fatal(err)
	}
	if err := db.QueryRow("PRAGMA page_size").Scan(&pageSize); err != nil {
		b.Fatal(err)
	}
	var ours, theirs time.Duration
	for b.Loop() {
		start := time.Now()
		rows, err := db.Query("SELECT seq, time, type, turn, data, hash FROM event ORDER BY session, seq")
		if err != nil {
			b.Fatal(err)
		}
		count := 0
		for rows.Next() {
			var seq, ms, turn int64
			var typ string
			var data, hash []byte
			if err := rows.Scan(&seq, &ms, &typ, &turn, &data, &hash); err != nil {
				b.Fatal(err)
			}
			count++
		}
		if err := rows.Err(); err != nil || count != n {
			b.Fatalf("%d rows, %v", count, err)
		}
		mid := time.Now()
		l, err := session.Open(b.Context(), keep{store}, session.Options{})
		if err != nil {
			b.Fatal(err)
		}
		s, err := l.Get(b.Context(), header.ID)
		if err != nil || s.Len() != n {
			b.Fatal(err)
		}
		theirs += mid.Sub(start)
		ours += time.Since(mid)
		if err := l.Close(); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(ours.Milliseconds())/float64(b.N), "ms/open")
	b.ReportMetric(float64(ours)/float64(theirs), "x-raw-read")
	b.ReportMetric(float64(pages*pageSize)/n, "bytes/event")
}

// keep is a store that a Log does not close.
type keep struct{ session.Store }

func (keep) Close() error { return nil }

// BenchmarkFold walks a log in memory.
func BenchmarkFold(b *testing.B) {
	const n = 100_000
	events := long(b, header, n)
	perEvent := func(b *testing.B) { b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/event") }
	b.Run("verify", func(b *testing.B) {
		for b.Loop() {
			if err := rules.Verify(header, events); err != nil {
				b.Fatal(err)
			}
		}
		perEvent(b)
	})
	b.Run("state", func(b *testing.B) {
		for b.Loop() {
			s := rules.NewState(header)
			for _, e := range events {
				s.Apply(e)
			}
			if s.Next() != n {
				b.Fatal(s.Next())
			}
		}
		perEvent(b)
	})
}

// BenchmarkMany lists 10,000 sessions, and holds 1,000 of them, with 20 events each, in memory.
func BenchmarkMany(b *testing.B) {
	const sessions, live, events = 10_000, 1_000, 20
	store, err := sqlite.Open(b.Context(), filepath.Join(b.TempDir(), "s.db"), sqlite.Options{})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { store.Close() })
	var wg sync.WaitGroup
	const makers = 50
	for m := range makers {
		wg.Go(func() {
			for i := m; i < sessions; i += makers {
				h := header
				h.ID = fmt.Sprintf("many-%05d", i)
				if err := store.Create(b.Context(), h); err != nil {
					b.Error(err)
					return
				}
				if err := store.Append(b.Context(), h.ID, 0, long(b, h, events)); err != nil {
					b.Error(err)
				}
			}
		})
	}
	wg.Wait()
	b.Run("list", func(b *testing.B) {
		for b.Loop() {
			if all, err := store.List(b.Context()); err != nil || len(all) != sessions {
				b.Fatal(len(all), err)
			}
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/sessions, "ns/session")
	})
	b.Run("live", func(b *testing.B) {
		var before, after runtime.MemStats
		for b.Loop() {
			l, err := session.Open(b.Context(), keep{store}, session.Options{})
			if err != nil {
				b.Fatal(err)
			}
			runtime.GC()
			runtime.ReadMemStats(&before)
			for i := range live {
				if _, err := l.Get(b.Context(), fmt.Sprintf("many-%05d", i)); err != nil {
					b.Fatal(err)
				}
			}
			runtime.GC()
			runtime.ReadMemStats(&after)
			if len(l.Live()) != live {
				b.Fatal(len(l.Live()))
			}
			if err := l.Close(); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/live, "B/session")
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/live/1e3, "µs/load")
	})
}

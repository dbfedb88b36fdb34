// Package sqlite keeps session logs in one SQLite file.
//
// The file belongs to one host at a time, held by a lock that ends with the process; a second host gets ErrInUse at once. Two
// hosts sharing the sessions of one file would each take the other's open turns for a crash and close them.
//
// All writing is done by one goroutine. It takes whatever appends are waiting and commits them in one transaction, so that many
// sessions share one sync of the disk, and tells each caller its own result. Every commit is synced before its callers are
// told (WAL with synchronous=FULL). If a transaction of several fails as a whole, each of them is tried alone.
package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/cordon-host/cordon/host/session"
)

const (
	// applicationID marks the file as ours, in the place SQLite has for it: "Crdn".
	applicationID = 0x4372646e

	// A transaction takes at most so many appends, and begins no further one beyond so many bytes: the first waits for the last.
	maxBatch      = 256
	maxBatchBytes = 32 << 20
)

// Options of a store. The zero value is the one to use.
type Options struct {
	// BusyTimeout is how long a transaction waits for a lock that another program, such as a backup, has on the file. Five
	// seconds when zero.
	BusyTimeout time.Duration
}

// migrations[v] brings a file from schema v to v+1. Schemas only go forward; a file of schema n has user_version n.
var migrations = []string{`
CREATE TABLE session (
	num     INTEGER PRIMARY KEY,
	id      TEXT NOT NULL UNIQUE,
	version INTEGER NOT NULL,
	created INTEGER NOT NULL, -- milliseconds since 1970
	cwd     TEXT NOT NULL,
	parent  TEXT NOT NULL
) STRICT;
-- The hash of the event before is not kept: it is the one in the row before.
CREATE TABLE event (
	session INTEGER NOT NULL REFERENCES session (num),
	seq     INTEGER NOT NULL,
	time    INTEGER NOT NULL, -- milliseconds since 1970
	type    TEXT NOT NULL,
	turn    INTEGER NOT NULL,
	data    TEXT NOT NULL,
	hash    BLOB NOT NULL CHECK (length(hash) = 32),
	PRIMARY KEY (session, seq)
) STRICT, WITHOUT ROWID;
CREATE TRIGGER event_is_final BEFORE UPDATE ON event BEGIN SELECT raise(ABORT, 'a session log is append-only'); END;
CREATE TRIGGER event_stays BEFORE DELETE ON event BEGIN SELECT raise(ABORT, 'a session log is append-only'); END;
CREATE TRIGGER session_is_final BEFORE UPDATE ON session BEGIN SELECT raise(ABORT, 'a session header is immutable'); END;
`}

// Store is a file of sessions.
type Store struct {
	path  string
	lock  *os.File
	write *sql.DB // one connection, used by the writer alone
	read  *sql.DB

	queue   chan *request
	closing chan struct{}
	once    sync.Once
	done    chan struct{} // the writer has ended
	err     error         // of Close

	conn *conn // of the writer; nil when there is none at the moment
}

// request is one thing to commit: a header, or events.
type request struct {
	header   *session.Header
	id       string
	expected int64
	events   []session.Event
	result   chan error // buffered: the writer never waits for a caller
}

func (r *request) size() (n int) {
	for _, e := range r.events {
		n += len(e.Data)
	}
	return n
}

// Open opens the file at path, makes it (0600, in a directory that is made 0700) when there is none, and brings it to the
// current schema. Errors are *session.StoreError.
func Open(ctx context.Context, path string, opts Options) (*Store, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, &session.StoreError{Store: path, Op: "open", Kind: session.ErrIO, Err: err}
	}
	if opts.BusyTimeout == 0 {
		opts.BusyTimeout = 5 * time.Second
	}
	s := &Store{path: path, queue: make(chan *request), closing: make(chan struct{}), done: make(chan struct{})}
	if err := s.open(ctx, opts); err != nil {
		s.release()
		return nil, err
	}
	go s.writer()
	return s, nil
}

func (s *Store) open(ctx context.Context, opts Options) error {
	// Whoever can write the directory can replace the file.
	dir := filepath.Dir(s.path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return s.osFail(err)
	}
	info, err := os.Stat(dir)
	if err != nil {
		return s.osFail(err)
	}
	if m := info.Mode(); m&0o002 != 0 && m&fs.ModeSticky == 0 {
		return s.fail("open", session.ErrExposed, nil, fmt.Sprintf("directory %s is writable by everybody: chmod o-w it", dir))
	}
	// One host at a time.
	if s.lock, err = lockFile(s.path + ".lock"); err != nil {
		if kind, ok := errors.AsType[*inUseError](err); ok {
			return s.fail("open", session.ErrInUse, nil, kind.hint())
		}
		return s.osFail(err)
	}
	if err := s.touch(dir); err != nil {
		return err
	}
	dsn := "file:" + (&url.URL{Path: s.path}).EscapedPath() + fmt.Sprintf("?mode=rw&_pragma=busy_timeout(%d)&_pragma=trusted_schema(0)&_pragma=cell_size_check(1)", opts.BusyTimeout.Milliseconds())
	if s.write, err = sql.Open("sqlite", dsn+"&_pragma=synchronous(FULL)&_pragma=foreign_keys(1)"); err != nil {
		return s.fail("open", session.ErrIO, err, "")
	}
	s.write.SetMaxOpenConns(1)
	if err := s.migrate(ctx); err != nil {
		return s.classify("open", err)
	}
	if s.read, err = sql.Open("sqlite", dsn+"&_pragma=query_only(1)"); err != nil {
		return s.fail("open", session.ErrIO, err, "")
	}
	// Loads are short and bounded by the disk; more connections than this only hold memory.
	s.read.SetMaxOpenConns(4)
	return nil
}

// touch makes the file if there is none, and refuses one that others may read: it has what people and models said.
func (s *Store) touch(dir string) error {
	f, err := os.OpenFile(s.path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		f, err = os.OpenFile(s.path, os.O_RDWR, 0)
	} else if err == nil {
		// The name must outlive a power cut as the content does.
		err = syncDir(dir)
	}
	if err != nil {
		if f != nil {
			f.Close()
		}
		return s.osFail(err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return s.osFail(err)
	}
	if !info.Mode().IsRegular() {
		return s.fail("open", session.ErrForeign, nil, "a regular file was expected")
	}
	if info.Mode()&0o077 != 0 {
		return s.fail("open", session.ErrExposed, nil, fmt.Sprintf("its mode is %04o: chmod 600 it", info.Mode().Perm()))
	}
	return nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// migrate checks whose file it is and brings it to the current schema, one transaction per step.
func (s *Store) migrate(ctx context.Context) error {
	conn, err := s.write.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	number := func(query string) (n int64, err error) {
		err = conn.QueryRowContext(ctx, query).Scan(&n)
		return n, err
	}
	app, err := number("PRAGMA application_id")
	if err != nil {
		return err
	}
	version, err := number("PRAGMA user_version")
	if err != nil {
		return err
	}
	objects, err := number("SELECT count(*) FROM sqlite_schema")
	if err != nil {
		return err
	}
	current := int64(len(migrations))
	switch empty := app == 0 && version == 0 && objects == 0; {
	case !empty && app != applicationID:
		return s.fail("open", session.ErrForeign, nil, "choose another file for session.store")
	case version > current:
		return s.fail("open", session.ErrNewer, nil, fmt.Sprintf("its schema is %d, this cordon knows up to %d: use the version that wrote it", version, current))
	}
	// Only now, since it changes the file.
	var mode string
	if err := conn.QueryRowContext(ctx, "PRAGMA journal_mode=WAL").Scan(&mode); err != nil {
		return err
	}
	if mode != "wal" {
		return s.fail("open", session.ErrIO, nil, fmt.Sprintf("its file system allows journal mode %s only, WAL is needed: put it on a local disk", mode))
	}
	for v := version; v < current; v++ {
		step := fmt.Sprintf("BEGIN IMMEDIATE; PRAGMA application_id=%d; %s PRAGMA user_version=%d; COMMIT", applicationID, migrations[v], v+1)
		if _, err := conn.ExecContext(ctx, step); err != nil {
			conn.ExecContext(context.Background(), "ROLLBACK") // fails when there is nothing to roll back
			return fmt.Errorf("schema %d to %d: %w", v, v+1, err)
		}
	}
	return nil
}

// Location is the path of the file.
func (s *Store) Location() string { return s.path }

// Create keeps a header.
func (s *Store) Create(ctx context.Context, header session.Header) error {
	return s.commit(ctx, &request{header: &header, id: header.ID})
}

// Append keeps events. See session.Store.
func (s *Store) Append(ctx context.Context, id string, expectedSeq int64, events []session.Event) error {
	return s.commit(ctx, &request{id: id, expected: expectedSeq, events: events})
}

// commit hands a request to the writer. Until the writer takes it the caller may give up; afterwards it learns what happened.
func (s *Store) commit(ctx context.Context, r *request) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	select {
	case <-s.closing:
		return session.ErrClosed
	default:
	}
	r.result = make(chan error, 1)
	select {
	case s.queue <- r:
		return <-r.result
	case <-ctx.Done():
		return ctx.Err()
	case <-s.closing:
		return session.ErrClosed
	}
}

// Load reads a header and its events from a sequence number on, as of one moment.
func (s *Store) Load(ctx context.Context, id string, from int64) (session.Header, []session.Event, error) {
	header, events, err := s.load(ctx, id, max(from, 0))
	if err != nil {
		return session.Header{}, nil, s.readFailed(ctx, "load", err)
	}
	return header, events, nil
}

func (s *Store) load(ctx context.Context, id string, from int64) (header session.Header, events []session.Event, err error) {
	tx, err := s.read.BeginTx(ctx, nil)
	if err != nil {
		return header, nil, err
	}
	defer tx.Rollback()
	var num, created int64
	err = tx.QueryRowContext(ctx, "SELECT num, version, id, created, cwd, parent FROM session WHERE id = ?", id).
		Scan(&num, &header.Version, &header.ID, &created, &header.Cwd, &header.Parent)
	if errors.Is(err, sql.ErrNoRows) {
		return header, nil, &session.NotFoundError{ID: id}
	}
	if err != nil {
		return header, nil, err
	}
	header.CreatedAt = time.UnixMilli(created).UTC()
	prev := header.Link()
	if from > 0 {
		err := tx.QueryRowContext(ctx, "SELECT hash FROM event WHERE session = ? AND seq = ?", num, from-1).Scan(into{&prev})
		if errors.Is(err, sql.ErrNoRows) {
			return header, nil, nil // the log ends before
		}
		if err != nil {
			return header, nil, err
		}
	}
	rows, err := tx.QueryContext(ctx, "SELECT seq, time, type, turn, data, hash FROM event WHERE session = ? AND seq >= ? ORDER BY seq", num, from)
	if err != nil {
		return header, nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var e session.Event
		var ms int64
		if err := rows.Scan(&e.Seq, &ms, &e.Type, &e.Turn, (*[]byte)(&e.Data), into{&e.Hash}); err != nil {
			return header, nil, err
		}
		e.Time, e.Prev = time.UnixMilli(ms).UTC(), prev
		prev = e.Hash
		events = append(events, e)
	}
	return header, events, rows.Err()
}

// List is every session, oldest first.
func (s *Store) List(ctx context.Context) ([]session.Summary, error) {
	all, err := s.list(ctx)
	if err != nil {
		return nil, s.readFailed(ctx, "list", err)
	}
	return all, nil
}

func (s *Store) list(ctx context.Context) ([]session.Summary, error) {
	rows, err := s.read.QueryContext(ctx, `
		SELECT s.version, s.id, s.created, s.cwd, s.parent, e.seq, e.time, e.type, e.turn, e.hash
		FROM session s LEFT JOIN event e ON e.session = s.num AND e.seq = (SELECT max(seq) FROM event WHERE session = s.num)
		ORDER BY s.num`)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var all []session.Summary
	for rows.Next() {
		var sum session.Summary
		var created int64
		var seq, ms, turn sql.NullInt64
		var typ sql.NullString
		h := &sum.Header
		if err := rows.Scan(&h.Version, &h.ID, &created, &h.Cwd, &h.Parent, &seq, &ms, &typ, &turn, into{&sum.Last.Hash}); err != nil {
			return nil, err
		}
		h.CreatedAt = time.UnixMilli(created).UTC()
		if seq.Valid {
			sum.Events = seq.Int64 + 1
			last := &sum.Last
			last.Seq, last.Time, last.Type, last.Turn = seq.Int64, time.UnixMilli(ms.Int64).UTC(), typ.String, turn.Int64
		}
		all = append(all, sum)
	}
	return all, rows.Err()
}

// into scans a hash; NULL leaves it zero.
type into struct{ hash *session.Hash }

// Scan is for database/sql.
func (h into) Scan(v any) error {
	b, ok := v.([]byte)
	if v != nil && (!ok || len(b) != len(h.hash)) {
		return fmt.Errorf("a hash of %d bytes was expected", len(h.hash))
	}
	copy(h.hash[:], b)
	return nil
}

// Close waits for the appends that were accepted, closes the file and gives it up to other hosts.
func (s *Store) Close() error {
	s.once.Do(func() {
		close(s.closing)
		<-s.done
		s.err = s.release()
	})
	<-s.done
	return s.err
}

// release gives back whatever is held, the lock last.
func (s *Store) release() error {
	var errs []error
	if s.conn != nil {
		errs = append(errs, s.conn.close())
	}
	for _, db := range []*sql.DB{s.read, s.write} {
		if db != nil {
			errs = append(errs, db.Close())
		}
	}
	if s.lock != nil {
		errs = append(errs, s.lock.Close())
	}
	if err := errors.Join(errs...); err != nil {
		return s.classify("close", err)
	}
	return nil
}

func (s *Store) fail(op string, kind, cause error, hint string) error {
	return &session.StoreError{Store: s.path, Op: op, Kind: kind, Err: cause, Hint: hint}
}

// osFail is a failure of the file system at opening.
func (s *Store) osFail(err error) error {
	switch {
	case isReadOnly(err):
		return s.fail("open", session.ErrReadOnly, err, "the directory must be writable by this user, too")
	case isFull(err):
		return s.fail("open", session.ErrFull, err, "")
	}
	return s.fail("open", session.ErrIO, err, "")
}

// readFailed keeps what callers tell apart: their own context, the end of the store, a session that is not there.
func (s *Store) readFailed(ctx context.Context, op string, err error) error {
	if _, ok := errors.AsType[*session.NotFoundError](err); ok {
		return err
	}
	select {
	case <-s.closing:
		return session.ErrClosed
	default:
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return s.classify(op, err)
}

// classify makes a *session.StoreError of an error of SQLite.
func (s *Store) classify(op string, err error) error {
	if _, ok := errors.AsType[*session.StoreError](err); ok {
		return err
	}
	kind, hint := session.ErrIO, ""
	if e, ok := errors.AsType[*sqlite.Error](err); ok {
		switch e.Code() & 0xff {
		case sqlite3.SQLITE_CORRUPT:
			kind, hint = session.ErrCorrupt, "restore it from a backup; appending to it is refused where the damage is met"
		case sqlite3.SQLITE_NOTADB:
			kind, hint = session.ErrForeign, "choose another file for session.store"
		case sqlite3.SQLITE_FULL:
			kind = session.ErrFull
		case sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN:
			kind, hint = session.ErrReadOnly, "the file and its directory must be writable by this user"
		case sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED:
			kind, hint = session.ErrBusy, "another program has the file open and does not let go"
		}
	}
	return s.fail(op, kind, err, hint)
}

var (
	_ session.Store   = (*Store)(nil)
	_ session.Locator = (*Store)(nil)
	_ sql.Scanner     = into{}
)

package sqlite

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"

	"github.com/cordon-host/cordon/host/session"
)

// writer commits until the store is closed.
func (s *Store) writer() {
	defer close(s.done)
	for {
		select {
		case r := <-s.queue:
			s.commitAll(s.gather(r))
		case <-s.closing:
			return
		}
	}
}

// gather adds to the first request those that are waiting now.
func (s *Store) gather(first *request) []*request {
	batch, size := []*request{first}, first.size()
	for len(batch) < maxBatch && size < maxBatchBytes {
		select {
		case r := <-s.queue:
			batch = append(batch, r)
			size += r.size()
		default:
			return batch
		}
	}
	return batch
}

// commitAll commits a batch and answers each request. What is wrong with one request does not touch the others: it is found
// before anything of that request is written. What is wrong with the transaction (no space, say, for the largest of them) might
// be one request's doing, so that each is tried by itself.
func (s *Store) commitAll(batch []*request) {
	results, err := s.transact(batch)
	if err != nil && len(batch) > 1 {
		for _, r := range batch {
			s.commitAll([]*request{r})
		}
		return
	}
	for i, r := range batch {
		if err != nil {
			r.result <- s.classify("append", err)
		} else {
			r.result <- results[i]
		}
	}
}

// transact commits what it can of a batch in one transaction. results are the refusals of single requests; with err nothing was
// committed, or (only when COMMIT itself failed) it is not known.
func (s *Store) transact(batch []*request) (results []error, err error) {
	// The context of a caller ends its waiting, not a transaction it shares with others.
	ctx := context.Background()
	if s.conn == nil {
		if s.conn, err = connect(ctx, s.write); err != nil {
			return nil, err
		}
	}
	c := s.conn
	defer func() {
		if err != nil {
			// A connection that failed may be inside a transaction or not. A new one certainly is not.
			s.conn = nil
			c.discard()
		}
	}()
	if _, err := c.ExecContext(ctx, "BEGIN IMMEDIATE"); err != nil {
		return nil, err
	}
	results = make([]error, len(batch))
	for i, r := range batch {
		if results[i], err = c.apply(ctx, r); err != nil {
			return nil, err
		}
	}
	if _, err := c.ExecContext(ctx, "COMMIT"); err != nil {
		return nil, err
	}
	return results, nil
}

// conn is the writer's connection with its statements.
type conn struct {
	*sql.Conn
	find, header, event *sql.Stmt
}

func connect(ctx context.Context, db *sql.DB) (*conn, error) {
	raw, err := db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: raw}
	for stmt, query := range map[**sql.Stmt]string{
		&c.find:   "SELECT num, (SELECT coalesce(max(seq) + 1, 0) FROM event WHERE session = num) FROM session WHERE id = ?",
		&c.header: "INSERT INTO session (id, version, created, cwd, parent) VALUES (?, ?, ?, ?, ?)",
		&c.event:  "INSERT INTO event (session, seq, time, type, turn, data, hash) VALUES (?, ?, ?, ?, ?, ?, ?)",
	} {
		if *stmt, err = raw.PrepareContext(ctx, query); err != nil {
			c.discard()
			return nil, err
		}
	}
	return c, nil
}

// close gives the connection back. Its statements go first: SQLite keeps a closed connection with living statements half alive,
// and then the last one to close does not fold the write-ahead log into the file.
func (c *conn) close() error {
	var errs []error
	for _, stmt := range []*sql.Stmt{c.find, c.header, c.event} {
		if stmt != nil {
			errs = append(errs, stmt.Close())
		}
	}
	return errors.Join(append(errs, c.Conn.Close())...)
}

// discard closes the connection for good instead of giving it back. It is called for one that failed: what else it says does not
// matter.
func (c *conn) discard() {
	for _, stmt := range []*sql.Stmt{c.find, c.header, c.event} {
		if stmt != nil {
			stmt.Close()
		}
	}
	c.Raw(func(any) error { return driver.ErrBadConn })
	c.Conn.Close()
}

// apply writes one request. refusal is what is wrong with the request, err what is wrong with the transaction.
func (c *conn) apply(ctx context.Context, r *request) (refusal, err error) {
	var num, next int64
	err = c.find.QueryRowContext(ctx, r.id).Scan(&num, &next)
	found := !errors.Is(err, sql.ErrNoRows)
	if found && err != nil {
		return nil, err
	}
	if h := r.header; h != nil {
		if found {
			return &session.ExistsError{ID: r.id}, nil
		}
		_, err = c.header.ExecContext(ctx, h.ID, h.Version, h.CreatedAt.UnixMilli(), h.Cwd, h.Parent)
		return nil, err
	}
	switch {
	case !found:
		return &session.NotFoundError{ID: r.id}, nil
	case next != r.expected:
		return &session.ConflictError{ID: r.id, Expected: r.expected, Actual: next}, nil
	}
	for _, e := range r.events {
		if _, err := c.event.ExecContext(ctx, num, e.Seq, e.Time.UnixMilli(), e.Type, e.Turn, string(e.Data), e.Hash[:]); err != nil {
			return nil, err
		}
	}
	return nil, nil
}

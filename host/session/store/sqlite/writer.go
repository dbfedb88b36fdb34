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
	results = make([]error, len(batch))
	// One event is one statement, and that is a transaction by itself: the usual case when little goes on.
	if r := batch[0]; len(batch) == 1 && r.header == nil && len(r.events) == 1 {
		results[0], err = c.append(ctx, r)
		return results, err
	}
	if _, err := c.ExecContext(ctx, "BEGIN IMMEDIATE"); err != nil {
		return nil, err
	}
	for i, r := range batch {
		if r.header != nil {
			results[i], err = c.create(ctx, r)
		} else {
			results[i], err = c.append(ctx, r)
		}
		if err != nil {
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
	find, header, first, more *sql.Stmt
}

const insertEvent = "INSERT INTO event (session, seq, time, type, turn, data, hash) SELECT num, ?2, ?3, ?4, ?5, ?6, ?7 FROM session WHERE id = ?1"

func connect(ctx context.Context, db *sql.DB) (*conn, error) {
	raw, err := db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: raw}
	for stmt, query := range map[**sql.Stmt]string{
		&c.find:   "SELECT (SELECT coalesce(max(seq) + 1, 0) FROM event WHERE session = num) FROM session WHERE id = ?",
		&c.header: "INSERT INTO session (id, version, created, cwd, parent) VALUES (?, ?, ?, ?, ?)",
		// The condition is what makes an append go to the end its caller knows, and it is in the statement that writes.
		&c.first: insertEvent + " AND (SELECT coalesce(max(seq) + 1, 0) FROM event WHERE session = num) = ?8",
		&c.more:  insertEvent,
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
	for _, stmt := range []*sql.Stmt{c.find, c.header, c.first, c.more} {
		if stmt != nil {
			errs = append(errs, stmt.Close())
		}
	}
	return errors.Join(append(errs, c.Conn.Close())...)
}

// discard closes the connection for good instead of giving it back. It is called for one that failed: what else it says does not
// matter.
func (c *conn) discard() {
	for _, stmt := range []*sql.Stmt{c.find, c.header, c.first, c.more} {
		if stmt != nil {
			stmt.Close()
		}
	}
	c.Raw(func(any) error { return driver.ErrBadConn })
	c.Conn.Close()
}

// create writes a header. refusal is what is wrong with the request, err what is wrong with the transaction.
func (c *conn) create(ctx context.Context, r *request) (refusal, err error) {
	found, _, err := c.length(ctx, r.id)
	if err != nil {
		return nil, err
	}
	if found {
		return &session.ExistsError{ID: r.id}, nil
	}
	h := r.header
	_, err = c.header.ExecContext(ctx, h.ID, h.Version, h.CreatedAt.UnixMilli(), h.Cwd, h.Parent)
	return nil, err
}

// append writes events, or nothing when it refuses the request.
func (c *conn) append(ctx context.Context, r *request) (refusal, err error) {
	for i, e := range r.events {
		args := []any{r.id, e.Seq, e.Time.UnixMilli(), e.Type, e.Turn, string(e.Data), e.Hash[:]}
		if i > 0 {
			if _, err := c.more.ExecContext(ctx, args...); err != nil {
				return nil, err
			}
			continue
		}
		result, err := c.first.ExecContext(ctx, append(args, r.expected)...)
		if err != nil {
			return nil, err
		}
		written, err := result.RowsAffected()
		if err != nil {
			return nil, err
		}
		if written == 1 {
			continue
		}
		found, next, err := c.length(ctx, r.id)
		switch {
		case err != nil:
			return nil, err
		case !found:
			return &session.NotFoundError{ID: r.id}, nil
		}
		return &session.ConflictError{ID: r.id, Expected: r.expected, Actual: next}, nil
	}
	return nil, nil
}

// length is the number of events of a session.
func (c *conn) length(ctx context.Context, id string) (found bool, n int64, err error) {
	err = c.find.QueryRowContext(ctx, id).Scan(&n)
	if errors.Is(err, sql.ErrNoRows) {
		return false, 0, nil
	}
	return err == nil, n, err
}

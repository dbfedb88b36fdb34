// Package memory is a session store that forgets everything with its process. It is for tests.
package memory

import (
	"bytes"
	"context"
	"slices"
	"sync"

	"github.com/cordon-host/cordon/host/session"
)

// Store is an empty store when new. It keeps copies of what it is given.
type Store struct {
	mu     sync.Mutex
	closed bool
	order  []string
	logs   map[string]*log
}

type log struct {
	header session.Header
	events []session.Event
}

// New is an empty store.
func New() *Store { return &Store{logs: map[string]*log{}} }

// Create keeps a header.
func (s *Store) Create(ctx context.Context, header session.Header) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.usable(ctx); err != nil {
		return err
	}
	if s.logs[header.ID] != nil {
		return &session.ExistsError{ID: header.ID}
	}
	s.logs[header.ID] = &log{header: header}
	s.order = append(s.order, header.ID)
	return nil
}

// Append keeps events.
func (s *Store) Append(ctx context.Context, id string, expectedSeq int64, events []session.Event) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.usable(ctx); err != nil {
		return err
	}
	l := s.logs[id]
	if l == nil {
		return &session.NotFoundError{ID: id}
	}
	if n := int64(len(l.events)); n != expectedSeq {
		return &session.ConflictError{ID: id, Expected: expectedSeq, Actual: n}
	}
	l.events = append(l.events, copied(events)...)
	return nil
}

// Load reads a header and events.
func (s *Store) Load(ctx context.Context, id string, from int64) (session.Header, []session.Event, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.usable(ctx); err != nil {
		return session.Header{}, nil, err
	}
	l := s.logs[id]
	if l == nil {
		return session.Header{}, nil, &session.NotFoundError{ID: id}
	}
	if from >= int64(len(l.events)) {
		return l.header, nil, nil
	}
	return l.header, copied(l.events[max(from, 0):]), nil
}

// List is every session, in the order of creation.
func (s *Store) List(ctx context.Context) ([]session.Summary, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.usable(ctx); err != nil {
		return nil, err
	}
	var all []session.Summary
	for _, id := range s.order {
		l := s.logs[id]
		sum := session.Summary{Header: l.header, Events: int64(len(l.events))}
		if n := len(l.events); n > 0 {
			sum.Last = l.events[n-1]
			sum.Last.Data, sum.Last.Prev = nil, session.Hash{}
		}
		all = append(all, sum)
	}
	return all, nil
}

// Close ends the store.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	return nil
}

func (s *Store) usable(ctx context.Context) error {
	if s.closed {
		return session.ErrClosed
	}
	return ctx.Err()
}

func copied(events []session.Event) []session.Event {
	events = slices.Clone(events)
	for i := range events {
		events[i].Data = bytes.Clone(events[i].Data)
	}
	return events
}

var _ session.Store = (*Store)(nil)

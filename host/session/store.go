// Package session is the host's session log: per session an immutable header and an append-only, hash-chained sequence of
// events, on disk before anyone sees them.
//
// The life of an event. A caller drafts it (Session.Append). Its data are brought into canonical form; every veto sees the
// draft and may refuse it; the rules of capability/session are held against the state of the log; the store commits it durably;
// only then it is visible to Last, Events, subscribers and observers, and Append returns. If any step before the commit fails,
// nothing was appended and the session goes on. If the store cannot say whether it committed, the session reads it again before
// it does anything else, and reports what it found there.
//
// A session is loaded when it is first asked for. Turns, questions and tool calls that a crash left open are closed then, and
// only then: a session in use is never repaired.
package session

import (
	"context"
	"errors"
	"fmt"

	rules "github.com/cordon-host/cordon/capability/session"
)

// Header is the immutable part of a session.
type Header = rules.Header

// Event is one entry of a log.
type Event = rules.Event

// Hash is one link of the chain.
type Hash = rules.Hash

// Summary is one row of a list of sessions.
type Summary struct {
	Header Header
	Events int64 // how many there are
	Last   Event // the newest one without its data and Prev; the zero Event when there is none
}

// Store keeps logs. Methods may be called from several goroutines.
//
// A store commits, it does not judge: what may follow what is for the Session. It does hold that an append goes where its
// caller believes the end of the log is.
type Store interface {
	// Create keeps a new header, durably. *ExistsError when the id is taken.
	Create(ctx context.Context, header Header) error
	// Append keeps events, all or none, durably before it returns, if the log of id has expectedSeq events now; *ConflictError
	// otherwise. A context that ends before the commit began aborts it, and the error then is the context's and means that
	// nothing was committed; after that the context is without effect. Any other error may leave the outcome open.
	Append(ctx context.Context, id string, expectedSeq int64, events []Event) error
	// Load reads a header and its events from a sequence number on. *NotFoundError when there is no such session.
	Load(ctx context.Context, id string, from int64) (Header, []Event, error)
	// List is every session, oldest first.
	List(ctx context.Context) ([]Summary, error)
	// Close ends the store; later calls fail with ErrClosed. It waits for the appends it has accepted.
	Close() error
}

// Locator is implemented by stores whose content is somewhere.
type Locator interface {
	// Location is the file or address, without secrets.
	Location() string
}

// Why a store could not do something. Errors of stores are *StoreError and answer to errors.Is with one of these.
var (
	ErrCorrupt  = errors.New("the content is damaged")
	ErrForeign  = errors.New("it is not a cordon session store")
	ErrNewer    = errors.New("a newer cordon wrote it")
	ErrInUse    = errors.New("another host has it open")
	ErrFull     = errors.New("no space left")
	ErrReadOnly = errors.New("it cannot be written")
	ErrBusy     = errors.New("it stayed locked")
	ErrExposed  = errors.New("other users can change it")
	ErrIO       = errors.New("reading or writing failed")
)

// ErrClosed is the error of everything asked of a closed Log or Store.
var ErrClosed = errors.New("session log is closed")

// A StoreError is a failure of the store, not of what it was asked.
type StoreError struct {
	Store string // the file or address
	Op    string // open, create, append, load, list
	Kind  error  // one of the Err values above
	Hint  string // what to do, or empty
	Err   error  // the cause, or nil
}

func (e *StoreError) Error() string {
	s := fmt.Sprintf("session store %s: %s: %v", e.Store, e.Op, e.Kind)
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	if e.Hint != "" {
		s += ": " + e.Hint
	}
	return s
}

// Unwrap gives the kind and, if there is one, the cause.
func (e *StoreError) Unwrap() []error {
	if e.Err == nil {
		return []error{e.Kind}
	}
	return []error{e.Kind, e.Err}
}

// A NotFoundError names a session that does not exist.
type NotFoundError struct{ ID string }

func (e *NotFoundError) Error() string {
	return fmt.Sprintf("session %q not found: `cordon sessions` lists them", e.ID)
}

// An ExistsError names a session id that is taken.
type ExistsError struct{ ID string }

func (e *ExistsError) Error() string { return fmt.Sprintf("session %q exists already", e.ID) }

// A ConflictError says that a log does not end where the caller believed.
type ConflictError struct {
	ID               string
	Expected, Actual int64 // number of events
}

func (e *ConflictError) Error() string {
	return fmt.Sprintf("append seq mismatch for %q: expected %d, the log has %d events: someone else appended", e.ID, e.Expected, e.Actual)
}

// A CorruptError is a log that was read and is not what was written.
type CorruptError struct {
	ID    string
	Store string // where the log is, as Location of the store says; empty if it does not
	Err   error  // a *rules.ChainError names the event
}

func (e *CorruptError) Error() string {
	s := fmt.Sprintf("session %q is damaged and cannot be continued: %v: `cordon audit verify %s` shows the event", e.ID, e.Err, e.ID)
	if e.Store != "" {
		s += " (raw log: " + e.Store + ")"
	}
	return s
}

func (e *CorruptError) Unwrap() error { return e.Err }

// A VetoError says that an event was refused before it was committed, and by what.
type VetoError struct {
	Type string
	Err  error
}

func (e *VetoError) Error() string { return fmt.Sprintf("event %s was vetoed: %v", e.Type, e.Err) }

func (e *VetoError) Unwrap() error { return e.Err }

// A ReentryError says that a veto or an observer tried to append to the session it was called for.
type ReentryError struct{ ID, Type string }

func (e *ReentryError) Error() string {
	return fmt.Sprintf("session append cannot reenter while another append is being published: %s to session %q: append after the observer or veto has returned", e.Type, e.ID)
}

// Package inbox is where questions wait for people.
//
// It is the one terminal answerer of approval/request: a question that no plugin answered ends here. Channels bring people
// to it: the command line, later the console and the front ends. A channel either watches questions and answers them, or
// binds an answer to one call beforehand (`cordon call --answer`). A question that nobody is there to answer is not kept: its
// answer is "unavailable", at once.
package inbox

import (
	"context"
	"crypto/rand"
	"fmt"
	"strings"
	"sync"
	"time"

	approvalv1 "github.com/cordon-host/cordon/api/approval/v1"
	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	"github.com/cordon-host/cordon/capability/approval"
)

// Question is what a person is asked.
type Question struct {
	*approvalv1.Question
	ID      string // the inbox's own: what a person answers cannot be exchanged for another question of the same name
	Session string
	Agent   string
	Call    string
	Tag     string // the mark of the front end that made the call
	AskedAt time.Time
}

// Verdict is a person's answer and the authority it came with.
type Verdict struct {
	Outcome approval.Outcome // allowed-once or rejected
	Note    string
	Channel string
	Level   kernelv1.Level
}

// LevelError is an answer that is not worth enough. The question stays open.
type LevelError struct{ Have, Need kernelv1.Level }

func (e *LevelError) Error() string {
	hint := "log in with the host's one-use code"
	if e.Need == kernelv1.Level_OWNER {
		hint = "repeat with --confirm danger-full-access"
	}
	return fmt.Sprintf("answer has level %s, the question needs %s: %s",
		approval.LevelName(e.Have), approval.LevelName(e.Need), hint)
}

// NotOpenError is an answer to a question that is not, or no longer, open.
type NotOpenError struct{ ID string }

func (e *NotOpenError) Error() string {
	return fmt.Sprintf("question %s is not open: it was answered, cancelled or never asked", e.ID)
}

// Event tells a watcher that a question was asked or settled.
type Event struct {
	Asked   *Question
	Settled *Settled
}

// Settled says how a question ended. Channel is empty when no person ended it.
type Settled struct {
	ID      string
	Outcome approval.Outcome
	Channel string
}

// Inbox holds the open questions.
type Inbox struct {
	mu       sync.Mutex
	open     map[string]*pending
	bound    map[string]Verdict // by call
	watchers map[*Watcher]struct{}
}

type pending struct {
	question Question
	verdict  chan Verdict // buffered: the first answer
	settled  bool
}

// New makes an empty inbox.
func New() *Inbox {
	return &Inbox{open: map[string]*pending{}, bound: map[string]Verdict{}, watchers: map[*Watcher]struct{}{}}
}

// Bind answers every question that a call asks, if the answer's level suffices for it.
func (b *Inbox) Bind(call string, v Verdict) (unbind func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.bound[call] = v
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.bound, call)
	}
}

// Ask puts a question to whoever may answer it and waits. The second result is false when nobody is there, or when the
// last one left. ctx ends the wait.
func (b *Inbox) Ask(ctx context.Context, q Question) (Verdict, bool, error) {
	b.mu.Lock()
	if v, ok := b.bound[q.Call]; ok && enough(v, q) {
		b.mu.Unlock()
		return v, true, nil
	}
	if !b.watched(q) {
		b.mu.Unlock()
		return Verdict{}, false, nil
	}
	q.ID = "q-" + strings.ToLower(rand.Text()[:10])
	p := &pending{question: q, verdict: make(chan Verdict, 1)}
	b.open[q.ID] = p
	b.publish(q, Event{Asked: &p.question})
	b.mu.Unlock()

	select {
	case v, ok := <-p.verdict:
		return v, ok, nil
	case <-ctx.Done():
		b.mu.Lock()
		defer b.mu.Unlock()
		b.settle(p, Settled{ID: q.ID, Outcome: approval.Cancelled})
		return Verdict{}, false, ctx.Err()
	}
}

// Answer settles an open question. It fails with a *NotOpenError or a *LevelError.
func (b *Inbox) Answer(id string, v Verdict) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	p, ok := b.open[id]
	if !ok {
		return &NotOpenError{id}
	}
	if !enough(v, p.question) {
		return &LevelError{Have: v.Level, Need: approval.Required(p.question.GetWidening())}
	}
	p.verdict <- v
	b.settle(p, Settled{ID: id, Outcome: v.Outcome, Channel: v.Channel})
	return nil
}

// enough: anybody who is asked may say no.
func enough(v Verdict, q Question) bool {
	return v.Outcome == approval.Rejected || v.Level >= approval.Required(q.GetWidening())
}

// settle closes a question. Callers hold mu.
func (b *Inbox) settle(p *pending, s Settled) {
	if p.settled {
		return
	}
	p.settled = true
	delete(b.open, p.question.ID)
	close(p.verdict)
	b.publish(p.question, Event{Settled: &s})
}

// publish tells the watchers of a question. Callers hold mu.
func (b *Inbox) publish(q Question, e Event) {
	for w := range b.watchers {
		if w.sees(q) {
			w.push(e)
		}
	}
}

// watched reports whether anybody is there for q. Callers hold mu.
func (b *Inbox) watched(q Question) bool {
	for w := range b.watchers {
		if w.answers && w.sees(q) {
			return true
		}
	}
	return false
}

// Watcher is somebody who sees questions as they come.
type Watcher struct {
	inbox   *Inbox
	tag     string
	answers bool

	mu     sync.Mutex
	queue  []Event
	wakeup chan struct{}
}

// Watch makes a watcher of the questions with a tag, or of all without one, beginning with those that are open. Answers
// says that a person is there to answer; a question with no such watcher is unavailable.
func (b *Inbox) Watch(tag string, answers bool) *Watcher {
	w := &Watcher{inbox: b, tag: tag, answers: answers, wakeup: make(chan struct{}, 1)}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.watchers[w] = struct{}{}
	for _, p := range b.open {
		if w.sees(p.question) {
			w.push(Event{Asked: &p.question})
		}
	}
	return w
}

// Close ends a watcher. Questions that nobody else is there to answer become unavailable.
func (w *Watcher) Close() {
	b := w.inbox
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.watchers, w)
	for _, p := range b.open {
		if !b.watched(p.question) {
			b.settle(p, Settled{ID: p.question.ID, Outcome: approval.Unavailable})
		}
	}
}

// Next waits for the next event.
func (w *Watcher) Next(ctx context.Context) (Event, error) {
	for {
		if e, ok := w.TryNext(); ok {
			return e, nil
		}
		select {
		case <-w.wakeup:
		case <-ctx.Done():
			return Event{}, ctx.Err()
		}
	}
}

// TryNext is the next event that is already there.
func (w *Watcher) TryNext() (Event, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.queue) == 0 {
		return Event{}, false
	}
	e := w.queue[0]
	w.queue = w.queue[1:]
	return e, true
}

func (w *Watcher) sees(q Question) bool { return w.tag == "" || w.tag == q.Tag }

func (w *Watcher) push(e Event) {
	w.mu.Lock()
	w.queue = append(w.queue, e)
	w.mu.Unlock()
	select {
	case w.wakeup <- struct{}{}:
	default:
	}
}

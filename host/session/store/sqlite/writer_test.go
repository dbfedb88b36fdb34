package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	rules "github.com/cordon-host/cordon/capability/session"
	"github.com/cordon-host/cordon/host/session"
)

// idle is an open store without its writer, which tests play themselves.
func idle(t *testing.T) *Store {
	t.Helper()
	s := &Store{path: filepath.Join(t.TempDir(), "s.db"), queue: make(chan *request), closing: make(chan struct{}), done: make(chan struct{})}
	if err := s.open(t.Context(), Options{BusyTimeout: time.Second}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.release() })
	return s
}

func create(id string) *request {
	h := session.Header{Version: 1, ID: id, Cwd: "/", CreatedAt: time.UnixMilli(1)}
	return &request{header: &h, id: id, result: make(chan error, 1)}
}

func appendOf(id string, size int) *request {
	h := create(id).header
	e := rules.NewState(*h).Seal(rules.Draft{Type: "test/event", Data: json.RawMessage(fmt.Sprintf(`{"x":%q}`, strings.Repeat("x", size)))}, time.UnixMilli(1))
	return &request{id: id, events: []session.Event{e}, result: make(chan error, 1)}
}

func (s *Store) has(t *testing.T, id string) int {
	t.Helper()
	_, events, err := s.Load(t.Context(), id, 0)
	if err != nil {
		t.Fatal(err)
	}
	return len(events)
}

// TestGather has many callers wait and sees them in one batch.
func TestGather(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &Store{queue: make(chan *request), closing: make(chan struct{})}
		gathered := func(callers, size int) []int {
			var wg sync.WaitGroup
			for range callers {
				wg.Go(func() { s.commit(context.Background(), appendOf("s-1", size)) })
			}
			synctest.Wait() // all of them wait in commit
			var batches []int
			for left := callers; left > 0; {
				batch := s.gather(<-s.queue)
				batches = append(batches, len(batch))
				left -= len(batch)
				for _, r := range batch {
					r.result <- nil
				}
			}
			wg.Wait()
			return batches
		}
		if got := gathered(100, 1); fmt.Sprint(got) != "[100]" {
			t.Errorf("100 appends went into batches of %v", got)
		}
		if got := gathered(maxBatch+1, 1); fmt.Sprint(got) != fmt.Sprint([]int{maxBatch, 1}) {
			t.Errorf("more than fit went into batches of %v", got)
		}
		if got := gathered(3, maxBatchBytes/2); fmt.Sprint(got) != "[2 1]" {
			t.Errorf("large appends went into batches of %v", got)
		}
	})
}

func TestOneBadAppendHarmsNoOther(t *testing.T) {
	s := idle(t)
	s.commitAll([]*request{create("s-1"), create("s-2"), create("s-3")})
	// No room for the largest: the transaction fails as a whole. The limit is of a connection, so every new one gets it.
	s.conn.discard()
	s.conn = nil
	s.write.Close()
	var err error
	if s.write, err = sql.Open("sqlite", "file:"+s.path+"?_pragma=max_page_count(100)"); err != nil {
		t.Fatal(err)
	}
	conflict := appendOf("s-1", 1)
	conflict.expected = 5
	batch := []*request{appendOf("s-1", 10), conflict, appendOf("s-2", 1<<20), appendOf("s-none", 1), create("s-1"), appendOf("s-3", 10)}
	s.commitAll(batch)
	for i, want := range []func(error) bool{
		func(err error) bool { return err == nil },
		func(err error) bool { _, ok := errors.AsType[*session.ConflictError](err); return ok },
		func(err error) bool { return errors.Is(err, session.ErrFull) },
		func(err error) bool { _, ok := errors.AsType[*session.NotFoundError](err); return ok },
		func(err error) bool { _, ok := errors.AsType[*session.ExistsError](err); return ok },
		func(err error) bool { return err == nil },
	} {
		if err := <-batch[i].result; !want(err) {
			t.Errorf("request %d: %v", i, err)
		}
	}
	if s.has(t, "s-1") != 1 || s.has(t, "s-2") != 0 || s.has(t, "s-3") != 1 {
		t.Error("what is on record is not what callers were told")
	}
}

func TestSyncedAndReadOnly(t *testing.T) {
	s := idle(t)
	s.commitAll([]*request{create("s-1")})
	number := func(pragma string) (n int) {
		t.Helper()
		if err := s.conn.QueryRowContext(t.Context(), "PRAGMA "+pragma).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	if number("synchronous") != 2 || number("foreign_keys") != 1 || number("application_id") != applicationID || number("user_version") != len(migrations) {
		t.Error("the connection is not what a commit relies on")
	}
	if _, err := s.conn.ExecContext(t.Context(), "PRAGMA query_only=1"); err != nil {
		t.Fatal(err)
	}
	r := appendOf("s-1", 1)
	s.commitAll([]*request{r})
	if err := <-r.result; !errors.Is(err, session.ErrReadOnly) {
		t.Errorf("got %v, want ErrReadOnly", err)
	}
	// The connection that failed is gone, and with it the reason.
	again := appendOf("s-1", 1)
	s.commitAll([]*request{again})
	if err := <-again.result; err != nil {
		t.Error(err)
	}
}

// mounted is a small file system of its own, or the test is skipped where one cannot be mounted.
func mounted(t *testing.T, options string) string {
	t.Helper()
	if runtime.GOOS != "linux" || os.Getuid() != 0 {
		t.Skip("mounting a file system needs root on Linux")
	}
	dir := t.TempDir()
	if err := syscall.Mount("cordon-test", dir, "tmpfs", 0, options); err != nil {
		t.Skipf("mount: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	return dir
}

func TestDiskFull(t *testing.T) {
	dir := mounted(t, "size=1m,mode=700")
	path := filepath.Join(dir, "s.db")
	s, err := Open(t.Context(), path, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	h := *create("s-1").header
	if err := s.Create(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	if err := s.Append(t.Context(), h.ID, 0, appendOf("s-1", 4<<20).events); !errors.Is(err, session.ErrFull) || !strings.Contains(err.Error(), path) {
		t.Errorf("got %v, want ErrFull", err)
	}
	if s.has(t, "s-1") != 0 {
		t.Error("an append that failed is on record")
	}
	if err := s.Append(t.Context(), h.ID, 0, appendOf("s-1", 100).events); err != nil {
		t.Errorf("a smaller one: %v", err)
	}
}

// TestDiskFullOfOtherThings fills the disk, then makes room: no restart is needed.
func TestDiskFullOfOtherThings(t *testing.T) {
	dir := mounted(t, "size=1m,mode=700")
	s, err := Open(t.Context(), filepath.Join(dir, "s.db"), Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	h := *create("s-1").header
	if err := s.Create(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(dir, "other")
	if err := os.WriteFile(other, make([]byte, 2<<20), 0o600); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("the disk is not full: %v", err)
	}
	events := appendOf("s-1", 200<<10).events
	if err := s.Append(t.Context(), h.ID, 0, events); !errors.Is(err, session.ErrFull) {
		t.Errorf("got %v, want ErrFull", err)
	}
	if s.has(t, "s-1") != 0 {
		t.Error("an append that failed is on record")
	}
	if err := os.Remove(other); err != nil {
		t.Fatal(err)
	}
	if err := s.Append(t.Context(), h.ID, 0, events); err != nil {
		t.Errorf("after room was made: %v", err)
	}
	if s.has(t, "s-1") != 1 {
		t.Error("an append that succeeded is not on record")
	}
}

func TestReadOnlyDisk(t *testing.T) {
	dir := mounted(t, "mode=700")
	path := filepath.Join(dir, "s.db")
	s, err := Open(t.Context(), path, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("", dir, "", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), path, Options{}); !errors.Is(err, session.ErrReadOnly) || !strings.Contains(err.Error(), path) {
		t.Errorf("got %v, want ErrReadOnly", err)
	}
}

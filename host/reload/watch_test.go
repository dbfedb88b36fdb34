package reload_test

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cordon-host/cordon/host/reload"
)

// patience bounds the wait for an event.
const patience = 20 * time.Second

// TestWaysOfSaving changes a watched file in the ways that editors and compilers have, and expects to be told to look again.
func TestWaysOfSaving(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "compose.yml")
	write := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	rename := func(from, to string) {
		t.Helper()
		if err := os.Rename(from, to); err != nil {
			t.Fatal(err)
		}
	}
	write(file, "0")
	w, err := reload.New(slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close(context.Background())
	if err := w.Watch([]string{dir}, func(path string) bool { return path == file }); err != nil {
		t.Fatal(err)
	}
	again := func() {
		t.Helper()
		select {
		case <-w.Again():
		case <-time.After(patience):
			t.Fatal("nobody said to look again")
		}
	}
	for _, way := range []struct {
		name string
		save func()
	}{
		{"in place", func() { write(file, "1") }},
		{"by rename", func() { write(file+"~", "2"); rename(file+"~", file) }},
		{"as vim does", func() { rename(file, file+".bak"); write(file, "3") }},
		{"by removing and creating", func() {
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
			write(file, "4")
		}},
		{"removed", func() {
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
		}},
		{"created", func() { write(file, "5") }},
	} {
		t.Run(way.name, func(t *testing.T) {
			way.save()
			again()
		})
	}

	// What does not matter is not looked at: the next thing said is about the file that does.
	write(filepath.Join(dir, "other"), "x")
	if err := os.Chmod(file, 0o640); err != nil {
		t.Fatal(err)
	}
	select {
	case <-w.Again():
		t.Error("a file that does not matter was looked at")
	default:
	}
	write(file, "6")
	again()

	// Not watched any more.
	elsewhere := t.TempDir()
	if err := w.Watch([]string{elsewhere}, func(string) bool { return true }); err != nil {
		t.Fatal(err)
	}
	write(filepath.Join(elsewhere, "now"), "x")
	again()
}

func TestMissingDirectory(t *testing.T) {
	w, err := reload.New(slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close(context.Background())
	if err := w.Watch([]string{filepath.Join(t.TempDir(), "missing")}, nil); err == nil {
		t.Error("a directory that is not there is watched")
	}
}

// Package reload notices that files changed.
//
// It says "look again" and nothing more: what changed, and whether it matters, is found out by looking. So a missed or a
// doubled event does no harm, and neither does an editor's way of saving.
package reload

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
)

// settle is how long nothing must happen before it is time to look: a file that is being written is not whole yet.
const settle = 150 * time.Millisecond

// Watcher watches directories for the sake of files in them.
type Watcher struct {
	fs    *fsnotify.Watcher
	log   *slog.Logger
	again chan struct{}
	done  chan struct{}

	mu      sync.Mutex
	watched map[string]bool
	matters func(path string) bool
}

// New makes a watcher of nothing.
func New(log *slog.Logger) (*Watcher, error) {
	fs, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, fmt.Errorf("file watch: %w", err)
	}
	w := &Watcher{
		fs: fs, log: log, again: make(chan struct{}, 1), done: make(chan struct{}),
		watched: map[string]bool{}, matters: func(string) bool { return false },
	}
	go w.run()
	return w, nil
}

// Again receives when it is time to look.
func (w *Watcher) Again() <-chan struct{} { return w.again }

// Watch makes the watcher watch these directories and no others, for the files that matter.
func (w *Watcher) Watch(dirs []string, matters func(path string) bool) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.matters = matters
	want := map[string]bool{}
	for _, d := range dirs {
		want[filepath.Clean(d)] = true
	}
	var errs []error
	for d := range maps.Keys(want) {
		if !w.watched[d] {
			if err := w.fs.Add(d); err != nil {
				errs = append(errs, fmt.Errorf("watch %s: %w", d, err))
				continue
			}
			w.watched[d] = true
		}
	}
	for _, d := range slices.Collect(maps.Keys(w.watched)) {
		if !want[d] {
			_ = w.fs.Remove(d) // it may be gone, which is as good
			delete(w.watched, d)
		}
	}
	return errors.Join(errs...)
}

// Close ends the watcher.
func (w *Watcher) Close(context.Context) error {
	err := w.fs.Close()
	<-w.done
	return err
}

func (w *Watcher) run() {
	defer close(w.done)
	quiet := time.NewTimer(settle)
	quiet.Stop()
	for {
		select {
		case e, ok := <-w.fs.Events:
			if !ok {
				return
			}
			if e.Op != fsnotify.Chmod && w.cares(e.Name) {
				quiet.Reset(settle)
			}
		case err, ok := <-w.fs.Errors:
			if !ok {
				return
			}
			// Events were lost. Looking makes good for it.
			w.log.Warn("file watch", "error", err)
			quiet.Reset(settle)
		case <-quiet.C:
			select {
			case w.again <- struct{}{}:
			default: // somebody is about to look anyway
			}
		}
	}
}

func (w *Watcher) cares(path string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.matters(path)
}

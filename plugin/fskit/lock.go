//go:build unix

package fskit

import (
	"context"
	"slices"
	"sync"
)

// lockTable has one lock for each key in use, held in the order in which it was asked for. Its zero value is ready.
type lockTable struct {
	mu   sync.Mutex
	held map[string][]chan struct{} // by key: who waits for it
}

// lock waits for a key. The error is the context's.
func (l *lockTable) lock(ctx context.Context, key string) error {
	l.mu.Lock()
	waiting, taken := l.held[key]
	if !taken {
		if l.held == nil {
			l.held = map[string][]chan struct{}{}
		}
		l.held[key] = nil
		l.mu.Unlock()
		return nil
	}
	turn := make(chan struct{})
	l.held[key] = append(waiting, turn)
	l.mu.Unlock()
	select {
	case <-turn:
		return nil
	case <-ctx.Done():
	}
	l.mu.Lock()
	if i := slices.Index(l.held[key], turn); i >= 0 {
		l.held[key] = slices.Delete(l.held[key], i, i+1)
		l.mu.Unlock()
		return ctx.Err()
	}
	l.mu.Unlock()
	l.unlock(key) // the turn came at the same moment, and goes to the next one
	return ctx.Err()
}

func (l *lockTable) unlock(key string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	waiting := l.held[key]
	if len(waiting) == 0 {
		delete(l.held, key)
		return
	}
	l.held[key] = waiting[1:]
	close(waiting[0])
}

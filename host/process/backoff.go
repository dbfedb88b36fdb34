package process

import (
	"math/rand/v2"
	"time"
)

// Backoff is the growing pause before a process that ended by itself is started again. Its zero value never pauses.
type Backoff struct {
	First, Max time.Duration
	// Reset is how long a process must have lived to count as healthy: the pauses begin at First again.
	Reset time.Duration

	next time.Duration
}

// Next is the pause after a process that lived that long: at least half of what is due, the rest by chance, so that many that ended
// together do not come back together.
func (b *Backoff) Next(lived time.Duration) time.Duration {
	if b.next == 0 || lived >= b.Reset {
		b.next = b.First
	}
	due := b.next
	b.next = min(2*b.next, b.Max)
	return due/2 + rand.N(due/2+1)
}

// Again makes the next pause the first.
func (b *Backoff) Again() { b.next = 0 }

// Breaker gives up on what fails too often. Once it has tripped it stays so until it is reset.
type Breaker struct {
	Failures int           // so many
	Window   time.Duration // within this time

	times   []time.Time
	tripped bool
}

// Fail counts a failure and reports whether that was one too many.
func (b *Breaker) Fail() bool {
	now := time.Now()
	kept := b.times[:0]
	for _, t := range b.times {
		if now.Sub(t) < b.Window {
			kept = append(kept, t)
		}
	}
	b.times = append(kept, now)
	if len(b.times) >= b.Failures {
		b.tripped = true
	}
	return b.tripped
}

// Tripped reports whether it has given up.
func (b *Breaker) Tripped() bool { return b.tripped }

// Reset forgets all failures.
func (b *Breaker) Reset() { b.times, b.tripped = nil, false }

package process_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/cordon-host/cordon/host/process"
)

func TestBackoff(t *testing.T) {
	b := process.Backoff{First: 100 * time.Millisecond, Max: time.Second, Reset: time.Minute}
	within := func(name string, got, due time.Duration) {
		t.Helper()
		if got < due/2 || got > due {
			t.Errorf("%s: %s, due %s", name, got, due)
		}
	}
	for _, due := range []time.Duration{100, 200, 400, 800, 1000, 1000} {
		within("growing", b.Next(time.Second), due*time.Millisecond)
	}
	within("after a healthy life", b.Next(time.Minute), 100*time.Millisecond)
	within("and again", b.Next(0), 200*time.Millisecond)
	b.Again()
	within("when told", b.Next(0), 100*time.Millisecond)

	seen := map[time.Duration]bool{}
	for range 50 {
		b.Again()
		seen[b.Next(0)] = true
	}
	if len(seen) < 10 {
		t.Errorf("only %d different pauses of 50: no jitter", len(seen))
	}
}

func TestBreaker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := process.Breaker{Failures: 5, Window: 2 * time.Minute}
		for i := range 20 {
			if b.Fail() {
				t.Fatalf("tripped at failure %d, one every 30 s", i)
			}
			time.Sleep(30 * time.Second)
		}
		b.Reset()
		for i := range 5 {
			if got, want := b.Fail(), i == 4; got != want {
				t.Errorf("failure %d of 5 in a minute: tripped %v", i+1, got)
			}
			time.Sleep(10 * time.Second)
		}
		time.Sleep(time.Hour)
		if !b.Tripped() || !b.Fail() {
			t.Error("time alone re-armed it")
		}
		b.Reset()
		if b.Tripped() || b.Fail() {
			t.Error("it was not re-armed")
		}
	})
}

package cli

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// interrupted is the cause of a context that a signal ended.
type interrupted struct{ signal syscall.Signal }

func (i *interrupted) Error() string {
	if i.signal == syscall.SIGINT {
		return "interrupted"
	}
	return fmt.Sprintf("ended by %s", unix.SignalName(i.signal))
}

// endings are the signals that ask a program to end. Those that were ignored when it started stay so (nohup).
var endings = []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP}

// interrupts turns signals into the end of a context. The first one ends the context that commands run with; the second
// hurries what is being cleaned up; the third ends the process as if nobody had caught it. Plugins notice that and end, too.
type interrupts struct {
	signals chan os.Signal
	done    chan struct{}
	wait    sync.WaitGroup

	mu     sync.Mutex
	divert func(syscall.Signal)

	hurry  context.Context
	hasten context.CancelFunc
}

func catchInterrupts(parent context.Context) (context.Context, *interrupts) {
	ctx, cancel := context.WithCancelCause(parent)
	i := &interrupts{signals: make(chan os.Signal, 8), done: make(chan struct{})}
	i.hurry, i.hasten = context.WithCancel(context.WithoutCancel(parent))
	i.notify(endings...)
	i.wait.Go(func() {
		defer cancel(nil)
		for count := 0; ; {
			select {
			case <-i.done:
				return
			case s := <-i.signals:
				sig, _ := s.(syscall.Signal)
				if to := i.target(); to != nil {
					to(sig)
					continue
				}
				switch count++; count {
				case 1:
					cancel(&interrupted{sig})
				case 2:
					i.hasten()
				default:
					signal.Reset(sig)
					_ = unix.Kill(os.Getpid(), sig) // does not fail for this process
				}
			}
		}
	})
	return ctx, i
}

// notify catches more signals, except those that are ignored.
func (i *interrupts) notify(signals ...os.Signal) {
	for _, s := range signals {
		if !signal.Ignored(s) {
			signal.Notify(i.signals, s)
		}
	}
}

// to passes all signals on to fn until the returned function is called.
func (i *interrupts) to(fn func(syscall.Signal)) (end func()) {
	set := func(fn func(syscall.Signal)) {
		i.mu.Lock()
		defer i.mu.Unlock()
		i.divert = fn
	}
	set(fn)
	return func() { set(nil) }
}

func (i *interrupts) target() func(syscall.Signal) {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.divert
}

// stop ends the watch.
func (i *interrupts) stop() {
	signal.Stop(i.signals)
	close(i.done)
	i.wait.Wait()
	i.hasten()
}

package process

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/journal"
	"github.com/cordon-host/cordon/host/logs"
)

// DefaultBeatTimeout is how long a plugin may be silent on its control stream before it counts as stuck. A plugin answers a beat in
// well under a millisecond; this is room for a machine that swaps.
const DefaultBeatTimeout = 15 * time.Second

// beatsPerTimeout is how often a plugin is asked within that time, so that one late answer decides nothing.
const beatsPerTimeout = 3

// controlDrain is how long records are still taken from a stream whose process is gone.
const controlDrain = 250 * time.Millisecond

// control is the host's end of a generation's control stream.
type control struct {
	g      *Generation
	frames atomic.Uint64 // that came: any of them is life
	done   chan struct{} // closed when the stream is over and all it carried was taken
}

// open starts the one goroutine that owns the stream. It ends with the stream, which ends with the process.
func (g *Generation) openControl(beat time.Duration) {
	if beat <= 0 {
		beat = DefaultBeatTimeout
	}
	g.control = &control{g: g, done: make(chan struct{})}
	go g.control.run(beat)
}

// run opens the stream, tells the level whenever it changes, asks whether the plugin is well, and waits for whoever reads.
func (c *control) run(timeout time.Duration) {
	defer close(c.done)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	stream, err := c.g.Kernel().Control(ctx)
	if err != nil {
		c.over(err)
		return
	}
	received := make(chan error, 1)
	go func() { received <- c.receive(ctx, stream) }()

	tell := func() (<-chan struct{}, error) {
		level, changed := c.g.log.Level()
		return changed, stream.Send(&kernelv1.HostControl{Frame: &kernelv1.HostControl_LogLevel{
			LogLevel: &kernelv1.LogLevel{Level: journal.LevelName(level)},
		}})
	}
	changed, _ := tell()
	interval := timeout / beatsPerTimeout
	beats := time.NewTicker(interval)
	defer beats.Stop()
	var number, heard uint64
	var silent time.Duration
	gone := c.g.run.done
	// What a broken stream says, receive says better: errors of sending only end the sending.
	for {
		select {
		case err := <-received:
			c.over(err)
			return
		case <-changed:
			changed, _ = tell()
		case <-beats.C:
			if now := c.frames.Load(); now != heard || number == 0 {
				heard, silent = now, 0
			} else if silent += interval; silent >= timeout && !c.g.stopping.Load() {
				// Counted in ticks: a host that was held up itself misses ticks, and hears what waited for it before it counts on.
				c.g.condemn(fmt.Sprintf("it did not answer beats for %s, see timeouts.beat of its row", timeout))
				silent = 0
			}
			number++
			_ = stream.Send(&kernelv1.HostControl{Frame: &kernelv1.HostControl_Beat{Beat: &kernelv1.Beat{Number: number}}})
		case <-gone:
			gone = nil
			beats.Stop()
			// The end of the stream comes behind the last records.
			defer time.AfterFunc(controlDrain, cancel).Stop()
		}
	}
}

// receive takes frames until the stream ends.
func (c *control) receive(ctx context.Context, stream kernelv1.Plugin_ControlClient) error {
	for {
		f, err := stream.Recv()
		if err != nil {
			return err
		}
		c.frames.Add(1)
		if r := f.GetLog(); r != nil {
			if err := c.g.log.Take(ctx, c.g.record(r)); err != nil {
				return err
			}
			c.frames.Add(1) // holding a plugin up is no reason to call it silent
		}
	}
}

// record is a plugin's record as it is kept.
func (g *Generation) record(r *kernelv1.LogRecord) logs.Record {
	level, err := journal.ParseLevel(r.GetLevel())
	if err != nil {
		level, _ = journal.ParseLevel("info")
	}
	at := time.Unix(0, r.GetTimeUnixNano())
	if r.GetTimeUnixNano() == 0 {
		at = time.Now()
	}
	return logs.Record{
		Time: at, Level: level, Stream: logs.StreamLog, Message: r.GetMessage(), Attributes: r.GetAttributes(),
		Dropped: r.GetDropped(), Truncated: r.GetTruncated(),
	}
}

// over decides what the end of the stream means.
func (c *control) over(err error) {
	select {
	case <-c.g.run.done:
		return
	default:
	}
	switch {
	case c.g.stopping.Load():
	case status.Code(err) == codes.Unimplemented:
		// Nobody asks this plugin whether it is well; its log is what it writes on stderr.
	case errors.Is(err, io.EOF):
		c.g.log.Log().Warn("plugin closed its control stream: it is not asked any more whether it is well")
	default:
		// The connection is the plugin's only way to be reached. Mostly it breaks because the process is ending.
		t := time.NewTimer(reapWait)
		defer t.Stop()
		select {
		case <-c.g.run.done:
			return
		case <-t.C:
		}
		c.g.condemn("its connection is lost: " + fault.Message(err))
	}
}

// condemn ends a generation that is of no use any more; what came of it shows as the reason of its end.
func (g *Generation) condemn(why string) {
	g.verdict.CompareAndSwap(nil, &why)
	g.run.kill()
}

package plugin

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	"github.com/cordon-host/cordon/capability/fault"
)

// ErrNextTwice is what next returns when a listener calls it again.
var ErrNextTwice = errors.New("next called twice: a listener may ask the rest of the chain once")

// maxDispatches bounds how many dispatches one generation works on at once; more wait in the stream.
const maxDispatches = 64

type nextFunc func(ctx context.Context, payload []byte) ([]byte, error)

type listener struct {
	decl *kernelv1.Listener
	call func(ctx context.Context, payload []byte, next nextFunc) ([]byte, error)
}

// bus serves one Bus stream: it runs listeners for the dispatches that arrive and matches the results of next to
// them.
type bus struct {
	plugin *Context
	stream grpc.BidiStreamingServer[kernelv1.HostFrame, kernelv1.PluginFrame]

	sendMu sync.Mutex // a gRPC stream takes one sender at a time

	mu       sync.Mutex
	running  map[uint64]*dispatch
	slots    chan struct{}
	finished sync.WaitGroup
}

type dispatch struct {
	cancel context.CancelFunc
	result chan *kernelv1.NextResult
}

func serveBus(c *Context, stream grpc.BidiStreamingServer[kernelv1.HostFrame, kernelv1.PluginFrame]) error {
	b := &bus{plugin: c, stream: stream, running: map[uint64]*dispatch{}, slots: make(chan struct{}, maxDispatches)}
	defer b.finished.Wait()
	defer b.cancelAll()
	for {
		frame, err := stream.Recv()
		if err != nil {
			return nil // the end of the stream is how the host ends it
		}
		switch f := frame.GetFrame().(type) {
		case *kernelv1.HostFrame_Dispatch:
			select {
			case b.slots <- struct{}{}:
			case <-stream.Context().Done():
				return nil
			}
			b.start(frame.GetId(), f.Dispatch)
		case *kernelv1.HostFrame_NextResult:
			if d := b.lookup(frame.GetId()); d != nil {
				select {
				case d.result <- f.NextResult:
				default: // a second result for one next: the host is confused, the first one counts
				}
			}
		case *kernelv1.HostFrame_Cancel:
			if d := b.lookup(frame.GetId()); d != nil {
				d.cancel()
			}
		}
	}
}

func (b *bus) lookup(id uint64) *dispatch {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.running[id]
}

func (b *bus) cancelAll() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, d := range b.running {
		d.cancel()
	}
}

// start runs the listener of one dispatch in a goroutine that ends with it.
func (b *bus) start(id uint64, f *kernelv1.Dispatch) {
	ctx := withCall(b.stream.Context(), func(key string) string { return f.GetMetadata()[key] })
	var cancel context.CancelFunc
	if f.GetBudgetMs() > 0 {
		ctx, cancel = context.WithTimeout(ctx, time.Duration(f.GetBudgetMs())*time.Millisecond)
	} else {
		ctx, cancel = context.WithCancel(ctx)
	}
	d := &dispatch{cancel: cancel, result: make(chan *kernelv1.NextResult, 1)}
	b.mu.Lock()
	b.running[id] = d
	b.mu.Unlock()
	b.finished.Go(func() {
		defer func() {
			cancel()
			b.mu.Lock()
			delete(b.running, id)
			b.mu.Unlock()
			<-b.slots
		}()
		done := &kernelv1.Done{}
		payload, err := b.run(ctx, id, d, f)
		if err != nil {
			done.Failure = failure(err)
		} else {
			done.Payload = payload
		}
		b.send(&kernelv1.PluginFrame{Id: id, Frame: &kernelv1.PluginFrame_Done{Done: done}})
	})
}

func (b *bus) run(ctx context.Context, id uint64, d *dispatch, f *kernelv1.Dispatch) (payload []byte, err error) {
	defer func() {
		if p := recover(); p != nil {
			b.plugin.log.Error("listener panicked", "event", f.GetEvent(), "panic", p, "stack", string(debug.Stack()))
			err = fault.New(codes.Internal, "PANIC", "listener for %s panicked: %v", f.GetEvent(), p)
		}
	}()
	if len(f.GetListeners()) != 1 {
		return nil, fault.New(codes.InvalidArgument, "NO_LISTENER", "dispatch of %s names %d listeners, want one", f.GetEvent(), len(f.GetListeners()))
	}
	l, ok := b.plugin.listeners[f.GetListeners()[0]]
	if !ok || l.decl.GetEvent() != f.GetEvent() {
		return nil, fault.New(codes.NotFound, "NO_LISTENER", "listener %d for %s is not registered", f.GetListeners()[0], f.GetEvent())
	}
	var asked sync.Once
	return l.call(ctx, f.GetPayload(), func(ctx context.Context, payload []byte) (reply []byte, err error) {
		err = ErrNextTwice
		asked.Do(func() {
			b.send(&kernelv1.PluginFrame{Id: id, Frame: &kernelv1.PluginFrame_Next{Next: &kernelv1.Next{Payload: payload}}})
			select {
			case r := <-d.result:
				if fail := r.GetFailure(); fail != nil {
					err = fault.New(codes.Code(fail.GetCode()), fail.GetReason(), "%s", fail.GetMessage())
					return
				}
				reply, err = r.GetPayload(), nil
			case <-ctx.Done():
				err = ctx.Err()
			}
		})
		return reply, err
	})
}

// send writes one frame. A broken stream means that the host gave this generation up; the stream's context ends every
// dispatch, so there is nothing to report to.
func (b *bus) send(f *kernelv1.PluginFrame) {
	b.sendMu.Lock()
	defer b.sendMu.Unlock()
	if err := b.stream.Send(f); err != nil {
		b.plugin.log.Debug("bus frame not sent", "error", err)
	}
}

func failure(err error) *kernelv1.Failure {
	code := status.Code(err)
	switch {
	case errors.Is(err, context.Canceled):
		code = codes.Canceled
	case errors.Is(err, context.DeadlineExceeded):
		code = codes.DeadlineExceeded
	}
	reason := fault.Reason(err)
	if errors.Is(err, ErrNextTwice) {
		reason = "NEXT_TWICE"
	}
	return &kernelv1.Failure{Code: int32(code), Message: fmt.Sprint(fault.Message(err)), Reason: reason}
}

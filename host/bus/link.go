package bus

import (
	"context"
	"fmt"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/host/route"
)

// maxInFlight bounds the dispatches that one generation has not answered yet. More of them wait: a slow listener slows those
// who dispatch, it does not fill the host's memory.
const maxInFlight = 64

// Link is the bus stream of one generation.
type Link struct {
	provider *route.Provider
	stream   grpc.BidiStreamingClient[kernelv1.HostFrame, kernelv1.PluginFrame]
	cancel   context.CancelFunc
	done     chan struct{} // closed when the stream has ended
	forget   func()
	credits  chan struct{}

	sendMu sync.Mutex // a gRPC stream takes one sender at a time

	mu      sync.Mutex
	lastID  uint64
	waiting map[uint64]chan *kernelv1.PluginFrame
}

// framesPerDispatch is how many frames a listener may send for one dispatch: one next, one done. A generation that sends
// more is talking nonsense, and what is too much is dropped.
const framesPerDispatch = 2

// Connect opens the bus stream of a generation that has been set up. Close ends it; so does the end of the process.
func (b *Bus) Connect(p *route.Provider, kernel kernelv1.PluginClient) (*Link, error) {
	ctx, cancel := context.WithCancel(context.Background())
	stream, err := kernel.Bus(ctx)
	if err != nil {
		cancel()
		return nil, fmt.Errorf("bus of %s: %w", p.Entry, err)
	}
	l := &Link{
		provider: p, stream: stream, cancel: cancel, done: make(chan struct{}),
		credits: make(chan struct{}, maxInFlight), waiting: map[uint64]chan *kernelv1.PluginFrame{},
	}
	go l.receive()
	b.mu.Lock()
	b.links[p] = l
	b.mu.Unlock()
	l.forget = func() {
		b.mu.Lock()
		delete(b.links, p)
		b.mu.Unlock()
	}
	return l, nil
}

// Close ends the stream and every dispatch on it.
func (l *Link) Close() {
	l.forget()
	l.cancel()
	<-l.done
}

func (l *Link) receive() {
	defer close(l.done)
	for {
		f, err := l.stream.Recv()
		if err != nil {
			return
		}
		l.mu.Lock()
		ch := l.waiting[f.GetId()]
		l.mu.Unlock()
		select {
		case ch <- f: // a nil channel is a dispatch that has ended: its late frames are dropped
		default:
		}
	}
}

// dispatch runs one listener of the generation. next serves the listener's request for the rest of the chain. The errors
// are faults: the listener's own, or the plugin's when it ended meanwhile.
func (l *Link) dispatch(ctx context.Context, leg *route.Leg, decl *kernelv1.Listener, payload []byte, next func(context.Context, []byte) ([]byte, error)) ([]byte, error) {
	select {
	case l.credits <- struct{}{}:
		defer func() { <-l.credits }()
	case <-l.done:
		return nil, l.broken()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	frames := make(chan *kernelv1.PluginFrame, framesPerDispatch)
	l.mu.Lock()
	l.lastID++
	id := l.lastID
	l.waiting[id] = frames
	l.mu.Unlock()
	defer func() {
		l.mu.Lock()
		delete(l.waiting, id)
		l.mu.Unlock()
	}()
	if err := l.send(&kernelv1.HostFrame{Id: id, Frame: &kernelv1.HostFrame_Dispatch{Dispatch: &kernelv1.Dispatch{
		Event: decl.GetEvent(), Listeners: []uint32{decl.GetIndex()}, Payload: payload, Metadata: leg.Metadata(),
	}}}); err != nil {
		return nil, err
	}
	asked := false
	for {
		select {
		case f := <-frames:
			switch f := f.GetFrame().(type) {
			case *kernelv1.PluginFrame_Done:
				if fail := f.Done.GetFailure(); fail != nil {
					return nil, fault.New(codes.Code(fail.GetCode()), fail.GetReason(), "%s: listener for %s: %s",
						l.provider.Entry, decl.GetEvent(), fail.GetMessage())
				}
				return f.Done.GetPayload(), nil
			case *kernelv1.PluginFrame_Next:
				if asked {
					return nil, fault.New(codes.FailedPrecondition, "NEXT_TWICE", "%s: listener for %s asked for the rest of the chain twice", l.provider.Entry, decl.GetEvent())
				}
				asked = true
				result := &kernelv1.NextResult{}
				reply, err := next(ctx, f.Next.GetPayload())
				if err != nil {
					result.Failure = &kernelv1.Failure{Code: int32(code(err)), Message: fault.Message(err), Reason: fault.Reason(err)}
				} else {
					result.Payload = reply
				}
				if err := l.send(&kernelv1.HostFrame{Id: id, Frame: &kernelv1.HostFrame_NextResult{NextResult: result}}); err != nil {
					return nil, err
				}
			}
		case <-l.done:
			return nil, l.broken()
		case <-ctx.Done():
			_ = l.send(&kernelv1.HostFrame{Id: id, Frame: &kernelv1.HostFrame_Cancel{Cancel: &kernelv1.Cancel{}}}) // best effort: the answer is not awaited
			return nil, ctx.Err()
		}
	}
}

func (l *Link) send(f *kernelv1.HostFrame) error {
	l.sendMu.Lock()
	defer l.sendMu.Unlock()
	if err := l.stream.Send(f); err != nil {
		return l.broken()
	}
	return nil
}

func (l *Link) broken() error { return l.provider.Broken("its event stream ended") }

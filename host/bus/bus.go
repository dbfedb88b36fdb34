// Package bus carries events between plugins.
//
// Order and liveness are the container's: every listener of a plugin is a listener of its fiber, and this package only knows
// how to run one in another process. What it adds is provenance. Each reply carries the host's stamp of who gave it, so
// that an emitter can tell a person's answer from a plugin's, and no plugin can pass its own off as another's.
package bus

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/ctxsvc"
	"github.com/cordon-host/cordon/host/route"
)

// Request is what a listener gets.
type Request struct {
	Payload []byte
	// Tree and Leg are the call tree of the dispatch and the hop that dispatched it; both are set for a plugin's emission.
	Tree *route.Tree
	Leg  *route.Leg
	// Fixed: the event's declaration forbids listeners to change the request.
	Fixed bool
}

// Reply is what a listener gives.
type Reply struct {
	Payload []byte
	// Answer is the host's stamp; nil for the emitter's own base answer.
	Answer *kernelv1.Answer
}

// Listener runs in the host's own process.
type Listener = func(ctx context.Context, q *Request, next func(context.Context, *Request) (*Reply, error)) (*Reply, error)

// Bus dispatches the events that plugins declare.
type Bus struct {
	router *route.Router

	mu      sync.Mutex
	events  map[string]*kernelv1.EventDecl
	answers map[string]*Stamped
	links   map[*route.Provider]*Link
}

// Stamped is an answer as the host saw it.
type Stamped struct {
	Event   string
	Call    string
	Request []byte
	Reply   []byte
	Answer  *kernelv1.Answer
}

// New makes a bus.
func New() *Bus {
	return &Bus{events: map[string]*kernelv1.EventDecl{}, answers: map[string]*Stamped{}, links: map[*route.Provider]*Link{}}
}

// Use sets the router that legs of dispatches belong to. It is called once, before anything is dispatched: router and bus
// need each other.
func (b *Bus) Use(r *route.Router) { b.router = r }

// Declare makes an event known. Emitters and listeners meet on one declaration, so two that differ are an error.
func (b *Bus) Declare(entry string, d *kernelv1.EventDecl) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if old, ok := b.events[d.GetEvent()]; ok && !proto.Equal(old, d) {
		return fmt.Errorf("event %s: %s declares it differently from another plugin", d.GetEvent(), entry)
	}
	b.events[d.GetEvent()] = d
	return nil
}

// event is the container's event of a declaration. An event nobody declares is never dispatched, so it may be anything.
func (b *Bus) event(name string) ctxsvc.Event[*Request, *Reply] {
	b.mu.Lock()
	defer b.mu.Unlock()
	return ctxsvc.Event[*Request, *Reply]{Name: name, FailClosed: b.events[name].GetFailClosed()}
}

// Listen registers a listener of a plugin with its fiber. Current finds the generation that serves it. Level is what an answer
// of this plugin is worth, as its row says.
func (b *Bus) Listen(c *ctxsvc.Context, entry string, decl *kernelv1.Listener, level kernelv1.Level, current func() (*route.Provider, error)) error {
	if decl.GetKind() != kernelv1.Listener_AROUND {
		return fmt.Errorf("listener of %s for %s: kind %s is not supported by this host", entry, decl.GetEvent(), decl.GetKind())
	}
	opts := []ctxsvc.ListenOption{ctxsvc.Label(entry)}
	if decl.GetPrepend() {
		opts = append(opts, ctxsvc.Prepend())
	}
	return ctxsvc.On(c, b.event(decl.GetEvent()), b.remote(entry, decl, level, current), opts...)
}

// Terminal registers the host's own innermost listener of an event.
func (b *Bus) Terminal(c *ctxsvc.Context, name, label string, fn Listener) error {
	return ctxsvc.On(c, b.event(name), fn, ctxsvc.Terminal(), ctxsvc.Label(label))
}

// remote runs a listener of another process. What it answers is its own answer, unless it is exactly what the rest of the
// chain answered it.
func (b *Bus) remote(entry string, decl *kernelv1.Listener, level kernelv1.Level, current func() (*route.Provider, error)) Listener {
	return func(ctx context.Context, q *Request, next func(context.Context, *Request) (*Reply, error)) (*Reply, error) {
		p, err := route.Pin(q.Tree, current)
		if err != nil {
			return nil, err
		}
		link, ok := b.link(p)
		if !ok {
			return nil, p.Broken("its event stream is closed")
		}
		leg, end, err := b.router.Begin(q.Tree, q.Leg, nil, p)
		if err != nil {
			return nil, err
		}
		defer end()
		var inner *Reply
		payload, err := link.dispatch(ctx, leg, decl, q.Payload, func(ctx context.Context, payload []byte) ([]byte, error) {
			if q.Fixed && !bytes.Equal(payload, q.Payload) {
				return nil, fault.New(codes.FailedPrecondition, "REQUEST_CHANGED", "%s changed the request of %s, which nobody may", entry, decl.GetEvent())
			}
			reply, err := next(ctx, &Request{Payload: payload, Tree: q.Tree, Leg: leg, Fixed: q.Fixed})
			if err != nil {
				return nil, err
			}
			inner = reply
			return reply.Payload, nil
		})
		if err != nil {
			return nil, err
		}
		if inner != nil && bytes.Equal(payload, inner.Payload) {
			return inner, nil
		}
		return &Reply{Payload: payload, Answer: &kernelv1.Answer{Entry: entry, Level: level}}, nil
	}
}

func (b *Bus) link(p *route.Provider) (*Link, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	l, ok := b.links[p]
	return l, ok
}

// Emit dispatches an event for the plugin that calls. It must have declared it. The stamped answer is kept, under its id, until
// it is taken or its call ends.
func (b *Bus) Emit(ctx context.Context, c *ctxsvc.Context, caller *route.Provider, leg *route.Leg, r *kernelv1.EmitRequest) (*kernelv1.EmitReply, error) {
	i := slices.IndexFunc(caller.Manifest.GetEvents(), func(d *kernelv1.EventDecl) bool { return d.GetEvent() == r.GetEvent() })
	if i < 0 {
		return nil, fault.New(codes.PermissionDenied, "NOT_DECLARED", "%s emits %s, which its manifest does not declare; add it to Emits", caller.Entry, r.GetEvent())
	}
	decl := caller.Manifest.GetEvents()[i]
	if r.GetMode() != kernelv1.EmitRequest_WATERFALL {
		return nil, fault.New(codes.Unimplemented, "NO_MODE", "event %s: mode %s is not supported by this host", r.GetEvent(), r.GetMode())
	}
	q := &Request{Payload: r.GetPayload(), Leg: leg, Fixed: decl.GetFixedRequest()}
	if leg != nil {
		q.Tree = leg.Tree
	} else {
		q.Tree = route.NewTree(route.Call{})
		defer q.Tree.End()
	}
	opts := []ctxsvc.DispatchOption{}
	if q.Tree.Agent != "" {
		opts = append(opts, ctxsvc.ForSubject(q.Tree.Agent))
	}
	reply, err := ctxsvc.Waterfall(ctx, c, b.event(decl.GetEvent()), q, func(context.Context, *Request) (*Reply, error) {
		return &Reply{Payload: r.GetBase()}, nil
	}, opts...)
	if err != nil {
		return nil, asFault(err)
	}
	out := &kernelv1.EmitReply{Payload: reply.Payload}
	if reply.Answer != nil {
		out.Answer = proto.CloneOf(reply.Answer)
		out.Answer.Id = b.keep(&Stamped{Event: r.GetEvent(), Call: q.Tree.ID, Request: r.GetPayload(), Reply: reply.Payload, Answer: reply.Answer})
	}
	return out, nil
}

func (b *Bus) keep(s *Stamped) string {
	id := "a-" + rand.Text()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.answers[id] = s
	return id
}

// Take gives out a stamped answer, once, to the call tree it was given in.
func (b *Bus) Take(id, call string) (*Stamped, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s, ok := b.answers[id]
	if !ok || s.Call != call {
		return nil, false
	}
	delete(b.answers, id)
	return s, true
}

// EndCall forgets the answers of a call.
func (b *Bus) EndCall(call string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for id, s := range b.answers {
		if s.Call == call {
			delete(b.answers, id)
		}
	}
}

// asFault gives the container's own errors a status, so that an emitter in another process can tell them apart.
func asFault(err error) error {
	if fault.Reason(err) != "" || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return fault.New(codes.Aborted, "DISPATCH_FAILED", "%v", err)
}

func code(err error) codes.Code {
	switch {
	case errors.Is(err, context.Canceled):
		return codes.Canceled
	case errors.Is(err, context.DeadlineExceeded):
		return codes.DeadlineExceeded
	}
	return status.Code(err)
}

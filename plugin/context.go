package plugin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	toolsv1 "github.com/cordon-host/cordon/api/tools/v1"
	"github.com/cordon-host/cordon/capability/event"
)

// undoTimeout bounds one undo step, so that a hanging one cannot keep the others from running.
const undoTimeout = 5 * time.Second

// Context is a plugin's view of its host, from Apply until the generation ends. Its methods may be called from any
// goroutine; those that register something work only while Apply runs.
type Context struct {
	setup    *kernelv1.SetupRequest
	manifest *kernelv1.Manifest
	log      *slog.Logger
	conn     *grpc.ClientConn

	mu        sync.Mutex
	sealed    bool // Apply has returned
	services  map[string]any
	facts     map[string]*kernelv1.Facts
	tools     map[string]Tool
	listeners map[uint32]listener
	contexts  map[string]func(context.Context) (string, error)
	undo      []effect
}

type effect struct {
	label string
	undo  func(context.Context) error
}

// Tool is one tool a model may call.
type Tool struct {
	Name        string
	Description string
	// InputSchema is the JSON Schema (2020-12) of the arguments. The host checks them before Call sees them.
	InputSchema json.RawMessage
	// Timeout is the longest time a call may take; 0 for the host's default.
	Timeout time.Duration
	// Call runs the tool. An error becomes an error result with the error's text and, for a fault, its reason.
	Call func(ctx context.Context, arguments json.RawMessage) (*toolsv1.CallReply, error)
}

// ErrSealed is returned by a registration after Apply has returned.
var ErrSealed = errors.New("registration after Apply: capabilities, listeners, tools and effects are registered while Apply runs")

// Entry is the id of the row.
func (c *Context) Entry() string { return c.setup.GetEntry() }

// Generation counts the processes of the row, from 1.
func (c *Context) Generation() uint64 { return c.setup.GetGeneration() }

// Deployment is where the host lives.
func (c *Context) Deployment() *kernelv1.Deployment { return c.setup.GetDeployment() }

// Logger writes structured records to the host's log.
func (c *Context) Logger() *slog.Logger { return c.log }

// Conn is the connection on which to call a needed capability; false when the need is optional and not met. Calls made with
// the context of a call being served belong to its call tree.
func (c *Context) Conn(capability string) (grpc.ClientConnInterface, bool) {
	for _, n := range c.manifest.GetNeeds() {
		if n.GetCapability() == capability {
			_, present := c.setup.GetFacts()[capability]
			return c.conn, present || !n.GetOptional()
		}
	}
	return nil, false
}

// Facts stores what the provider of a needed capability published about itself in into; false when the need is not met.
func (c *Context) Facts(capability string, into any) (bool, error) {
	f, ok := c.setup.GetFacts()[capability]
	if !ok {
		return false, nil
	}
	if len(f.GetJson()) == 0 {
		return true, nil
	}
	if err := json.Unmarshal(f.GetJson(), into); err != nil {
		return true, fmt.Errorf("facts of %s: %w", capability, err)
	}
	return true, nil
}

// Provide publishes impl, which implements the contract's generated Server interface, as the provider of an offered
// capability. Facts is what consumers may know about it at their Apply; nil for nothing. They are applied again when it
// changes with a new generation.
func (c *Context) Provide(capability string, impl any, facts any) error {
	service, ok := offered(c.manifest, capability)
	if !ok {
		return fmt.Errorf("provide %s: %s does not offer it; add it to Offers", capability, c.manifest.GetName())
	}
	raw := []byte("{}")
	if facts != nil {
		var err error
		if raw, err = json.Marshal(facts); err != nil {
			return fmt.Errorf("provide %s: facts: %w", capability, err)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.sealed {
		return fmt.Errorf("provide %s: %w", capability, ErrSealed)
	}
	if _, dup := c.services[service]; dup {
		return fmt.Errorf("provide %s: provided already", capability)
	}
	c.services[service] = impl
	c.facts[capability] = &kernelv1.Facts{Json: raw}
	return nil
}

// Tool registers a tool the manifest names.
func (c *Context) Tool(t Tool) error {
	if !slices.Contains(c.manifest.GetTools(), t.Name) {
		return fmt.Errorf("tool %s: not in the manifest of %s; add it to Tools", t.Name, c.manifest.GetName())
	}
	if t.Call == nil || !json.Valid(t.InputSchema) {
		return fmt.Errorf("tool %s: Call and a JSON InputSchema must be set", t.Name)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.sealed {
		return fmt.Errorf("tool %s: %w", t.Name, ErrSealed)
	}
	if _, dup := c.tools[t.Name]; dup {
		return fmt.Errorf("tool %s: registered already", t.Name)
	}
	c.tools[t.Name] = t
	return nil
}

// Contribute registers a contribution that the manifest names. Text is asked for the session of the call, before a model's
// first step and after anything that may have changed it; the same facts must give the same bytes.
func (c *Context) Contribute(name string, text func(ctx context.Context) (string, error)) error {
	if !slices.ContainsFunc(c.manifest.GetContexts(), func(d *kernelv1.Context) bool { return d.GetName() == name }) {
		return fmt.Errorf("context %s: not in the manifest of %s; add it to Contexts", name, c.manifest.GetName())
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.sealed {
		return fmt.Errorf("context %s: %w", name, ErrSealed)
	}
	if _, dup := c.contexts[name]; dup {
		return fmt.Errorf("context %s: registered already", name)
	}
	c.contexts[name] = text
	return nil
}

// Effect names something Apply did that must be undone when the generation ends. Effects are undone newest first, each
// within five seconds; a failing one is logged and does not stop the others.
func (c *Context) Effect(label string, undo func(context.Context) error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.sealed {
		return fmt.Errorf("effect %s: %w", label, ErrSealed)
	}
	c.undo = append(c.undo, effect{label, undo})
	return nil
}

// seal ends the registration phase.
func (c *Context) seal() {
	c.mu.Lock()
	c.sealed = true
	c.mu.Unlock()
}

// dispose undoes the effects, newest first, once.
func (c *Context) dispose(ctx context.Context) error {
	c.mu.Lock()
	undo := c.undo
	c.undo, c.sealed = nil, true
	c.mu.Unlock()
	var errs []error
	for _, e := range slices.Backward(undo) {
		if err := runUndo(ctx, e); err != nil {
			c.log.Error("undo failed", "effect", e.label, "error", err)
			errs = append(errs, fmt.Errorf("undo %s: %w", e.label, err))
		}
	}
	return errors.Join(errs...)
}

func runUndo(ctx context.Context, e effect) (err error) {
	ctx, cancel := context.WithTimeout(ctx, undoTimeout)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		defer func() {
			if p := recover(); p != nil {
				done <- fmt.Errorf("panic: %v", p)
			}
		}()
		done <- e.undo(ctx)
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Around registers the listener for ev that the manifest declares. fn answers itself, or asks the rest of the chain with
// next, at most once, and returns what it likes of that. Across processes a request is changed by passing a changed one to
// next, never by writing to the one received.
func Around[Q, A proto.Message](c *Context, ev event.Event[Q, A], fn func(ctx context.Context, q Q, next func(context.Context, Q) (A, error)) (A, error)) error {
	var decl *kernelv1.Listener
	for _, l := range c.manifest.GetListeners() {
		if l.GetEvent() == ev.Name {
			decl = l
		}
	}
	if decl == nil {
		return fmt.Errorf("listen to %s: not in the manifest of %s; add it to Listens", ev.Name, c.manifest.GetName())
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.sealed {
		return fmt.Errorf("listen to %s: %w", ev.Name, ErrSealed)
	}
	if _, dup := c.listeners[decl.GetIndex()]; dup {
		return fmt.Errorf("listen to %s: registered already", ev.Name)
	}
	c.listeners[decl.GetIndex()] = listener{decl: decl, call: func(ctx context.Context, payload []byte, next nextFunc) ([]byte, error) {
		q := ev.NewRequest()
		if err := proto.Unmarshal(payload, q); err != nil {
			return nil, fmt.Errorf("%s: request: %w", ev.Name, err)
		}
		a, err := fn(ctx, q, func(ctx context.Context, q Q) (A, error) {
			a := ev.NewReply()
			raw, err := proto.Marshal(q)
			if err != nil {
				return a, err
			}
			if raw, err = next(ctx, raw); err != nil {
				return a, err
			}
			return a, proto.Unmarshal(raw, a)
		})
		if err != nil {
			return nil, err
		}
		return proto.Marshal(a)
	}}
	return nil
}

// Waterfall dispatches an event the manifest declares. Base is the answer when no listener gives one. The second result
// says whose answer it is; nil for the base answer. It belongs to the call tree of ctx.
func Waterfall[Q, A proto.Message](ctx context.Context, c *Context, ev event.Event[Q, A], q Q, base A) (A, *kernelv1.Answer, error) {
	a := ev.NewReply()
	rawQ, err := proto.Marshal(q)
	if err != nil {
		return a, nil, err
	}
	rawBase, err := proto.Marshal(base)
	if err != nil {
		return a, nil, err
	}
	reply, err := kernelv1.NewHostClient(c.conn).Emit(ctx, &kernelv1.EmitRequest{
		Event: ev.Name, Mode: kernelv1.EmitRequest_WATERFALL, Payload: rawQ, Base: rawBase,
	})
	if err != nil {
		return a, nil, err
	}
	return a, reply.GetAnswer(), proto.Unmarshal(reply.GetPayload(), a)
}

// Redeem exchanges a grant that arrived with the call of ctx for what it grants, once.
func Redeem(ctx context.Context, c *Context, grant string) (*kernelv1.RedeemGrantReply, error) {
	return kernelv1.NewHostClient(c.conn).RedeemGrant(ctx, &kernelv1.RedeemGrantRequest{Grant: grant})
}

// Text is a tool result of one text.
func Text(text string) *toolsv1.CallReply {
	return &toolsv1.CallReply{Content: []*toolsv1.Content{{Type: "text", Text: text}}}
}

package route

import (
	"context"
	"crypto/rand"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/descriptorpb"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	"github.com/cordon-host/cordon/capability/fault"
)

// HostEntry is the caller's name when the host itself calls.
const HostEntry = "host"

// MaxHops is how many plugins one call tree may pass. A deeper one is a loop between capabilities.
const MaxHops = 16

// Call is what a whole call tree has in common.
type Call struct {
	ID        string // of the tool call at its root; made up for other trees
	Session   string
	Agent     string
	Turn      int64
	Authority kernelv1.Level // of whoever asked for the tree
	Tag       string         // the front end's own mark, repeated in questions
	Purpose   string         // kernelv1.PurposePin, or empty for any other
}

// Tree is a call and everything it causes. It stays on the generations it first met, and keeps them alive until it ends.
type Tree struct {
	Call

	mu    sync.Mutex
	pins  map[string]*Provider // by entry
	ended bool
}

// NewTree starts a call tree. An empty id is made up. Whoever starts a tree ends it.
func NewTree(call Call) *Tree {
	if call.ID == "" {
		call.ID = "c-" + strings.ToLower(rand.Text())
	}
	return &Tree{Call: call, pins: map[string]*Provider{}}
}

// pin is the generation of p's entry that the tree is on: the one it met first, or else p from now on. It fails when p was
// retired meanwhile; then there is a newer one.
func (t *Tree) pin(p *Provider) (*Provider, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if pinned, ok := t.pins[p.Entry]; ok {
		return pinned, true
	}
	// A hop that outlives its tree, a listener's late one for example, holds nothing.
	if t.ended || !p.lease.take() {
		return p, t.ended
	}
	t.pins[p.Entry] = p
	return p, true
}

// epoch is the generations that the tree is on so far, as ENTRY@GENERATION, separated by commas.
func (t *Tree) epoch() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var on []string
	for _, entry := range slices.Sorted(maps.Keys(t.pins)) {
		on = append(on, entry+"@"+strconv.FormatUint(t.pins[entry].Generation, 10))
	}
	return strings.Join(on, ",")
}

// End lets the generations of the tree go. Later calls end nothing twice.
func (t *Tree) End() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ended = true
	for _, p := range t.pins {
		p.lease.release()
	}
	clear(t.pins)
}

// lease counts the call trees that are on a generation.
type lease struct {
	mu      sync.Mutex
	trees   int
	retired bool
	idle    chan struct{} // closed when retired and no tree is left
}

func (l *lease) take() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.retired {
		return false
	}
	l.trees++
	return true
}

func (l *lease) release() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.trees--; l.trees == 0 && l.retired {
		close(l.idle)
	}
}

// Retire makes new call trees go elsewhere. The channel is closed when the last tree on the generation has ended.
func (p *Provider) Retire() <-chan struct{} {
	l := &p.lease
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.retired {
		l.retired, l.idle = true, make(chan struct{})
		if l.trees == 0 {
			close(l.idle)
		}
	}
	return l.idle
}

// Leg is one hop of a tree: the time during which one generation serves it. Its token lets that generation, and no other,
// act in the name of the call, for that time.
type Leg struct {
	Tree *Tree
	// Provider serves the leg.
	Provider *Provider

	token    string
	caller   string
	provides []string // by the caller, to the deployment at large
	path     []string // entries from the root to this one
}

// Path is the entries a leg has passed, from the root.
func (l *Leg) Path() []string { return slices.Clone(l.path) }

// Metadata is what the serving plugin is told.
func (l *Leg) Metadata() map[string]string {
	md := map[string]string{
		kernelv1.KeyLeg: l.token, kernelv1.KeyCaller: l.caller, kernelv1.KeyCall: l.Tree.ID,
		kernelv1.KeyHops: strconv.Itoa(len(l.path)), kernelv1.KeyAuthority: l.Tree.Authority.String(), kernelv1.KeyEpoch: l.Tree.epoch(),
	}
	if len(l.provides) > 0 {
		md[kernelv1.KeyProvides] = strings.Join(l.provides, ",")
	}
	if l.Tree.Purpose != "" {
		md[kernelv1.KeyPurpose] = l.Tree.Purpose
	}
	if l.Tree.Session != "" {
		md[kernelv1.KeySession] = l.Tree.Session
	}
	if l.Tree.Agent != "" {
		md[kernelv1.KeyAgent] = l.Tree.Agent
	}
	if l.Tree.Turn != 0 {
		md[kernelv1.KeyTurn] = strconv.FormatInt(l.Tree.Turn, 10)
	}
	return md
}

// Outgoing is ctx for a gRPC call to the plugin that serves the leg.
func (l *Leg) Outgoing(ctx context.Context) context.Context {
	md, _ := metadata.FromOutgoingContext(ctx)
	md = md.Copy()
	if md == nil {
		md = metadata.MD{}
	}
	for k, v := range l.Metadata() {
		md.Set(k, v)
	}
	return metadata.NewOutgoingContext(ctx, md)
}

// legs are the hops in flight, by token.
type legs struct {
	mu sync.Mutex
	m  map[string]*Leg
}

// Begin adds a hop from a caller, nil for the host itself, to p below parent, which is nil at the root of a tree. The returned
// function ends it.
func (r *Router) Begin(tree *Tree, parent *Leg, caller *Provider, p *Provider) (*Leg, func(), error) {
	var path []string
	if parent != nil {
		path = parent.path
	}
	leg := &Leg{Tree: tree, Provider: p, token: rand.Text(), caller: HostEntry, path: append(slices.Clone(path), p.Entry)}
	if caller != nil {
		leg.caller = caller.Entry
		for _, o := range caller.Manifest.GetOffers() {
			if r.resolver.Owns(caller.Entry, o.GetCapability()) {
				leg.provides = append(leg.provides, o.GetCapability())
			}
		}
	}
	if len(leg.path) > MaxHops {
		return nil, nil, fault.New(codes.ResourceExhausted, "TOO_MANY_HOPS",
			"call %s passed more than %d plugins: %s", tree.ID, MaxHops, strings.Join(leg.path, " → "))
	}
	r.legs.mu.Lock()
	r.legs.m[leg.token] = leg
	r.legs.mu.Unlock()
	return leg, func() {
		r.legs.mu.Lock()
		delete(r.legs.m, leg.token)
		r.legs.mu.Unlock()
	}, nil
}

// legFor is the hop a plugin says it is serving. It must be one in flight, and this generation must be the one serving it.
func (r *Router) legFor(p *Provider, token string) (*Leg, error) {
	r.legs.mu.Lock()
	leg, ok := r.legs.m[token]
	r.legs.mu.Unlock()
	if !ok || leg.Provider != p {
		return nil, fault.New(codes.PermissionDenied, "FOREIGN_CALL",
			"%s is not serving the call it speaks for; calls to the host must use the context of a call in progress", p.Entry)
	}
	return leg, nil
}

type legKey struct{}

// LegFrom is the hop in whose name the host's own services are called; nil for a call outside any tree.
func LegFrom(ctx context.Context) *Leg {
	leg, _ := ctx.Value(legKey{}).(*Leg)
	return leg
}

type providerKey struct{}

// CallerFrom is the generation that called one of the host's own services.
func CallerFrom(ctx context.Context) *Provider {
	p, _ := ctx.Value(providerKey{}).(*Provider)
	return p
}

// Provider is one generation of an entry as the router sees it.
type Provider struct {
	Entry      string
	Generation uint64
	Manifest   *kernelv1.Manifest
	Conn       Conn
	// Done is closed when the generation is gone; Exit then says how it ended, and nothing before.
	Done <-chan struct{}
	Exit func() string
	// Crash is the head of the trace it died with, then; nil where there can be none.
	Crash func() string

	lease lease

	contracts sync.Once
	unaries   map[string]bool // full method names
}

// unary reports whether the contracts in the manifest say that a method has one request and one reply. What they do not say is
// taken for a stream, which any call can be.
func (p *Provider) unary(method string) bool {
	p.contracts.Do(func() {
		p.unaries = map[string]bool{}
		var set descriptorpb.FileDescriptorSet
		if proto.Unmarshal(p.Manifest.GetDescriptors(), &set) != nil {
			return
		}
		for _, f := range set.GetFile() {
			for _, s := range f.GetService() {
				for _, m := range s.GetMethod() {
					name := "/" + strings.TrimPrefix(f.GetPackage()+"."+s.GetName(), ".") + "/" + m.GetName()
					p.unaries[name] = !m.GetClientStreaming() && !m.GetServerStreaming()
				}
			}
		}
	})
	return p.unaries[method]
}

// Needs reports whether the generation declared a need for a gRPC service, and the capability it is.
func (p *Provider) Needs(service string) (capability string, ok bool) {
	for _, n := range p.Manifest.GetNeeds() {
		if n.GetService() == service {
			return n.GetCapability(), true
		}
	}
	return "", false
}

// Offers reports whether the generation's manifest offers capability.
func (p *Provider) Offers(capability string) bool {
	return slices.ContainsFunc(p.Manifest.GetOffers(), func(o *kernelv1.Offer) bool { return o.GetCapability() == capability })
}

// reapWait is how long a broken connection waits to learn that its process is gone: the socket breaks first, the process is
// reaped a moment later.
const reapWait = time.Second

// fault makes a failed call to the provider say so, when it was the provider that failed and not the call.
func (p *Provider) fault(err error) error {
	switch {
	case fault.Reason(err) != "":
		return err
	case status.Code(err) == codes.Canceled:
		// The host closes the connection of a plugin that crashed, which may be the first that a call hears of it.
		select {
		case <-p.Done:
			return p.typed(codes.Unavailable, "PLUGIN_CRASHED", false, "ended while serving the call: "+p.Exit())
		default:
			return err
		}
	case status.Code(err) != codes.Unavailable:
		return err
	}
	t := time.NewTimer(reapWait)
	defer t.Stop()
	select {
	case <-p.Done:
	case <-t.C:
		return p.typed(codes.Unavailable, "PLUGIN_UNREACHABLE", false, "does not answer on its connection: "+fault.Message(err))
	}
	return p.typed(codes.Unavailable, "PLUGIN_CRASHED", false, "ended while serving the call: "+p.Exit())
}

// Broken is the error of work that the generation can no longer do, because what connects it to the host is gone.
func (p *Provider) Broken(what string) error { return p.fault(status.Error(codes.Unavailable, what)) }

// gone is the error of a call that was never delivered, because the generation that its tree is pinned to has ended.
func (p *Provider) gone() error {
	return p.typed(codes.Unavailable, "PLUGIN_NOT_RUNNING", true, "has ended: "+p.Exit())
}

func (p *Provider) typed(code codes.Code, reason string, retryable bool, what string) error {
	f := &kernelv1.PluginFault{Entry: p.Entry, Generation: p.Generation, Reason: reason, Exit: p.Exit(), Retryable: retryable}
	if p.Crash != nil {
		f.Crash = p.Crash()
	}
	return fault.With(code, reason, fmt.Sprintf("%s (generation %d) %s", p.Entry, p.Generation, what), FaultDetail(f))
}

// FaultDetail is a fault as a status detail.
func FaultDetail(f *kernelv1.PluginFault) protoadapt.MessageV1 { return protoadapt.MessageV1Of(f) }

// Package route carries capability calls between plugins.
//
// A call arrives on the channel of the generation that makes it, a socket of its own, so the host knows the caller without
// being told. The router looks at the method's service name, finds the capability that the caller's manifest needs under
// that name, its provider in the caller's realm, and the generation this call tree is pinned to; then it copies frames both
// ways. It knows no schema but the kernel's: deadlines, cancellation, streams and status details pass through as gRPC has them.
package route

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	"github.com/cordon-host/cordon/capability/fault"
)

// MaxMessageSize is the largest message the host passes on, in bytes; the SDK has the same limit.
const MaxMessageSize = 64 << 20

// Conn is a connection to a plugin.
type Conn = grpc.ClientConnInterface

// Resolver finds the provider of a capability in a caller's realm.
type Resolver interface {
	// Resolve is called for every call tree that does not hold a generation of the provider yet. HostEntry is the caller for the
	// host's own calls, which are made in the root realm.
	Resolve(caller, capability string) (*Provider, error)
	// Owns reports whether an entry provides a capability to the deployment at large.
	Owns(entry, capability string) bool
}

// Router routes capability calls.
type Router struct {
	resolver Resolver
	kernel   kernelv1.HostServer
	dir      string // for the channels' sockets
	log      *slog.Logger
	legs     legs
}

// New makes a router. Kernel serves the host's own side of the kernel protocol; sockets are made in dir, which only the
// host's user may enter.
func New(dir string, resolver Resolver, kernel kernelv1.HostServer, log *slog.Logger) *Router {
	return &Router{resolver: resolver, kernel: kernel, dir: dir, log: log, legs: legs{m: map[string]*Leg{}}}
}

// Channel is the way from one generation to the host.
type Channel struct {
	Address string // gRPC target
	Token   string // what the generation must show on it

	server *grpc.Server
	served sync.WaitGroup
	path   string
}

// Open makes the channel of a generation. The caller closes it.
func (r *Router) Open(p *Provider) (*Channel, error) {
	path := filepath.Join(r.dir, fmt.Sprintf("%s.%d.sock", shortName(p.Entry), p.Generation))
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("channel of %s: %w", p.Entry, err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("channel of %s: %w", p.Entry, err)
	}
	c := &Channel{Address: "unix:" + path, Token: rand.Text(), path: path}
	h := &handler{router: r, caller: p, token: c.Token}
	c.server = grpc.NewServer(
		grpc.ForceServerCodecV2(codec{}),
		grpc.MaxRecvMsgSize(MaxMessageSize), grpc.MaxSendMsgSize(MaxMessageSize),
		grpc.UnaryInterceptor(h.unary),
		grpc.UnknownServiceHandler(h.proxy),
	)
	kernelv1.RegisterHostServer(c.server, r.kernel)
	c.served.Go(func() {
		if err := c.server.Serve(l); err != nil {
			r.log.Error("channel closed", "entry", p.Entry, "error", err)
		}
	})
	return c, nil
}

// Close ends the channel and every call on it.
func (c *Channel) Close() {
	c.server.Stop()
	c.served.Wait()
	_ = os.Remove(c.path) // the listener has removed it unless it failed
}

// shortName is a name of its own for every entry, short enough for a socket's path, which has 108 bytes.
func shortName(entry string) string {
	sum := sha256.Sum256([]byte(entry))
	return hex.EncodeToString(sum[:8])
}

// handler serves one generation's channel.
type handler struct {
	router *Router
	caller *Provider
	token  string
}

// authenticate checks the generation's secret and finds the leg it acts for.
func (h *handler) authenticate(ctx context.Context) (*Leg, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	if subtle.ConstantTimeCompare([]byte(first(md, kernelv1.KeyChannel)), []byte(h.token)) != 1 {
		return nil, fault.New(codes.Unauthenticated, "BAD_CHANNEL", "call on the channel of %s without its token", h.caller.Entry)
	}
	token := first(md, kernelv1.KeyLeg)
	if token == "" {
		return nil, nil
	}
	return h.router.legFor(h.caller, token)
}

// unary serves the host's own services.
func (h *handler) unary(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	leg, err := h.authenticate(ctx)
	if err != nil {
		return nil, err
	}
	ctx = context.WithValue(ctx, providerKey{}, h.caller)
	if leg != nil {
		ctx = context.WithValue(ctx, legKey{}, leg)
	}
	return next(ctx, req)
}

// proxy passes one call on, in five steps: who calls and for which call tree, what may be called, who provides it, a leg
// for the provider, and then frames both ways until both sides have ended.
func (h *handler) proxy(_ any, in grpc.ServerStream) error {
	leg, err := h.authenticate(in.Context())
	if err != nil {
		return err
	}
	method, _ := grpc.MethodFromServerStream(in)
	capability, err := h.declared(method)
	if err != nil {
		return err
	}
	var tree *Tree
	if leg != nil {
		tree = leg.Tree
	} else {
		tree = NewTree(Call{})
		defer tree.End()
	}
	next, end, err := h.router.step(tree, leg, h.caller, capability)
	if err != nil {
		return err
	}
	defer end()
	if next.Provider.unary(method) {
		return forwardOne(in, method, next)
	}
	return forward(in, method, next)
}

// declared refuses what the caller's manifest does not need.
func (h *handler) declared(method string) (string, error) {
	service, _, _ := strings.Cut(strings.TrimPrefix(method, "/"), "/")
	capability, ok := h.caller.Needs(service)
	if !ok {
		return "", fault.New(codes.PermissionDenied, "NOT_DECLARED",
			"%s calls %s, which its manifest does not need; add it to Needs", h.caller.Entry, service)
	}
	return capability, nil
}

// step resolves a capability for a tree and begins the leg of its provider.
func (r *Router) step(tree *Tree, parent *Leg, caller *Provider, capability string) (*Leg, func(), error) {
	name := HostEntry
	if caller != nil {
		name = caller.Entry
	}
	p, err := Pin(tree, func() (*Provider, error) { return r.resolver.Resolve(name, capability) })
	if err != nil {
		return nil, nil, err
	}
	select {
	case <-p.Done:
		return nil, nil, p.gone()
	default:
	}
	return r.Begin(tree, parent, caller, p)
}

// Pin is the generation that a tree uses of an entry; current finds the newest one. A swap between finding and pinning is met by
// looking again.
func Pin(tree *Tree, current func() (*Provider, error)) (*Provider, error) {
	for {
		p, err := current()
		if err != nil {
			return nil, err
		}
		if pinned, ok := tree.pin(p); ok {
			return pinned, nil
		}
	}
}

// forwardOne passes a unary call on. It is what forward does for any call, cheaper: one message each way needs no second goroutine,
// and the header can travel with the reply.
func forwardOne(in grpc.ServerStream, method string, leg *Leg) error {
	var request, reply frame
	if err := in.RecvMsg(&request); err != nil {
		return err
	}
	var header, trailer metadata.MD
	err := leg.Provider.Conn.Invoke(leg.Outgoing(passThrough(in.Context())), method, &request, &reply,
		grpc.ForceCodecV2(codec{}), grpc.Header(&header), grpc.Trailer(&trailer),
		grpc.MaxCallRecvMsgSize(MaxMessageSize), grpc.MaxCallSendMsgSize(MaxMessageSize))
	in.SetTrailer(trailer)
	if err != nil {
		return leg.Provider.fault(err)
	}
	if err := in.SetHeader(header); err != nil {
		return err
	}
	return in.SendMsg(&reply)
}

// forward copies frames between the caller's stream and a new one to the provider of leg.
func forward(in grpc.ServerStream, method string, leg *Leg) error {
	ctx, cancel := context.WithCancel(leg.Outgoing(passThrough(in.Context())))
	defer cancel()
	out, err := leg.Provider.Conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, method,
		grpc.ForceCodecV2(codec{}), grpc.MaxCallRecvMsgSize(MaxMessageSize), grpc.MaxCallSendMsgSize(MaxMessageSize))
	if err != nil {
		return leg.Provider.fault(err)
	}
	go func() { // ends with either stream: in's context ends when proxy returns
		for {
			f := &frame{}
			if err := in.RecvMsg(f); err != nil {
				if errors.Is(err, io.EOF) {
					_ = out.CloseSend() // an error shows in RecvMsg
				} else {
					cancel()
				}
				return
			}
			if err := out.SendMsg(f); err != nil {
				return // shows in RecvMsg
			}
		}
	}()
	if header, err := out.Header(); err == nil {
		if err := in.SendHeader(header); err != nil {
			return err
		}
	}
	for {
		f := &frame{}
		if err := out.RecvMsg(f); err != nil {
			in.SetTrailer(out.Trailer())
			if errors.Is(err, io.EOF) {
				return nil
			}
			return leg.Provider.fault(err)
		}
		if err := in.SendMsg(f); err != nil {
			return err
		}
	}
}

// passThrough keeps the caller's metadata for the provider, less the keys that only the host may set.
func passThrough(ctx context.Context) context.Context {
	md, _ := metadata.FromIncomingContext(ctx)
	out := metadata.MD{}
	for k, v := range md {
		switch {
		case strings.HasPrefix(k, kernelv1.KeyPrefix), strings.HasPrefix(k, ":"), strings.HasPrefix(k, "grpc-"):
		case k == "content-type", k == "user-agent", k == "te":
		default:
			out[k] = v
		}
	}
	return metadata.NewOutgoingContext(ctx, out)
}

func first(md metadata.MD, key string) string {
	if v := md.Get(key); len(v) > 0 {
		return v[0]
	}
	return ""
}

// Conn is how the host itself calls a capability, in the root realm and in the name of tree.
func (r *Router) Conn(tree *Tree, capability string) Conn {
	return hostConn{r, tree, capability}
}

type hostConn struct {
	router     *Router
	tree       *Tree
	capability string
}

func (c hostConn) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	leg, end, err := c.router.step(c.tree, nil, nil, c.capability)
	if err != nil {
		return err
	}
	defer end()
	if err := leg.Provider.Conn.Invoke(leg.Outgoing(ctx), method, args, reply, opts...); err != nil {
		return leg.Provider.fault(err)
	}
	return nil
}

func (c hostConn) NewStream(context.Context, *grpc.StreamDesc, string, ...grpc.CallOption) (grpc.ClientStream, error) {
	return nil, fault.New(codes.Unimplemented, "NO_STREAMS", "the host calls %s without streams", c.capability)
}

// CallError is the error of a call that a leg's provider failed.
func (l *Leg) CallError(err error) error {
	if err == nil {
		return nil
	}
	return l.Provider.fault(err)
}

// frame is one message of any schema.
type frame struct{ data mem.BufferSlice }

// codec passes frames through untouched and speaks protobuf for the kernel's own messages on the same server.
type codec struct{}

func (codec) Name() string { return "proto" }

func (codec) Marshal(v any) (mem.BufferSlice, error) {
	if f, ok := v.(*frame); ok {
		return f.data, nil
	}
	return encoding.GetCodecV2("proto").Marshal(v)
}

func (codec) Unmarshal(data mem.BufferSlice, v any) error {
	if f, ok := v.(*frame); ok {
		data.Ref()
		f.data = data
		return nil
	}
	return encoding.GetCodecV2("proto").Unmarshal(data, v)
}

// Interface guards.
var (
	_ encoding.CodecV2 = codec{}
	_ Conn             = hostConn{}
)

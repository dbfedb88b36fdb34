package plugintest

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	sessionv1 "github.com/cordon-host/cordon/api/session/v1"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/plugin"
)

// host is the plugin's side of a host: the channel it calls on, with the fakes behind it.
type host struct {
	kernelv1.UnimplementedHostServer

	token     string
	manifest  *kernelv1.Manifest // set before the channel is served
	services  []service
	listeners map[string]func(ctx context.Context, payload, base []byte) ([]byte, *kernelv1.Answer, error)
	redeem    func(ctx context.Context, grant string) (*kernelv1.RedeemGrantReply, error)

	mu   sync.Mutex
	legs map[string]plugin.Call // calls in the plugin's hands
}

type service struct {
	desc *grpc.ServiceDesc
	impl any
}

func newHost() *host {
	return &host{
		token: rand.Text(), legs: map[string]plugin.Call{},
		listeners: map[string]func(context.Context, []byte, []byte) ([]byte, *kernelv1.Answer, error){},
	}
}

func (h *host) grpc() *grpc.Server {
	g := grpc.NewServer(grpc.UnaryInterceptor(h.unary), grpc.StreamInterceptor(h.stream),
		grpc.MaxRecvMsgSize(plugin.MaxMessageSize), grpc.MaxSendMsgSize(plugin.MaxMessageSize))
	kernelv1.RegisterHostServer(g, h)
	for _, s := range h.services {
		g.RegisterService(s.desc, s.impl)
	}
	return g
}

// begin notes that the plugin is about to serve call and returns the metadata that says so.
func (h *host) begin(call plugin.Call) map[string]string {
	leg := rand.Text()
	h.mu.Lock()
	h.legs[leg] = call
	h.mu.Unlock()
	md := map[string]string{
		kernelv1.KeyLeg: leg, kernelv1.KeyCaller: call.Caller, kernelv1.KeyCall: call.ID,
		kernelv1.KeyAuthority: call.Authority.String(),
	}
	if len(call.Provides) > 0 {
		md[kernelv1.KeyProvides] = strings.Join(call.Provides, ",")
	}
	if call.Purpose != "" {
		md[kernelv1.KeyPurpose] = call.Purpose
	}
	if call.Session != "" {
		md[kernelv1.KeySession] = call.Session
	}
	if call.Agent != "" {
		md[kernelv1.KeyAgent] = call.Agent
	}
	if call.Turn != 0 {
		md[kernelv1.KeyTurn] = strconv.FormatInt(call.Turn, 10)
	}
	return md
}

// admit checks a call of the plugin and stamps it for the fake that serves it.
func (h *host) admit(ctx context.Context, method string) (context.Context, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	if first(md, kernelv1.KeyChannel) != h.token {
		return nil, fault.New(codes.Unauthenticated, "BAD_CHANNEL", "call without the token of the channel")
	}
	name, _, _ := strings.Cut(strings.TrimPrefix(method, "/"), "/")
	needed := slices.ContainsFunc(h.manifest.GetNeeds(), func(n *kernelv1.Need) bool { return n.GetService() == name })
	if !needed && name != kernelv1.Host_ServiceDesc.ServiceName {
		return nil, fault.New(codes.PermissionDenied, "NOT_DECLARED", "%s calls %s, which its manifest does not need; add it to Needs", h.manifest.GetName(), name)
	}
	leg := first(md, kernelv1.KeyLeg)
	if leg == "" {
		return plugin.WithCall(ctx, plugin.Call{Caller: h.manifest.GetName()}), nil
	}
	h.mu.Lock()
	call, ok := h.legs[leg]
	h.mu.Unlock()
	if !ok {
		return nil, fault.New(codes.PermissionDenied, "FOREIGN_CALL", "%s is not serving the call it speaks for", h.manifest.GetName())
	}
	call.Caller, call.Provides = h.manifest.GetName(), nil
	for _, o := range h.manifest.GetOffers() {
		call.Provides = append(call.Provides, o.GetCapability())
	}
	return plugin.WithCall(ctx, call), nil
}

func (h *host) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	ctx, err := h.admit(ctx, info.FullMethod)
	if err != nil {
		return nil, err
	}
	if r, ok := req.(*sessionv1.AppendRequest); ok && !declared(h.manifest.GetAppends(), r.GetType()) {
		return nil, fault.New(codes.PermissionDenied, "NOT_DECLARED", "%s appends %s, which its manifest does not declare; add it to Appends", h.manifest.GetName(), r.GetType())
	}
	return next(ctx, req)
}

func declared(appends []string, typ string) bool {
	return slices.ContainsFunc(appends, func(a string) bool {
		return a == typ || strings.HasSuffix(a, "/") && strings.HasPrefix(typ, a)
	})
}

type stamped struct {
	grpc.ServerStream
	ctx context.Context
}

func (s stamped) Context() context.Context { return s.ctx }

func (h *host) stream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	ctx, err := h.admit(stream.Context(), info.FullMethod)
	if err != nil {
		return err
	}
	return next(srv, stamped{stream, ctx})
}

func (h *host) Emit(ctx context.Context, r *kernelv1.EmitRequest) (*kernelv1.EmitReply, error) {
	if !slices.ContainsFunc(h.manifest.GetEvents(), func(e *kernelv1.EventDecl) bool { return e.GetEvent() == r.GetEvent() }) {
		return nil, fault.New(codes.PermissionDenied, "NOT_DECLARED", "%s emits %s, which its manifest does not declare; add it to Emits", h.manifest.GetName(), r.GetEvent())
	}
	listen, ok := h.listeners[r.GetEvent()]
	if !ok {
		return &kernelv1.EmitReply{Payload: r.GetBase()}, nil
	}
	payload, answer, err := listen(ctx, r.GetPayload(), r.GetBase())
	if err != nil {
		return nil, err
	}
	return &kernelv1.EmitReply{Payload: payload, Answer: answer}, nil
}

func (h *host) RedeemGrant(ctx context.Context, r *kernelv1.RedeemGrantRequest) (*kernelv1.RedeemGrantReply, error) {
	if h.redeem == nil {
		return nil, fault.New(codes.PermissionDenied, "GRANT_UNKNOWN", "grant is unknown: it was never minted, or its call has ended")
	}
	return h.redeem(ctx, r.GetGrant())
}

func first(md metadata.MD, key string) string {
	if v := md.Get(key); len(v) > 0 {
		return v[0]
	}
	return ""
}

func statusCode(err error) codes.Code { return status.Code(err) }

func failed(f *kernelv1.Failure) error {
	if f.GetReason() != "" {
		return fault.New(codes.Code(f.GetCode()), f.GetReason(), "%s", f.GetMessage())
	}
	return status.Error(codes.Code(f.GetCode()), f.GetMessage())
}

// checkJSON checks a document against a schema; an empty document is an empty object.
func checkJSON(what string, schema, doc []byte) error {
	if len(doc) == 0 {
		doc = []byte("{}")
	}
	s, err := jsonschema.UnmarshalJSON(bytes.NewReader(schema))
	if err != nil {
		return fmt.Errorf("%s: schema: %w", what, err)
	}
	c := jsonschema.NewCompiler()
	const url = "test:schema"
	if err := c.AddResource(url, s); err != nil {
		return fmt.Errorf("%s: schema: %w", what, err)
	}
	compiled, err := c.Compile(url)
	if err != nil {
		return fmt.Errorf("%s: schema: %w", what, err)
	}
	if !json.Valid(doc) {
		return fmt.Errorf("invalid %s: not JSON", what)
	}
	v, err := jsonschema.UnmarshalJSON(bytes.NewReader(doc))
	if err != nil {
		return fmt.Errorf("invalid %s: %w", what, err)
	}
	if err := compiled.Validate(v); err != nil {
		return fmt.Errorf("invalid %s: %w", what, err)
	}
	return nil
}

// Interface guard.
var _ kernelv1.HostServer = (*host)(nil)

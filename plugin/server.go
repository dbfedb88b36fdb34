package plugin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	promptv1 "github.com/cordon-host/cordon/api/prompt/v1"
	toolsv1 "github.com/cordon-host/cordon/api/tools/v1"
	"github.com/cordon-host/cordon/capability/fault"
)

// MaxMessageSize is the largest message either side accepts, in bytes. Larger values belong in a stream.
const MaxMessageSize = 64 << 20

// Server serves one generation of a plugin: the kernel protocol, the offered capabilities and the tools.
type Server struct {
	kernelv1.UnimplementedPluginServer

	program program
	log     *slog.Logger
	journal *journal      // of a process of its own; nil inside another
	stopped chan struct{} // closed when Stop has undone everything

	mu       sync.Mutex
	plugin   *Context // set by Setup
	setup    bool
	active   atomic.Bool
	stopOnce sync.Once

	counted  map[string]bool // services whose calls a drain waits for
	inFlight sync.WaitGroup
	draining atomic.Bool
	drainMu  sync.RWMutex // orders "draining" against new calls joining inFlight
}

// NewServer makes a server for p that logs to log. Use it to run a plugin inside a process of yours; [Main] is the
// process of its own.
func NewServer[C any](p Plugin[C], log *slog.Logger) *Server {
	return newServer(p, log, nil)
}

func newServer(p program, log *slog.Logger, j *journal) *Server {
	s := &Server{program: p, log: log, journal: j, stopped: make(chan struct{})}
	s.counted = map[string]bool{toolsv1.Tools_ServiceDesc.ServiceName: true, promptv1.Prompt_ServiceDesc.ServiceName: true}
	for _, desc := range p.services() {
		s.counted[desc.ServiceName] = true
	}
	return s
}

// GRPC makes the gRPC server of the generation. The caller serves and stops it.
func (s *Server) GRPC(opts ...grpc.ServerOption) *grpc.Server {
	opts = append(opts,
		grpc.MaxRecvMsgSize(MaxMessageSize), grpc.MaxSendMsgSize(MaxMessageSize),
		grpc.UnaryInterceptor(s.unary), grpc.StreamInterceptor(s.stream),
	)
	g := grpc.NewServer(opts...)
	kernelv1.RegisterPluginServer(g, s)
	toolsv1.RegisterToolsServer(g, toolServer{s: s})
	promptv1.RegisterPromptServer(g, promptServer{s: s})
	for _, desc := range s.program.services() {
		s.register(g, desc)
	}
	return g
}

// Stopped is closed when the generation has ended: the process has nothing left to do.
func (s *Server) Stopped() <-chan struct{} { return s.stopped }

func (s *Server) Describe(context.Context, *kernelv1.DescribeRequest) (*kernelv1.Manifest, error) {
	m, err := s.program.manifest()
	if err != nil {
		return nil, fault.New(codes.Internal, "BAD_MANIFEST", "%v", err)
	}
	return m, nil
}

func (s *Server) Setup(ctx context.Context, r *kernelv1.SetupRequest) (*kernelv1.SetupReply, error) {
	s.mu.Lock()
	if s.setup {
		s.mu.Unlock()
		return nil, fault.New(codes.FailedPrecondition, "SETUP_TWICE", "setup of %s: a generation is set up once", r.GetEntry())
	}
	s.setup = true
	s.mu.Unlock()

	m, err := s.program.manifest()
	if err != nil {
		return nil, fault.New(codes.Internal, "BAD_MANIFEST", "%v", err)
	}
	if s.journal != nil {
		s.journal.setLevel(r.GetLogLevel())
	}
	conn, err := grpc.NewClient(r.GetHostAddress(),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithPerRPCCredentials(channelCredentials{r.GetChannelToken()}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessageSize), grpc.MaxCallSendMsgSize(MaxMessageSize)),
	)
	if err != nil {
		return nil, fault.New(codes.Unavailable, "NO_HOST", "host at %s: %v", r.GetHostAddress(), err)
	}
	c := &Context{
		setup: r, manifest: m, log: s.log, conn: conn,
		services: map[string]any{}, facts: map[string]*kernelv1.Facts{}, tools: map[string]Tool{}, listeners: map[uint32]listener{},
		contexts: map[string]func(context.Context) (string, error){},
	}
	// The connection is the oldest effect: it closes last.
	c.undo = []effect{{"host connection", func(context.Context) error { return conn.Close() }}}

	err = protect("apply", func() error { return s.program.apply(c, r.GetConfig()) })
	c.seal()
	if err != nil {
		err = errors.Join(err, c.dispose(context.WithoutCancel(ctx)))
		if fault.Reason(err) != "" {
			return nil, err
		}
		return nil, fault.New(codes.FailedPrecondition, "APPLY_FAILED", "%v", err)
	}
	s.mu.Lock()
	s.plugin = c
	s.mu.Unlock()
	return c.registered(), nil
}

// registered is what Apply registered, in the manifest's order.
func (c *Context) registered() *kernelv1.SetupReply {
	reply := &kernelv1.SetupReply{Facts: c.facts}
	for _, name := range c.manifest.GetTools() { // the manifest's order
		if t, ok := c.tools[name]; ok {
			reply.Tools = append(reply.Tools, &kernelv1.Tool{
				Name: t.Name, Description: t.Description, InputSchema: t.InputSchema, TimeoutMs: t.Timeout.Milliseconds(),
			})
		}
	}
	for _, l := range c.manifest.GetListeners() {
		if _, ok := c.listeners[l.GetIndex()]; ok {
			reply.Listeners = append(reply.Listeners, l)
		}
	}
	for _, d := range c.manifest.GetContexts() {
		if _, ok := c.contexts[d.GetName()]; ok {
			reply.Contexts = append(reply.Contexts, d)
		}
	}
	return reply
}

func (s *Server) Activate(context.Context, *kernelv1.ActivateRequest) (*kernelv1.ActivateReply, error) {
	if _, err := s.applied(); err != nil {
		return nil, err
	}
	s.active.Store(true)
	return &kernelv1.ActivateReply{}, nil
}

func (s *Server) Drain(ctx context.Context, _ *kernelv1.DrainRequest) (*kernelv1.DrainReply, error) {
	s.drainMu.Lock()
	s.draining.Store(true)
	s.drainMu.Unlock()
	done := make(chan struct{})
	go func() { s.inFlight.Wait(); close(done) }() // ends with the last call in flight, or with the process
	select {
	case <-done:
		return &kernelv1.DrainReply{}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (s *Server) Stop(ctx context.Context, _ *kernelv1.StopRequest) (*kernelv1.StopReply, error) {
	if err := s.Close(ctx); err != nil {
		return nil, fault.New(codes.Internal, "UNDO_FAILED", "%v", err)
	}
	return &kernelv1.StopReply{}, nil
}

// Close undoes what Apply did. Later calls return at once.
func (s *Server) Close(ctx context.Context) (err error) {
	s.stopOnce.Do(func() {
		s.active.Store(false)
		s.mu.Lock()
		c := s.plugin
		s.mu.Unlock()
		if c != nil {
			err = c.dispose(ctx)
		}
		if s.journal != nil {
			s.journal.close(flushTimeout)
		}
		close(s.stopped)
	})
	return err
}

func (s *Server) Bus(stream grpc.BidiStreamingServer[kernelv1.HostFrame, kernelv1.PluginFrame]) error {
	c, err := s.applied()
	if err != nil {
		return err
	}
	return serveBus(c, stream)
}

// Control carries the log to the host and answers its beats. Inside another process there is no need for either.
func (s *Server) Control(stream grpc.BidiStreamingServer[kernelv1.HostControl, kernelv1.PluginControl]) error {
	if s.journal == nil {
		return s.UnimplementedPluginServer.Control(stream)
	}
	return s.journal.serve(stream)
}

func (s *Server) applied() (*Context, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.plugin == nil {
		return nil, fault.New(codes.FailedPrecondition, "NOT_SET_UP", "plugin is not set up")
	}
	return s.plugin, nil
}

// impl is the implementation of an offered service, once there is one and the generation is active.
func (s *Server) impl(service string) (any, error) {
	c, err := s.applied()
	if err != nil {
		return nil, err
	}
	if !s.active.Load() {
		return nil, fault.New(codes.Unavailable, "NOT_ACTIVE", "%s: generation %d of %s is not active", service, c.Generation(), c.Entry())
	}
	impl, ok := c.services[service]
	if !ok {
		return nil, fault.New(codes.Unimplemented, "NOT_PROVIDED", "%s offers %s but did not provide it", c.Entry(), service)
	}
	return impl, nil
}

// register registers desc with handlers that look the implementation up per call: gRPC wants its services before it
// serves, a plugin has them only after Apply.
func (s *Server) register(g *grpc.Server, desc *grpc.ServiceDesc) {
	late := *desc
	late.Methods = append([]grpc.MethodDesc(nil), desc.Methods...)
	for i, m := range desc.Methods {
		late.Methods[i].Handler = func(_ any, ctx context.Context, dec func(any) error, in grpc.UnaryServerInterceptor) (any, error) {
			impl, err := s.impl(desc.ServiceName)
			if err != nil {
				return nil, err
			}
			return m.Handler(impl, ctx, dec, in)
		}
	}
	late.Streams = append([]grpc.StreamDesc(nil), desc.Streams...)
	for i, st := range desc.Streams {
		late.Streams[i].Handler = func(_ any, stream grpc.ServerStream) error {
			impl, err := s.impl(desc.ServiceName)
			if err != nil {
				return err
			}
			return st.Handler(impl, stream)
		}
	}
	g.RegisterService(&late, nil)
}

// enter counts a call in, or refuses it when the generation is draining. Only calls of capabilities and tools count: the kernel's
// own and go-plugin's streams stay open as long as the process does.
func (s *Server) enter(method string) (leave func(), err error) {
	service, _, _ := strings.Cut(strings.TrimPrefix(method, "/"), "/")
	if !s.counted[service] {
		return func() {}, nil
	}
	s.drainMu.RLock()
	defer s.drainMu.RUnlock()
	if s.draining.Load() {
		return nil, fault.New(codes.Unavailable, "DRAINING", "generation is draining")
	}
	s.inFlight.Add(1)
	return s.inFlight.Done, nil
}

func (s *Server) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
	leave, err := s.enter(info.FullMethod)
	if err != nil {
		return nil, err
	}
	defer leave()
	err = protectCall(s.log, info.FullMethod, func() (err error) {
		resp, err = handler(incoming(ctx), req)
		return err
	})
	return resp, err
}

func (s *Server) stream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	leave, err := s.enter(info.FullMethod)
	if err != nil {
		return err
	}
	defer leave()
	return protectCall(s.log, info.FullMethod, func() error {
		return handler(srv, servedStream{stream, incoming(stream.Context())})
	})
}

// protectCall contains a panic of a handler: one bad call must not end the others in flight.
func protectCall(log *slog.Logger, method string, fn func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			log.Error("handler panicked", "method", method, "panic", p, "stack", string(debug.Stack()))
			err = fault.New(codes.Internal, "PANIC", "%s panicked: %v", method, p)
		}
	}()
	return fn()
}

// protect turns a panic of an author's function into an error with the stack.
func protect(what string, fn func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%s panicked: %v\n%s", what, p, debug.Stack())
		}
	}()
	return fn()
}

// toolServer serves the registered tools.
type toolServer struct {
	toolsv1.UnimplementedToolsServer
	s *Server
}

func (t toolServer) Call(ctx context.Context, r *toolsv1.CallRequest) (*toolsv1.CallReply, error) {
	c, err := t.s.applied()
	if err != nil {
		return nil, err
	}
	if !t.s.active.Load() {
		return nil, fault.New(codes.Unavailable, "NOT_ACTIVE", "tool %s: generation %d of %s is not active", r.GetName(), c.Generation(), c.Entry())
	}
	tool, ok := c.tools[r.GetName()]
	if !ok {
		return nil, fault.New(codes.NotFound, "TOOL_NOT_FOUND", "tool %s is not registered by %s", r.GetName(), c.Entry())
	}
	reply, err := tool.Call(ctx, r.GetArguments())
	if err != nil {
		if ctx.Err() != nil {
			return nil, err
		}
		reply = Text(fault.Message(err))
		reply.IsError, reply.ErrorCode = true, fault.Reason(err)
	}
	return reply, nil
}

// promptServer serves the registered contributions.
type promptServer struct {
	promptv1.UnimplementedPromptServer
	s *Server
}

func (p promptServer) Text(ctx context.Context, r *promptv1.TextRequest) (*promptv1.TextReply, error) {
	c, err := p.s.applied()
	if err != nil {
		return nil, err
	}
	fn, ok := c.contexts[r.GetName()]
	if !ok {
		return nil, fault.New(codes.NotFound, "CONTEXT_NOT_FOUND", "context %s is not registered by %s", r.GetName(), c.Entry())
	}
	text, err := fn(ctx)
	if err != nil {
		return nil, err
	}
	return &promptv1.TextReply{Text: text}, nil
}

// Interface guards.
var (
	_ kernelv1.PluginServer = (*Server)(nil)
	_ toolsv1.ToolsServer   = toolServer{}
	_ promptv1.PromptServer = promptServer{}
)

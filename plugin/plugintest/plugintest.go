// Package plugintest runs a plugin in a test the way a host runs it: over real gRPC connections on unix sockets, through
// Describe, Setup and Activate, with the config checked against the plugin's own schema and every call stamped. Only the process is
// the test's own, so a debugger and the race detector see all of it.
//
// What the plugin needs is answered by fakes:
//
//	p := plugintest.Start(t, Plugin,
//		plugintest.Config(`{"mode": "workspace-write"}`),
//		plugintest.Fake("session", &sessionv1.Session_ServiceDesc, log))
//	reply, err := policyv1.NewPolicyClient(p.Conn()).Resolve(p.Stamp(ctx, plugin.Call{Session: "s1"}), …)
//
// The kit holds a plugin to its manifest as the host does: calling a capability it does not need, emitting an event it does
// not declare or appending an event type it does not declare is refused.
package plugintest

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	promptv1 "github.com/cordon-host/cordon/api/prompt/v1"
	toolsv1 "github.com/cordon-host/cordon/api/tools/v1"
	"github.com/cordon-host/cordon/capability/event"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/plugin"
)

// stopTimeout bounds the end of a plugin, so that one that hangs fails its test instead of the whole run.
const stopTimeout = 10 * time.Second

// Option says how a plugin is run.
type Option func(*setup)

type setup struct {
	entry      string
	config     []byte
	deployment *kernelv1.Deployment
	facts      map[string]*kernelv1.Facts
	host       *host
	err        error
}

// Config is the row's config: JSON as string, []byte or json.RawMessage, or anything that marshals to it.
func Config(v any) Option {
	return func(s *setup) {
		switch v := v.(type) {
		case string:
			s.config = []byte(v)
		case []byte:
			s.config = v
		default:
			raw, err := json.Marshal(v)
			s.config, s.err = raw, errors.Join(s.err, err)
		}
	}
}

// Entry is the row's id; the plugin's name without it.
func Entry(id string) Option { return func(s *setup) { s.entry = id } }

// Deployment is where the host lives. Without it, root and state directory are temporary ones of the test.
func Deployment(d *kernelv1.Deployment) Option { return func(s *setup) { s.deployment = d } }

// Fake answers the calls to a needed capability with impl, which implements the contract's generated Server interface. Its
// methods find the stamp of the call with [plugin.Caller].
func Fake(capability string, desc *grpc.ServiceDesc, impl any) Option {
	return func(s *setup) {
		s.host.services = append(s.host.services, service{desc, impl})
		if s.facts[capability] == nil {
			s.facts[capability] = &kernelv1.Facts{Json: []byte("{}")}
		}
	}
}

// FactsOf is what the provider of a needed capability publishes about itself; v marshals to a JSON object.
func FactsOf(capability string, v any) Option {
	return func(s *setup) {
		raw, err := json.Marshal(v)
		s.facts[capability], s.err = &kernelv1.Facts{Json: raw}, errors.Join(s.err, err)
	}
}

// Answers lets fn be everybody who listens to ev. A nil reply stands for nobody: the plugin gets its own base answer. The
// stamp says whose answer it is; its id is made up when it is empty, a nil one stays nil.
func Answers[Q, A proto.Message](ev event.Event[Q, A], fn func(ctx context.Context, q Q) (A, *kernelv1.Answer, error)) Option {
	return func(s *setup) {
		s.host.listeners[ev.Name] = func(ctx context.Context, payload, base []byte) ([]byte, *kernelv1.Answer, error) {
			q := ev.NewRequest()
			if err := proto.Unmarshal(payload, q); err != nil {
				return nil, nil, err
			}
			a, stamp, err := fn(ctx, q)
			if err != nil {
				return nil, nil, err
			}
			if !a.ProtoReflect().IsValid() {
				return base, nil, nil
			}
			if stamp != nil && stamp.GetId() == "" {
				stamp.Id = "a-" + rand.Text()
			}
			raw, err := proto.Marshal(a)
			return raw, stamp, err
		}
	}
}

// Redeems lets fn say what a grant is worth. Without it every grant is unknown.
func Redeems(fn func(ctx context.Context, grant string) (*kernelv1.RedeemGrantReply, error)) Option {
	return func(s *setup) { s.host.redeem = fn }
}

// Plugin is a running plugin.
type Plugin struct {
	conn     *grpc.ClientConn
	host     *host
	server   *plugin.Server
	manifest *kernelv1.Manifest
	setup    *kernelv1.SetupReply
	stop     func() error
}

// Start runs p until the test ends. It fails the test when p does not load.
func Start[C any](t testing.TB, p plugin.Plugin[C], opts ...Option) *Plugin {
	t.Helper()
	i, err := Load(t, p, opts...)
	if err != nil {
		t.Fatalf("%s does not load: %v", p.Name, err)
	}
	return i
}

// Load runs p until the test ends. The error is why it does not load, as the host would report it.
func Load[C any](t testing.TB, p plugin.Plugin[C], opts ...Option) (*Plugin, error) {
	t.Helper()
	s := &setup{entry: p.Name, facts: map[string]*kernelv1.Facts{}, host: newHost()}
	for _, o := range opts {
		o(s)
	}
	if s.err != nil {
		t.Fatalf("plugintest: %v", s.err)
	}
	if s.deployment == nil {
		s.deployment = &kernelv1.Deployment{Id: "test", Root: t.TempDir(), StateDir: t.TempDir(), HostVersion: "test"}
	}

	// Not t.TempDir: its paths can exceed the 108 bytes of a socket address.
	dir, err := os.MkdirTemp("", "cordon")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })

	log := slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
	i := &Plugin{host: s.host, server: plugin.NewServer(p, log)}
	g := i.server.GRPC()
	stopServing := serve(t, g, filepath.Join(dir, "plugin.sock"))
	i.conn = dial(t, filepath.Join(dir, "plugin.sock"))
	i.stop = sync.OnceValue(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
		defer cancel()
		kernel := kernelv1.NewPluginClient(i.conn)
		_, drain := kernel.Drain(ctx, &kernelv1.DrainRequest{})
		_, stop := kernel.Stop(ctx, &kernelv1.StopRequest{})
		err := errors.Join(drain, stop)
		return errors.Join(err, i.conn.Close())
	})
	t.Cleanup(func() {
		if err := i.Stop(); err != nil {
			t.Errorf("stop %s: %v", p.Name, err)
		}
		stopServing()
	})

	ctx := t.Context()
	kernel := kernelv1.NewPluginClient(i.conn)
	if i.manifest, err = kernel.Describe(ctx, &kernelv1.DescribeRequest{}); err != nil {
		return nil, err
	}
	for _, n := range i.manifest.GetNeeds() {
		if _, ok := s.facts[n.GetCapability()]; !ok && !n.GetOptional() {
			t.Fatalf("%s needs %s: add plugintest.Fake(%[2]q, …)", p.Name, n.GetCapability())
		}
	}
	s.host.manifest = i.manifest
	stopHost := serve(t, s.host.grpc(), filepath.Join(dir, "host.sock"))
	t.Cleanup(stopHost)

	if err := checkJSON("config", i.manifest.GetConfigSchema(), s.config); err != nil {
		return nil, err
	}
	i.setup, err = kernel.Setup(ctx, &kernelv1.SetupRequest{
		Entry: s.entry, Generation: 1, Config: s.config, LogLevel: "debug",
		HostAddress: "unix:" + filepath.Join(dir, "host.sock"), ChannelToken: s.host.token,
		Facts: s.facts, Deployment: s.deployment,
	})
	if err != nil {
		return nil, err
	}
	if _, err := kernel.Activate(ctx, &kernelv1.ActivateRequest{}); err != nil {
		return nil, err
	}
	return i, nil
}

func serve(t testing.TB, g *grpc.Server, path string) (stop func()) {
	t.Helper()
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	var served sync.WaitGroup
	served.Go(func() { _ = g.Serve(l) }) // the listener only fails when stop closes it
	return func() {
		g.Stop()
		served.Wait()
	}
}

func dial(t testing.TB, path string) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(plugin.MaxMessageSize), grpc.MaxCallSendMsgSize(plugin.MaxMessageSize)))
	if err != nil {
		t.Fatal(err)
	}
	return conn
}

// Conn reaches the capabilities and tools the plugin offers, as the host does. Calls carry the stamp of [Plugin.Stamp].
func (i *Plugin) Conn() grpc.ClientConnInterface { return i.conn }

// Manifest is what the plugin says about itself.
func (i *Plugin) Manifest() *kernelv1.Manifest { return i.manifest }

// Facts stores what the plugin published about an offered capability in into; false when it provided none.
func (i *Plugin) Facts(capability string, into any) (bool, error) {
	f, ok := i.setup.GetFacts()[capability]
	if !ok {
		return false, nil
	}
	return true, json.Unmarshal(f.GetJson(), into)
}

// Tools are the registered tools, in the manifest's order.
func (i *Plugin) Tools() []*kernelv1.Tool { return i.setup.GetTools() }

// Stamp is ctx for a call that the host makes in the name of call. An empty caller is "host", an empty id is made up.
func (i *Plugin) Stamp(ctx context.Context, call plugin.Call) context.Context {
	if call.Caller == "" {
		call.Caller = "host"
	}
	if call.ID == "" {
		call.ID = "c-" + rand.Text()
	}
	return metadata.NewOutgoingContext(ctx, metadata.New(i.host.begin(call)))
}

// CallTool runs a tool with args, which is JSON (string, []byte, json.RawMessage) or marshals to it. Arguments that the
// tool's schema refuses do not reach the plugin; the reply then has the code INVALID_ARGUMENTS, as the host's has. To send
// the plugin something its schema forbids, use the generated client on [Plugin.Conn].
func (i *Plugin) CallTool(ctx context.Context, name string, args any) (*toolsv1.CallReply, error) {
	s := &setup{}
	Config(args)(s)
	if s.err != nil {
		return nil, s.err
	}
	for _, t := range i.Tools() {
		if t.GetName() != name {
			continue
		}
		if err := checkJSON("arguments", t.GetInputSchema(), s.config); err != nil {
			reply := plugin.Text(err.Error())
			reply.IsError, reply.ErrorCode = true, "INVALID_ARGUMENTS"
			return reply, nil
		}
		if _, stamped := metadata.FromOutgoingContext(ctx); !stamped {
			ctx = i.Stamp(ctx, plugin.Call{})
		}
		return toolsv1.NewToolsClient(i.conn).Call(ctx, &toolsv1.CallRequest{Name: name, Arguments: s.config})
	}
	return nil, fmt.Errorf("tool %s is not registered", name)
}

// Context is the text of a registered contribution to a model's context.
func (i *Plugin) Context(ctx context.Context, name string) (string, error) {
	r, err := promptv1.NewPromptClient(i.conn).Text(ctx, &promptv1.TextRequest{Name: name})
	return r.GetText(), err
}

// Dispatch sends one event to the plugin's listener for ev and returns its answer. Next is the rest of the chain.
func Dispatch[Q, A proto.Message](ctx context.Context, i *Plugin, call plugin.Call, ev event.Event[Q, A], q Q, next func(context.Context, Q) (A, error)) (A, error) {
	none := ev.NewReply()
	var index uint32
	found := false
	for _, l := range i.setup.GetListeners() {
		if l.GetEvent() == ev.Name {
			index, found = l.GetIndex(), true
		}
	}
	if !found {
		return none, fmt.Errorf("no listener for %s is registered", ev.Name)
	}
	payload, err := proto.Marshal(q)
	if err != nil {
		return none, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the stream
	stream, err := kernelv1.NewPluginClient(i.conn).Bus(ctx)
	if err != nil {
		return none, err
	}
	const id = 1 // the only dispatch of this stream
	err = stream.Send(&kernelv1.HostFrame{Id: id, Frame: &kernelv1.HostFrame_Dispatch{Dispatch: &kernelv1.Dispatch{
		Event: ev.Name, Listeners: []uint32{index}, Payload: payload, Metadata: i.host.begin(call),
	}}})
	if err != nil {
		return none, err
	}
	for {
		frame, err := stream.Recv()
		if err != nil {
			return none, err
		}
		switch f := frame.GetFrame().(type) {
		case *kernelv1.PluginFrame_Next:
			if err := stream.Send(&kernelv1.HostFrame{Id: id, Frame: &kernelv1.HostFrame_NextResult{
				NextResult: rest(ctx, ev, f.Next.GetPayload(), next),
			}}); err != nil {
				return none, err
			}
		case *kernelv1.PluginFrame_Done:
			if fail := f.Done.GetFailure(); fail != nil {
				return none, failed(fail)
			}
			return none, proto.Unmarshal(f.Done.GetPayload(), none)
		}
	}
}

func rest[Q, A proto.Message](ctx context.Context, ev event.Event[Q, A], payload []byte, next func(context.Context, Q) (A, error)) *kernelv1.NextResult {
	q := ev.NewRequest()
	err := proto.Unmarshal(payload, q)
	if err == nil {
		var a A
		if a, err = next(ctx, q); err == nil {
			payload, err = proto.Marshal(a)
		}
	}
	if err != nil {
		return &kernelv1.NextResult{Failure: &kernelv1.Failure{
			Code: int32(statusCode(err)), Message: fault.Message(err), Reason: fault.Reason(err),
		}}
	}
	return &kernelv1.NextResult{Payload: payload}
}

// Stop ends the plugin: drain, then undo. Later calls return what the first one did.
func (i *Plugin) Stop() error { return i.stop() }

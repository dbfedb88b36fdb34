package route_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/types/descriptorpb"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	policyv1 "github.com/cordon-host/cordon/api/policy/v1"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/host/route"
)

// policy is a provider that shows what it was told.
type policy struct {
	policyv1.UnimplementedPolicyServer
	resolve func(ctx context.Context) (*policyv1.ResolveReply, error)
}

func (p *policy) Resolve(ctx context.Context, _ *policyv1.ResolveRequest) (*policyv1.ResolveReply, error) {
	return p.resolve(ctx)
}

// logs is a provider with a stream.
type logs struct {
	controlv1.UnimplementedControlServer
}

func (logs) ReadLog(r *controlv1.ReadLogRequest, s grpc.ServerStreamingServer[controlv1.LogEvent]) error {
	s.SetTrailer(metadata.Pairs("x-end", "yes"))
	for i := range r.GetFromSeq() {
		if err := s.Send(&controlv1.LogEvent{Seq: i}); err != nil {
			return err
		}
	}
	return nil
}

// world is a router with one provider and one caller.
type world struct {
	*testing.T
	router   *route.Router
	provider *route.Provider
	done     chan struct{}
	server   *grpc.Server
	policy   *policy
}

func (w *world) Resolve(caller, capability string) (*route.Provider, error) {
	return w.provider, nil
}

func (w *world) Owns(string, string) bool { return true }

func newWorld(t *testing.T) *world {
	dir, err := os.MkdirTemp("", "cordon")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	w := &world{T: t, done: make(chan struct{}), server: grpc.NewServer(), policy: &policy{}}
	policyv1.RegisterPolicyServer(w.server, w.policy)
	controlv1.RegisterControlServer(w.server, logs{})
	l := bufconn.Listen(1 << 16)
	go w.server.Serve(l)
	t.Cleanup(w.server.Stop)
	conn, err := grpc.NewClient("passthrough:p", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	set := &descriptorpb.FileDescriptorSet{File: []*descriptorpb.FileDescriptorProto{
		protodesc.ToFileDescriptorProto(policyv1.File_cordon_policy_v1_policy_proto),
	}}
	descriptors, err := proto.Marshal(set)
	if err != nil {
		t.Fatal(err)
	}
	w.provider = &route.Provider{
		Entry: "provider", Generation: 3, Conn: conn, Done: w.done, Manifest: &kernelv1.Manifest{Descriptors: descriptors},
		Exit: func() string {
			select {
			case <-w.done:
				return "signal SIGKILL"
			default:
				return ""
			}
		},
	}
	w.router = route.New(dir, w, kernelv1.UnimplementedHostServer{}, slog.New(slog.DiscardHandler))
	return w
}

// caller opens the channel of an entry and dials it the way an SDK does.
func (w *world) caller(entry string, needs ...string) (*route.Provider, *route.Channel, *grpc.ClientConn) {
	w.Helper()
	p := &route.Provider{Entry: entry, Generation: 1, Manifest: &kernelv1.Manifest{}, Done: make(chan struct{}), Exit: func() string { return "" }}
	for _, n := range needs {
		p.Manifest.Needs = append(p.Manifest.Needs, &kernelv1.Need{Capability: strings.ToLower(n), Service: n})
	}
	ch, err := w.router.Open(p)
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(ch.Close)
	conn, err := grpc.NewClient(ch.Address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() { conn.Close() })
	return p, ch, conn
}

func with(ctx context.Context, kv ...string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, kv...)
}

const policyService, controlService = "cordon.policy.v1.Policy", "cordon.control.v1.Control"

func TestCallerIsStamped(t *testing.T) {
	w := newWorld(t)
	var got metadata.MD
	w.policy.resolve = func(ctx context.Context) (*policyv1.ResolveReply, error) {
		got, _ = metadata.FromIncomingContext(ctx)
		return &policyv1.ResolveReply{Mode: "read-only"}, nil
	}
	p, ch, conn := w.caller("caller", policyService)
	tree := route.NewTree(route.Call{Session: "s-1", Agent: "a", Turn: 7, Authority: kernelv1.Level_HUMAN})
	leg, end, err := w.router.Begin(tree, nil, nil, p)
	if err != nil {
		t.Fatal(err)
	}
	defer end()
	ctx := with(t.Context(), "cordon-channel", ch.Token, "cordon-leg", leg.Metadata()["cordon-leg"],
		"cordon-caller", "host", "cordon-session", "s-other", "cordon-authority", "OWNER", "x-mine", "kept")
	reply, err := policyv1.NewPolicyClient(conn).Resolve(ctx, &policyv1.ResolveRequest{})
	if err != nil || reply.GetMode() != "read-only" {
		t.Fatal(reply, err)
	}
	for key, want := range map[string]string{
		"cordon-caller": "caller", "cordon-session": "s-1", "cordon-agent": "a", "cordon-turn": "7",
		"cordon-authority": "HUMAN", "cordon-call": tree.ID, "cordon-hops": "2", "cordon-epoch": "provider@3", "x-mine": "kept",
	} {
		if v := got.Get(key); len(v) != 1 || v[0] != want {
			t.Errorf("%s = %q, want %q", key, v, want)
		}
	}
	if v := got.Get("cordon-channel"); len(v) != 0 {
		t.Error("the caller's secret reached the provider")
	}
	if v := got.Get("cordon-leg"); len(v) != 1 || v[0] == leg.Metadata()["cordon-leg"] {
		t.Errorf("the provider speaks for the caller's leg: %q", v)
	}
}

func TestRefusals(t *testing.T) {
	w := newWorld(t)
	reached := false
	w.policy.resolve = func(context.Context) (*policyv1.ResolveReply, error) {
		reached = true
		return &policyv1.ResolveReply{}, nil
	}
	p, ch, conn := w.caller("caller", policyService)
	_, otherCh, otherConn := w.caller("other", policyService)
	_, bareCh, bareConn := w.caller("bare")
	leg, end, err := w.router.Begin(route.NewTree(route.Call{}), nil, nil, p)
	if err != nil {
		t.Fatal(err)
	}
	token := leg.Metadata()["cordon-leg"]
	for _, tt := range []struct {
		name   string
		conn   *grpc.ClientConn
		md     []string
		reason string
	}{
		{"control: own channel, own leg", conn, []string{"cordon-channel", ch.Token, "cordon-leg", token}, ""},
		{"control: own channel, no call", conn, []string{"cordon-channel", ch.Token}, ""},
		{"no token", conn, nil, "BAD_CHANNEL"},
		{"another's token", conn, []string{"cordon-channel", otherCh.Token}, "BAD_CHANNEL"},
		{"another's leg", otherConn, []string{"cordon-channel", otherCh.Token, "cordon-leg", token}, "FOREIGN_CALL"},
		{"made-up leg", conn, []string{"cordon-channel", ch.Token, "cordon-leg", "x"}, "FOREIGN_CALL"},
		{"undeclared need", bareConn, []string{"cordon-channel", bareCh.Token}, "NOT_DECLARED"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			reached = false
			_, err := policyv1.NewPolicyClient(tt.conn).Resolve(with(t.Context(), tt.md...), &policyv1.ResolveRequest{})
			if got := fault.Reason(err); got != tt.reason {
				t.Errorf("reason = %q, want %q (%v)", got, tt.reason, err)
			}
			if reached != (tt.reason == "") {
				t.Errorf("provider reached = %v", reached)
			}
		})
	}
	end()
	_, err = policyv1.NewPolicyClient(conn).Resolve(with(t.Context(), "cordon-channel", ch.Token, "cordon-leg", token), &policyv1.ResolveRequest{})
	if fault.Reason(err) != "FOREIGN_CALL" {
		t.Errorf("a leg outlived its hop: %v", err)
	}
}

func TestStreamsAndStatusPassThrough(t *testing.T) {
	w := newWorld(t)
	_, ch, conn := w.caller("caller", controlService, policyService)
	ctx := with(t.Context(), "cordon-channel", ch.Token)
	stream, err := controlv1.NewControlClient(conn).ReadLog(ctx, &controlv1.ReadLogRequest{FromSeq: 100})
	if err != nil {
		t.Fatal(err)
	}
	n := int64(0)
	for {
		e, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil || e.GetSeq() != n {
			t.Fatal(e, err)
		}
		n++
	}
	if n != 100 || len(stream.Trailer().Get("x-end")) != 1 {
		t.Errorf("%d messages, trailer %v", n, stream.Trailer())
	}
	w.policy.resolve = func(context.Context) (*policyv1.ResolveReply, error) {
		return nil, fault.New(codes.FailedPrecondition, "MINE", "no %s", "way")
	}
	_, err = policyv1.NewPolicyClient(conn).Resolve(ctx, &policyv1.ResolveRequest{})
	if fault.Reason(err) != "MINE" || status.Code(err) != codes.FailedPrecondition || fault.Message(err) != "no way" {
		t.Errorf("err = %v", err)
	}
}

func TestCancellationReachesTheProvider(t *testing.T) {
	w := newWorld(t)
	entered, left := make(chan struct{}), make(chan error, 1)
	w.policy.resolve = func(ctx context.Context) (*policyv1.ResolveReply, error) {
		close(entered)
		<-ctx.Done()
		left <- ctx.Err()
		return nil, ctx.Err()
	}
	_, ch, conn := w.caller("caller", policyService)
	ctx, cancel := context.WithCancel(with(t.Context(), "cordon-channel", ch.Token))
	go func() { <-entered; cancel() }()
	_, err := policyv1.NewPolicyClient(conn).Resolve(ctx, &policyv1.ResolveRequest{})
	if status.Code(err) != codes.Canceled {
		t.Errorf("err = %v", err)
	}
	if err := <-left; !errors.Is(err, context.Canceled) {
		t.Errorf("provider saw %v", err)
	}
}

func TestCrashIsATypedFault(t *testing.T) {
	w := newWorld(t)
	w.policy.resolve = func(ctx context.Context) (*policyv1.ResolveReply, error) {
		close(w.done)
		go w.server.Stop()
		<-ctx.Done()
		return nil, ctx.Err()
	}
	_, ch, conn := w.caller("caller", policyService)
	ctx := with(t.Context(), "cordon-channel", ch.Token)
	_, err := policyv1.NewPolicyClient(conn).Resolve(ctx, &policyv1.ResolveRequest{})
	var f *kernelv1.PluginFault
	if !fault.Detail(err, &f) || f.GetEntry() != "provider" || f.GetGeneration() != 3 || f.GetReason() != "PLUGIN_CRASHED" || f.GetRetryable() {
		t.Fatalf("fault = %v (%v)", f, err)
	}
	if !strings.Contains(err.Error(), "SIGKILL") {
		t.Errorf("the error does not say how it ended: %v", err)
	}
	_, err = policyv1.NewPolicyClient(conn).Resolve(ctx, &policyv1.ResolveRequest{})
	if !fault.Detail(err, &f) || f.GetReason() != "PLUGIN_NOT_RUNNING" || !f.GetRetryable() {
		t.Errorf("fault = %v (%v)", f, err)
	}
}

func TestHopsAreBounded(t *testing.T) {
	w := newWorld(t)
	tree := route.NewTree(route.Call{})
	var leg *route.Leg
	for i := range route.MaxHops {
		next, end, err := w.router.Begin(tree, leg, nil, w.provider)
		if err != nil {
			t.Fatalf("hop %d: %v", i+1, err)
		}
		defer end()
		leg = next
	}
	_, _, err := w.router.Begin(tree, leg, nil, w.provider)
	if fault.Reason(err) != "TOO_MANY_HOPS" || !strings.Contains(err.Error(), "provider → provider") {
		t.Errorf("err = %v", err)
	}
}

func TestTreeStaysOnItsGeneration(t *testing.T) {
	first, second := &route.Provider{Entry: "p", Generation: 1}, &route.Provider{Entry: "p", Generation: 2}
	now := first
	current := func() (*route.Provider, error) { return now, nil }
	pin := func(tree *route.Tree) *route.Provider {
		t.Helper()
		p, err := route.Pin(tree, current)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	old, other := route.NewTree(route.Call{}), route.NewTree(route.Call{})
	pin(old)
	pin(other)
	now = second
	idle := first.Retire()
	if pin(old) != first {
		t.Error("a call tree saw two generations of one entry")
	}
	fresh := route.NewTree(route.Call{})
	if pin(fresh) != second {
		t.Error("a new call tree did not get the new generation")
	}
	old.End()
	old.End()
	select {
	case <-idle:
		t.Error("the old generation is idle while a call tree is on it")
	default:
	}
	other.End()
	<-idle
	busy := second.Retire()
	select {
	case <-busy:
		t.Error("the new generation is idle while a call tree is on it")
	default:
	}
	fresh.End()
	<-busy
}

// TestRetiredWhilePinning is the moment between finding a generation and pinning it.
func TestRetiredWhilePinning(t *testing.T) {
	first, second := &route.Provider{Entry: "p", Generation: 1}, &route.Provider{Entry: "p", Generation: 2}
	<-first.Retire()
	found := []*route.Provider{first, second}
	p, err := route.Pin(route.NewTree(route.Call{}), func() (*route.Provider, error) {
		p := found[0]
		found = found[1:]
		return p, nil
	})
	if err != nil || p != second {
		t.Errorf("pinned %v, %v", p, err)
	}
}

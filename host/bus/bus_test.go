package bus_test

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"

	approvalv1 "github.com/cordon-host/cordon/api/approval/v1"
	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	"github.com/cordon-host/cordon/capability/approval"
	"github.com/cordon-host/cordon/capability/event"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/ctxsvc"
	"github.com/cordon-host/cordon/host/bus"
	"github.com/cordon-host/cordon/host/route"
	"github.com/cordon-host/cordon/plugin"
)

type (
	question = *approvalv1.Question
	verdict  = *approvalv1.Verdict
	next     = func(context.Context, question) (verdict, error)
	listener = func(context.Context, question, next) (verdict, error)
)

// loose is an event whose request listeners may change, and that skips a listener that fails.
var loose = event.Event[question, verdict]{Name: "test/loose"}

// world is a bus with listeners that speak the whole protocol, over connections in memory, and a person behind them.
type world struct {
	*testing.T
	bus    *bus.Bus
	root   *ctxsvc.Context
	router *route.Router
	caller *route.Provider
	person func(*approvalv1.Question) (verdict, *kernelv1.Answer)
	kill   map[string]func() // by entry
}

func (w *world) Resolve(string, string) (*route.Provider, error) {
	return nil, errors.New("no routes here")
}
func (w *world) Owns(string, string) bool { return true }

func newWorld(t *testing.T) *world {
	w := &world{T: t, bus: bus.New(), root: ctxsvc.New(), kill: map[string]func(){}}
	t.Cleanup(func() { _ = w.root.Fiber().Dispose(context.Background()) })
	w.router = route.New(t.TempDir(), w, kernelv1.UnimplementedHostServer{}, slog.New(slog.DiscardHandler))
	w.bus.Use(w.router)
	w.caller = &route.Provider{Entry: "emitter", Manifest: &kernelv1.Manifest{}}
	for _, e := range []event.Event[question, verdict]{approval.Request, loose} {
		d := &kernelv1.EventDecl{Event: e.Name, FailClosed: e.FailClosed, FixedRequest: e.FixedRequest}
		w.caller.Manifest.Events = append(w.caller.Manifest.Events, d)
		if err := w.bus.Declare("emitter", d); err != nil {
			t.Fatal(err)
		}
		err := w.bus.Terminal(w.root, e.Name, "person", func(_ context.Context, q *bus.Request, _ func(context.Context, *bus.Request) (*bus.Reply, error)) (*bus.Reply, error) {
			var asked approvalv1.Question
			if err := proto.Unmarshal(q.Payload, &asked); err != nil {
				return nil, err
			}
			v, a := w.person(&asked)
			raw, err := proto.Marshal(v)
			return &bus.Reply{Payload: raw, Answer: a}, err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	w.person = func(q *approvalv1.Question) (verdict, *kernelv1.Answer) {
		return &approvalv1.Verdict{Outcome: "rejected", Note: q.GetReason()}, &kernelv1.Answer{Entry: "inbox", Level: kernelv1.Level_HUMAN}
	}
	return w
}

// listen adds a plugin that listens to both events.
func (w *world) listen(entry string, level kernelv1.Level, fn listener) {
	w.Helper()
	p := plugin.Plugin[struct{}]{
		Name:    entry,
		Listens: []plugin.Listen{plugin.ListenTo(approval.Request, false), plugin.ListenTo(loose, false)},
		Apply: func(ctx *plugin.Context, _ struct{}) error {
			return errors.Join(plugin.Around(ctx, approval.Request, fn), plugin.Around(ctx, loose, fn))
		},
	}
	l := bufconn.Listen(1 << 16)
	g := plugin.NewServer(p, slog.New(slog.DiscardHandler)).GRPC()
	go g.Serve(l)
	conn, err := grpc.NewClient("passthrough:x", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }))
	if err != nil {
		w.Fatal(err)
	}
	kernel := kernelv1.NewPluginClient(conn)
	m, err := kernel.Describe(w.Context(), &kernelv1.DescribeRequest{})
	if err != nil {
		w.Fatal(err)
	}
	if _, err := kernel.Setup(w.Context(), &kernelv1.SetupRequest{Entry: entry, HostAddress: "unix:/nowhere"}); err != nil {
		w.Fatal(err)
	}
	done := make(chan struct{})
	provider := &route.Provider{Entry: entry, Generation: 1, Manifest: m, Conn: conn, Done: done, Exit: func() string { return "killed" }}
	link, err := w.bus.Connect(provider, kernel)
	if err != nil {
		w.Fatal(err)
	}
	w.kill[entry] = func() { close(done); g.Stop() }
	w.Cleanup(func() { link.Close(); conn.Close(); g.Stop() })
	for _, d := range m.GetListeners() {
		if err := w.bus.Listen(w.root, entry, d, level, func() (*route.Provider, error) { return provider, nil }); err != nil {
			w.Fatal(err)
		}
	}
}

func (w *world) emit(name string) (verdict, *kernelv1.Answer, error) {
	w.Helper()
	raw, err := proto.Marshal(&approvalv1.Question{Id: "q", Reason: "as asked"})
	if err != nil {
		w.Fatal(err)
	}
	base, err := proto.Marshal(&approvalv1.Verdict{Outcome: "unavailable"})
	if err != nil {
		w.Fatal(err)
	}
	tree := route.NewTree(route.Call{ID: "c1"})
	defer tree.End()
	r, err := w.bus.Emit(w.Context(), w.root, w.caller, &route.Leg{Tree: tree}, &kernelv1.EmitRequest{
		Event: name, Mode: kernelv1.EmitRequest_WATERFALL, Payload: raw, Base: base,
	})
	if err != nil {
		return nil, nil, err
	}
	v := &approvalv1.Verdict{}
	return v, r.GetAnswer(), proto.Unmarshal(r.GetPayload(), v)
}

func pass(ctx context.Context, q question, next next) (verdict, error) { return next(ctx, q) }

func allow(context.Context, question, next) (verdict, error) {
	return &approvalv1.Verdict{Outcome: "allowed-once"}, nil
}

// rewrite shows the rest of the chain another question.
func rewrite(ctx context.Context, q question, next next) (verdict, error) {
	q = proto.CloneOf(q)
	q.Reason = "something harmless"
	return next(ctx, q)
}

func TestAnswersAreStamped(t *testing.T) {
	for _, tt := range []struct {
		name    string
		fn      listener
		level   kernelv1.Level
		outcome string
		by      string
		worth   kernelv1.Level
	}{
		{"who passes on leaves the person's answer the person's", pass, kernelv1.Level_NONE, "rejected", "inbox", kernelv1.Level_HUMAN},
		{"an answer is the listener's own, worth what its row says: nothing", allow, kernelv1.Level_NONE, "allowed-once", "listener", kernelv1.Level_NONE},
		{"an answer is the listener's own, worth what its row says: client", allow, kernelv1.Level_CLIENT, "allowed-once", "listener", kernelv1.Level_CLIENT},
		{"who turns the answer round gives its own", func(ctx context.Context, q question, next next) (verdict, error) {
			if _, err := next(ctx, q); err != nil {
				return nil, err
			}
			return &approvalv1.Verdict{Outcome: "allowed-once"}, nil
		}, kernelv1.Level_NONE, "allowed-once", "listener", kernelv1.Level_NONE},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			w.listen("listener", tt.level, tt.fn)
			v, a, err := w.emit(approval.Request.Name)
			if err != nil || v.GetOutcome() != tt.outcome || a.GetEntry() != tt.by || a.GetLevel() != tt.worth || a.GetId() == "" {
				t.Fatalf("%v, %v, %v", v, a, err)
			}
			if s, ok := w.bus.Take(a.GetId(), "c2"); ok {
				t.Errorf("another call took the answer: %v", s)
			}
			if s, ok := w.bus.Take(a.GetId(), "c1"); !ok || s.Answer.GetEntry() != tt.by {
				t.Errorf("the call cannot take its answer: %v", s)
			}
			if _, ok := w.bus.Take(a.GetId(), "c1"); ok {
				t.Error("an answer was taken twice")
			}
		})
	}
}

func TestBaseAnswerHasNoStamp(t *testing.T) {
	w := newWorld(t)
	bare := ctxsvc.New()
	defer bare.Fiber().Dispose(context.Background())
	w.root = bare
	v, a, err := w.emit(approval.Request.Name)
	if err != nil || v.GetOutcome() != "unavailable" || a != nil {
		t.Errorf("%v, %v, %v", v, a, err)
	}
}

func TestNobodyRewritesAFixedRequest(t *testing.T) {
	w := newWorld(t)
	w.listen("listener", kernelv1.Level_HUMAN, rewrite)
	if v, _, err := w.emit(approval.Request.Name); fault.Reason(err) != "REQUEST_CHANGED" {
		t.Errorf("%v, %v", v, err)
	}
	// The control: where it is allowed, the change arrives.
	v, _, err := w.emit(loose.Name)
	if err != nil || v.GetNote() != "something harmless" {
		t.Errorf("%v, %v", v, err)
	}
}

func TestNextOnlyOnce(t *testing.T) {
	w := newWorld(t)
	calls := 0
	w.person = func(*approvalv1.Question) (verdict, *kernelv1.Answer) {
		calls++
		return &approvalv1.Verdict{Outcome: "rejected"}, &kernelv1.Answer{Entry: "inbox"}
	}
	var second error
	w.listen("listener", kernelv1.Level_NONE, func(ctx context.Context, q question, next next) (verdict, error) {
		v, err := next(ctx, q)
		_, second = next(ctx, q)
		return v, err
	})
	if v, _, err := w.emit(approval.Request.Name); err != nil || v.GetOutcome() != "rejected" {
		t.Errorf("%v, %v", v, err)
	}
	if !errors.Is(second, plugin.ErrNextTwice) || calls != 1 {
		t.Errorf("second next: %v, the person was asked %d times", second, calls)
	}
}

// TestDeadListener kills a listener in the middle of a dispatch. It had the rest of the chain in its hands, so nobody can say what it
// would have answered: the dispatch fails, and says whose fault it was.
func TestDeadListener(t *testing.T) {
	w := newWorld(t)
	entered := make(chan struct{})
	w.listen("listener", kernelv1.Level_HUMAN, func(ctx context.Context, _ question, _ next) (verdict, error) {
		close(entered)
		<-ctx.Done()
		return nil, ctx.Err()
	})
	go func() { <-entered; w.kill["listener"]() }()
	v, a, err := w.emit(approval.Request.Name)
	var f *kernelv1.PluginFault
	if err == nil || !fault.Detail(err, &f) || f.GetEntry() != "listener" {
		t.Errorf("%v, %v, %v", v, a, err)
	}
}

func TestUndeclared(t *testing.T) {
	w := newWorld(t)
	if _, _, err := w.emit("other/event"); fault.Reason(err) != "NOT_DECLARED" {
		t.Errorf("an undeclared event: %v", err)
	}
	d := &kernelv1.EventDecl{Event: approval.Request.Name}
	if err := w.bus.Declare("rogue", d); err == nil {
		t.Error("two plugins declare one event differently")
	}
}

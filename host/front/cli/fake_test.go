package cli

import (
	"bytes"
	"context"
	"flag"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/test/bufconn"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
	sandboxv1 "github.com/cordon-host/cordon/api/sandbox/v1"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/host"
	"github.com/cordon-host/cordon/host/compose"
	"github.com/cordon-host/cordon/host/lock"
)

var update = flag.Bool("update", false, "write golden files instead of comparing with them")

func TestMain(m *testing.M) {
	time.Local = time.UTC // golden files hold times
	goleak.VerifyTestMain(m)
}

// golden compares what a person reads with a file of testdata.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("%v; run go test -update", err)
	}
	if got != string(want) {
		t.Errorf("%s differs; run go test -update and look at the change\n--- got\n%s\n--- want\n%s", path, got, want)
	}
}

// The code that the fake's person knows and the token for it.
const (
	fakeCode  = "aaaa-bbbb-cccc"
	fakeToken = "token"
)

// fake is a control server that records what it is asked and answers as told. Its questions are real enough to be
// answered: a call asks those of its questions in turn and ends with the first no.
type fake struct {
	controlv1.UnimplementedControlServer

	running bool // dial finds it
	// What start, validate and trust fail with or find.
	startErr, trustErr error
	diagnostics        compose.Diagnostics
	runs               []host.Runs
	changes            []lock.Change // what cordon lock would write
	writeErr           error
	wrote              int
	busy               int // how often start finds another host before it does not

	status    *controlv1.StatusReply
	tools     []*controlv1.Tool
	sessions  []*controlv1.SessionInfo
	events    []*controlv1.LogEvent
	lines     []*controlv1.LogLine
	inspect   *sandboxv1.InspectReply
	confine   func(*controlv1.ConfineRequest) (*sandboxv1.ConfineReply, error)
	call      func(context.Context, *controlv1.CallRequest) (*controlv1.CallReply, error)
	knob      func(*controlv1.KnobRequest) (*controlv1.KnobReply, error)
	presets   *controlv1.PresetsReply
	prompts   map[string]*controlv1.PromptReply // by session
	questions []*controlv1.Question
	settles   chan *controlv1.Settled // sent to the inbox as they come

	mu    sync.Mutex
	calls []*controlv1.CallRequest
	// What was asked of the log.
	logsAsked []*controlv1.LogsRequest
	levels    []*controlv1.SetLogLevelRequest
	answered  []*controlv1.AnswerRequest
	answers   chan *controlv1.AnswerRequest
	watching  chan string // the tag of each inbox that is followed
	asks      chan *controlv1.Question
	started   int
	stopped   int
	codes     []func(string)
	done      chan struct{}
}

func newFake() *fake {
	return &fake{
		answers: make(chan *controlv1.AnswerRequest, 16), watching: make(chan string, 16), asks: make(chan *controlv1.Question, 16),
		settles: make(chan *controlv1.Settled, 16), done: make(chan struct{}),
		status: &controlv1.StatusReply{Deployment: "d", Compose: "/srv/compose.yml", Pid: 4711, Version: "v1", ReadyMs: 812},
	}
}

// connect serves the fake in memory. With a login the connection is its owner's.
func (f *fake) connect(t *testing.T, owner bool) (controlv1.ControlClient, io.Closer) {
	t.Helper()
	l := bufconn.Listen(1 << 16)
	s := grpc.NewServer()
	controlv1.RegisterControlServer(s, f)
	var serving sync.WaitGroup
	serving.Go(func() { _ = s.Serve(l) })
	opts := []grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }),
	}
	if owner {
		opts = append(opts, grpc.WithUnaryInterceptor(
			func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
				return invoke(metadata.AppendToOutgoingContext(ctx, keyLogin, fakeToken), method, req, reply, cc, opts...)
			}), grpc.WithStreamInterceptor(
			func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, stream grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
				return stream(metadata.AppendToOutgoingContext(ctx, keyLogin, fakeToken), desc, cc, method, opts...)
			}))
	}
	conn, err := grpc.NewClient("passthrough:fake", opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = conn.Close()
		s.Stop()
		serving.Wait()
	})
	return controlv1.NewControlClient(conn), conn
}

// deployment of the fake.
type fakeDeployment struct {
	t *testing.T
	f *fake
	p place
}

func (d fakeDeployment) dial(context.Context) (controlv1.ControlClient, io.Closer, error) {
	if !d.f.running {
		return nil, nil, errNotRunning
	}
	c, conn := d.f.connect(d.t, false)
	return c, conn, nil
}

func (d fakeDeployment) start(context.Context) (hosted, error) {
	if d.f.startErr != nil {
		return nil, d.f.startErr
	}
	if d.f.busy > 0 {
		d.f.busy--
		return nil, &busyError{4711}
	}
	d.f.started++
	c, _ := d.f.connect(d.t, true)
	return fakeHost{d.f, c}, nil
}

func (d fakeDeployment) validate(context.Context) (compose.Diagnostics, []host.Runs, error) {
	return d.f.diagnostics, d.f.runs, d.f.startErr
}

func (d fakeDeployment) lock(context.Context) (locking, error) {
	return locking{"/srv/compose.lock", d.f.changes, func() error { d.f.wrote++; return d.f.writeErr }}, d.f.startErr
}

func (d fakeDeployment) trust(context.Context) (trusted, error) {
	return trusted{d.p.compose, "abc", 12}, d.f.trustErr
}

type fakeHost struct {
	f *fake
	c controlv1.ControlClient
}

func (h fakeHost) Control() controlv1.ControlClient { return h.c }
func (h fakeHost) Code() string                     { return fakeCode }
func (h fakeHost) OnCode(fn func(string))           { h.f.codes = append(h.f.codes, fn) }
func (h fakeHost) Done() <-chan struct{}            { return h.f.done }
func (h fakeHost) Stop(context.Context) error       { h.f.stopped++; return nil }

func person(ctx context.Context) error {
	md, _ := metadata.FromIncomingContext(ctx)
	if got := md.Get(keyLogin); len(got) == 0 || got[0] != fakeToken {
		return fault.New(codes.PermissionDenied, "LOGIN_REQUIRED", "answering needs a person")
	}
	return nil
}

func (f *fake) Login(_ context.Context, r *controlv1.LoginRequest) (*controlv1.LoginReply, error) {
	if r.GetCode() != fakeCode {
		return nil, fault.New(codes.Unauthenticated, "BAD_CODE", "login code is wrong or was used")
	}
	return &controlv1.LoginReply{Token: fakeToken}, nil
}

func (f *fake) Status(context.Context, *controlv1.StatusRequest) (*controlv1.StatusReply, error) {
	return f.status, nil
}

func (f *fake) ListTools(context.Context, *controlv1.ListToolsRequest) (*controlv1.ListToolsReply, error) {
	return &controlv1.ListToolsReply{Tools: f.tools}, nil
}

func (f *fake) ListSessions(context.Context, *controlv1.ListSessionsRequest) (*controlv1.ListSessionsReply, error) {
	return &controlv1.ListSessionsReply{Sessions: f.sessions}, nil
}

func (f *fake) ReadLog(r *controlv1.ReadLogRequest, s grpc.ServerStreamingServer[controlv1.LogEvent]) error {
	if r.GetSession() != "s1" {
		return fault.New(codes.NotFound, "SESSION_NOT_FOUND", "session %q does not exist; see `cordon sessions`", r.GetSession())
	}
	for _, e := range f.events {
		if err := s.Send(e); err != nil {
			return err
		}
	}
	if r.GetFollow() {
		<-s.Context().Done()
	}
	return nil
}

func (f *fake) Logs(r *controlv1.LogsRequest, s grpc.ServerStreamingServer[controlv1.LogLine]) error {
	if r.GetEntry() == "x" {
		return fault.New(codes.NotFound, "NO_ENTRY", "entry %q is not in the composition; see `cordon status`", r.GetEntry())
	}
	f.mu.Lock()
	f.logsAsked = append(f.logsAsked, r)
	f.mu.Unlock()
	for _, l := range f.lines {
		if err := s.Send(l); err != nil {
			return err
		}
	}
	if r.GetFollow() {
		<-s.Context().Done()
	}
	return nil
}

func (f *fake) SetLogLevel(_ context.Context, r *controlv1.SetLogLevelRequest) (*controlv1.SetLogLevelReply, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.levels = append(f.levels, r)
	return &controlv1.SetLogLevelReply{}, nil
}

func (f *fake) Knob(ctx context.Context, r *controlv1.KnobRequest) (*controlv1.KnobReply, error) {
	return f.knob(r)
}

func (f *fake) Presets(context.Context, *controlv1.PresetsRequest) (*controlv1.PresetsReply, error) {
	return f.presets, nil
}

func (f *fake) Prompt(_ context.Context, r *controlv1.PromptRequest) (*controlv1.PromptReply, error) {
	if s := r.GetSession(); s != "" && s != "s1" {
		return nil, fault.New(codes.NotFound, "SESSION_NOT_FOUND", "session %q does not exist; see `cordon sessions`", s)
	}
	return f.prompts[r.GetSession()], nil
}

func (f *fake) Reload(_ context.Context, r *controlv1.ReloadRequest) (*controlv1.ReloadReply, error) {
	switch r.GetEntry() {
	case "good":
		return &controlv1.ReloadReply{Generation: 2, Digest: "abc", Changed: true}, nil
	case "broken":
		return nil, fault.New(codes.FailedPrecondition, "NOT_ACCEPTED", "broken does not build")
	}
	return nil, fault.New(codes.NotFound, "NO_ENTRY", "entry %q is not in the composition; see `cordon status`", r.GetEntry())
}

func (f *fake) Confine(_ context.Context, r *controlv1.ConfineRequest) (*sandboxv1.ConfineReply, error) {
	return f.confine(r)
}

func (f *fake) Doctor(context.Context, *controlv1.DoctorRequest) (*sandboxv1.InspectReply, error) {
	return f.inspect, nil
}

func (f *fake) Call(ctx context.Context, r *controlv1.CallRequest) (*controlv1.CallReply, error) {
	f.mu.Lock()
	f.calls = append(f.calls, r)
	f.mu.Unlock()
	if r.GetAnswer() != "" {
		if err := person(ctx); err != nil {
			return nil, err
		}
	}
	if r.GetAnswer() == "ask" {
		for _, q := range f.questions {
			q.Tag = r.GetTag()
			select {
			case f.asks <- q:
			case <-ctx.Done():
				return nil, ctx.Err()
			}
			select {
			case a := <-f.answers:
				if a.GetOutcome() != "allowed-once" {
					return &controlv1.CallReply{IsError: true, Texts: []string{"Error: rejected"}, Session: "s1", Call: "c1"}, nil
				}
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
	}
	if f.call != nil {
		return f.call(ctx, r)
	}
	return &controlv1.CallReply{Texts: []string{"done"}, Session: "s1", Call: "c1"}, nil
}

func (f *fake) Inbox(r *controlv1.InboxRequest, s grpc.ServerStreamingServer[controlv1.InboxEvent]) error {
	if err := person(s.Context()); err != nil {
		return err
	}
	if err := s.SendHeader(nil); err != nil {
		return err
	}
	if !r.GetFollow() {
		for _, q := range f.questions {
			if err := s.Send(&controlv1.InboxEvent{Asked: q}); err != nil {
				return err
			}
		}
		return nil
	}
	f.watching <- r.GetTag()
	for {
		var e controlv1.InboxEvent
		select {
		case e.Asked = <-f.asks:
		case e.Settled = <-f.settles:
		case <-f.done:
			return nil
		case <-s.Context().Done():
			return nil
		}
		if err := s.Send(&e); err != nil {
			return err
		}
	}
}

func (f *fake) Answer(ctx context.Context, r *controlv1.AnswerRequest) (*controlv1.AnswerReply, error) {
	if err := person(ctx); err != nil {
		return nil, err
	}
	if r.GetId() == "gone" {
		return nil, fault.New(codes.NotFound, "NOT_OPEN", "question gone is not open")
	}
	f.mu.Lock()
	f.answered = append(f.answered, r)
	f.mu.Unlock()
	f.answers <- r
	return &controlv1.AnswerReply{}, nil
}

// syncBuffer is a buffer that several goroutines may write and one may watch.
type syncBuffer struct {
	mu      sync.Mutex
	b       bytes.Buffer
	changed chan struct{} // one token when something was written since
}

func newBuffer() *syncBuffer { return &syncBuffer{changed: make(chan struct{}, 1)} }

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, err := s.b.Write(p)
	select {
	case s.changed <- struct{}{}:
	default:
	}
	return n, err
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// await waits until the buffer has text; the test's own deadline ends the wait.
func (s *syncBuffer) await(t *testing.T, text string) {
	t.Helper()
	for !bytes.Contains([]byte(s.String()), []byte(text)) {
		select {
		case <-s.changed:
		case <-t.Context().Done():
			t.Fatalf("no %q in %q", text, s.String())
		}
	}
}

// shell is a place to run command lines in.
type shell struct {
	t              *testing.T
	fake           *fake
	world          world
	stdout, stderr *syncBuffer
}

func newShell(t *testing.T, f *fake) *shell {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "compose.yml"), []byte("cordon: 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { null.Close() })
	s := &shell{t: t, fake: f, stdout: newBuffer(), stderr: newBuffer()}
	s.world = world{
		stdin: null, stdout: s.stdout, stderr: s.stderr, dir: dir, environ: os.Environ(),
		open: func(p place) deployment { return fakeDeployment{t, f, p} },
	}
	return s
}

// input is what stdin has.
func (s *shell) input(text string) *shell {
	s.t.Helper()
	path := filepath.Join(s.t.TempDir(), "stdin")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		s.t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { f.Close() })
	s.world.stdin = f
	return s
}

// terminal puts a person in front of the command; what it returns is their keyboard.
func (s *shell) terminal() *os.File {
	s.t.Helper()
	master, slave := pty(s.t)
	s.world.stdin = slave
	s.world.inTTY, s.world.outTTY, s.world.errTTY = true, true, true
	return master
}

func (s *shell) run(args ...string) int { return s.world.run(s.t.Context(), args) }

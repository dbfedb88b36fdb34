package host

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/host/builtin"
	"github.com/cordon-host/cordon/host/compose"
	"github.com/cordon-host/cordon/host/logs"
	"github.com/cordon-host/cordon/host/process"
	"github.com/cordon-host/cordon/host/route"
	"github.com/cordon-host/cordon/plugin"
)

// mountBuiltins mounts what the host provides itself.
func (h *Host) mountBuiltins(ctx context.Context) error {
	inbox, err := h.root.Plugin(builtin.Inbox(h.bus, h.inbox), nil)
	if err != nil {
		return err
	}
	if err := inbox.Wait(ctx); err != nil {
		return err
	}
	session := builtin.Session(builtin.SessionDeps{Log: h.sessions, Grants: h.grants, Bus: h.bus, Manifest: h.manifestOf, Owns: h.owns})
	manifest, err := session.Manifest()
	if err != nil {
		return err
	}
	return h.mountEntry(h.root, h.newEntry(builtin.SessionEntry, kernelv1.Level_NONE, runnable{
		composition: h.composition, manifest: manifest,
		launch: func(_ context.Context, _ uint64, log *logs.Writer) (generationProcess, error) {
			return embed(plugin.NewServer(session, log.Log()))
		},
	}))
}

// builtinManifests are what the composition may need without a row of its own, by the entry that offers it.
func builtinManifests() (map[string]*kernelv1.Manifest, error) {
	m, err := builtin.Session(builtin.SessionDeps{}).Manifest()
	return map[string]*kernelv1.Manifest{builtin.SessionEntry: m}, err
}

// manifestOf is the manifest of what a mounted entry runs.
func (h *Host) manifestOf(id string) (*kernelv1.Manifest, bool) {
	e, ok := h.entry(id)
	if !ok {
		return nil, false
	}
	return e.now().manifest, true
}

// owns reports whether a mounted entry provides a capability in the root realm.
func (h *Host) owns(id, capability string) bool {
	e, ok := h.entry(id)
	if !ok {
		return false
	}
	what := e.now()
	return what.row != nil && what.row.Realm(capability) == compose.RootRealm &&
		slices.ContainsFunc(what.manifest.GetOffers(), func(o *kernelv1.Offer) bool { return o.GetCapability() == capability })
}

// embedded is a generation in the host's own process. It speaks the same protocol as any other, over a connection in memory.
type embedded struct {
	server *plugin.Server
	grpc   *grpc.Server
	conn   *grpc.ClientConn
	done   chan struct{}
	once   sync.Once
	served sync.WaitGroup
}

func embed(s *plugin.Server) (*embedded, error) {
	l := bufconn.Listen(inProcess)
	e := &embedded{server: s, grpc: s.GRPC(), done: make(chan struct{})}
	e.served.Go(func() { _ = e.grpc.Serve(l) }) // ends with Stop
	var err error
	e.conn, err = grpc.NewClient("passthrough:builtin",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(route.MaxMessageSize), grpc.MaxCallSendMsgSize(route.MaxMessageSize)),
	)
	if err != nil {
		return nil, fmt.Errorf("built-in: %w", err)
	}
	return e, nil
}

func (e *embedded) Conn() route.Conn              { return e.conn }
func (e *embedded) Kernel() kernelv1.PluginClient { return kernelv1.NewPluginClient(e.conn) }
func (e *embedded) Done() <-chan struct{}         { return e.done }
func (e *embedded) PID() int                      { return os.Getpid() }

// What runs inside the host ends with it: there is no crash of it that anybody could report.
func (e *embedded) Crash() *process.Crash    { return nil }
func (e *embedded) Timings() process.Timings { return process.Timings{} }

func (e *embedded) Failed(phase process.Phase, timeout time.Duration, err error) error {
	return &process.StartError{Entry: "built-in", Phase: phase, Timeout: timeout, Err: errors.New(fault.Message(err))}
}

func (e *embedded) Exit() string {
	select {
	case <-e.done:
		return "stopped with the host"
	default:
		return ""
	}
}

func (e *embedded) Stop(ctx context.Context) (err error) {
	e.once.Do(func() {
		err = errors.Join(e.server.Close(ctx), e.conn.Close())
		e.grpc.Stop()
		e.served.Wait()
		close(e.done)
	})
	return err
}

// Interface guards.
var (
	_ generationProcess = (*embedded)(nil)
	_ generationProcess = processGeneration{}
)

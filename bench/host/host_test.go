// Package host measures the main job: a tool call through all plugin processes, a routed capability call, and the start of a host. Every
// figure comes with its ratio to something everybody has, taken in the same run.
package host

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	policyv1 "github.com/cordon-host/cordon/api/policy/v1"
	toolsv1 "github.com/cordon-host/cordon/api/tools/v1"
	"github.com/cordon-host/cordon/host"
	"github.com/cordon-host/cordon/host/process"
	"github.com/cordon-host/cordon/host/route"
	"github.com/cordon-host/cordon/internal/testenv"
	"github.com/cordon-host/cordon/plugin"
)

// The test binary is both plugins of the routing benchmark.
func TestMain(m *testing.M) {
	switch os.Getenv("CORDON_BENCH_PLUGIN") {
	case "callee":
		plugin.Main(plugin.Plugin[struct{}]{
			Name: "callee", Offers: []plugin.Offer{{Capability: "policy", Desc: &policyv1.Policy_ServiceDesc}},
			Apply: func(ctx *plugin.Context, _ struct{}) error { return ctx.Provide("policy", callee{}, nil) },
		})
	case "caller":
		plugin.Main(plugin.Plugin[struct{}]{
			Name: "caller", Needs: []plugin.Need{{Capability: "policy", Desc: &policyv1.Policy_ServiceDesc}}, Tools: []string{"loop"},
			Apply: caller,
		})
	}
	os.Exit(m.Run())
}

type callee struct {
	policyv1.UnimplementedPolicyServer
}

func (callee) Resolve(context.Context, *policyv1.ResolveRequest) (*policyv1.ResolveReply, error) {
	return &policyv1.ResolveReply{Mode: "read-only"}, nil
}

// caller calls the other plugin n times and says how long each call took, in nanoseconds.
func caller(ctx *plugin.Context, _ struct{}) error {
	conn, _ := ctx.Conn("policy")
	policy := policyv1.NewPolicyClient(conn)
	return ctx.Tool(plugin.Tool{
		Name: "loop", InputSchema: json.RawMessage(`{"type":"object"}`),
		Call: func(ctx context.Context, args json.RawMessage) (*toolsv1.CallReply, error) {
			var n int
			if err := json.Unmarshal(args, &n); err != nil {
				return nil, err
			}
			took, err := times(n, func() error {
				_, err := policy.Resolve(ctx, &policyv1.ResolveRequest{})
				return err
			})
			if err != nil {
				return nil, err
			}
			text, err := json.Marshal(took)
			return plugin.Text(string(text)), err
		},
	})
}

func times(n int, fn func() error) ([]time.Duration, error) {
	took := make([]time.Duration, n)
	for i := range took {
		start := time.Now()
		if err := fn(); err != nil {
			return nil, err
		}
		took[i] = time.Since(start)
	}
	return took, nil
}

func quantile(d []time.Duration, q float64) time.Duration {
	d = slices.Clone(d)
	slices.Sort(d)
	return d[int(q*float64(len(d)-1))]
}

func shortDir(b *testing.B) string {
	dir, err := os.MkdirTemp("", "cordon") // b.TempDir is too long for a socket
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func startPlugin(b *testing.B, role string) *process.Generation {
	exe, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	f, err := os.Open(exe)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		b.Fatal(err)
	}
	dir := shortDir(b)
	g, err := process.Start(b.Context(), process.Spec{
		Entry: role, Path: exe, Digest: hex.EncodeToString(h.Sum(nil)), Dir: dir, RunDir: dir,
		Env: []string{"CORDON_BENCH_PLUGIN=" + role},
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = g.Stop(context.Background()) })
	return g
}

// one resolves everything to one provider.
type one struct{ p *route.Provider }

func (o one) Resolve(string, string) (*route.Provider, error) { return o.p, nil }

func (one) Owns(string, string) bool { return true }

func provider(b *testing.B, entry string, g *process.Generation) *route.Provider {
	m, err := g.Kernel().Describe(b.Context(), &kernelv1.DescribeRequest{})
	if err != nil {
		b.Fatal(err)
	}
	return &route.Provider{Entry: entry, Generation: 1, Manifest: m, Conn: g.Conn(), Done: g.Done(), Exit: g.Exit}
}

func setUp(b *testing.B, r *route.Router, p *route.Provider, g *process.Generation) {
	ch, err := r.Open(p)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(ch.Close)
	if _, err := g.Kernel().Setup(b.Context(), &kernelv1.SetupRequest{
		Entry: p.Entry, HostAddress: ch.Address, ChannelToken: ch.Token, LogLevel: "error",
		Facts: map[string]*kernelv1.Facts{"policy": {}},
	}); err != nil {
		b.Fatal(err)
	}
	if _, err := g.Kernel().Activate(b.Context(), &kernelv1.ActivateRequest{}); err != nil {
		b.Fatal(err)
	}
}

// BenchmarkRoutedCall is a capability call plugin → host → plugin against one raw go-plugin unary call. Budget: 3.
func BenchmarkRoutedCall(b *testing.B) {
	calleeG, callerG := startPlugin(b, "callee"), startPlugin(b, "caller")
	calleeP, callerP := provider(b, "callee", calleeG), provider(b, "caller", callerG)
	r := route.New(shortDir(b), one{calleeP}, kernelv1.UnimplementedHostServer{}, slog.New(slog.DiscardHandler))
	setUp(b, r, calleeP, calleeG)
	setUp(b, r, callerP, callerG)
	direct := policyv1.NewPolicyClient(calleeG.Conn())
	raw := func(n int) []time.Duration {
		took, err := times(n, func() error {
			_, err := direct.Resolve(b.Context(), &policyv1.ResolveRequest{})
			return err
		})
		if err != nil {
			b.Fatal(err)
		}
		return took
	}
	routed := func(n int) (took []time.Duration) {
		tree := route.NewTree(route.Call{Session: "s-1"})
		defer tree.End()
		leg, end, err := r.Begin(tree, nil, nil, callerP)
		if err != nil {
			b.Fatal(err)
		}
		defer end()
		reply, err := toolsv1.NewToolsClient(callerP.Conn.(*grpc.ClientConn)).Call(leg.Outgoing(b.Context()), &toolsv1.CallRequest{
			Name: "loop", Arguments: fmt.Append(nil, n),
		})
		if err != nil || reply.GetIsError() {
			b.Fatal(reply, err)
		}
		if err := json.Unmarshal([]byte(reply.GetContent()[0].GetText()), &took); err != nil {
			b.Fatal(err)
		}
		return took
	}
	raw(200)
	routed(200)
	var a, z []time.Duration
	for b.Loop() { // in turns, so that both see the same machine
		a, z = append(a, raw(50)...), append(z, routed(50)...)
	}
	report(b, "raw", a, "routed", z)
}

// report prints two series and the ratio of their medians and 99th percentiles.
func report(b *testing.B, nameA string, a []time.Duration, nameZ string, z []time.Duration) {
	b.ReportMetric(0, "ns/op")
	for _, s := range []struct {
		name string
		d    []time.Duration
	}{{nameA, a}, {nameZ, z}} {
		b.ReportMetric(float64(quantile(s.d, 0.5).Microseconds()), s.name+"-p50-µs")
		b.ReportMetric(float64(quantile(s.d, 0.99).Microseconds()), s.name+"-p99-µs")
	}
	b.ReportMetric(float64(quantile(z, 0.5))/float64(quantile(a, 0.5)), "ratio-p50")
	b.ReportMetric(float64(quantile(z, 0.99))/float64(quantile(a, 0.99)), "ratio-p99")
}

// deployment is the default composition of this repository, trusted, with a state of its own.
func deployment(b *testing.B) host.Options {
	b.Setenv("XDG_RUNTIME_DIR", shortDir(b))
	compose, err := filepath.Abs("../../compose.yml")
	if err != nil {
		b.Fatal(err)
	}
	o := host.Options{Compose: compose, State: filepath.Join(shortDir(b), "state"), Version: "bench", LogLevel: slog.LevelError}
	if _, err := host.Trust(b.Context(), o); err != nil {
		b.Fatal(err)
	}
	return o
}

func startHost(b *testing.B, o host.Options) *host.Host {
	h, err := host.Start(b.Context(), o)
	if err != nil {
		b.Fatal(err)
	}
	return h
}

func stopHost(b *testing.B, h *host.Host) {
	if err := h.Stop(context.Background()); err != nil {
		b.Error(err)
	}
}

// BenchmarkBashCall is a whole bash tool call, from the front end through every plugin process and back, with its log on disk,
// against bare bubblewrap running the same command. Budget: 1.
func BenchmarkBashCall(b *testing.B) {
	testenv.Require(b, "bwrap")
	h := startHost(b, deployment(b))
	b.Cleanup(func() { stopHost(b, h) })
	cwd := shortDir(b)
	first, err := h.Control().Call(b.Context(), &controlv1.CallRequest{Tool: "bash", Arguments: []byte(`{"command":"true"}`), Cwd: cwd})
	if err != nil || first.GetIsError() {
		b.Fatal(first, err)
	}
	var bare, whole []time.Duration
	for b.Loop() {
		start := time.Now()
		if err := exec.Command("bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--unshare-pid", "--unshare-ipc",
			"--cap-drop", "ALL", "--new-session", "--die-with-parent", "--", "bash", "-c", "true").Run(); err != nil {
			b.Fatal(err)
		}
		bare = append(bare, time.Since(start))
		start = time.Now()
		r, err := h.Control().Call(b.Context(), &controlv1.CallRequest{
			Tool: "bash", Arguments: []byte(`{"command":"true"}`), Session: first.GetSession(),
		})
		if err != nil || r.GetIsError() {
			b.Fatal(r, err)
		}
		whole = append(whole, time.Since(start))
	}
	report(b, "bwrap", bare, "call", whole)
}

// BenchmarkStart is the start of the default deployment until it is ready, with everything built, against one bare plugin process with
// AutoMTLS from start to its first answered call.
func BenchmarkStart(b *testing.B) {
	testenv.Require(b, "bwrap")
	o := deployment(b)
	stopHost(b, startHost(b, o)) // builds what is not built
	var bare, ready []time.Duration
	for b.Loop() {
		start := time.Now()
		g := startPlugin(b, "callee")
		if _, err := g.Kernel().Describe(b.Context(), &kernelv1.DescribeRequest{}); err != nil {
			b.Fatal(err)
		}
		bare = append(bare, time.Since(start))
		b.StopTimer()
		if err := g.Stop(b.Context()); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		h := startHost(b, o)
		s, err := h.Control().Status(b.Context(), &controlv1.StatusRequest{})
		if err != nil {
			b.Fatal(err)
		}
		ready = append(ready, time.Duration(s.GetReadyMs())*time.Millisecond)
		b.StopTimer()
		stopHost(b, h)
		b.StartTimer()
	}
	report(b, "plugin", bare, "host", ready)
}

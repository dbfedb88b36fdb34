package plugin_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/testing/protocmp"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	policyv1 "github.com/cordon-host/cordon/api/policy/v1"
	sessionv1 "github.com/cordon-host/cordon/api/session/v1"
	toolsv1 "github.com/cordon-host/cordon/api/tools/v1"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/host/process"
	"github.com/cordon-host/cordon/plugin"
)

type config struct {
	Mode  string `json:"mode" jsonschema:"required,enum=a,enum=b"`
	Panic string `json:"panic,omitempty"`
}

type policyServer struct {
	policyv1.UnimplementedPolicyServer
	config config
}

func (p policyServer) Resolve(ctx context.Context, _ *policyv1.ResolveRequest) (*policyv1.ResolveReply, error) {
	if p.config.Panic == "handler" {
		panic("handler boom")
	}
	return &policyv1.ResolveReply{Mode: p.config.Mode, Source: plugin.Caller(ctx).Session}, nil
}

// example is one plugin, run both ways.
var example = plugin.Plugin[config]{
	Name: "example", Version: "1.2.3",
	Needs:   []plugin.Need{{Capability: "session", Desc: &sessionv1.Session_ServiceDesc, Optional: true}},
	Offers:  []plugin.Offer{{Capability: "policy", Desc: &policyv1.Policy_ServiceDesc}},
	Tools:   []string{"echo"},
	Default: func() config { return config{Mode: "a"} },
	Apply: func(ctx *plugin.Context, c config) error {
		if c.Panic == "apply" {
			panic("apply boom")
		}
		if err := ctx.Provide("policy", policyServer{config: c}, map[string]string{"mode": c.Mode}); err != nil {
			return err
		}
		return ctx.Tool(plugin.Tool{
			Name: "echo", Description: "says it again", InputSchema: json.RawMessage(`{"type":"object"}`),
			Call: func(_ context.Context, args json.RawMessage) (*toolsv1.CallReply, error) {
				if string(args) == "{}" {
					return nil, fault.New(codes.InvalidArgument, "EMPTY", "nothing to say")
				}
				return plugin.Text(string(args)), nil
			},
		})
	},
}

func TestMain(m *testing.M) {
	if os.Getenv("CORDON_TEST_PLUGIN") != "" {
		plugin.Main(example)
	}
	os.Exit(m.Run())
}

// ways are the two ways in which a plugin runs.
var ways = map[string]func(*testing.T) *grpc.ClientConn{"in process": inProcess, "as a process": asProcess}

func inProcess(t *testing.T) *grpc.ClientConn {
	l := bufconn.Listen(1 << 16)
	g := plugin.NewServer(example, slog.New(slog.DiscardHandler)).GRPC()
	go g.Serve(l)
	t.Cleanup(g.Stop)
	conn, err := grpc.NewClient("passthrough:x", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func asProcess(t *testing.T) *grpc.ClientConn {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(exe)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "cordon")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	g, err := process.Start(t.Context(), process.Spec{
		Entry: "example", Path: exe, Digest: hex.EncodeToString(h.Sum(nil)), Dir: dir, RunDir: dir,
		Env: []string{"CORDON_TEST_PLUGIN=1"},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = g.Stop(context.Background()) })
	return g.Conn()
}

// TestSameBothWays runs one plugin through its life in and out of process and expects the same of both.
func TestSameBothWays(t *testing.T) {
	type seen struct {
		Manifest *kernelv1.Manifest
		Setup    *kernelv1.SetupReply
		Early    string
		Resolve  *policyv1.ResolveReply
		Echo     *toolsv1.CallReply
		Empty    *toolsv1.CallReply
		Twice    string
		Drained  string
	}
	got := map[string]seen{}
	for name, way := range ways {
		t.Run(name, func(t *testing.T) {
			conn := way(t)
			kernel, policy, tools := kernelv1.NewPluginClient(conn), policyv1.NewPolicyClient(conn), toolsv1.NewToolsClient(conn)
			var s seen
			var err error
			ok := func(err error) {
				t.Helper()
				if err != nil {
					t.Fatal(err)
				}
			}
			ctx := t.Context()
			s.Manifest, err = kernel.Describe(ctx, &kernelv1.DescribeRequest{})
			ok(err)
			setup := &kernelv1.SetupRequest{Entry: "e", Generation: 1, HostAddress: "unix:/nowhere", Config: []byte(`{"mode":"b"}`)}
			s.Setup, err = kernel.Setup(ctx, setup)
			ok(err)
			_, err = policy.Resolve(ctx, &policyv1.ResolveRequest{})
			s.Early = fault.Reason(err)
			_, err = kernel.Activate(ctx, &kernelv1.ActivateRequest{})
			ok(err)
			s.Resolve, err = policy.Resolve(ctx, &policyv1.ResolveRequest{})
			ok(err)
			s.Echo, err = tools.Call(ctx, &toolsv1.CallRequest{Name: "echo", Arguments: []byte(`{"x":1}`)})
			ok(err)
			s.Empty, err = tools.Call(ctx, &toolsv1.CallRequest{Name: "echo", Arguments: []byte(`{}`)})
			ok(err)
			_, err = kernel.Setup(ctx, setup)
			s.Twice = fault.Reason(err)
			_, err = kernel.Drain(ctx, &kernelv1.DrainRequest{})
			ok(err)
			_, err = policy.Resolve(ctx, &policyv1.ResolveRequest{})
			s.Drained = fault.Reason(err)
			got[name] = s
		})
	}
	a, b := got["in process"], got["as a process"]
	if diff := cmp.Diff(a, b, protocmp.Transform()); diff != "" {
		t.Errorf("the two ways differ:\n%s", diff)
	}
	if a.Early != "NOT_ACTIVE" || a.Twice != "SETUP_TWICE" || a.Drained != "DRAINING" {
		t.Errorf("early %q, twice %q, drained %q", a.Early, a.Twice, a.Drained)
	}
	if string(a.Setup.GetFacts()["policy"].GetJson()) != `{"mode":"b"}` || a.Resolve.GetMode() != "b" {
		t.Errorf("config did not arrive: %v, %v", a.Setup, a.Resolve)
	}
	if !a.Empty.GetIsError() || a.Empty.GetErrorCode() != "EMPTY" {
		t.Errorf("a failing tool: %v", a.Empty)
	}
	if !strings.Contains(string(a.Manifest.GetConfigSchema()), `"additionalProperties":false`) {
		t.Errorf("schema accepts unknown keys: %s", a.Manifest.GetConfigSchema())
	}
}

func TestApplyFailures(t *testing.T) {
	for _, tt := range []struct{ name, config, want string }{
		{"panic", `{"panic":"apply"}`, "apply boom"},
		{"unknown key", `{"mood":"b"}`, "mood"},
		{"two values", `{} {}`, "more than one"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			kernel := kernelv1.NewPluginClient(inProcess(t))
			_, err := kernel.Setup(t.Context(), &kernelv1.SetupRequest{Entry: "e", HostAddress: "unix:/nowhere", Config: []byte(tt.config)})
			if fault.Reason(err) != "APPLY_FAILED" || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("err = %v", err)
			}
		})
	}
}

func TestPanicOfOneCallIsContained(t *testing.T) {
	conn := inProcess(t)
	kernel, policy := kernelv1.NewPluginClient(conn), policyv1.NewPolicyClient(conn)
	if _, err := kernel.Setup(t.Context(), &kernelv1.SetupRequest{Entry: "e", HostAddress: "unix:/nowhere", Config: []byte(`{"panic":"handler"}`)}); err != nil {
		t.Fatal(err)
	}
	if _, err := kernel.Activate(t.Context(), &kernelv1.ActivateRequest{}); err != nil {
		t.Fatal(err)
	}
	_, err := policy.Resolve(t.Context(), &policyv1.ResolveRequest{})
	if fault.Reason(err) != "PANIC" || status.Code(err) != codes.Internal {
		t.Errorf("err = %v", err)
	}
	if _, err := kernel.Describe(t.Context(), &kernelv1.DescribeRequest{}); err != nil {
		t.Errorf("the panic ended the plugin: %v", err)
	}
}

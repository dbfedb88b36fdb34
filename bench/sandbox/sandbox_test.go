//go:build linux

// Package sandbox measures what confinement costs: the same command with and without it, in one run, as ratios. Absolute
// times depend on the machine and its load; both sides of a ratio see the same.
//
//	go test -bench . -benchtime 100x ./bench/sandbox
package sandbox

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	sandboxv1 "github.com/cordon-host/cordon/api/sandbox/v1"
	"github.com/cordon-host/cordon/host/process"
	"github.com/cordon-host/cordon/internal/testenv"
	"github.com/cordon-host/cordon/plugin/launch"
)

var env = []string{"PATH=/usr/bin:/bin"}

// provider is the built plugin as a process of its own, as a deployment has it.
type provider struct {
	client sandboxv1.SandboxClient
	root   string
}

func start(b *testing.B) *provider {
	b.Helper()
	testenv.Require(b, "bwrap")
	dir, err := os.MkdirTemp("", "cordon-bench") // b.TempDir is too long for a socket
	must(b, err)
	b.Cleanup(func() { os.RemoveAll(dir) })
	exe := filepath.Join(dir, "sandbox-local")
	if out, err := exec.Command("go", "build", "-o", exe, "github.com/cordon-host/cordon/plugins/sandbox-local").CombinedOutput(); err != nil {
		b.Fatalf("go build: %v\n%s", err, out)
	}
	image, err := os.ReadFile(exe)
	must(b, err)
	digest := sha256.Sum256(image)
	// Sandboxes replace /tmp, so the workspace is elsewhere.
	parent := "/var/lib"
	if os.Geteuid() != 0 {
		parent, err = os.UserCacheDir()
		must(b, err)
		must(b, os.MkdirAll(parent, 0o700))
	}
	root, err := os.MkdirTemp(parent, "cordon-bench-")
	must(b, err)
	b.Cleanup(func() { os.RemoveAll(root) })

	g, err := process.Start(b.Context(), process.Spec{
		Unconfined: true, // as its row grants it
		Entry:      "sandbox", Path: exe, Digest: hex.EncodeToString(digest[:]), Dir: dir, RunDir: dir,
		Env: process.Environment(nil),
	})
	must(b, err)
	b.Cleanup(func() { _ = g.Stop(context.Background()) })
	// The plugin dials its host when it is set up; this one has nothing to say.
	host := grpc.NewServer(grpc.Creds(insecure.NewCredentials()))
	b.Cleanup(host.Stop)
	_, err = g.Kernel().Setup(b.Context(), &kernelv1.SetupRequest{
		Entry: "sandbox", Generation: 1, Config: []byte(`{"probeTimeoutMs": 60000}`), HostAddress: "unix://" + dir + "/host.sock", LogLevel: "warn",
		Deployment: &kernelv1.Deployment{Id: "bench", Root: root, StateDir: filepath.Join(dir, "state"), TempDir: filepath.Join(dir, "temp")},
	})
	must(b, err)
	_, err = g.Kernel().Activate(b.Context(), &kernelv1.ActivateRequest{})
	must(b, err)
	p := &provider{client: sandboxv1.NewSandboxClient(g.Conn()), root: root}
	p.confine(b, "read-only") // probes
	return p
}

func (p *provider) confine(b *testing.B, mode string, argv ...string) *sandboxv1.Launch {
	b.Helper()
	if len(argv) == 0 {
		argv = []string{"true"}
	}
	reply, err := p.client.Confine(b.Context(), &sandboxv1.ConfineRequest{Argv: argv, Cwd: p.root, Mode: mode, WorkspaceRoot: p.root, Session: "bench"})
	must(b, err)
	return reply.GetLaunch()
}

func run(b *testing.B, spec launch.Spec) {
	spec.Env, spec.Stdout, spec.Stderr = env, io.Discard, io.Discard
	p, err := launch.Start(b.Context(), spec)
	must(b, err)
	if r := p.Wait(); r.Code != 0 {
		b.Errorf("%v: %+v", spec.Argv, r)
	}
}

// variant is one way of running a command.
type variant struct {
	name string
	run  func()
}

// compare runs all variants in turn, so that a load that comes and goes hits all alike, and reports medians and 99th
// percentiles as multiples of the first one's median.
func compare(b *testing.B, variants ...variant) {
	times := make([][]time.Duration, len(variants))
	for b.Loop() {
		for i, v := range variants {
			begin := time.Now()
			v.run()
			times[i] = append(times[i], time.Since(begin))
		}
	}
	at := func(d []time.Duration, q float64) float64 {
		slices.Sort(d)
		return float64(d[int(q*float64(len(d)-1))])
	}
	base := at(times[0], 0.5)
	for i, v := range variants {
		b.ReportMetric(at(times[i], 0.5)/base, v.name+"-p50")
		b.ReportMetric(at(times[i], 0.99)/base, v.name+"-p99")
	}
	b.ReportMetric(base/1e6, "plain-ms")
	b.ReportMetric(0, "ns/op") // of all variants together: no meaning
}

func plain(b *testing.B, argv ...string) variant {
	return variant{"plain", func() {
		cmd := exec.Command(argv[0], argv[1:]...)
		cmd.Env = env
		if err := cmd.Run(); err != nil {
			b.Error(err)
		}
	}}
}

// BenchmarkTrue is `true`, run to completion: what a sandbox costs when a command does nothing.
func BenchmarkTrue(b *testing.B) {
	p := start(b)
	ready := p.confine(b, "workspace-write")
	compare(b,
		plain(b, "/bin/true"),
		variant{"launch", func() { run(b, launch.Spec{Argv: []string{"/bin/true"}}) }},
		variant{"bare-bwrap", func() {
			run(b, launch.Spec{Argv: []string{"bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--die-with-parent", "--", "/bin/true"}})
		}},
		variant{"bwrap", func() { run(b, launch.Spec{Launch: ready}) }},
		variant{"bwrap-read-only", func() { run(b, launch.Spec{Launch: p.confine(b, "read-only")}) }},
		variant{"bwrap-workspace-write", func() { run(b, launch.Spec{Launch: p.confine(b, "workspace-write")}) }},
	)
}

// BenchmarkConfine is the provider's answer alone, over the wire, against a plain `true`.
func BenchmarkConfine(b *testing.B) {
	p := start(b)
	compare(b, plain(b, "/bin/true"), variant{"confine", func() { p.confine(b, "workspace-write") }})
}

// BenchmarkAtOnce is 16 commands at the same time.
func BenchmarkAtOnce(b *testing.B) {
	p := start(b)
	all := func(one func()) func() {
		return func() {
			var wg sync.WaitGroup
			for range 16 {
				wg.Go(one)
			}
			wg.Wait()
		}
	}
	one := plain(b, "/bin/true")
	compare(b, variant{"plain", all(one.run)}, variant{"bwrap", all(func() { run(b, launch.Spec{Launch: p.confine(b, "workspace-write")}) })})
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

package process_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	"github.com/cordon-host/cordon/host/logs"
	"github.com/cordon-host/cordon/host/process"
	"github.com/cordon-host/cordon/internal/testenv"
	"github.com/cordon-host/cordon/plugin"
)

// The test binary is the plugin: with CORDON_TEST_PLUGIN it misbehaves as told.
func TestMain(m *testing.M) {
	how, isPlugin := os.LookupEnv("CORDON_TEST_PLUGIN")
	if !isPlugin {
		os.Exit(m.Run())
	}
	misbehave(how)
}

func misbehave(how string) {
	switch how {
	case "print":
		fmt.Println("hello from init")
		fmt.Println("1|2|not a handshake")
	case "longline":
		os.Stdout.Write(bytes.Repeat([]byte("x"), 200<<10))
		fmt.Println()
	case "half":
		fmt.Print("no end of line") // the handshake comes behind it
	case "late":
		// After the handshake, where go-plugin does not read any more.
		go func() {
			time.Sleep(100 * time.Millisecond)
			os.Stdout.Write(bytes.Repeat([]byte("y"), 200<<10))
			fmt.Println()
		}()
	case "quit":
		f, err := os.OpenFile(os.Getenv("CORDON_TEST_FILE"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
		if err != nil {
			panic(err)
		}
		fmt.Fprintln(f, "spawned")
		os.Exit(3)
	case "panic":
		panic("init boom")
	case "deep":
		deep(40)
	case "hugeshake":
		fmt.Println("1|1|unix|/x|grpc|" + strings.Repeat("A", 60<<10))
	case "grandchild":
		// A child in the group that holds both pipes open.
		cmd := exec.Command("sleep", "300")
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
		if err := cmd.Start(); err != nil {
			panic(err)
		}
		_ = os.WriteFile(os.Getenv("CORDON_TEST_FILE"), []byte(strconv.Itoa(cmd.Process.Pid)), 0o600)
	case "environ":
		if err := os.WriteFile(os.Getenv("CORDON_TEST_FILE"), []byte(strings.Join(os.Environ(), "\x00")), 0o600); err != nil {
			panic(err)
		}
	case "eat":
		eat()
	case "breed":
		breed()
	case "hang":
		select {}
	case "reach":
		reach()
	case "old":
		old()
	case "host":
		hostAndPlugin()
	}
	plugin.Main(plugin.Plugin[struct{}]{
		Name: "helper", Version: "1",
		Apply: func(ctx *plugin.Context, _ struct{}) error {
			if err := apply(ctx, how); err != nil {
				return err
			}
			return ctx.Effect("mark", func(context.Context) error {
				if f := os.Getenv("CORDON_TEST_FILE"); f != "" && how == "stop" {
					return os.WriteFile(f, []byte("stopped"), 0o600)
				}
				return nil
			})
		},
	})
}

// book is the log of a helper.
type book struct {
	*testing.T
	*logs.Book
}

// all are the records so far.
func (b *book) all() (out []logs.Record) {
	b.Helper()
	if err := b.Read(b.Context(), logs.Query{Entry: "helper", Level: -100, Tail: -1}, func(r logs.Record) error {
		out = append(out, r)
		return nil
	}); err != nil {
		b.Fatal(err)
	}
	return out
}

// errFound ends a search.
var errFound = errors.New("found")

// await waits for a record; the test's own deadline ends the wait.
func (b *book) await(is func(logs.Record) bool) (found logs.Record) {
	b.Helper()
	err := b.Read(b.Context(), logs.Query{Entry: "helper", Level: -100, Tail: -1, Follow: true}, func(r logs.Record) error {
		if is(r) {
			found = r
			return errFound
		}
		return nil
	})
	if !errors.Is(err, errFound) {
		b.Fatalf("no such record: %v", err)
	}
	return found
}

func says(text string) func(logs.Record) bool {
	return func(r logs.Record) bool { return strings.Contains(r.Message, text) }
}

func spec(t *testing.T, how string) (process.Spec, *book) {
	t.Helper()
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
	run, err := os.MkdirTemp("", "cordon") // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(run) })
	log := &book{T: t, Book: logs.NewBook(slog.DiscardHandler, slog.LevelInfo)}
	return process.Spec{
		Entry: "helper", Path: exe, Digest: hex.EncodeToString(h.Sum(nil)), Dir: run, RunDir: run,
		Env: process.Environment(map[string]string{"CORDON_TEST_PLUGIN": how, "CORDON_TEST_FILE": filepath.Join(run, "file")}),
		Log: log.Writer("helper", 1),
	}, log
}

func start(t *testing.T, s process.Spec) *process.Generation {
	t.Helper()
	g, err := process.Start(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = g.Stop(context.Background()) })
	if _, err := g.Kernel().Describe(t.Context(), &kernelv1.DescribeRequest{}); err != nil {
		t.Fatal(err)
	}
	return g
}

// gone waits until a process does not exist, and fails if it does not come to that.
func gone(t *testing.T, pid int) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for alive(pid) {
		if time.Now().After(deadline) {
			t.Fatalf("process %d is still there", pid)
		}
		time.Sleep(5 * time.Millisecond) // there is no event for a process that is not ours
	}
}

func alive(pid int) bool {
	stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	return err == nil && !strings.Contains(string(stat), ") Z ")
}

func TestStartAndStop(t *testing.T) {
	s, log := spec(t, "stop")
	g := start(t, s)
	if _, err := g.Kernel().Setup(t.Context(), &kernelv1.SetupRequest{Entry: "helper", HostAddress: "unix:/nowhere"}); err != nil {
		t.Fatal(err)
	}
	pid := g.PID()
	if err := g.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	gone(t, pid)
	if g.Exit() != "exit code 0" || g.Crash() != nil {
		t.Errorf("exit = %q, crash %v", g.Exit(), g.Crash())
	}
	if text, err := os.ReadFile(filepath.Join(s.RunDir, "file")); string(text) != "stopped" {
		t.Errorf("the stop hook did not run: %q, %v", text, err)
	}
	for _, r := range log.all() {
		if r.Level >= slog.LevelWarn {
			t.Errorf("a normal stop is an alarm: %+v", r)
		}
	}
}

func TestHandshakeIsImmuneToPrints(t *testing.T) {
	for _, tt := range []struct{ how, logged string }{
		{"print", "hello from init"},
		{"longline", "xxxxxxxx"},
		{"half", "no end of line"},
	} {
		t.Run(tt.how, func(t *testing.T) {
			s, log := spec(t, tt.how)
			start(t, s)
			if r := log.await(says(tt.logged)); r.Stream != logs.StreamStdout {
				t.Errorf("what was printed is of %s", r.Stream)
			}
		})
	}
}

func TestStartErrorQuotesThePanic(t *testing.T) {
	s, _ := spec(t, "panic")
	_, err := process.Start(t.Context(), s)
	var start *process.StartError
	if !errors.As(err, &start) {
		t.Fatalf("err = %v", err)
	}
	for _, want := range []string{"init boom", "process_test.go:", "exit code 2"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in %q", want, err)
		}
	}
}

func TestStartTimeoutLeavesNothing(t *testing.T) {
	s, _ := spec(t, "hang")
	s.StartTimeout = 300 * time.Millisecond
	_, err := process.Start(t.Context(), s)
	var late *process.StartError
	if !errors.As(err, &late) || late.Phase != process.PhaseHandshake || late.Timeout != s.StartTimeout {
		t.Fatalf("err = %v", err)
	}
	if !strings.Contains(err.Error(), "timeouts.start") || !strings.Contains(err.Error(), "300ms") {
		t.Errorf("the error does not say what to raise: %v", err)
	}
	left, err := os.ReadDir(s.RunDir)
	if err != nil || len(left) != 0 {
		t.Errorf("run directory holds %v, %v", left, err)
	}
	// The next attempt owes nothing to this one.
	again, _ := spec(t, "stop")
	start(t, again)
}

func TestStopIsBoundedAndTakesTheGroup(t *testing.T) {
	s, _ := spec(t, "grandchild")
	g := start(t, s)
	text, err := os.ReadFile(filepath.Join(s.RunDir, "file"))
	if err != nil {
		t.Fatal(err)
	}
	child, err := strconv.Atoi(string(text))
	if err != nil {
		t.Fatal(err)
	}
	if !alive(child) {
		t.Fatal("the grandchild is not there to begin with")
	}
	// A frozen plugin answers nothing.
	if err := unix.Kill(g.PID(), unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_ = g.Stop(ctx) // the error is the deadline
	gone(t, g.PID())
	gone(t, child)
}

func TestChangedExecutableDoesNotRun(t *testing.T) {
	s, _ := spec(t, "stop")
	s.Digest = strings.Repeat("0", 64)
	_, err := process.Start(t.Context(), s)
	var start *process.StartError
	if !errors.As(err, &start) || start.Phase != process.PhaseHash || !strings.Contains(err.Error(), "changed after it was checked") {
		t.Fatalf("err = %v", err)
	}
}

func TestCrashIsReported(t *testing.T) {
	s, _ := spec(t, "stop")
	g := start(t, s)
	if err := unix.Kill(g.PID(), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-g.Done()
	if c := g.Crash(); g.Exit() != "signal SIGKILL" || c == nil || c.Exit != g.Exit() || c.Trace != "" {
		t.Errorf("exit = %q, crash %+v", g.Exit(), c)
	}
}

func TestEnvironmentIsAnAllowList(t *testing.T) {
	t.Setenv("DB_PASSWORD", "secret")
	t.Setenv("LC_TIME", "C")
	env := strings.Join(process.Environment(map[string]string{"OWN": "yes", "PATH": "/row"}), "\n")
	for _, want := range []string{"OWN=yes", "PATH=/row", "LC_TIME=C"} {
		if !strings.Contains(env, want) {
			t.Errorf("%s is missing", want)
		}
	}
	if strings.Contains(env, "DB_PASSWORD") || strings.Count(env, "PATH=") != 1 {
		t.Errorf("environment leaks: %s", env)
	}
}

// reach tries what a confined plugin must not be able to do, and what it must, and writes down what worked.
func reach() {
	own, outside := os.Getenv("CORDON_TEST_FILE"), os.Getenv("CORDON_TEST_OUTSIDE")
	var worked []string
	try := func(name string, err error) {
		if err == nil {
			worked = append(worked, name)
		}
	}
	_, err := os.ReadFile(filepath.Join(outside, "secret"))
	try("read outside", err)
	try("write outside", os.WriteFile(filepath.Join(outside, "made"), []byte("x"), 0o600))
	try("remove outside", os.Remove(filepath.Join(outside, "remove")))
	try("exec outside", exec.Command(filepath.Join(outside, "script")).Run())
	_, err = net.Dial("tcp", os.Getenv("CORDON_TEST_TCP"))
	try("tcp", err)
	try("signal the host", unix.Kill(os.Getppid(), 0))
	try("exec a system program", exec.Command("true").Run())
	status, err := os.ReadFile("/proc/self/status")
	try("read a system file", err)
	if strings.Contains(string(status), "CapEff:\t0000000000000000") {
		worked = append(worked, "no capabilities")
	}
	if err := os.WriteFile(own, []byte(strings.Join(worked, ", ")), 0o600); err != nil {
		panic(err)
	}
}

func TestConfinement(t *testing.T) {
	if gap := process.Confinable(); gap != "" {
		testenv.Require(t, "landlock", func() error { return errors.New(gap) })
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, tt := range []struct {
		unconfined bool
		want       string
	}{
		{false, "exec a system program, read a system file, no capabilities"},
		{true, "read outside, write outside, remove outside, exec outside, tcp, signal the host, exec a system program, read a system file"},
	} {
		outside := t.TempDir()
		for name, mode := range map[string]os.FileMode{"secret": 0o600, "remove": 0o600, "script": 0o700} {
			if err := os.WriteFile(filepath.Join(outside, name), []byte("#!/bin/sh\n"), mode); err != nil {
				t.Fatal(err)
			}
		}
		s, _ := spec(t, "reach")
		s.Unconfined = tt.unconfined
		s.Env = append(s.Env, "CORDON_TEST_OUTSIDE="+outside, "CORDON_TEST_TCP="+l.Addr().String())
		start(t, s)
		text, err := os.ReadFile(filepath.Join(s.RunDir, "file"))
		if err != nil {
			t.Fatal(err)
		}
		got := string(text)
		if os.Geteuid() != 0 {
			got = strings.TrimSuffix(got, ", no capabilities")
			tt.want = strings.TrimSuffix(tt.want, ", no capabilities")
		}
		if got != tt.want {
			t.Errorf("unconfined %v: it could %q, want %q", tt.unconfined, got, tt.want)
		}
		if _, err := os.Stat(filepath.Join(outside, "made")); (err == nil) != tt.unconfined {
			t.Errorf("unconfined %v: the file outside: %v", tt.unconfined, err)
		}
	}
}

// hostAndPlugin is a host that starts a plugin, tells its pid and waits to be killed.
func hostAndPlugin() {
	s := process.Spec{
		Entry: "helper", Path: "/proc/self/exe", Digest: os.Getenv("CORDON_TEST_DIGEST"),
		RunDir: os.Getenv("CORDON_TEST_RUN"), Dir: os.Getenv("CORDON_TEST_RUN"),
		Env: []string{"CORDON_TEST_PLUGIN=stop"},
	}
	g, err := process.Start(context.Background(), s)
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(g.PID())
	select {}
}

func TestKilledHostLeavesNoPlugin(t *testing.T) {
	s, _ := spec(t, "")
	cmd := exec.Command(s.Path)
	cmd.Env = append(os.Environ(), "CORDON_TEST_PLUGIN=host", "CORDON_TEST_DIGEST="+s.Digest, "CORDON_TEST_RUN="+s.RunDir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var pid int
	if _, err := fmt.Fscan(out, &pid); err != nil {
		t.Fatal(err)
	}
	if !alive(pid) {
		t.Fatal("the plugin is not there to begin with")
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	gone(t, pid)
}

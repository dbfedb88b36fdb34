package process_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	goplugin "github.com/hashicorp/go-plugin"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	"github.com/cordon-host/cordon/host/logs"
	"github.com/cordon-host/cordon/host/process"
	"github.com/cordon-host/cordon/plugin"
)

// apply is what helpers do when they are set up.
func apply(c *plugin.Context, how string) error {
	switch how {
	case "die":
		go func() { panic("late boom") }()
		select {}
	case "overflow":
		go func() { depth = recurse(1) }()
		select {}
	case "fatal":
		log.Fatal("cannot go on")
	case "refuse":
		return errors.New("no such database")
	case "slow":
		select {}
	case "loggers":
		slog.Error(strings.Repeat("e", 100<<10), "n", 1)
		slog.With("a", 1).WithGroup("g").Warn("grouped", "b", 2)
		log.Print("by package log")
		hclog.Default().Named("lib").With("k", "v").Error("by hclog", "x", 1)
		c.Logger().Info("by the context")
		slog.Debug("too quiet")
		slog.Info(strings.Repeat("l", 2<<20))
		fmt.Fprintln(os.Stderr, "printed on stderr")
	case "flood":
		for i := range 100_000 {
			slog.Info("flood", "i", i)
		}
		slog.Error("behind the flood")
	case "debug":
		for i := range 200_000 {
			slog.Debug("nobody wants this", "i", i)
		}
	case "chatty":
		go func() {
			for {
				slog.Debug("tick")
				time.Sleep(time.Millisecond)
			}
		}()
	case "lastwords":
		return c.Effect("last words", func(context.Context) error {
			for i := range 500 {
				slog.Info("last words", "i", i)
			}
			slog.Info("the very last")
			return nil
		})
	case "escape":
		// A descendant outside of the group that holds both pipes.
		cmd := exec.Command("sleep", "300")
		cmd.Stdout, cmd.Stderr = os.NewFile(1, "stdout"), os.NewFile(2, "stderr")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if err := cmd.Start(); err != nil {
			return err
		}
		return os.WriteFile(os.Getenv("CORDON_TEST_FILE"), []byte(strconv.Itoa(cmd.Process.Pid)), 0o600)
	case "survived":
		// On the process's own stderr, as a child of it would print.
		fmt.Fprint(os.NewFile(2, "stderr"), "panic: of somebody else\n\ngoroutine 1 [running]:\nmain.main()\n")
	}
	return nil
}

// old is a plugin of another SDK: it serves the kernel protocol without the control stream, and logs on stderr.
func old() {
	fmt.Fprintln(os.Stderr, `{"@level":"error","@message":"over stderr","@timestamp":"2026-01-02T03:04:05.000000Z","k":1}`)
	fmt.Fprintln(os.Stderr, `{"@level":"error","@message":"`+strings.Repeat("m", 2<<20)+`"}`)
	goplugin.Serve(&goplugin.ServeConfig{
		HandshakeConfig: plugin.Handshake,
		Plugins:         goplugin.PluginSet{"cordon": plugin.Glue{}},
		GRPCServer: func(opts []grpc.ServerOption) *grpc.Server {
			s := grpc.NewServer(opts...)
			kernelv1.RegisterPluginServer(s, describer{})
			return s
		},
		Logger: hclog.NewNullLogger(),
	})
}

type describer struct {
	kernelv1.UnimplementedPluginServer
}

func (describer) Describe(context.Context, *kernelv1.DescribeRequest) (*kernelv1.Manifest, error) {
	return &kernelv1.Manifest{}, nil
}

// deep panics below enough frames for the panic's own line to be far from the end.
func deep(n int) {
	if n == 0 {
		panic("deep boom")
	}
	deep(n - 1)
}

// recurse overflows the stack, long before it could count to its end.
func recurse(n int) int {
	if n == 0 {
		return 0
	}
	return recurse(n+1) + 1
}

var depth int // keeps the recursion from being dropped

func setup(t *testing.T, g *process.Generation) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, err := g.Kernel().Setup(ctx, &kernelv1.SetupRequest{Entry: "helper", Generation: 1, HostAddress: "unix:/nowhere", LogLevel: "info"})
	return err
}

func mustSetup(t *testing.T, g *process.Generation) {
	t.Helper()
	if err := setup(t, g); err != nil {
		t.Fatal(err)
	}
}

// Every logger an author may use ends in the same log, whole, with its level and its attributes.
func TestLoggersReachTheHost(t *testing.T) {
	s, log := spec(t, "loggers")
	mustSetup(t, start(t, s))
	log.await(says("printed on stderr"))
	log.await(func(r logs.Record) bool { return strings.HasPrefix(r.Message, "lll") })
	type short struct {
		stream, message, attributes string
		level                       slog.Level
		truncated                   bool
	}
	var got []short
	for _, r := range log.all() {
		if r.Entry != "helper" || r.Generation != 1 || r.Time.IsZero() {
			t.Errorf("a record without its origin: %+v", r)
		}
		m := r.Message
		if len(m) > 100 {
			m = fmt.Sprintf("%c×%d", m[0], len(m))
		}
		got = append(got, short{r.Stream, m, string(r.Attributes), r.Level, r.Truncated})
	}
	for _, want := range []short{
		{logs.StreamLog, "e×102400", `{"n":1}`, slog.LevelError, false},
		{logs.StreamLog, "grouped", `{"a":1,"g":{"b":2}}`, slog.LevelWarn, false},
		{logs.StreamLog, "by package log", "", slog.LevelInfo, false},
		{logs.StreamLog, "by hclog", `{"module":"lib","k":"v","x":1}`, slog.LevelError, false},
		{logs.StreamLog, "by the context", "", slog.LevelInfo, false},
		{logs.StreamLog, "l×1048576", "", slog.LevelInfo, true},
		{logs.StreamStderr, "printed on stderr", "", slog.LevelInfo, false},
	} {
		if n := len(slices.DeleteFunc(slices.Clone(got), func(s short) bool { return s != want })); n != 1 {
			t.Errorf("%d records %+v", n, want)
		}
	}
	if len(got) != 7 {
		t.Errorf("%d records: %+v", len(got), got)
	}
}

// A plugin that logs as fast as it can is not held up, its host keeps little, and what is missing is counted.
func TestFloodIsBoundedAndCounted(t *testing.T) {
	s, log := spec(t, "flood")
	g := start(t, s)
	mustSetup(t, g)
	// The plugin still answers, and what it says now is heard in time.
	if _, err := g.Kernel().Describe(t.Context(), &kernelv1.DescribeRequest{}); err != nil {
		t.Fatal(err)
	}
	if err := g.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	var kept, dropped uint64
	for _, r := range log.all() {
		kept++
		dropped += r.Dropped
	}
	if kept > logs.MaxRecords || dropped == 0 {
		t.Errorf("%d records kept, %d dropped", kept, dropped)
	}
}

// What the host does not want is not sent, and it can change its mind while the plugin runs.
func TestLevelIsKeptByThePlugin(t *testing.T) {
	s, log := spec(t, "debug")
	log.SetLevel("", slog.LevelWarn)
	g := start(t, s)
	mustSetup(t, g)
	if frames := g.Frames(); frames > 100 {
		t.Errorf("%d frames for records that nobody wants", frames)
	}

	s, log = spec(t, "chatty")
	g = start(t, s)
	mustSetup(t, g)
	if _, err := g.Kernel().Describe(t.Context(), &kernelv1.DescribeRequest{}); err != nil {
		t.Fatal(err)
	}
	if all := log.all(); len(all) != 0 {
		t.Errorf("records below the level: %+v", all)
	}
	log.SetLevel("helper", slog.LevelDebug)
	log.await(says("tick"))
	log.SetLevel("helper", slog.LevelError)
	// Once the plugin knows, nothing comes any more: beats do, and they come behind what was sent before.
	seen := g.Frames()
	for still := uint64(0); still != seen; {
		still = seen
		time.Sleep(50 * time.Millisecond) // fifty ticks of the plugin
		seen = g.Frames()
	}
}

func TestLastWordsAreFlushed(t *testing.T) {
	s, log := spec(t, "lastwords")
	g := start(t, s)
	mustSetup(t, g)
	if err := g.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	all := log.all()
	if len(all) != 501 || all[500].Message != "the very last" {
		t.Errorf("%d records", len(all))
	}
}

// A plugin that is frozen answers no beats and is ended; one that answers them is left alone.
func TestFrozenPluginIsEnded(t *testing.T) {
	healthy, _ := spec(t, "stop")
	healthy.BeatTimeout = 3 * time.Second
	other := start(t, healthy)

	s, _ := spec(t, "stop")
	s.BeatTimeout = 300 * time.Millisecond
	g := start(t, s)
	before := g.Frames()
	for g.Frames() == before { // it does answer
		time.Sleep(time.Millisecond)
	}
	if err := unix.Kill(g.PID(), unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	select {
	case <-g.Done():
	case <-t.Context().Done():
		t.Fatal("a frozen plugin lives on")
	}
	c := g.Crash()
	if c == nil || !strings.Contains(c.Exit, "signal SIGKILL; it did not answer beats for 300ms") {
		t.Errorf("crash = %+v", c)
	}
	select {
	case <-other.Done():
		t.Error("a healthy plugin was ended: " + other.Exit())
	default:
	}
}

// A plugin that nobody can reach any more is of no use, even if its process is well.
func TestLostConnectionEndsTheProcess(t *testing.T) {
	s, _ := spec(t, "stop")
	g := start(t, s)
	if err := g.Conn().Close(); err != nil { // what a connection that broke looks like from here
		t.Fatal(err)
	}
	<-g.Done()
	if !strings.Contains(g.Crash().Exit, "its connection is lost") {
		t.Errorf("exit = %q", g.Exit())
	}
}

func TestPanicIsOneReport(t *testing.T) {
	for _, tt := range []struct{ how, trace, frame string }{
		{"die", "panic: late boom", "supervision_test.go:"},
		{"overflow", "fatal error: stack overflow", "process_test.recurse("},
	} {
		t.Run(tt.how, func(t *testing.T) {
			s, log := spec(t, tt.how)
			g := start(t, s)
			err := setup(t, g)
			if err == nil {
				t.Fatal("a dead plugin was set up")
			}
			<-g.Done()
			c := g.Crash()
			if c == nil || c.Exit != "exit code 2" || !strings.Contains(c.Trace, tt.trace) || !strings.Contains(c.Trace, tt.frame) {
				t.Fatalf("crash = %+v", c)
			}
			if len(c.Head()) > process.CrashHead || !strings.HasPrefix(c.Trace, c.Head()) || c.Head() == "" {
				t.Errorf("head of %d bytes", len(c.Head()))
			}
			for _, r := range log.all() {
				if strings.Contains(r.Message, "goroutine ") {
					t.Errorf("a part of the trace is a record of its own: %q", r.Message)
				}
			}
			failed := g.Failed(process.PhaseSetup, 0, err)
			for _, want := range []string{"setup: ", "exit code 2", tt.trace} {
				if !strings.Contains(failed.Error(), want) {
					t.Errorf("%q is not in %q", want, failed)
				}
			}
		})
	}
}

// The line that says why is quoted, however long the stacks behind it are.
func TestStartErrorQuotesTheHeadOfTheTrace(t *testing.T) {
	s, _ := spec(t, "deep")
	_, err := process.Start(t.Context(), s)
	var e *process.StartError
	if !errors.As(err, &e) || e.Phase != process.PhaseHandshake || strings.Contains(e.Stderr, "deep boom") || !strings.Contains(err.Error(), "panic: deep boom") {
		t.Errorf("err = %v", err)
	}
}

// A trace that did not end its process is an error in the log, and no crash.
func TestTraceOfSomebodyElse(t *testing.T) {
	s, log := spec(t, "survived")
	g := start(t, s)
	mustSetup(t, g)
	r := log.await(says("panic: of somebody else"))
	if r.Level != slog.LevelError || !strings.Contains(r.Message, "main.main()") {
		t.Errorf("record %+v", r)
	}
}

func TestFatalIsTheLastWord(t *testing.T) {
	s, _ := spec(t, "fatal")
	g := start(t, s)
	err := setup(t, g)
	if failed := g.Failed(process.PhaseSetup, 0, err); !strings.Contains(failed.Error(), "(exit code 1); its last words:\ncannot go on") {
		t.Errorf("err = %v", failed)
	}
}

func TestSetupErrorsNameTheirPhase(t *testing.T) {
	s, _ := spec(t, "refuse")
	g := start(t, s)
	if failed := g.Failed(process.PhaseSetup, 0, setup(t, g)); failed.Error() != "plugin helper: setup: no such database" {
		t.Errorf("err = %v", failed)
	}
	s, _ = spec(t, "slow")
	g = start(t, s)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := g.Kernel().Setup(ctx, &kernelv1.SetupRequest{Entry: "helper", HostAddress: "unix:/nowhere"})
	failed := g.Failed(process.PhaseSetup, 50*time.Millisecond, err)
	if !strings.Contains(failed.Error(), "plugin helper: setup: not done within 50ms, which timeouts.start of its row can raise") {
		t.Errorf("err = %v", failed)
	}
	if tm := g.Timings(); tm.Hash <= 0 || tm.Exec <= 0 || tm.Handshake <= 0 {
		t.Errorf("timings %+v", tm)
	}
}

// Whatever is done with a start that failed, there is one process of it.
func TestFailedStartSpawnsOnce(t *testing.T) {
	s, _ := spec(t, "quit")
	_, err := process.Start(t.Context(), s)
	var e *process.StartError
	if !errors.As(err, &e) || e.Phase != process.PhaseHandshake || e.Exit != "exit code 3" || e.Timeout != 0 {
		t.Errorf("err = %v", err)
	}
	if text, err := os.ReadFile(filepath.Join(s.RunDir, "file")); string(text) != "spawned\n" {
		t.Errorf("spawns: %q, %v", text, err)
	}
}

func TestCancelledStartLeavesNothing(t *testing.T) {
	s, _ := spec(t, "hang")
	ctx, cancel := context.WithCancel(t.Context())
	process.BeforeExec(func(string) { cancel() })
	defer process.BeforeExec(func(string) {})
	_, err := process.Start(ctx, s)
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("err = %v", err)
	}
	var e *process.StartError
	if !errors.As(err, &e) || e.Phase != process.PhaseExec || e.Exit != "" {
		t.Errorf("err = %#v", err)
	}
}

// Nothing that a plugin prints in place of a handshake may hold its host up.
func TestHugeHandshake(t *testing.T) {
	s, log := spec(t, "hugeshake")
	start(t, s)
	if r := log.await(says("1|1|unix|/x|grpc|AAA")); r.Stream != logs.StreamStdout {
		t.Errorf("record %+v", r)
	}
}

func TestLongLineAfterTheHandshake(t *testing.T) {
	s, log := spec(t, "late")
	g := start(t, s)
	r := log.await(says("yyyyyyyy"))
	if len(r.Message) != 200<<10 || r.Truncated {
		t.Errorf("%d bytes, truncated %v", len(r.Message), r.Truncated)
	}
	if _, err := g.Kernel().Describe(t.Context(), &kernelv1.DescribeRequest{}); err != nil {
		t.Error(err)
	}
}

// Between the check and the execution the file is replaced: what was checked runs. Or written to: nothing runs.
func TestExecutableChangesBetweenCheckAndExec(t *testing.T) {
	private := func(t *testing.T) process.Spec {
		s, _ := spec(t, "stop")
		to := filepath.Join(s.RunDir, "exe")
		copyFile(t, s.Path, to)
		s.Path = to
		return s
	}
	defer process.BeforeExec(func(string) {})
	t.Run("replaced", func(t *testing.T) {
		s := private(t)
		ran := filepath.Join(s.RunDir, "ran")
		process.BeforeExec(func(path string) {
			other := path + ".new"
			if err := os.WriteFile(other, []byte("#!/bin/sh\ntouch "+ran+"\n"), 0o700); err != nil {
				t.Error(err)
			}
			if err := os.Rename(other, path); err != nil {
				t.Error(err)
			}
		})
		start(t, s) // answers Describe, so it is what was checked
		if _, err := os.Stat(ran); err == nil {
			t.Error("the other file ran")
		}
	})
	t.Run("written to", func(t *testing.T) {
		s := private(t)
		process.BeforeExec(func(path string) {
			f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
			if err != nil {
				t.Error(err)
				return
			}
			_, err = f.WriteString("x")
			if err := errors.Join(err, f.Close()); err != nil {
				t.Error(err)
			}
		})
		_, err := process.Start(t.Context(), s)
		var e *process.StartError
		if !errors.As(err, &e) || e.Phase != process.PhaseExec || !strings.Contains(err.Error(), "changed after it was checked") {
			t.Errorf("err = %v", err)
		}
	})
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	in, err := os.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY, 0o700)
	if err != nil {
		t.Fatal(err)
	}
	_, err = io.Copy(out, in)
	if err := errors.Join(err, out.Close()); err != nil {
		t.Fatal(err)
	}
}

// A descendant that left the group cannot hold the stop up, though it holds the pipes.
func TestEscapedDescendantDoesNotHoldTheStopUp(t *testing.T) {
	s, _ := spec(t, "escape")
	g := start(t, s)
	mustSetup(t, g)
	text, err := os.ReadFile(filepath.Join(s.RunDir, "file"))
	if err != nil {
		t.Fatal(err)
	}
	child, err := strconv.Atoi(string(text))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Kill(child, unix.SIGKILL) })
	if err := g.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !alive(child) {
		t.Error("the descendant is gone, so this showed nothing")
	}
}

// Crashes leave nothing behind in the host: no goroutine, no descriptor, no zombie, no file.
func TestCrashesLeaveNothing(t *testing.T) {
	s, _ := spec(t, "stop")
	crash := func() {
		g, err := process.Start(t.Context(), s)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Kill(g.PID(), unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		<-g.Done()
		if err := g.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	crash() // what is made once is made now
	ignore := goleak.IgnoreCurrent()
	before := descriptors(t)
	cycles := 15
	if os.Getenv("CORDON_TEST_TIER") == "nightly" {
		cycles = 200
	}
	for range cycles {
		crash()
	}
	goleak.VerifyNone(t, ignore)
	if after := descriptors(t); after > before {
		t.Errorf("%d descriptors, %d before", after, before)
	}
	if z := zombies(t); z != 0 {
		t.Errorf("%d zombies", z)
	}
	if left, err := os.ReadDir(s.RunDir); err != nil || len(left) != 0 {
		t.Errorf("run directory holds %v, %v", left, err)
	}
}

func descriptors(t *testing.T) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// zombies counts the children of this process that nobody waited for.
func zombies(t *testing.T) (n int) {
	t.Helper()
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range stats {
		text, err := os.ReadFile(f)
		_, rest, ok := bytes.Cut(text, []byte(") "))
		if err == nil && ok && bytes.HasPrefix(rest, []byte("Z "+strconv.Itoa(os.Getpid())+" ")) {
			n++
		}
	}
	return n
}

// A plugin that is not made with this SDK and does not know the control stream is left in peace, and heard on stderr.
func TestPluginWithoutControl(t *testing.T) {
	s, log := spec(t, "old")
	s.BeatTimeout = 100 * time.Millisecond
	g := start(t, s)
	r := log.await(says("over stderr"))
	if r.Level != slog.LevelError || r.Stream != logs.StreamLog || string(r.Attributes) != `{"k":1}` {
		t.Errorf("record %+v", r)
	}
	long := log.await(func(r logs.Record) bool { return r.Truncated })
	if long.Level != slog.LevelError || len(long.Message) != 1<<20 {
		t.Errorf("a record that is too long: level %v, %d bytes", long.Level, len(long.Message))
	}
	time.Sleep(300 * time.Millisecond) // more than it takes to be called stuck
	select {
	case <-g.Done():
		t.Error("it was ended: " + g.Exit())
	default:
	}
}

// Starts do not wait for each other.
func TestStartsAreIndependent(t *testing.T) {
	slow, _ := spec(t, "hang")
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { _, _ = process.Start(ctx, slow) })
	fast, _ := spec(t, "stop")
	start(t, fast)
	cancel()
	wg.Wait()
}

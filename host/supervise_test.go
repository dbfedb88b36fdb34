package host

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/host/process"
)

// A plugin that panics takes its own calls with it and no others; they get the trace; it comes back by itself; and everybody can see what
// happened, once.
func TestCrashIsReportedAndComesBack(t *testing.T) {
	w := newWorld(t, row{"a", ""}, row{"b", ""})
	w.mustStart()
	first := w.status("a")
	served, err := w.serving("a")
	if err != nil {
		t.Fatal(err)
	}
	w.flag("b", "hold")
	var calls sync.WaitGroup
	calls.Go(func() {
		if r := w.poke("b", "hold"); r.GetIsError() {
			t.Errorf("the call of another plugin failed: %v", r)
		}
	})
	if r := w.poke("a", "die"); r.GetErrorCode() != "PLUGIN_CRASHED" || !strings.Contains(r.GetTexts()[0], "exit code 2") {
		t.Errorf("the call that died with it: %v", r)
	}
	s := w.active("a", first.GetGeneration()+1)
	w.unflag("b", "hold")
	calls.Wait()
	c := s.GetCrash()
	if c.GetGeneration() != first.GetGeneration() || c.GetExit() != "exit code 2" || !strings.HasPrefix(c.GetTrace(), "panic: boom in a goroutine") || len(c.GetTrace()) > process.CrashHead {
		t.Errorf("the status's crash is %v", c)
	}
	if s.GetPid() == first.GetPid() {
		t.Error("it is the same process")
	}
	if r := w.poke("a", "ok"); r.GetIsError() {
		t.Errorf("a later call: %v", r)
	}
	var f *kernelv1.PluginFault
	if err := served.provider.Broken("x"); !fault.Detail(err, &f) || f.GetReason() != "PLUGIN_CRASHED" || f.GetCrash() != c.GetTrace() ||
		!strings.HasPrefix(f.GetExit(), "exit code 2") || f.GetGeneration() != first.GetGeneration() || f.GetRetryable() {
		t.Errorf("the fault of a call that died with it: %v", f)
	}
	var reports int
	for _, l := range w.log("a") {
		if strings.Contains(string(l.GetAttributes())+l.GetMessage(), "goroutine ") {
			reports++
			var attrs struct{ Exit, Trace string }
			if err := json.Unmarshal(l.GetAttributes(), &attrs); err != nil || l.GetLevel() != "error" || l.GetStream() != "host" ||
				l.GetMessage() != "plugin crashed" || !strings.Contains(attrs.Trace, "world_test.go:") || attrs.Exit != "exit code 2" {
				t.Errorf("record %v, %v", l, err)
			}
		}
	}
	if reports != 1 {
		t.Errorf("%d records have the trace", reports)
	}
	if l := w.log("b"); len(l) != 0 {
		t.Errorf("the other's log: %v", l)
	}
}

func TestPanicOfAHandlerIsAnErrorOfItsCall(t *testing.T) {
	w := newWorld(t, row{"a", ""})
	w.mustStart()
	before := w.status("a")
	w.flag("a", "hold")
	var calls sync.WaitGroup
	calls.Go(func() {
		if r := w.poke("a", "hold"); r.GetIsError() {
			t.Errorf("another call of the plugin: %v", r)
		}
	})
	if r := w.poke("a", "panic"); r.GetErrorCode() != "PANIC" || !strings.Contains(r.GetTexts()[0], "boom in a handler") {
		t.Errorf("reply %v", r)
	}
	w.unflag("a", "hold")
	calls.Wait()
	if now := w.status("a"); now.GetPid() != before.GetPid() || now.GetCrash() != nil {
		t.Errorf("status %v", now)
	}
	for _, l := range w.log("a") {
		if l.GetMessage() == "handler panicked" && l.GetLevel() == "error" && strings.Contains(string(l.GetAttributes()), "world_test.go:") {
			return
		}
	}
	t.Errorf("no record with the stack: %v", w.log("a"))
}

// An entry that fails too often is given up. Calls fail at once and say why; it is tried again when somebody says so, and
// what is healthy is left alone.
func TestGivenUpAndReArmed(t *testing.T) {
	w := newWorld(t, row{"a", ""}, row{"b", ""})
	w.mustStart()
	other := w.status("b")
	w.flag("a", "panic")
	w.poke("a", "die")
	s := w.until("a", "failed", func(s *controlv1.EntryStatus) bool { return s.GetState() == "failed" })
	if !strings.Contains(s.GetProblem(), "given up after 5 failures within 2m0s") || !strings.Contains(s.GetProblem(), "panic: boom at boot") {
		t.Errorf("problem %q", s.GetProblem())
	}
	if !strings.HasPrefix(s.GetCrash().GetTrace(), "panic: boom at boot") {
		t.Errorf("crash %v", s.GetCrash())
	}
	_, err := w.serving("a")
	var f *kernelv1.PluginFault
	if !fault.Detail(err, &f) || f.GetReason() != "PLUGIN_NOT_RUNNING" || !f.GetRetryable() || !strings.HasPrefix(f.GetCrash(), "panic: boom at boot") {
		t.Errorf("fault %v of %v", f, err)
	}
	if r := w.poke("a", "ok"); r.GetErrorCode() != "PLUGIN_NOT_RUNNING" || !strings.Contains(r.GetTexts()[0], "given up") {
		t.Errorf("reply %v", r)
	}

	reload := func() (*controlv1.ReloadReply, error) {
		return w.host.Control().Reload(t.Context(), &controlv1.ReloadRequest{Entry: "a"})
	}
	if _, err := reload(); err == nil || !strings.Contains(err.Error(), "boom at boot") {
		t.Errorf("reload of what still fails: %v", err)
	}
	// It is armed again, so it comes back by itself when it can.
	w.unflag("a", "panic")
	back := w.active("a", s.GetGeneration()+1)
	if r := w.poke("a", "ok"); r.GetIsError() {
		t.Errorf("reply %v", r)
	}
	r, err := reload()
	if err != nil || r.GetChanged() || r.GetGeneration() != back.GetGeneration() || w.status("a").GetPid() != back.GetPid() {
		t.Errorf("reload of what is healthy: %v, %v", r, err)
	}
	if now := w.status("b"); now.GetPid() != other.GetPid() {
		t.Error("another entry was started again")
	}
}

// What was given up comes back with another executable or another config, and not because of an edit that is none of its business.
func TestGivenUpIsReArmedByItsOwnChange(t *testing.T) {
	w := newWorld(t, row{"a", ""}, row{"b", ""})
	w.mustStart()
	fail := func() uint64 {
		t.Helper()
		w.flag("a", "panic")
		w.poke("a", "die")
		w.until("a", "failed", func(s *controlv1.EntryStatus) bool { return s.GetState() == "failed" })
		w.unflag("a", "panic")
		e, _ := w.host.entry("a")
		e.mu.Lock()
		defer e.mu.Unlock()
		return e.number
	}
	last := fail()
	w.executable("b", "2")
	w.trust()
	w.active("b", 2)
	if s := w.status("a"); s.GetState() != "failed" {
		t.Errorf("an edit of another row: %v", s)
	}
	w.executable("a", "2")
	w.trust()
	w.active("a", last+1)

	last = fail()
	w.compose(row{"a", ", config: {token: another-token}"}, row{"b", ""})
	w.trust()
	if s := w.active("a", last+1); s.GetCrash() != nil {
		t.Errorf("crash of what was there before: %v", s.GetCrash())
	}
}

// serving is what a call finds.
func (w *world) serving(id string) (*generation, error) {
	w.Helper()
	e, ok := w.host.entry(id)
	if !ok {
		w.Fatalf("no entry %s", id)
	}
	return e.serving()
}

// One bad plugin keeps the host from starting only if it is required; if not, it is tried again.
func TestOptionalRowMayFail(t *testing.T) {
	w := newWorld(t, row{"a", ", required: false"}, row{"b", ""})
	w.flag("a", "panic")
	w.mustStart()
	if s := w.status("b"); s.GetState() != "active" {
		t.Errorf("the other row: %v", s)
	}
	s := w.until("a", "failed", func(s *controlv1.EntryStatus) bool { return s.GetState() == "failed" && s.GetProblem() != "" })
	if !strings.Contains(s.GetProblem(), "boom at boot") || s.GetPid() != 0 {
		t.Errorf("status %v", s)
	}
	w.unflag("a", "panic")
	w.active("a", 2)
	if r := w.poke("a", "ok"); r.GetIsError() {
		t.Errorf("reply %v", r)
	}
}

func TestOptionalRowIsGivenUpToo(t *testing.T) {
	w := newWorld(t, row{"a", ", required: false"})
	w.flag("a", "refuse")
	w.mustStart()
	s := w.until("a", "given up", func(s *controlv1.EntryStatus) bool { return strings.Contains(s.GetProblem(), "given up") })
	if !strings.Contains(s.GetProblem(), "cannot log in") || s.GetState() != "failed" {
		t.Errorf("status %v", s)
	}
	w.unflag("a", "refuse")
	if r, err := w.host.Control().Reload(t.Context(), &controlv1.ReloadRequest{Entry: "a"}); err != nil || r.GetGeneration() == 0 {
		t.Errorf("reload: %v, %v", r, err)
	}
}

func TestRequiredRowStopsTheBoot(t *testing.T) {
	w := newWorld(t, row{"a", ""}, row{"b", ""})
	w.flag("a", "panic")
	err := w.start()
	var failed *StartError
	if !errors.As(err, &failed) || failed.Entry != "a" {
		t.Fatalf("err = %v", err)
	}
	for _, want := range []string{"compose.yml:4", "setup: ", "exit code 2", "panic: boom at boot", "world_test.go:"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in %q", want, err)
		}
	}
}

func TestStartTimeoutNamesItsSetting(t *testing.T) {
	w := newWorld(t, row{"a", ", timeouts: {start: 1s}"})
	w.flag("a", "wait")
	err := w.start()
	if err == nil || !strings.Contains(err.Error(), "setup: not done within 1s, which timeouts.start of its row can raise") {
		t.Errorf("err = %v", err)
	}
}

// A frozen plugin is replaced like one that crashed.
func TestFrozenPluginIsReplaced(t *testing.T) {
	w := newWorld(t, row{"a", ", timeouts: {beat: 2s}"}, row{"b", ", timeouts: {beat: 30s}"})
	w.mustStart()
	first, other := w.status("a"), w.status("b")
	if err := unix.Kill(int(first.GetPid()), unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	s := w.active("a", 2)
	if !strings.Contains(s.GetCrash().GetExit(), "it did not answer beats for 2s") {
		t.Errorf("crash %v", s.GetCrash())
	}
	if r := w.poke("a", "ok"); r.GetIsError() {
		t.Errorf("reply %v", r)
	}
	if now := w.status("b"); now.GetPid() != other.GetPid() {
		t.Error("the other one was replaced too")
	}
}

// The socket's file is swept away, the connection breaks: the plugin is started again.
func TestLostConnectionIsReplaced(t *testing.T) {
	w := newWorld(t, row{"a", ""})
	w.mustStart()
	g, err := w.serving("a")
	if err != nil {
		t.Fatal(err)
	}
	p, ok := g.process.(processGeneration)
	if !ok {
		t.Fatalf("process is a %T", g.process)
	}
	if err := os.RemoveAll(p.runDir); err != nil {
		t.Fatal(err)
	}
	if err := p.Generation.Conn().Close(); err != nil {
		t.Fatal(err)
	}
	w.active("a", 2)
	if r := w.poke("a", "ok"); r.GetIsError() {
		t.Errorf("reply %v", r)
	}
}

// A plugin that takes its time to come back holds nobody else up.
func TestSlowStartDelaysNobody(t *testing.T) {
	w := newWorld(t, row{"a", ""}, row{"b", ""})
	w.mustStart()
	w.flag("a", "wait")
	w.poke("a", "die")
	e, _ := w.host.entry("a")
	w.until("a", "being started", func(*controlv1.EntryStatus) bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		return e.number == 2
	})
	w.poke("b", "die")
	w.active("b", 2)
	if r := w.poke("b", "ok"); r.GetIsError() {
		t.Errorf("reply %v", r)
	}
	if s := w.status("a"); s.GetState() != "restarting" {
		t.Errorf("the slow one is %s, so this showed nothing", s.GetState())
	}
	w.unflag("a", "wait")
	w.active("a", 2)
}

// However often somebody says that a file changed, there is one change.
func TestManyEventsAreOneChange(t *testing.T) {
	w := newWorld(t, row{"a", ""}, row{"b", ""})
	w.mustStart()
	w.executable("a", "2")
	w.trust()
	var asks sync.WaitGroup
	for range 20 {
		asks.Go(func() {
			now := time.Now()
			_ = os.Chtimes(filepath.Join(w.dir, "a"), now, now)
			if _, err := w.host.Control().Reload(t.Context(), &controlv1.ReloadRequest{Entry: "a"}); err != nil {
				t.Error(err)
			}
		})
	}
	asks.Wait()
	if s := w.status("a"); s.GetGeneration() != 2 {
		t.Errorf("generation %d", s.GetGeneration())
	}
	if s := w.status("b"); s.GetGeneration() != 1 {
		t.Errorf("the other's generation %d", s.GetGeneration())
	}
}

// What runs is what status shows.
func TestStatusShowsTheNewDigest(t *testing.T) {
	w := newWorld(t, row{"a", ""})
	w.mustStart()
	before := w.status("a")
	w.executable("a", "2")
	w.trust()
	after := w.active("a", 2)
	if before.GetDigest() == after.GetDigest() || len(after.GetDigest()) != 64 {
		t.Errorf("digests %s and %s", before.GetDigest(), after.GetDigest())
	}
}

// A stop that everybody takes part in is no alarm, and leaves no process and no file.
func TestStopIsNoAlarm(t *testing.T) {
	w := newWorld(t, row{"a", ""}, row{"b", ""})
	w.mustStart()
	pid := int(w.status("a").GetPid())
	h := w.host
	if err := h.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(pid, 0); !errors.Is(err, unix.ESRCH) {
		t.Errorf("process %d: %v", pid, err)
	}
	h.logs.SetLevel("", -100)
	if err := h.logs.Read(t.Context(), everything, func(r record) error {
		if r.Level > 0 {
			t.Errorf("record %+v", r)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	left, err := os.ReadDir(w.layout.RunDir)
	if err != nil || len(left) != 0 {
		t.Errorf("run directory holds %v, %v", left, err)
	}
}

// What a host that was killed left in the run directory is swept by the next one.
func TestRunDirectoryIsSwept(t *testing.T) {
	w := newWorld(t, row{"a", ""})
	stale := filepath.Join(w.layout.RunDir, "p123", "plugin-dir")
	if err := os.MkdirAll(stale, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(stale, "plugin1"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	w.mustStart()
	if _, err := os.Stat(filepath.Dir(stale)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("stale directory: %v", err)
	}
	// A killed plugin's goes with it.
	first := w.status("a")
	if err := unix.Kill(int(first.GetPid()), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	w.active("a", 2)
	dirs, err := filepath.Glob(filepath.Join(w.layout.RunDir, "p*"))
	if err != nil || len(dirs) != 1 {
		t.Errorf("run directories %v, %v", dirs, err)
	}
}

// No plugin sees what the host's environment has beside the allow-list.
func TestPluginDoesNotSeeTheHostsSecrets(t *testing.T) {
	t.Setenv("SECRET", "of-the-host")
	w := newWorld(t, row{"a", "OWN: mine|"})
	w.mustStart()
	env := w.poke("a", "environ").GetTexts()[0]
	if strings.Contains(env, "SECRET=") || strings.Contains(env, "PLUGIN_CLIENT_CERT") || !strings.Contains(env, "OWN=mine") || !strings.Contains(env, "PATH=") {
		t.Errorf("environment:\n%s", env)
	}
}

// Many crashes leave nothing behind in the host.
func TestManyCrashes(t *testing.T) {
	w := newWorld(t, row{"a", ""})
	w.mustStart()
	e, _ := w.host.entry("a")
	before := -1
	for i := range 12 {
		s := w.active("a", uint64(i+1))
		// A breaker in the way of a test.
		e.rearm()
		if err := unix.Kill(int(s.GetPid()), unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		w.active("a", uint64(i+2))
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		if i == 1 { // what is made once was made
			before = len(fds)
		}
		if i == 11 && len(fds) > before {
			t.Errorf("%d descriptors, %d before ten crashes", len(fds), before)
		}
	}
	if stat, err := os.ReadFile("/proc/self/task/" + strconv.Itoa(os.Getpid()) + "/children"); err == nil && len(strings.Fields(string(stat))) > 1 {
		t.Errorf("children: %s", stat)
	}
}

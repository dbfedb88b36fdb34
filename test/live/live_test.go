// Package live works on a running default deployment: it edits it the way a person does, on real sources with the real compiler, while
// sessions are live, and holds the two families of tools against each other.
package live

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
	"github.com/cordon-host/cordon/host"
	"github.com/cordon-host/cordon/internal/testenv"
)

// patience bounds every wait for an event; a build on a busy machine takes its time.
const patience = 4 * time.Minute

// world is a copy of this repository, trusted and hosted, and a workspace elsewhere.
type world struct {
	*testing.T
	tree string
	cwd  string
	opts host.Options
	host *host.Host
	log  *os.File
}

func newWorld(t *testing.T) *world {
	w := unstarted(t)
	w.start()
	return w
}

// unstarted is a world whose host is still to be started.
func unstarted(t *testing.T) *world {
	testenv.Require(t, "bwrap")
	if testing.Short() {
		t.Skip("builds plugins")
	}
	w := &world{T: t, tree: dir(t), cwd: dir(t)}
	copyTree(t, "../..", w.tree)
	t.Setenv("XDG_RUNTIME_DIR", dir(t))
	log, err := os.Create(filepath.Join(t.TempDir(), "host.log"))
	if err != nil {
		t.Fatal(err)
	}
	w.log = log
	w.opts = host.Options{
		Compose: filepath.Join(w.tree, "compose.yml"), State: filepath.Join(dir(t), "state"), Version: "test",
		Log: log, LogLevel: slog.LevelInfo,
	}
	t.Cleanup(func() {
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("host log:\n%s", text)
		}
		log.Close()
	})
	return w
}

// start trusts the tree as it is and hosts it.
func (w *world) start() {
	w.Helper()
	w.trust()
	ctx, cancel := context.WithTimeout(w.Context(), patience)
	defer cancel()
	var err error
	if w.host, err = host.Start(ctx, w.opts); err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() {
		if err := w.host.Stop(context.Background()); err != nil {
			w.Error(err)
		}
	})
}

// compose edits the compose file.
func (w *world) compose(edit func(string) string) {
	w.Helper()
	text, err := os.ReadFile(w.opts.Compose)
	if err != nil {
		w.Fatal(err)
	}
	w.save(w.opts.Compose, edit(string(text)))
}

// dir is a temp directory with a path short enough for sockets.
func dir(t *testing.T) string {
	d, err := os.MkdirTemp("", "cordon")
	if err != nil {
		t.Fatal(err)
	}
	if d, err = filepath.EvalSymlinks(d); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(d) })
	return d
}

// copyTree copies what leads to the plugins.
func copyTree(t *testing.T, from, to string) {
	for _, part := range []string{"go.mod", "go.sum", "compose.yml", "api", "capability", "ctxsvc", "plugin", "plugins"} {
		copyTo(t, filepath.Join(from, part), to)
	}
}

func copyTo(t *testing.T, from, to string) {
	t.Helper()
	if out, err := exec.Command("cp", "-r", from, to).CombinedOutput(); err != nil {
		t.Fatalf("copying %s: %v: %s", from, err, out)
	}
}

func (w *world) trust() {
	w.Helper()
	if _, err := host.Trust(w.Context(), w.opts); err != nil {
		w.Fatal(err)
	}
}

// call runs a command and returns its result.
func (w *world) call(r *controlv1.CallRequest, command string, more ...string) (*controlv1.CallReply, map[string]any) {
	w.Helper()
	args := map[string]any{"command": command}
	for i := 0; i+1 < len(more); i += 2 {
		args[more[i]] = more[i+1]
	}
	raw, err := json.Marshal(args)
	if err != nil {
		w.Fatal(err)
	}
	r.Tool, r.Arguments = "bash", raw
	return w.send(r)
}

// tool runs one call of any tool.
func (w *world) tool(session, tool string, args map[string]any) (*controlv1.CallReply, map[string]any) {
	w.Helper()
	raw, err := json.Marshal(args)
	if err != nil {
		w.Fatal(err)
	}
	return w.send(&controlv1.CallRequest{Session: session, Tool: tool, Arguments: raw})
}

func (w *world) send(r *controlv1.CallRequest) (*controlv1.CallReply, map[string]any) {
	w.Helper()
	if r.Session == "" && r.Cwd == "" {
		r.Cwd = w.cwd
	}
	reply, err := w.host.Control().Call(w.Context(), r)
	if err != nil {
		w.Errorf("call %s %s: %v", r.GetTool(), r.GetArguments(), err)
		return &controlv1.CallReply{IsError: true}, nil
	}
	meta := map[string]any{}
	if len(reply.GetMeta()) > 0 {
		if err := json.Unmarshal(reply.GetMeta(), &meta); err != nil {
			w.Error(err)
		}
	}
	return reply, meta
}

// edit changes a plugin's version, which makes another binary of it, and saves the file in one step.
func (w *world) edit(plugin, version string) {
	w.Helper()
	files, err := filepath.Glob(filepath.Join(w.tree, "plugins", plugin, "*.go"))
	if err != nil {
		w.Fatal(err)
	}
	old := regexp.MustCompile(`Version:(\s*)"[^"]*"`)
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			w.Fatal(err)
		}
		if strings.HasSuffix(f, "_test.go") || !old.Match(text) {
			continue
		}
		w.save(f, old.ReplaceAllString(string(text), `Version:$1"`+version+`"`))
		return
	}
	w.Fatalf("plugin %s has no version to change", plugin)
}

func (w *world) save(path, text string) {
	w.Helper()
	if err := os.WriteFile(path+"~", []byte(text), 0o600); err != nil {
		w.Fatal(err)
	}
	if err := os.Rename(path+"~", path); err != nil {
		w.Fatal(err)
	}
}

// event waits for the first event of a session that fits, from the beginning of its log.
func (w *world) event(session, typ string, fits func(map[string]any) bool) {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.Context(), patience)
	defer cancel()
	log, err := w.host.Control().ReadLog(ctx, &controlv1.ReadLogRequest{Session: session, Follow: true})
	if err != nil {
		w.Fatal(err)
	}
	for {
		e, err := log.Recv()
		if err != nil {
			w.Fatalf("waiting for %s: %v", typ, err)
		}
		data := map[string]any{}
		if err := json.Unmarshal(e.GetData(), &data); err != nil {
			w.Fatal(err)
		}
		if e.GetType() == typ && fits(data) {
			return
		}
	}
}

func (w *world) events(session string) (all []*controlv1.LogEvent) {
	w.Helper()
	log, err := w.host.Control().ReadLog(w.Context(), &controlv1.ReadLogRequest{Session: session})
	if err != nil {
		w.Fatal(err)
	}
	for {
		e, err := log.Recv()
		if err == io.EOF {
			return all
		}
		if err != nil {
			w.Fatal(err)
		}
		all = append(all, e)
	}
}

// status waits until what the host says of itself fits.
func (w *world) status(what string, fits func(*controlv1.StatusReply) bool) *controlv1.StatusReply {
	w.Helper()
	deadline := time.Now().Add(patience)
	for {
		s, err := w.host.Control().Status(w.Context(), &controlv1.StatusRequest{})
		if err != nil {
			w.Fatal(err)
		}
		if fits(s) {
			return s
		}
		if time.Now().After(deadline) {
			w.Fatalf("waited for %s in vain; status: %v", what, s)
		}
		time.Sleep(20 * time.Millisecond) // status has no event of its own yet
	}
}

func (w *world) entry(s *controlv1.StatusReply, id string) *controlv1.EntryStatus {
	w.Helper()
	for _, e := range s.GetEntries() {
		if e.GetId() == id {
			return e
		}
	}
	w.Fatalf("no entry %s", id)
	return nil
}

func (w *world) knob(session, knob, value string) string {
	w.Helper()
	r, err := w.host.Control().Knob(w.Context(), &controlv1.KnobRequest{Session: session, Knob: knob, Value: value})
	if err != nil {
		w.Fatal(err)
	}
	return r.GetValue()
}

func (w *world) read(name string) string {
	text, err := os.ReadFile(filepath.Join(w.cwd, name))
	if err != nil && !os.IsNotExist(err) {
		w.Error(err)
	}
	return string(text)
}

// TestRebuildUnderLoad rebuilds one plugin after the other while calls run in a loop. No call fails, each runs under the session's
// mode, each has its effect exactly once, and the log says what was swapped.
func TestRebuildUnderLoad(t *testing.T) {
	w := newWorld(t)
	first, meta := w.call(&controlv1.CallRequest{}, "echo no > denied")
	session := first.GetSession()
	if meta["denied"] != true || w.read("denied") != "" {
		t.Fatalf("the control: a fresh session may write: %v", first)
	}
	if got := w.knob(session, "preset", "workspace-write"); got != "workspace-write" {
		t.Fatalf("preset is %s", got)
	}

	var stop atomic.Bool
	var n atomic.Int64
	var loop sync.WaitGroup
	for range 2 {
		loop.Go(func() {
			for !stop.Load() {
				r, meta := w.call(&controlv1.CallRequest{Session: session}, "echo x >> calls")
				if r.GetIsError() || meta["mode"] != "workspace-write" || meta["exitCode"] != float64(0) {
					t.Errorf("a call failed: %v", r)
				}
				n.Add(1)
			}
		})
	}
	plugins := map[string]string{"sandbox": "sandbox-local", "policy": "sandbox-policy", "presets": "permission-presets"}
	for i, entry := range []string{"sandbox", "policy", "presets"} {
		version := fmt.Sprintf("99.0.%d", i)
		w.edit(plugins[entry], version)
		w.event(session, "plugin/pin", func(d map[string]any) bool { return d["entry"] == entry && d["version"] == version })
	}
	stop.Store(true)
	loop.Wait()

	if got := int64(strings.Count(w.read("calls"), "x\n")); got != n.Load() || got == 0 {
		t.Errorf("%d calls left %d marks", n.Load(), got)
	}
	if mode := w.knob(session, "mode", ""); mode != "workspace-write" {
		t.Errorf("mode is %s after the swaps", mode)
	}
	s := w.status("the old generations to end", func(s *controlv1.StatusReply) bool {
		for _, e := range s.GetEntries() {
			if e.GetDraining() > 0 {
				return false
			}
		}
		return true
	})
	for entry := range plugins {
		if e := w.entry(s, entry); e.GetGeneration() != 2 || e.GetState() != "active" {
			t.Errorf("%s is %s in generation %d", entry, e.GetState(), e.GetGeneration())
		}
	}
	// A session born now runs on the new generations and is pinned as before.
	other, meta := w.call(&controlv1.CallRequest{}, "echo no > denied")
	if meta["mode"] != "read-only" || w.read("denied") != "" {
		t.Errorf("a session after the swaps: %v", other)
	}
}

// TestPanickingBuildLeavesTheOld gives user-approval a build that panics in Apply: the old one keeps answering, and status says why.
func TestPanickingBuildLeavesTheOld(t *testing.T) {
	w := newWorld(t)
	main := filepath.Join(w.tree, "plugins", "user-approval", "main.go")
	good, err := os.ReadFile(main)
	if err != nil {
		t.Fatal(err)
	}
	apply := regexp.MustCompile(`(?m)^func apply\(ctx \*plugin\.Context, \w+ Config\) error \{\n`)
	files, err := filepath.Glob(filepath.Join(w.tree, "plugins", "user-approval", "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	broken := false
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(f, "_test.go") || !apply.Match(text) {
			continue
		}
		main, good, broken = f, text, true
		w.save(f, apply.ReplaceAllString(string(text), "${0}\tif true {\n\t\tpanic(\"apply boom\")\n\t}\n"))
	}
	if !broken {
		t.Fatal("user-approval has no apply function to break")
	}
	s := w.status("the edit to be rejected", func(s *controlv1.StatusReply) bool { return s.GetRejected() != "" })
	if !strings.Contains(s.GetRejected(), "apply boom") || !strings.Contains(s.GetRejected(), "approval") {
		t.Errorf("the reason is %q", s.GetRejected())
	}
	if e := w.entry(s, "approval"); e.GetGeneration() != 1 || e.GetState() != "active" {
		t.Errorf("approval is %s in generation %d", e.GetState(), e.GetGeneration())
	}
	w.call(&controlv1.CallRequest{Answer: "allow-once"}, "echo yes > allowed", "sandbox_permissions", "workspace-write", "justification", "test")
	if w.read("allowed") != "yes\n" {
		t.Error("the old approval service does not answer")
	}
	w.save(main, string(good))
	w.status("the edit back to be accepted", func(s *controlv1.StatusReply) bool { return s.GetRejected() == "" })
}

// TestSessionBornWhilePresetsWereAway kills the presets, makes a session, and finds it pinned when they are back.
func TestSessionBornWhilePresetsWereAway(t *testing.T) {
	w := newWorld(t)
	s := w.status("presets", func(s *controlv1.StatusReply) bool { return w.entry(s, "presets").GetPid() != 0 })
	if err := syscall.Kill(int(w.entry(s, "presets").GetPid()), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	w.status("presets to be missed", func(s *controlv1.StatusReply) bool {
		e := w.entry(s, "presets")
		return e.GetPid() == 0 || e.GetGeneration() > 1
	})
	r, meta := w.call(&controlv1.CallRequest{}, "true")
	if r.GetIsError() || meta["mode"] != "read-only" {
		t.Fatalf("no session without presets: %v", r)
	}
	for _, typ := range []string{"permission/preset", "sandbox/mode", "approval/policy"} {
		w.event(r.GetSession(), typ, func(map[string]any) bool { return true })
	}
	counts := map[string]int{}
	for _, e := range w.events(r.GetSession()) {
		counts[e.GetType()]++
	}
	for _, typ := range []string{"permission/preset", "sandbox/mode", "approval/policy"} {
		if counts[typ] != 1 {
			t.Errorf("%s was written %d times", typ, counts[typ])
		}
	}
}

// TestEditBelowAWritableWorkspaceWaits lets a confined command live where the sources are: an edit there is not built before a person
// agrees, and is when one does.
func TestEditBelowAWritableWorkspaceWaits(t *testing.T) {
	w := newWorld(t)
	w.cwd = w.tree
	w.call(&controlv1.CallRequest{Answer: "allow-once"}, "echo yes > allowed", "sandbox_permissions", "workspace-write", "justification", "test")
	if w.read("allowed") != "yes\n" {
		t.Fatal("the control: the workspace is not writable")
	}
	target := filepath.Join(w.tree, "plugins", "tool-bash", "main.go")
	before, err := os.ReadFile(target)
	if err != nil {
		t.Fatal(err)
	}
	w.call(&controlv1.CallRequest{Answer: "allow-once"}, "echo '// evil' >> plugins/tool-bash/main.go; echo evil > compose.yml; mv plugins p; rm -rf plugins",
		"sandbox_permissions", "workspace-write", "justification", "test")
	if after, err := os.ReadFile(target); err != nil || string(after) != string(before) {
		t.Fatalf("a confined command changed a plugin's source: %v", err)
	}
	// The owner's own edit, in the same place.
	w.edit("tool-bash", "99.1.0")
	s := w.status("the edit to wait", func(s *controlv1.StatusReply) bool { return s.GetRejected() != "" })
	if !strings.Contains(s.GetRejected(), "cordon trust") || w.entry(s, "bash").GetGeneration() != 1 {
		t.Errorf("rejected = %q, bash in generation %d", s.GetRejected(), w.entry(s, "bash").GetGeneration())
	}
	w.trust()
	w.status("the edit to be accepted", func(s *controlv1.StatusReply) bool {
		return s.GetRejected() == "" && w.entry(s, "bash").GetVersion() == "99.1.0"
	})
}

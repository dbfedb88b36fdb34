package live

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
)

// running is the process and generation of every entry that has one.
func running(s *controlv1.StatusReply) map[string]string {
	out := map[string]string{}
	for _, e := range s.GetEntries() {
		if e.GetPid() != 0 {
			out[e.GetId()] = fmt.Sprintf("pid %d generation %d", e.GetPid(), e.GetGeneration())
		}
	}
	return out
}

// others reports what changed but for the entries named.
func others(t *testing.T, before, after map[string]string, but ...string) {
	t.Helper()
	for id, was := range before {
		named := false
		for _, b := range but {
			named = named || b == id
		}
		if is := after[id]; is != was && !named {
			t.Errorf("%s was %s and is %q", id, was, is)
		}
	}
}

// executors are told which paths lead to execution, so a row that comes or goes makes a new generation of them.
var executors = []string{"sandbox", "shell", "files"}

// look has the host look again and waits for what it makes of it.
func (w *world) look(entry string) error {
	w.Helper()
	_, err := w.host.Control().Reload(w.Context(), &controlv1.ReloadRequest{Entry: entry})
	return err
}

func accepted(s *controlv1.StatusReply) bool { return s.GetRejected() == "" }

// TestEditsOfTheFile edits the compose file of a running deployment: what the edit is about changes, everything else keeps its
// process, and what cannot be accepted changes nothing.
func TestEditsOfTheFile(t *testing.T) {
	w := newWorld(t)
	good, err := os.ReadFile(w.opts.Compose)
	if err != nil {
		t.Fatal(err)
	}
	text := string(good)
	replace := func(old, new string) {
		t.Helper()
		if !strings.Contains(text, old) {
			t.Fatalf("%q is not in the file", old)
		}
		text = strings.Replace(text, old, new, 1)
		w.save(w.opts.Compose, text)
	}
	status := func(what string, fits func(*controlv1.StatusReply) bool) map[string]string {
		t.Helper()
		return running(w.status(what, fits))
	}
	start := status("everything", accepted)

	// A broken edit, a duplicate id, a need that nobody meets: the last good composition serves.
	for _, broken := range []string{text + "  - id: [\n", text + "  - {id: bash, use: ./plugins/tool-bash}\n", strings.Replace(text, "  - id: policy", "  - id: policy\n    disabled: true", 1)} {
		w.save(w.opts.Compose, broken)
		others(t, start, status("the edit to be rejected", func(s *controlv1.StatusReply) bool { return s.GetRejected() != "" }))
		w.save(w.opts.Compose, text)
		others(t, start, status("the edit back", accepted))
	}

	// One row's config: another generation of that row alone, where what it tells others stays the same.
	replace("config: {policy: ask}", "config: {policy: never}")
	replace("config: {policy: never}", "config: {policy: ask}")
	if err := w.look("approval"); err != nil {
		t.Fatal(err)
	}
	others(t, start, status("the config there and back", accepted), "approval")

	// The default mode is something others are told: they are applied again, and all is well.
	replace("{mode: read-only, workspaceRoot", "{mode: workspace-write, workspaceRoot")
	if err := w.look("policy"); err != nil {
		t.Fatal(err)
	}
	now := status("the new default", accepted)
	others(t, start, now, "policy", "approval", "shell", "files", "presets", "bash", "file-tools")

	// A row that is disabled is gone with its tools, and comes back.
	replace("  - id: file-tools\n", "  - id: file-tools\n    disabled: true\n")
	gone := func(s *controlv1.StatusReply) bool {
		for _, e := range s.GetEntries() {
			if e.GetId() == "file-tools" {
				return false
			}
		}
		return accepted(s)
	}
	others(t, now, status("file-tools to be gone", gone), append(executors, "file-tools")...)
	r, _ := w.tool("", "write", map[string]any{"file_path": "x", "content": "x"})
	if r.GetErrorCode() != "TOOL_NOT_FOUND" {
		t.Errorf("a tool of a disabled row: %v", r)
	}
	replace("    disabled: true\n", "")
	status("file-tools to be back", func(s *controlv1.StatusReply) bool { return accepted(s) && !gone(s) })
	if err := w.look("file-tools"); err != nil {
		t.Fatal(err)
	}
	now = status("everything", accepted)

	// A move into a group and out of it restarts nothing; a disabled group stops its rows.
	replace("  - id: file-tools\n    use: ./plugins/tool-fs\n", "  - id: box\n    plugins:\n      - id: file-tools\n        use: ./plugins/tool-fs\n")
	reply, err := w.host.Control().Reload(t.Context(), &controlv1.ReloadRequest{Entry: "file-tools"})
	if err != nil || reply.GetChanged() {
		t.Errorf("a move into a group: %v, %v", reply, err)
	}
	others(t, now, status("the move", accepted))
	replace("  - id: box\n", "  - id: box\n    disabled: true\n")
	others(t, now, status("the group to be gone", gone), append(executors, "file-tools")...)
	replace("    disabled: true\n", "")
	status("the group to be back", func(s *controlv1.StatusReply) bool { return accepted(s) && !gone(s) })
	if err := w.look("file-tools"); err != nil {
		t.Fatal(err)
	}
	now = status("everything", accepted)

	// New code of a row whose config was edited keeps the edited config.
	w.edit("sandbox-policy", "99.2.0")
	if err := w.look("policy"); err != nil {
		t.Fatal(err)
	}
	after := w.status("the new policy", accepted)
	others(t, now, running(after), "policy")
	fresh, _ := w.call(&controlv1.CallRequest{}, "true")
	if mode := w.knob(fresh.GetSession(), "mode", ""); mode != "workspace-write" || w.entry(after, "policy").GetVersion() != "99.2.0" {
		t.Errorf("a new session is in %s under policy %s: the edited config was lost", mode, w.entry(after, "policy").GetVersion())
	}
	// The file is the person's: nobody but this test wrote it.
	if left, err := os.ReadFile(w.opts.Compose); err != nil || string(left) != text {
		t.Errorf("the compose file was written: %v", err)
	}
}

// TestEditsOfSources edits what plugins are built from: a package that several share, a mistake and its correction, a burst.
func TestEditsOfSources(t *testing.T) {
	w := newWorld(t)
	start := running(w.status("everything", accepted))

	// A shared package: those that are built from it are new, the others are not.
	shared := filepath.Join(w.tree, "capability", "approval", "approval.go")
	source, err := os.ReadFile(shared)
	if err != nil {
		t.Fatal(err)
	}
	w.save(shared, string(source)+"\nvar probe = string(Ask)\n\nfunc init() {\n\tif probe == \"touched\" {\n\t\tpanic(probe)\n\t}\n}\n")
	if err := w.look("approval"); err != nil {
		t.Fatal(err)
	}
	after := w.status("approval to be new", accepted)
	now := running(after)
	if w.entry(after, "approval").GetGeneration() != 2 {
		t.Errorf("approval is %s", now["approval"])
	}
	if now["sandbox"] != start["sandbox"] || now["shell"] != start["shell"] {
		t.Errorf("plugins that are not built from the package changed: %v, %v", start, now)
	}

	// A mistake: the old ones serve, and the correction is followed.
	w.save(shared, string(source)+"\nfunc init() {\n")
	s := w.status("the mistake to be rejected", func(s *controlv1.StatusReply) bool { return s.GetRejected() != "" })
	others(t, now, running(s))
	r, meta := w.call(&controlv1.CallRequest{}, "true")
	if r.GetIsError() || meta["exitCode"] != float64(0) {
		t.Errorf("a call meanwhile: %v", r)
	}
	w.save(shared, string(source))
	if err := w.look("approval"); err != nil {
		t.Fatal(err)
	}
	w.status("the correction", accepted)

	// A burst of saves is not a burst of swaps.
	before := w.entry(w.status("the burst's start", accepted), "bash").GetGeneration()
	for i := range 20 {
		w.edit("tool-bash", fmt.Sprintf("99.3.%d", i))
	}
	s = w.status("the burst's end", func(s *controlv1.StatusReply) bool {
		return accepted(s) && w.entry(s, "bash").GetVersion() == "99.3.19"
	})
	if n := w.entry(s, "bash").GetGeneration() - before; n > 2 {
		t.Errorf("20 saves made %d generations", n)
	}
}

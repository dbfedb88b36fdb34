package live

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
	"github.com/cordon-host/cordon/internal/testenv"
	"github.com/cordon-host/cordon/plugin/launch"
)

// TestHostilePlugin composes a plugin that tries to become more than one. A row that grants it nothing gives it nothing.
func TestHostilePlugin(t *testing.T) {
	testenv.Require(t, "bwrap")
	w := unstarted(t)
	copyTo(t, "../plugins/mallory", filepath.Join(w.tree, "plugins"))
	w.compose(func(text string) string {
		text = strings.Replace(text, "  - id: presets\n    use: ./plugins/permission-presets\n", "", 1)
		return text + "  - id: mallory\n    use: ./plugins/mallory\n"
	})
	w.start()
	secret := filepath.Join(lasting(t), "secret")
	if err := os.WriteFile(secret, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	first, _ := w.call(&controlv1.CallRequest{}, "true")
	r, _ := w.tool(first.GetSession(), "attack", map[string]any{"file": secret})
	if got := strings.Join(r.GetTexts(), ""); got != "own state, resolve" {
		t.Errorf("it could: %s", got)
	}
	if mode := w.knob(first.GetSession(), "mode", ""); mode != "read-only" {
		t.Errorf("the session is in %s", mode)
	}
}

// TestRowAddedAtRunTimeIsProtected adds a row whose executable lies in a directory that confined commands may write to. From then on
// they may not write that file, and if it changes all the same, a person is asked.
func TestRowAddedAtRunTimeIsProtected(t *testing.T) {
	w := newWorld(t)
	work := lasting(t)
	plug := filepath.Join(work, "plug")
	if out, err := exec.Command("go", "build", "-o", plug, "../plugins/thief").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	run := func(script string) {
		t.Helper()
		c, err := w.host.Control().Confine(t.Context(), &controlv1.ConfineRequest{
			Argv: []string{"sh", "-c", script}, Cwd: work, Mode: "workspace-write",
		})
		if err != nil {
			t.Fatal(err)
		}
		p, err := launch.Start(t.Context(), launch.Spec{Launch: c.GetLaunch(), Env: os.Environ()})
		if err != nil {
			t.Fatal(err)
		}
		p.Wait()
	}
	w.compose(func(text string) string { return text + "  - id: late\n    use: " + plug + "\n" })
	w.status("the new row", func(s *controlv1.StatusReply) bool {
		for _, e := range s.GetEntries() {
			if e.GetId() == "late" && e.GetState() == "active" {
				return true
			}
		}
		return false
	})
	before, err := os.ReadFile(plug)
	if err != nil {
		t.Fatal(err)
	}
	run("touch control; echo evil > new; mv new plug; cp /bin/true plug; rm -f plug")
	if _, err := os.Stat(filepath.Join(work, "control")); err != nil {
		t.Fatal("the control: the directory is not writable")
	}
	after, err := os.ReadFile(plug)
	if err != nil || string(after) != string(before) {
		t.Fatalf("a confined command changed an executable of the composition: %v", err)
	}
	// The owner's own edit there: somebody confined could have made it, so a person is asked.
	if out, err := exec.Command("cp", "/bin/true", plug+"~").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := os.Rename(plug+"~", plug); err != nil {
		t.Fatal(err)
	}
	s := w.status("the edit to wait", func(s *controlv1.StatusReply) bool { return s.GetRejected() != "" })
	if !strings.Contains(s.GetRejected(), "cordon trust") || w.entry(s, "late").GetGeneration() != 1 {
		t.Errorf("rejected %q, late in generation %d", s.GetRejected(), w.entry(s, "late").GetGeneration())
	}
}

package live

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
)

// verdict is what became of one attempt to write.
type verdict struct {
	denied bool
	made   bool // the file that the path leads to has the text
}

// lasting is a directory that is not below a temp directory, where a session sees its own instead.
func lasting(t *testing.T) string {
	base := "/var/cache"
	if os.Geteuid() != 0 {
		var err error
		if base, err = os.UserCacheDir(); err != nil {
			t.Fatal(err)
		}
	}
	d, err := os.MkdirTemp(base, "cordon-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(d) })
	if d, err = filepath.EvalSymlinks(d); err != nil {
		t.Fatal(err)
	}
	return d
}

// TestContainment asks bash, write and edit for the same paths in every mode, and expects one verdict of all of them, on the real disk.
func TestContainment(t *testing.T) {
	w := newWorld(t)
	outside := lasting(t)
	root := filepath.Join(outside, "root")
	real := filepath.Join(outside, "real")
	for _, d := range []string{root, real, filepath.Join(root, "sub")} {
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for link, to := range map[string]string{
		filepath.Join(root, "out"):      real,                        // a symlinked directory that leads out
		filepath.Join(root, "in"):       filepath.Join(root, "sub"),  // one that stays inside
		filepath.Join(outside, "alias"): root,                        // another spelling of the root
		filepath.Join(root, "dangling"): filepath.Join(real, "made"), // a link to a file that is not there
	} {
		if err := os.Symlink(to, link); err != nil {
			t.Fatal(err)
		}
	}
	w.cwd = root
	first, _ := w.call(&controlv1.CallRequest{}, "true")
	session := first.GetSession()

	rows := []struct {
		name, path string
		leads      string // to this file on the host; empty where there is none to look for
		workspace  verdict
	}{
		{"inside", "sub/f", filepath.Join(root, "sub/f"), verdict{false, true}},
		{"absolute inside", filepath.Join(root, "f"), filepath.Join(root, "f"), verdict{false, true}},
		{"a link that stays inside", "in/g", filepath.Join(root, "sub/g"), verdict{false, true}},
		{"up and back", "sub/../h", filepath.Join(root, "h"), verdict{false, true}},
		{"absolute outside", filepath.Join(real, "f"), filepath.Join(real, "f"), verdict{true, false}},
		{"parent", "../f", filepath.Join(outside, "f"), verdict{true, false}},
		{"a symlinked directory out", "out/f", filepath.Join(real, "f"), verdict{true, false}},
		{"a new directory's file under one", "out/new/f", filepath.Join(real, "new/f"), verdict{true, false}},
		{"up from behind a link", "out/../f", filepath.Join(outside, "f"), verdict{true, false}},
		{"a dangling link out", "dangling", filepath.Join(real, "made"), verdict{true, false}},
		{"an alias of the root", filepath.Join(outside, "alias", "i"), filepath.Join(root, "i"), verdict{false, true}},
		{"the root itself", root, "", verdict{false, false}},
		{"the root with a separator", root + "/", "", verdict{false, false}},
		{"the file system's root", "/", "", verdict{false, false}},
		{"a system directory", "/etc/cordon-test", "/etc/cordon-test", verdict{true, false}},
	}
	clean := func(path string) {
		if path != "" {
			if err := os.RemoveAll(path); err != nil {
				t.Fatal(err)
			}
		}
	}
	look := func(path, text string) bool {
		got, err := os.ReadFile(path)
		return path != "" && err == nil && strings.TrimSpace(string(got)) == text
	}
	for _, mode := range []string{"read-only", "workspace-write"} {
		if got := w.knob(session, "mode", mode); got != mode {
			t.Fatalf("mode is %s", got)
		}
		for _, row := range rows {
			want := row.workspace
			if mode == "read-only" {
				want = verdict{denied: row.leads != "", made: false}
			}
			clean(row.leads)
			_, meta := w.tool(session, "bash", map[string]any{"command": `mkdir -p -- "$(dirname -- '` + row.path + `')"; echo bash > '` + row.path + `'`})
			bash := verdict{meta["denied"] == true, look(row.leads, "bash")}
			clean(row.leads)
			_, meta = w.tool(session, "write", map[string]any{"file_path": row.path, "content": "write\n"})
			write := verdict{meta["denied"] == true, look(row.leads, "write")}
			clean(row.leads)
			if row.leads == "" {
				// Nothing can be written to a directory; that it is refused, and how, is each family's own affair.
				if bash.made || write.made {
					t.Errorf("%s, %s: bash %+v, write %+v", mode, row.name, bash, write)
				}
				continue
			}
			if bash != want || write != want {
				t.Errorf("%s, %s: bash %+v, write %+v, want %+v", mode, row.name, bash, write, want)
			}
			// edit needs a file to be there, put there by the owner.
			if os.WriteFile(row.leads, []byte("before\n"), 0o600) != nil {
				continue // no place for one
			}
			_, meta = w.tool(session, "edit", map[string]any{"file_path": row.path, "old_string": "before", "new_string": "edit"})
			if edit := (verdict{meta["denied"] == true, look(row.leads, "edit")}); edit != want {
				t.Errorf("%s, %s: edit %+v, want %+v", mode, row.name, edit, want)
			}
			clean(row.leads)
		}
		// The session's temp directory is the same for both families, and there is none in read-only.
		_, meta := w.tool(session, "write", map[string]any{"file_path": "/tmp/shared", "content": "from write\n"})
		r, _ := w.tool(session, "bash", map[string]any{"command": "cat /tmp/shared"})
		there := strings.Contains(strings.Join(r.GetTexts(), ""), "from write")
		if want := mode == "workspace-write"; there != want || (meta["denied"] == true) == want {
			t.Errorf("%s: temp shared: %v, write denied: %v", mode, there, meta["denied"])
		}
		if _, err := os.Stat("/tmp/shared"); err == nil {
			t.Error("the session's temp directory is the host's /tmp")
		}
	}
}

// TestOneSwitchForBothFamilies switches a preset and finds both families in the new mode at their next call.
func TestOneSwitchForBothFamilies(t *testing.T) {
	w := newWorld(t)
	first, _ := w.call(&controlv1.CallRequest{}, "true")
	session := first.GetSession()
	try := func(preset string, want bool) {
		t.Helper()
		w.knob(session, "preset", preset)
		for _, f := range []string{"bash", "write"} {
			os.Remove(filepath.Join(w.cwd, f))
		}
		w.call(&controlv1.CallRequest{Session: session}, "echo x > bash")
		w.tool(session, "write", map[string]any{"file_path": "write", "content": "x"})
		for _, f := range []string{"bash", "write"} {
			if made := w.read(f) != ""; made != want {
				t.Errorf("under %s, %s wrote: %v", preset, f, made)
			}
		}
	}
	try("read-only", false)
	try("workspace-write", true)
	try("read-only", false)
}

// TestTwoSessionsSideBySide runs two sessions with different roots: own writes land, cross writes are denied.
func TestTwoSessionsSideBySide(t *testing.T) {
	w := newWorld(t)
	roots := []string{lasting(t), lasting(t)}
	sessions := make([]string, 2)
	for i := range sessions {
		w.cwd = roots[i]
		r, _ := w.call(&controlv1.CallRequest{}, "true")
		sessions[i] = r.GetSession()
		w.knob(sessions[i], "preset", "workspace-write")
	}
	for i := range sessions {
		own, other := roots[i], roots[1-i]
		for _, at := range []struct {
			root string
			want bool
		}{{own, true}, {other, false}} {
			b, f := filepath.Join(at.root, "bash"), filepath.Join(at.root, "write")
			w.call(&controlv1.CallRequest{Session: sessions[i]}, "echo x > "+b)
			w.tool(sessions[i], "write", map[string]any{"file_path": f, "content": "x"})
			for _, path := range []string{b, f} {
				if _, err := os.Stat(path); (err == nil) != at.want {
					t.Errorf("session %d wrote %s: %v, want %v", i, path, err == nil, at.want)
				}
				os.Remove(path)
			}
		}
	}
}

package process

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// fakeGroups is a tree of plain files that looks like control groups. Nothing in it limits anything: what the kernel does with
// them is tested where there are real ones.
func fakeGroups(t *testing.T, own string, files map[string]string) (*grouping, string) {
	t.Helper()
	root := t.TempDir()
	dir := filepath.Join(root, own)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	proc := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(proc, name)
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return path
	}
	return &grouping{
		selfCgroup: write("cgroup", "9:memory:/elsewhere\n0::"+own+"\n"),
		mountInfo:  write("mountinfo", "22 1 0:5 / / rw - ext4 /dev/x rw\n40 30 0:37 / "+root+" rw,relatime - cgroup2 cgroup2 rw\n"),
		pid:        4711,
	}, dir
}

func TestProbe(t *testing.T) {
	alone := map[string]string{"cgroup.controllers": "cpu memory pids\n", "cgroup.subtree_control": "", "cgroup.type": "domain\n", "cgroup.procs": "4711\n"}
	with := func(name, text string) map[string]string {
		out := map[string]string{}
		for k, v := range alone {
			out[k] = v
		}
		if out[name] = text; text == "absent" {
			delete(out, name)
		}
		return out
	}
	both := Limits{Memory: 1, Pids: 1}
	for _, tt := range []struct {
		name  string
		files map[string]string
		want  Limits
		says  string // empty: it can
	}{
		{"alone", alone, both, ""},
		{"handed on already", with("cgroup.subtree_control", "memory pids\n"), both, ""},
		{"others, but handed on already", map[string]string{"cgroup.controllers": "memory", "cgroup.subtree_control": "memory", "cgroup.procs": "1\n", "cgroup.type": "domain"}, Limits{Memory: 1}, ""},
		{"others", with("cgroup.procs", "4711\n4712\n"), both, "other processes than this host, such as 4712"},
		{"no memory controller", with("cgroup.controllers", "pids\n"), both, "no memory controller"},
		{"only pids wanted", with("cgroup.controllers", "pids\n"), Limits{Pids: 1}, ""},
		{"root", with("cgroup.type", "absent"), both, "root control group"},
		{"not readable", with("cgroup.controllers", "absent"), both, "cannot be read"},
		{"not there", with("cgroup.subtree_control", "absent"), both, "cannot be written"},
	} {
		g, dir := fakeGroups(t, "/a/b", tt.files)
		before := listing(t, dir)
		err := g.probe(tt.want)
		var missing *LimitError
		switch {
		case tt.says == "" && err != nil:
			t.Errorf("%s: %v", tt.name, err)
		case tt.says != "" && (!errors.As(err, &missing) || !strings.Contains(missing.Missing, tt.says)):
			t.Errorf("%s: %v", tt.name, err)
		}
		if after := listing(t, dir); after != before {
			t.Errorf("%s: looking changed something:\n%s\nwas\n%s", tt.name, after, before)
		}
	}
	for text, says := range map[string]string{
		"9:memory:/x\n": "no control group of version 2", "0::/../x\n": "no control group of version 2", "0::/a/b/..\n": "no control group of version 2", "": "no control group of version 2",
	} {
		g, _ := fakeGroups(t, "/a/b", alone)
		if err := os.WriteFile(g.selfCgroup, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := g.probe(both); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v", text, err)
		}
	}
	g, _ := fakeGroups(t, "/a/b", alone)
	if err := os.WriteFile(g.mountInfo, []byte("22 1 0:5 / / rw - ext4 /dev/x rw\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := g.probe(both); err == nil || !strings.Contains(err.Error(), "not mounted") {
		t.Errorf("nothing mounted: %v", err)
	}
	// A mount of a part that this process is not in.
	if err := os.WriteFile(g.mountInfo, []byte("40 30 0:37 /other /mnt\\040x rw - cgroup2 cgroup2 rw\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := g.probe(both); err == nil || !strings.Contains(err.Error(), "outside of what is mounted at /mnt x") {
		t.Errorf("another part mounted: %v", err)
	}
}

func listing(t *testing.T, dir string) string {
	t.Helper()
	var out strings.Builder
	err := filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			out.WriteString(path + "\n")
			return err
		}
		text, err := os.ReadFile(path)
		out.WriteString(path + " " + string(text) + "\n")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// TestLeafThatCannotBeLimited: a kernel that does not give a leaf its files gives no limits, and nothing of the leaf is left.
func TestLeafThatCannotBeLimited(t *testing.T) {
	g, dir := fakeGroups(t, "/a/b", map[string]string{"cgroup.controllers": "memory", "cgroup.subtree_control": "memory", "cgroup.procs": "", "cgroup.type": "domain"})
	var missing *LimitError
	if l, err := g.leaf(Limits{Memory: 1}, "x"); l != nil || !errors.As(err, &missing) {
		t.Errorf("%v, %v", l, err)
	}
	if left, err := filepath.Glob(filepath.Join(dir, "cordon-*")); err != nil || len(left) > 0 {
		t.Errorf("left: %v %v", left, err)
	}
}

// TestSweepTakesOnlyWhatADeadHostLeft.
func TestSweepTakesOnlyWhatADeadHostLeft(t *testing.T) {
	g, dir := fakeGroups(t, "/a/b", map[string]string{"cgroup.controllers": "memory", "cgroup.subtree_control": "memory", "cgroup.procs": "", "cgroup.type": "domain"})
	dead, living := strconv.Itoa(1<<30), strconv.Itoa(os.Getpid())
	for _, name := range []string{"cordon-" + dead + "-x-1-1", "cordon-" + living + "-x-1-1", "cordon-host", "other-" + dead, "cordon-" + dead + "-busy-1-1/member"} {
		if err := os.MkdirAll(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	g.own = dir
	g.sweep()
	for name, want := range map[string]bool{
		"cordon-" + dead + "-x-1-1": false, "cordon-" + living + "-x-1-1": true, "cordon-host": true, "other-" + dead: true, "cordon-" + dead + "-busy-1-1": true,
	} {
		if _, err := os.Stat(filepath.Join(dir, name)); (err == nil) != want {
			t.Errorf("%s: %v, want it there: %v", name, err, want)
		}
	}
}

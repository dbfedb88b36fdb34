package sandbox

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestCanonicalPath(t *testing.T) {
	base := CanonicalPath(t.TempDir())
	must(t, os.MkdirAll(base+"/real/deep", 0o755))
	must(t, os.WriteFile(base+"/file", nil, 0o644))
	must(t, os.Symlink("real/deep", base+"/link"))
	must(t, os.Symlink("loop", base+"/loop"))
	must(t, os.Symlink("/gone/away", base+"/dangling"))
	t.Chdir(base)
	for _, c := range []struct{ in, want string }{
		{base + "/link", base + "/real/deep"},
		{base + "/link/..", base + "/real"}, // a lexical `..` would say base
		{base + "/link/../..", base},
		{base + "/real/./deep//", base + "/real/deep"},
		{"link/..", base + "/real"},
		{".", base},
		{"/..", "/"},
		{base + "/missing", base + "/missing"},
		{base + "/missing/../real", base + "/missing/../real"},
		{base + "/file/..", base + "/file/.."},
		{base + "/loop", base + "/loop"},
		{base + "/dangling", base + "/dangling"},
		{"missing/../x", "missing/../x"},
		{"a\x00b", "a\x00b"},
		{"", ""},
	} {
		if got := CanonicalPath(c.in); got != c.want {
			t.Errorf("CanonicalPath(%q) = %q, want %q", c.in, got, c.want)
		}
	}
}

func TestWritableRoots(t *testing.T) {
	base := CanonicalPath(t.TempDir())
	ws, tmp := base+"/ws", base+"/tmp"
	must(t, os.Mkdir(ws, 0o755))
	must(t, os.Mkdir(tmp, 0o755))
	must(t, os.Symlink(ws, base+"/alias"))
	for _, c := range []struct {
		mode       Mode
		root, temp string
		want       []string
	}{
		{ReadOnly, ws, tmp, nil},
		{DangerFullAccess, ws, tmp, nil},
		{"bogus", ws, tmp, nil},
		{WorkspaceWrite, ws, tmp, []string{ws, tmp}},
		{WorkspaceWrite, base + "/alias", tmp, []string{ws, tmp}},
		{WorkspaceWrite, ws, base + "/alias", []string{ws}},
		{WorkspaceWrite, ws, "", []string{ws}},
	} {
		if got := WritableRoots(c.mode, c.root, c.temp); !slices.Equal(got, c.want) {
			t.Errorf("WritableRoots(%s, %s, %s) = %v, want %v", c.mode, c.root, c.temp, got, c.want)
		}
	}
}

func TestSessionTemp(t *testing.T) {
	for _, c := range []struct{ dir, session, want string }{
		{"/t", "s1", "/t/s1"},
		{"/t", "a b\n", "/t/a b\n"},
		{"/t", "-rf", "/t/-rf"},
		{"/t", "", ""}, {"/t", ".", ""}, {"/t", "..", ""}, {"/t", "../x", ""}, {"/t", "a/b", ""}, {"/t", "a\x00", ""},
		{"/t", strings.Repeat("a", 256), ""}, {"t", "s1", ""}, {"", "s1", ""},
	} {
		if got, err := SessionTemp(c.dir, c.session); got != c.want || (err == nil) != (c.want != "") {
			t.Errorf("SessionTemp(%q, %q) = %q, %v", c.dir, c.session, got, err)
		}
	}
}

func TestContains(t *testing.T) {
	for _, c := range []struct {
		root, path string
		want       bool
	}{
		{"/w", "/w", true},
		{"/w", "/w/a/b", true},
		{"/w", "/wx", false},
		{"/w", "/", false},
		{"/", "/", true},
		{"/", "/a", true},
		{"/w", "/w/../etc", false},
		{"/w", "/w/a/..", false},
		{"/w", "w/a", false},
		{"w", "w/a", false},
		{"/w/", "/w/a", false},
		{"", "", false},
		{"", "/a", false},
		{"/w\n", "/w\n/-rf", true},
	} {
		if got := Contains(c.root, c.path); got != c.want {
			t.Errorf("Contains(%q, %q) = %v", c.root, c.path, got)
		}
	}
}

// FuzzCanonicalPath compares with the kernel: opening the spelling and asking /proc what was opened.
func FuzzCanonicalPath(f *testing.F) {
	base := CanonicalPath(f.TempDir())
	for _, err := range []error{
		os.MkdirAll(base+"/a/b/c", 0o755),
		os.WriteFile(base+"/f", nil, 0o644),
		os.Symlink("a/b", base+"/l"),
		os.Symlink("../..", base+"/a/b/up"),
		os.Symlink(base+"/l/c", base+"/a/abs"),
		os.Symlink("nowhere", base+"/d"),
		os.Symlink("self", base+"/self"),
	} {
		if err != nil {
			f.Fatal(err)
		}
	}
	for _, s := range []string{"l/..", "f/", "l/", "d/", "f/.", "l/../l/c/../up", "a/abs/..", "f/..", "d", "self/x", "l//./c/", "..", "a/b/up/l", "\x00", strings.Repeat("a/../", 50)} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, rel string) {
		if strings.HasPrefix(rel, "/proc") || len(rel) > 1000 {
			t.Skip()
		}
		p := base + "/" + rel
		got := CanonicalPath(p)
		fd, err := unix.Open(p, unix.O_PATH|unix.O_CLOEXEC, 0)
		if err != nil {
			if got != p {
				t.Fatalf("CanonicalPath(%q) = %q, but the kernel says %v", p, got, err)
			}
			return
		}
		defer unix.Close(fd)
		want, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
		must(t, err)
		if got != want {
			t.Fatalf("CanonicalPath(%q) = %q, the kernel opened %q", p, got, want)
		}
		if !Contains("/", got) || got != CanonicalPath(got) {
			t.Fatalf("CanonicalPath(%q) = %q is not canonical", p, got)
		}
	})
}

func FuzzContains(f *testing.F) {
	f.Add("/w", "/w/a")
	f.Add("/w", "/w/../a")
	f.Fuzz(func(t *testing.T, root, path string) {
		if !Contains(root, path) {
			return
		}
		rel, err := filepath.Rel(root, path)
		if err != nil || !filepath.IsLocal(rel) {
			t.Fatalf("Contains(%q, %q), but the relative path is %q, %v", root, path, rel, err)
		}
	})
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

//go:build unix

package fskit

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/fs"
	"github.com/cordon-host/cordon/capability/sandbox"
)

// FuzzResolve compares the walk with the kernel's: opening the spelling and asking what was opened.
func FuzzResolve(f *testing.F) {
	base := sandbox.CanonicalPath(f.TempDir())
	for _, err := range []error{
		os.MkdirAll(base+"/a/b/c", 0o755),
		os.WriteFile(base+"/f", nil, 0o644),
		os.Symlink("a/b", base+"/l"),
		os.Symlink("../..", base+"/a/b/up"),
		os.Symlink(base+"/l/c", base+"/a/abs"),
		os.Symlink("a/b/", base+"/slash"),
		os.Symlink("f/", base+"/fslash"),
		os.Symlink("nowhere", base+"/d"),
		os.Symlink("self", base+"/self"),
	} {
		must(f, err)
	}
	for _, s := range []string{"l/..", "f/", "l/", "d/", "f/.", "l/../l/c/../up", "a/abs/..", "f/..", "d", "self/x", "l//./c/", "..", "a/b/up/l", "slash/c", "fslash", "fslash/x", "new", "new/x", "a/new/", "new/../f", strings.Repeat("a/../", 50)} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, rel string) {
		if strings.Contains(rel, "\x00") || len(rel) > 1000 {
			t.Skip()
		}
		v := newView(everything(base))
		loc, err := v.resolve("./" + rel)
		fd, kernel := unix.Open(base+"/./"+rel, unix.O_PATH|unix.O_CLOEXEC, 0)
		if kernel != nil {
			if err == nil && loc.missing == 0 {
				t.Fatalf("%q is %+v, but the kernel says %v", rel, loc, kernel)
			}
			if loc.missing > 0 { // where it would be made
				parent := loc.host[:strings.LastIndexByte(loc.host, '/')]
				if loc.missing == 1 && sandbox.CanonicalPath(parent+"/") != or(parent, "/") {
					t.Fatalf("%q would be made in %q, which is not canonical", rel, parent)
				}
			}
			return
		}
		defer unix.Close(fd)
		want, readErr := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
		if readErr != nil {
			t.Skip(readErr)
		}
		if err != nil || loc.missing > 0 || loc.host != want || loc.view != want {
			t.Fatalf("%q is %+v, %v; the kernel opened %q", rel, loc, err, want)
		}
	})
}

func or(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}

// FuzzWrite spells paths every way there is: a write in workspace-write mode changes nothing outside, whatever it says.
func FuzzWrite(f *testing.F) {
	for _, s := range []string{"out/x", "dangling", "../x", "back/../../x", "/tmp/escape/x", "alias/x", "uplink/../x", "sub/../../ws/x", ".git/hooks/x", "/", "//", "totemp/escape/../x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, path string) {
		if len(path) > 300 || strings.Count(path, "/") > 20 {
			t.Skip()
		}
		a := newArena(t)
		guarded := func() string {
			var b strings.Builder
			tree := a.tree()
			for _, dir := range []string{"/outside", "/state/key", "/ws/compose.yml", "/ws/cordon.lock", "/ws/.git/hooks", "/alias"} {
				for p, what := range tree {
					if sandbox.Contains(dir, p) {
						fmt.Fprintf(&b, "%d:%d ", len(p), len(what))
						if strings.Contains(what, "fuzz") {
							b.WriteString("WRITTEN ")
						}
					}
				}
			}
			return fmt.Sprint(len(b.String()), strings.Contains(b.String(), "WRITTEN"))
		}
		before := guarded()
		_, err := a.write(sandbox.WorkspaceWrite, path, "fuzz")
		if after := guarded(); after != before {
			t.Fatalf("%q changed something outside: %v", path, err)
		}
		if err != nil && fault.Reason(err) == "" {
			t.Fatalf("%q: %v is no fault of the capability", path, err)
		}
	})
}

// FuzzReplace holds an edit to what it promises: what is not replaced stays, byte for byte, and undoing it is possible by
// hand.
func FuzzReplace(f *testing.F) {
	f.Add("a\r\nb\r\n", "a\nb", "c\nd", true)
	f.Add("a\nb\r\nc\n", "b\n", "x\r\ny\n", false)
	f.Add("\ufeffx\r\n", "x", "", false)
	f.Add("\r\r\n\n", "\r", "\n", true)
	f.Add("aaa", "aa", "a", true)
	f.Fuzz(func(t *testing.T, text, old, replacement string, all bool) {
		if !utf8.ValidString(text) {
			t.Skip()
		}
		got, n, err := replace(text, old, replacement, all, "/f")
		count := 0
		if o := normalized(old); o != "" {
			count = strings.Count(normalized(text), o)
		}
		switch {
		case err != nil:
			want := fs.EditNotFound
			if count > 1 {
				want = fs.AmbiguousEdit
			}
			if fault.Reason(err) != want || count == 1 || count > 1 && all {
				t.Fatalf("%d matches: %v", count, err)
			}
			return
		case int(n) != count || count > 1 && !all:
			t.Fatalf("%d matches, %d replaced", count, n)
		}
		// A CR that ends no line may come to stand before an LF; what that means then is not a question of normalizing.
		if !strings.Contains(normalized(text)+normalized(replacement), "\r") {
			if want := strings.ReplaceAll(normalized(text), normalized(old), normalized(replacement)); normalized(got) != want {
				t.Fatalf("%q, want %q", normalized(got), want)
			}
		}
		if !strings.Contains(text, "\r\n") {
			if want := strings.ReplaceAll(text, normalized(old), normalized(replacement)); got != want {
				t.Fatalf("%q, want %q", got, want)
			}
		}
		// The bytes before the first match and behind the last one are the file's own.
		plain, o := normalized(text), normalized(old)
		head := offsets(text)(strings.Index(plain, o))
		if !strings.HasPrefix(got, text[:head]) {
			t.Fatalf("%q does not begin as %q", got, text[:head])
		}
		last, rest := 0, plain
		for i := strings.Index(rest, o); i >= 0; i = strings.Index(rest, o) {
			last += i + len(o)
			rest = rest[i+len(o):]
		}
		if tail := text[offsets(text)(last):]; !strings.HasSuffix(got, tail) {
			t.Fatalf("%q does not end as %q", got, tail)
		}
	})
}

// FuzzWindow compares the window of a text with what splitting it says.
func FuzzWindow(f *testing.F) {
	f.Add("a\nb\r\nc", int64(2), int64(5), 3)
	f.Add("\ufeffx\n\n", int64(1), int64(1), 1)
	f.Fuzz(func(t *testing.T, text string, offset, limit int64, chunk int) {
		if offset < 1 || limit < 1 || chunk < 1 || !utf8.ValidString(text) || strings.Contains(text, "\x00") {
			t.Skip()
		}
		got, err := readWindow(&slow{[]byte(text), chunk}, Window{Offset: offset, Limit: limit, MaxBytes: 1 << 30}, "/f")
		lines := strings.SplitAfter(strings.TrimPrefix(text, "\ufeff"), "\n")
		if lines[len(lines)-1] == "" {
			lines = lines[:len(lines)-1]
		}
		if offset > int64(len(lines)) && !(len(lines) == 0 && offset == 1) {
			if fault.Reason(err) != fs.NotFound {
				t.Fatalf("%v", err)
			}
			return
		}
		if err != nil || got.Total != int64(len(lines)) {
			t.Fatalf("%d lines, %v, want %d", got.Total, err, len(lines))
		}
		want := lines[offset-1:]
		if limit < int64(len(want)) {
			want = want[:limit]
		}
		if len(lines) == 0 {
			want = nil
		}
		for i, l := range want {
			text, ended := strings.CutSuffix(l, "\n")
			if ended {
				text = strings.TrimSuffix(text, "\r")
			}
			if i >= len(got.Lines) || got.Lines[i].Text != text || got.Lines[i].Number != offset+int64(i) {
				t.Fatalf("line %d of %q: %+v", i, text, got.Lines)
			}
		}
	})
}

//go:build unix

package fskit

import (
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/fs"
	"github.com/cordon-host/cordon/capability/sandbox"
)

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

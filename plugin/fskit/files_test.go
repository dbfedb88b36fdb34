//go:build unix

package fskit

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/fs"
	"github.com/cordon-host/cordon/capability/sandbox"
)

// everything is a policy without a fence.
func everything(root string) Policy { return Policy{Mode: sandbox.DangerFullAccess, Root: root} }

func wide(offset, limit int64) Window {
	return Window{Offset: offset, Limit: limit, MaxBytes: 1 << 20, MaxLine: 2000}
}

func TestReads(t *testing.T) {
	for _, mode := range sandbox.Modes() {
		confined := func(want string) string {
			if mode.Confined() {
				return want
			}
			return ""
		}
		temp := ""
		if mode == sandbox.ReadOnly {
			temp = fs.NotFound // read-only mode has no temp directory
		}
		for _, c := range []struct{ name, path, canonical, want string }{
			{"inside", "in.txt", "$W/in.txt", ""},
			{"outside", "$B/outside/secret.txt", "$B/outside/secret.txt", ""},
			{"by `..`", "../outside/secret.txt", "$B/outside/secret.txt", ""},
			{"by a link", "filelink", "$B/outside/secret.txt", ""},
			{"protected", "compose.yml", "$W/compose.yml", ""},
			{"missing", "none.txt", "", fs.NotFound},
			{"a link that leads nowhere", "dangling", "", fs.NotFound},
			{"below a file", "in.txt/x", "", fs.NotFound},
			{"a file as a directory", "in.txt/", "", fs.NotFound},
			{"a link to itself", "loop", "", fs.IOError},
			{"a directory", "sub", "", fs.NotRegularFile},
			{"the root of the file system", "/", "", fs.NotRegularFile},
			{"temp", "/tmp/t.txt", "/tmp/t.txt", temp},
			{"out of temp by a link", "/tmp/escape/secret.txt", "$B/outside/secret.txt", temp},
			{"hidden", "$B/state/key", "$B/state/key", confined(fs.SandboxDenied)},
			{"hidden, missing", "$B/state/none", "", confined(fs.SandboxDenied)},
			{"temp where the host has it", "$T/t.txt", "$T/t.txt", confined(fs.SandboxDenied)},
			{"another process", "/proc/self/environ", "", confined(fs.SandboxDenied)},
			{"another process, through itself", "/proc/thread-self/root/proc/1/comm", "", confined(fs.SandboxDenied)},
		} {
			if !mode.Confined() && (strings.HasPrefix(c.path, "/tmp") || strings.HasPrefix(c.path, "/proc")) || c.name == "hidden, missing" && !mode.Confined() {
				continue // the machine's own
			}
			t.Run(string(mode)+"/"+c.name, func(t *testing.T) {
				a := newArena(t)
				got, err := a.fs.Read(t.Context(), a.policy(mode), a.path(c.path), wide(1, 9))
				if reason(err) != c.want {
					t.Fatalf("read: %v, want %s", err, c.want)
				}
				if c.want == "" && (len(got.Lines) != 1 || got.Lines[0].Text != "old" || got.Path != a.path(c.canonical) || got.Version == "") {
					t.Errorf("read %+v", got)
				}
				st, err := a.fs.Stat(t.Context(), a.policy(mode), a.path(c.path))
				want := c.want
				if want == fs.NotRegularFile {
					want = ""
				}
				if reason(err) != want {
					t.Errorf("stat: %v, want %s", err, want)
				}
				if c.want == "" && (st.Kind != KindFile || st.Size != 4 || st.Version != got.Version || st.Path != got.Path) {
					t.Errorf("stat %+v", st)
				}
			})
		}
	}
}

func TestReadsKnownFiles(t *testing.T) {
	a := newArena(t)
	if _, err := os.Stat("/etc/hosts"); err != nil {
		t.Skip("no /etc/hosts")
	}
	if _, err := a.fs.Read(t.Context(), a.policy(sandbox.ReadOnly), "/etc/hosts", wide(1, 1)); err != nil {
		t.Error(err)
	}
}

func TestSpecialFiles(t *testing.T) {
	a := newArena(t)
	must(t, syscall.Mkfifo(a.ws+"/pipe", 0o644))
	must(t, os.Symlink("pipe", a.ws+"/to-pipe"))
	p := a.policy(sandbox.WorkspaceWrite)
	for _, path := range []string{"pipe", "to-pipe", "/dev/null"} {
		if _, err := a.fs.Read(t.Context(), p, path, wide(1, 1)); reason(err) != fs.NotRegularFile {
			t.Errorf("read %s: %v", path, err)
		}
		if path == "/dev/null" {
			continue
		}
		if _, err := a.fs.Write(t.Context(), p, path, nil, Precondition{}); reason(err) != fs.NotRegularFile {
			t.Errorf("write %s: %v", path, err)
		}
		if _, err := a.fs.Edit(t.Context(), p, path, "a", "b", false, Precondition{}); reason(err) != fs.NotRegularFile {
			t.Errorf("edit %s: %v", path, err)
		}
		if st, err := a.fs.Stat(t.Context(), p, path); err != nil || st.Kind != KindOther {
			t.Errorf("stat %s: %+v, %v", path, st, err)
		}
	}
}

func TestWindow(t *testing.T) {
	line := func(n int64, text string) Line { return Line{Number: n, Text: text} }
	cut := func(n int64, text string) Line { return Line{Number: n, Text: text, Cut: true} }
	for _, c := range []struct {
		name, text string
		w          Window
		want       Text
		err        string
	}{
		{"numbers lines and reports total for a whole-file read", "a\nb\n", wide(1, 10), Text{Lines: []Line{line(1, "a"), line(2, "b")}, Total: 2}, ""},
		{"applies offset/limit", "a\nb\nc\nd\n", wide(2, 2), Text{Lines: []Line{line(2, "b"), line(3, "c")}, Total: 4}, ""},
		{"strips CRLF", "a\r\nb\r\n", wide(1, 10), Text{Lines: []Line{line(1, "a"), line(2, "b")}, Total: 2}, ""},
		{"a CR inside a line is a part of it", "a\rb\n\r\r\n\r", wide(1, 10), Text{Lines: []Line{line(1, "a\rb"), line(2, "\r"), line(3, "\r")}, Total: 3}, ""},
		{"a final line with no trailing newline", "a\nb", wide(1, 10), Text{Lines: []Line{line(1, "a"), line(2, "b")}, Total: 2}, ""},
		{"empty lines", "\n\na\n\n", wide(1, 10), Text{Lines: []Line{line(1, ""), line(2, ""), line(3, "a"), line(4, "")}, Total: 4}, ""},
		{"an empty file at offset 1", "", wide(1, 10), Text{}, ""},
		{"an empty file at offset 2", "", wide(2, 10), Text{}, `offset 2 is out of range for "/f" (0 lines)`},
		{"an offset past the end", "a\nb", wide(3, 10), Text{}, `offset 3 is out of range for "/f" (2 lines)`},
		{"a byte order mark", "\ufeffa\n", wide(1, 10), Text{Lines: []Line{line(1, "a")}, Total: 1}, ""},
		{"nothing but a byte order mark", "\ufeff", wide(1, 10), Text{}, ""},
		{"a second byte order mark is text", "\ufeff\ufeffa", wide(1, 10), Text{Lines: []Line{line(1, "\ufeffa")}, Total: 1}, ""},
		{"truncates an over-long line by characters", "ééé\néé\n", Window{Offset: 1, Limit: 9, MaxBytes: 99, MaxLine: 2}, Text{Lines: []Line{cut(1, "éé"), line(2, "éé")}, Total: 2}, ""},
		{"a line of exactly the longest length before CRLF", "ab\r\nabc\r\n", Window{Offset: 1, Limit: 9, MaxBytes: 99, MaxLine: 2}, Text{Lines: []Line{line(1, "ab"), cut(2, "ab")}, Total: 2}, ""},
		{"no cut", "abc\n", Window{Offset: 1, Limit: 9, MaxBytes: 99}, Text{Lines: []Line{line(1, "abc")}, Total: 1}, ""},
		{"caps output bytes", "aa\nbb\ncc\n", Window{Offset: 1, Limit: 9, MaxBytes: 5, MaxLine: 9}, Text{Lines: []Line{line(1, "aa"), line(2, "bb")}, Total: 3, Capped: true}, ""},
		{"separators count", "aa\nbb\n", Window{Offset: 1, Limit: 9, MaxBytes: 4, MaxLine: 9}, Text{Lines: []Line{line(1, "aa")}, Total: 2, Capped: true}, ""},
		{"a cap below the first line", "aaa\nb\n", Window{Offset: 1, Limit: 9, MaxBytes: 2, MaxLine: 9}, Text{Total: 2, Capped: true}, ""},
		{"a cap at an offset", "a\nbbb\n", Window{Offset: 2, Limit: 9, MaxBytes: 2, MaxLine: 9}, Text{Total: 2, Capped: true}, ""},
		{"binary", "a\x00b\n", wide(1, 10), Text{}, `cannot read "/f": binary file`},
		{"a NUL at the end of the sample", strings.Repeat("a", 8191) + "\x00", wide(1, 10), Text{}, `cannot read "/f": binary file`},
		{"a late NUL is text", strings.Repeat("a\n", 4096) + "\x00\n", wide(4097, 1), Text{Lines: []Line{line(4097, "\x00")}, Total: 4097}, ""},
		{"invalid UTF-8", "a\xff\n", wide(1, 10), Text{}, `cannot read "/f": invalid UTF-8 text`},
		{"invalid UTF-8 behind the window", "a\nb\nc\xc3\n", wide(1, 1), Text{}, `cannot read "/f": invalid UTF-8 text`},
		{"a character that is cut apart", "a\xc3", wide(1, 10), Text{}, `cannot read "/f": invalid UTF-8 text`},
		{"a surrogate", "\xed\xa0\x80", wide(1, 10), Text{}, `cannot read "/f": invalid UTF-8 text`},
	} {
		for _, chunk := range []int{1, 2, 3, 7, 1 << 20} { // windows identically when text arrives in small chunks
			got, err := readWindow(&slow{[]byte(c.text), chunk}, c.w, "/f")
			msg := ""
			if err != nil {
				msg = fault.Message(err)
			}
			if d := cmp.Diff(c.want, got); d != "" || msg != c.err {
				t.Errorf("%s, %d bytes at a time: %v\n%s", c.name, chunk, err, d)
			}
		}
	}
}

// slow is a reader of a few bytes at a time.
type slow struct {
	data []byte
	n    int
}

func (s *slow) Read(p []byte) (int, error) {
	if len(s.data) == 0 {
		return 0, io.EOF
	}
	n := copy(p[:min(len(p), s.n)], s.data)
	s.data = s.data[n:]
	return n, nil
}

// caps a newline-free giant line without unbounded buffering
func TestGiantLine(t *testing.T) {
	a := newArena(t)
	must(t, os.WriteFile(a.ws+"/giant", bytes.Repeat([]byte("é"), 8<<20), 0o644))
	got, err := a.fs.Read(t.Context(), a.policy(sandbox.ReadOnly), "giant", Window{Offset: 1, Limit: 9, MaxBytes: 50 << 10, MaxLine: 2000})
	if err != nil || len(got.Lines) != 1 || got.Lines[0].Text != strings.Repeat("é", 2000) || !got.Lines[0].Cut {
		t.Errorf("%d lines, %v", len(got.Lines), err)
	}
}

func TestLists(t *testing.T) {
	a := newArena(t)
	p := a.policy(sandbox.WorkspaceWrite)
	list := func(path string) []string {
		t.Helper()
		entries, err := a.fs.List(t.Context(), p, a.path(path))
		if err != nil {
			return []string{reason(err)}
		}
		out := []string{}
		for _, e := range entries {
			out = append(out, e.Name+" "+e.Kind)
		}
		return out
	}
	must(t, syscall.Mkfifo(a.ws+"/code/pipe", 0o644))
	must(t, os.Mkdir(a.ws+"/empty", 0o755))
	must(t, os.Symlink(a.base+"/state/key", a.ws+"/code/to-hidden"))
	must(t, os.Symlink("/tmp/t.txt", a.ws+"/code/to-temp"))
	must(t, os.Symlink("../sub", a.ws+"/code/to-dir"))
	must(t, os.Symlink("nowhere", a.ws+"/code/to-nothing"))
	for path, want := range map[string][]string{
		"code":           {"pipe other", "to-dir directory", "to-hidden other", "to-nothing other", "to-temp file"},
		"back":           {"in.txt file"},
		"empty":          {},
		"/tmp":           {"escape directory", "home file", "t.txt file"},
		"$B/outside/dir": {"x.txt file"},
		"in.txt":         {fs.NotDirectory},
		"none":           {fs.NotFound},
		"$B/state":       {fs.SandboxDenied},
		"$B/state/tmp":   {fs.SandboxDenied},
		"/proc":          {fs.SandboxDenied},
		"":               {fs.NotFound},
	} {
		if got := list(path); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", path, got, want)
		}
	}
	if got := list("/"); !slices.Contains(got, "etc directory") {
		t.Errorf("/: %q", got)
	}
}

func TestPrecondition(t *testing.T) {
	a := newArena(t)
	p := a.policy(sandbox.WorkspaceWrite)
	write := func(path, text string, pre Precondition) (Written, error) {
		return a.fs.Write(t.Context(), p, path, []byte(text), pre)
	}
	first, err := write("v.txt", "1", Precondition{MustNotExist: true})
	must(t, err)
	if st, err := a.fs.Stat(t.Context(), p, "v.txt"); err != nil || st.Version != first.Version || !first.Created || st.Mode != 0o600 {
		t.Errorf("created %+v, then it is %+v, %v", first, st, err)
	}
	if _, err := write("v.txt", "x", Precondition{MustNotExist: true}); fault.Message(err) != `cannot overwrite existing "`+a.ws+`/v.txt" without reading it first` {
		t.Error(err)
	}
	second, err := write("v.txt", "2", Precondition{Version: first.Version})
	must(t, err)
	if second.Version == first.Version || second.Created {
		t.Errorf("%+v after %+v", second, first)
	}
	for _, path := range []string{"v.txt", a.base + "/alias/v.txt"} { // aliases share one version
		if _, err := write(path, "x", Precondition{Version: first.Version}); reason(err) != fs.StaleVersion || !strings.HasSuffix(fault.Message(err), "file changed since it was read") {
			t.Error(err)
		}
		if _, err := a.fs.Edit(t.Context(), p, path, "2", "3", false, Precondition{Version: first.Version}); reason(err) != fs.StaleVersion {
			t.Error(err)
		}
		// stale before matching
		if _, err := a.fs.Edit(t.Context(), p, path, "not there", "3", false, Precondition{Version: first.Version}); reason(err) != fs.StaleVersion {
			t.Error(err)
		}
	}
	third, err := a.fs.Edit(t.Context(), p, "v.txt", "2", "3", false, Precondition{Version: second.Version})
	must(t, err)
	if got := content(t, a.ws+"/v.txt"); got != "3" || third.Version == second.Version || third.Replacements != 1 {
		t.Errorf("%q, %+v", got, third)
	}
	must(t, os.Remove(a.ws+"/v.txt"))
	if _, err := write("v.txt", "x", Precondition{Version: third.Version}); reason(err) != fs.StaleVersion || !strings.HasSuffix(fault.Message(err), "file no longer exists") {
		t.Error(err)
	}
	if _, err := write("d/v.txt", "x", Precondition{Version: third.Version}); reason(err) != fs.StaleVersion || content(t, a.ws+"/d") != "(none)" {
		t.Error(err)
	}
	if _, err := a.fs.Edit(t.Context(), p, "v.txt", "a", "b", false, Precondition{}); fault.Message(err) != `cannot edit "`+a.ws+`/v.txt": file changed since it was read` {
		t.Error(err)
	}
}

// What somebody else does between staging and publication is not lost.
func TestPreconditionAtPublication(t *testing.T) {
	for _, c := range []struct {
		name  string
		do    func(a *arena, p Policy) error
		while func(path string) error
		want  string
		holds string
	}{
		{"an edit of a file that is written meanwhile", edits, func(p string) error { return os.WriteFile(p, []byte("theirs\n"), 0o644) }, fs.StaleVersion, "theirs\n"},
		{"an edit of a file that is replaced meanwhile", edits, func(p string) error {
			return replaced(p, "theirs\n")
		}, fs.StaleVersion, "theirs\n"},
		{"an edit of a file that is removed meanwhile", edits, os.Remove, fs.StaleVersion, "(none)"},
		{"a guarded write of a file that is written meanwhile", guarded, func(p string) error { return os.WriteFile(p, []byte("theirs\n"), 0o644) }, fs.StaleVersion, "theirs\n"},
		{"a guarded write of a file that is removed meanwhile", guarded, os.Remove, fs.StaleVersion, "(none)"},
		{"a write of a file that is removed meanwhile", writes, os.Remove, "", "ours\n"},
		{"a write of a file that is replaced meanwhile", writes, func(p string) error { return replaced(p, "theirs\n") }, "", "ours\n"},
		{"a file that becomes a directory meanwhile", writes, func(p string) error { return joined(os.Remove(p), os.Mkdir(p, 0o755)) }, fs.NotRegularFile, "dir"},
		{"a file that becomes a link out meanwhile", writes, func(p string) error {
			return joined(os.Remove(p), os.Symlink("../outside/secret.txt", p))
		}, fs.SandboxDenied, "old\n"},
		{"a file that becomes a link meanwhile", writes, func(p string) error { return joined(os.Remove(p), os.Symlink("sub/in.txt", p)) }, "", "ours\n"},
		{"a creation that another one overtakes", creates, func(p string) error {
			return os.WriteFile(filepath.Join(filepath.Dir(p), "new.txt"), []byte("theirs\n"), 0o644)
		}, fs.NotObserved, "old\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := newArena(t)
			once := sync.OnceFunc(func() { must(t, c.while(a.ws+"/in.txt")) })
			a.fs.staged = once
			before := a.tree()
			if err := c.do(a, a.policy(sandbox.WorkspaceWrite)); reason(err) != c.want {
				t.Errorf("%v, want %s", err, c.want)
			}
			if c.holds == "dir" {
				if fi, err := os.Stat(a.ws + "/in.txt"); err != nil || !fi.IsDir() {
					t.Errorf("%v, %v", fi, err)
				}
			} else if got := content(t, a.ws+"/in.txt"); got != c.holds {
				t.Errorf("holds %q, want %q", got, c.holds)
			}
			after := a.tree()
			for _, p := range []string{"/ws/in.txt", "/ws/sub/in.txt", "/ws/new.txt"} {
				delete(before, p)
				delete(after, p)
			}
			if d := cmp.Diff(before, after); d != "" {
				t.Errorf("something else changed:\n%s", d)
			}
		})
	}
}

func edits(a *arena, p Policy) error {
	_, err := a.fs.Edit(a.t.Context(), p, "in.txt", "old", "ours", false, Precondition{})
	return err
}

func writes(a *arena, p Policy) error {
	_, err := a.fs.Write(a.t.Context(), p, "in.txt", []byte("ours\n"), Precondition{})
	return err
}

func guarded(a *arena, p Policy) error {
	st, err := a.fs.Stat(a.t.Context(), p, "in.txt")
	must(a.t, err)
	_, err = a.fs.Write(a.t.Context(), p, "in.txt", []byte("ours\n"), Precondition{Version: st.Version})
	return err
}

func creates(a *arena, p Policy) error {
	_, err := a.fs.Write(a.t.Context(), p, "new.txt", []byte("ours\n"), Precondition{MustNotExist: true})
	return err
}

func replaced(path, text string) error {
	return joined(os.WriteFile(path+".theirs", []byte(text), 0o644), os.Rename(path+".theirs", path))
}

func joined(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func TestPermissions(t *testing.T) {
	a := newArena(t)
	p := a.policy(sandbox.WorkspaceWrite)
	for _, mode := range []os.FileMode{0o644, 0o755, 0o600, 0o664, 0o400 | 0o200} {
		name := fmt.Sprintf("m%o.sh", mode)
		must(t, os.WriteFile(a.ws+"/"+name, []byte("old\n"), 0o600))
		must(t, os.Chmod(a.ws+"/"+name, mode))
		for _, err := range []error{second(a.fs.Write(t.Context(), p, name, []byte("old 2\n"), Precondition{})), second(a.fs.Edit(t.Context(), p, name, "old", "new", false, Precondition{}))} {
			must(t, err)
			if fi, err := os.Stat(a.ws + "/" + name); err != nil || fi.Mode() != mode {
				t.Errorf("%s: mode %v, %v", name, fi.Mode(), err)
			}
		}
	}
	must(t, os.WriteFile(a.ws+"/suid", []byte("old\n"), 0o755))
	must(t, os.Chmod(a.ws+"/suid", 0o755|os.ModeSetuid|os.ModeSetgid))
	must(t, second(a.fs.Write(t.Context(), p, "suid", []byte("x"), Precondition{})))
	if fi, err := os.Stat(a.ws + "/suid"); err != nil || fi.Mode() != 0o755 {
		t.Errorf("a set-id bit survives: %v, %v", fi.Mode(), err)
	}
	if os.Geteuid() == 0 {
		must(t, os.Chown(a.ws+"/in.txt", 1234, 4321))
		must(t, second(a.fs.Write(t.Context(), p, "in.txt", []byte("x"), Precondition{})))
		fi, err := os.Stat(a.ws + "/in.txt")
		must(t, err)
		if st := fi.Sys().(*syscall.Stat_t); st.Uid != 1234 || st.Gid != 4321 {
			t.Errorf("owner %d:%d", st.Uid, st.Gid)
		}
		return
	}
	// What the host does not let this user do.
	must(t, os.WriteFile(a.ws+"/ro.txt", []byte("old\n"), 0o444))
	must(t, os.WriteFile(a.ws+"/no.txt", []byte("old\n"), 0))
	must(t, os.Mkdir(a.ws+"/ro", 0o755))
	must(t, os.WriteFile(a.ws+"/ro/in.txt", []byte("old\n"), 0o644))
	must(t, os.Chmod(a.ws+"/ro", 0o555))
	must(t, os.Mkdir(a.ws+"/shut", 0o700))
	must(t, os.WriteFile(a.ws+"/shut/in.txt", []byte("old\n"), 0o644))
	must(t, os.Chmod(a.ws+"/shut", 0))
	defer func() {
		must(t, os.Chmod(a.ws+"/ro", 0o755))
		must(t, os.Chmod(a.ws+"/shut", 0o755))
	}()
	for _, path := range []string{"ro.txt", "no.txt", "ro/in.txt", "ro/new.txt", "ro/d/new.txt", "shut/in.txt", "shut/new.txt"} {
		_, err := a.fs.Write(t.Context(), p, path, []byte("x"), Precondition{})
		if reason(err) != fs.PermissionDenied || fault.Message(err) != `cannot write "`+a.ws+"/"+path+`": permission denied` {
			t.Errorf("%s: %v", path, err)
		}
	}
	for _, path := range []string{"no.txt", "shut/in.txt"} {
		if _, err := a.fs.Read(t.Context(), p, path, wide(1, 1)); reason(err) != fs.PermissionDenied {
			t.Errorf("%s: %v", path, err)
		}
	}
	if _, err := a.fs.List(t.Context(), p, "shut"); reason(err) != fs.PermissionDenied {
		t.Error(err)
	}
}

func second[T any](_ T, err error) error { return err }

// A hard link in the workspace shares its content with a file outside until it is written: then it is a file of its own.
func TestHardLink(t *testing.T) {
	a := newArena(t)
	must(t, second(a.write(sandbox.WorkspaceWrite, "hard.txt", "new\n")))
	must(t, second(a.write(sandbox.WorkspaceWrite, "hard.txt", "newer\n")))
	if got := content(t, a.base+"/outside/hard.txt"); got != "old\n" {
		t.Errorf("the other name holds %q", got)
	}
	// One of a protected file is as protected.
	must(t, os.Link(a.ws+"/compose.yml", a.ws+"/copy.yml"))
	if _, err := a.write(sandbox.WorkspaceWrite, "copy.yml", "new\n"); reason(err) != fs.SandboxDenied || content(t, a.ws+"/copy.yml") != "old\n" {
		t.Error(err)
	}
}

// R20 of the survey of peers: a dangling link is not a way to create a file outside.
func TestDanglingLink(t *testing.T) {
	a := newArena(t)
	for _, pre := range []Precondition{{}, {MustNotExist: true}} {
		if _, err := a.fs.Write(t.Context(), a.policy(sandbox.WorkspaceWrite), "dangling", []byte("x"), pre); reason(err) != fs.SandboxDenied {
			t.Error(err)
		}
	}
	if content(t, a.base+"/outside/new.txt") != "(none)" {
		t.Error("the target was created")
	}
	if to, err := os.Readlink(a.ws + "/dangling"); err != nil || to != a.base+"/outside/new.txt" {
		t.Errorf("the link is %q, %v", to, err)
	}
}

// Readers see the old or the new content, and nothing is left beside it.
func TestAtomic(t *testing.T) {
	a := newArena(t)
	p := a.policy(sandbox.WorkspaceWrite)
	texts := []string{strings.Repeat("a", 1<<20), strings.Repeat("b", 1<<20+1)}
	must(t, os.WriteFile(a.ws+"/big", []byte(texts[0]), 0o644))
	var stop atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		for !stop.Load() {
			if got := content(t, a.ws+"/big"); got != texts[0] && got != texts[1] {
				t.Errorf("a reader saw %d bytes of %q…", len(got), got[:1])
				return
			}
		}
	})
	for i := range 30 {
		must(t, second(a.fs.Write(t.Context(), p, "big", []byte(texts[i%2]), Precondition{})))
	}
	stop.Store(true)
	wg.Wait()
	names, err := filepath.Glob(a.ws + "/.*")
	must(t, err)
	if want := []string{a.ws + "/.git"}; !slices.Equal(names, want) {
		t.Errorf("left behind: %q", names)
	}
}

// Staging under a name, where the file system or the platform has no files without one.
func TestStageNamed(t *testing.T) {
	a := newArena(t)
	d, err := openRoot(a.ws)
	must(t, err)
	defer d.close()
	stage := func(text string) *stage {
		s, err := d.stageNamed(strings.Repeat("é", 120))
		must(t, err)
		must(t, fill(t.Context(), s.file, []byte(text), nil))
		return s
	}
	s := stage("one")
	if fi, err := s.file.Stat(); err != nil || fi.Mode() != 0o600 {
		t.Errorf("mode %v, %v", fi.Mode(), err)
	}
	must(t, s.create("named.txt"))
	must(t, s.discard())
	s = stage("two")
	if err := s.create("named.txt"); err != syscall.EEXIST {
		t.Errorf("created over a file: %v", err)
	}
	must(t, s.replace("named.txt"))
	must(t, s.discard())
	s = stage("three")
	must(t, s.discard())
	if got := content(t, a.ws+"/named.txt"); got != "two" {
		t.Errorf("holds %q", got)
	}
	if left, _ := filepath.Glob(a.ws + "/.*.tmp"); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
	// descend by single steps
	w, err := d.walk("sub")
	must(t, err)
	w.close()
	for _, p := range []string{"back", "out", "in.txt", "sub/in.txt", "none"} {
		if w, err := d.walk(p); err == nil {
			w.close()
			t.Errorf("%s: walked", p)
		} else if p != "none" && !moved(err) {
			t.Errorf("%s: %v", p, err)
		}
	}
}

func TestNames(t *testing.T) {
	a := newArena(t)
	p := a.policy(sandbox.WorkspaceWrite)
	for _, name := range []string{"-rf", "a\nb", "\xff\xfe", " lead", "trail ", "$(x)", "...", "\ufb01", "\u00e9", "e\u0301", strings.Repeat("n", 255), "*", `back\slash`} {
		path := a.ws + "/names/" + name
		must(t, second(a.fs.Write(t.Context(), p, path, []byte("old"), Precondition{})))
		must(t, second(a.fs.Edit(t.Context(), p, path, "old", fmt.Sprintf("%q", name), false, Precondition{})))
	}
	made, err := os.ReadDir(a.ws + "/names")
	must(t, err)
	if len(made) != 13 {
		t.Errorf("%d files were made", len(made))
	}
	for _, e := range made {
		if got := content(t, a.ws+"/names/"+e.Name()); got != fmt.Sprintf("%q", e.Name()) {
			t.Errorf("%q holds %s", e.Name(), got)
		}
	}
	for _, path := range []string{strings.Repeat("n", 256), "names/" + strings.Repeat("n", 256), strings.Repeat("n", 256) + "/x", "none/" + strings.Repeat("n", 256), strings.Repeat("d/", 3000) + "x", "/tmp/" + strings.Repeat("n", 256)} {
		if _, err := a.fs.Write(t.Context(), p, path, []byte("x"), Precondition{}); reason(err) != fs.IOError || !strings.HasSuffix(fault.Message(err), "file name too long") {
			t.Errorf("%.20s…: %v", path, err)
		}
	}
	for _, dir := range []string{"/none", "/d"} {
		if _, err := os.Lstat(a.ws + dir); err == nil {
			t.Errorf("%s was made for a name that cannot be", dir)
		}
	}
}

func TestCanceled(t *testing.T) {
	a := newArena(t)
	p := a.policy(sandbox.WorkspaceWrite)
	ctx, cancel := context.WithCancel(t.Context())
	a.fs.staged = cancel
	before := a.tree()
	if _, err := a.fs.Write(ctx, p, "in.txt", []byte("x"), Precondition{}); reason(err) != fs.Aborted || fault.Message(err) != "write aborted" {
		t.Error(err)
	}
	for op, err := range map[string]error{
		"write": second(a.fs.Write(ctx, p, "in.txt", []byte("x"), Precondition{})),
		"edit":  second(a.fs.Edit(ctx, p, "in.txt", "old", "x", false, Precondition{})),
		"read":  second(a.fs.Read(ctx, p, "in.txt", wide(1, 1))),
		"stat":  second(a.fs.Stat(ctx, p, "in.txt")),
		"list":  second(a.fs.List(ctx, p, ".")),
	} {
		if fault.Message(err) != op+" aborted" {
			t.Error(err)
		}
	}
	if d := cmp.Diff(before, a.tree()); d != "" {
		t.Error(d)
	}
}

// Mutations of one file wait for each other in order, those of others do not.
func TestLocks(t *testing.T) {
	var l lockTable
	must(t, l.lock(t.Context(), "a"))
	must(t, l.lock(t.Context(), "b"))
	const n = 20
	var order []int
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			if err := l.lock(t.Context(), "a"); err != nil {
				t.Error(err)
				return
			}
			order = append(order, i)
			l.unlock("a")
		})
		waitFor(t, func() bool {
			l.mu.Lock()
			defer l.mu.Unlock()
			return len(l.held["a"]) == i+1
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	gaveUp := make(chan error)
	go func() { gaveUp <- l.lock(ctx, "a") }()
	waitFor(t, func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.held["a"]) == n+1
	})
	cancel()
	if err := <-gaveUp; err != context.Canceled {
		t.Error(err)
	}
	l.unlock("a")
	wg.Wait()
	if !slices.IsSorted(order) || len(order) != n {
		t.Errorf("order %v", order)
	}
	l.unlock("b")
	if len(l.held) != 0 {
		t.Errorf("still held: %v", l.held)
	}
}

func waitFor(t *testing.T, ok func() bool) {
	t.Helper()
	for !ok() {
		if t.Context().Err() != nil {
			t.Fatal("canceled")
		}
		time.Sleep(time.Millisecond) // another goroutine has to get somewhere
	}
}

// Concurrent edits of one file lose nothing.
func TestConcurrentEdits(t *testing.T) {
	a := newArena(t)
	p := a.policy(sandbox.WorkspaceWrite)
	var want []string
	for i := range 20 {
		want = append(want, fmt.Sprintf("<%02d>", i))
	}
	must(t, second(a.fs.Write(t.Context(), p, "many", []byte(strings.Join(want, "\n")), Precondition{})))
	var wg sync.WaitGroup
	for _, w := range want {
		wg.Go(func() {
			if _, err := a.fs.Edit(t.Context(), p, "many", w, "done "+w, false, Precondition{}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, w := range want {
		if !strings.Contains(content(t, a.ws+"/many"), "done "+w) {
			t.Errorf("%s is lost", w)
		}
	}
	// With a version, one wins and the others are stale.
	st, err := a.fs.Stat(t.Context(), p, "many")
	must(t, err)
	var won atomic.Int32
	for _, w := range want {
		wg.Go(func() {
			switch _, err := a.fs.Edit(t.Context(), p, "many", "done "+w, "again "+w, false, Precondition{Version: st.Version}); reason(err) {
			case "":
				won.Add(1)
			case fs.StaleVersion:
			default:
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if won.Load() != 1 {
		t.Errorf("%d edits of one version", won.Load())
	}
}

func TestMakeTemp(t *testing.T) {
	base := t.TempDir()
	dir, err := MakeTemp(base+"/tmp", "s1")
	must(t, err)
	again, err := MakeTemp(base+"/tmp", "s1")
	must(t, err)
	fi, err := os.Lstat(dir)
	must(t, err)
	if dir != base+"/tmp/s1" || again != dir || fi.Mode().Perm() != 0o700 {
		t.Errorf("%s, %s, %v", dir, again, fi.Mode())
	}
	must(t, os.Symlink(base, base+"/tmp/link"))
	must(t, os.WriteFile(base+"/tmp/file", nil, 0o600))
	for _, session := range []string{"", ".", "..", "a/b", "link", "file", "\x00"} {
		if dir, err := MakeTemp(base+"/tmp", session); err == nil {
			t.Errorf("%q: %s", session, dir)
		}
	}
	if _, err := MakeTemp("relative", "s1"); err == nil {
		t.Error("a relative place for temp directories was taken")
	}
}

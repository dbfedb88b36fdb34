package launch

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

func TestTail(t *testing.T) {
	for _, c := range []struct {
		name      string
		writes    []string
		limit     int
		max       int64
		data      string
		truncated bool
		spill     string // content; "-" for no file
	}{
		{"short", []string{"ab", "c"}, 4, 100, "abc", false, "-"},
		{"exactly the limit", []string{"abcd"}, 4, 100, "abcd", false, "-"},
		{"one over", []string{"abcd", "e"}, 4, 100, "bcde", true, "abcde"},
		{"one big write", []string{"abcdefghijkl"}, 4, 100, "ijkl", true, "abcdefghijkl"},
		{"many small", []string{"a", "b", "c", "d", "e", "f", "g", "h", "i", "j"}, 3, 100, "hij", true, "abcdefghij"},
		{"bytes, not text", []string{"a\xff\n", "\x00\x1b["}, 4, 100, "\n\x00\x1b[", true, "a\xff\n\x00\x1b["},
		{"spill exactly full", []string{"abcdef"}, 4, 6, "cdef", true, "abcdef"},
		{"spill too small", []string{"abcdef", "g"}, 4, 6, "defg", true, "-"},
		{"spill never fits", []string{"abcdefg"}, 4, 6, "defg", true, "-"},
		{"nothing", nil, 4, 100, "", false, "-"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			tail, err := NewTail(c.limit, Spill{Dir: dir, Label: "stdout", Max: c.max})
			must(t, err)
			var total int64
			for _, w := range c.writes {
				n, err := tail.Write([]byte(w))
				if n != len(w) || err != nil {
					t.Fatalf("Write(%q) = %d, %v", w, n, err)
				}
				total += int64(n)
			}
			must(t, tail.Close())
			must(t, tail.Close())
			o := tail.Output()
			if string(o.Data) != c.data || o.Truncated != c.truncated || o.Total != total {
				t.Errorf("got %q, %v, %d", o.Data, o.Truncated, o.Total)
			}
			files, err := filepath.Glob(dir + "/*")
			must(t, err)
			if c.spill == "-" {
				if o.SpillPath != "" || len(files) != 0 {
					t.Errorf("spill %q, files %v", o.SpillPath, files)
				}
				return
			}
			got, err := os.ReadFile(o.SpillPath)
			must(t, err)
			if string(got) != c.spill {
				t.Errorf("spill %q, want %q", got, c.spill)
			}
			if fi, err := os.Stat(o.SpillPath); err != nil || fi.Mode().Perm() != 0o600 {
				t.Errorf("spill mode %v, %v", fi.Mode(), err)
			}
		})
	}
	if _, err := NewTail(0, Spill{}); err == nil {
		t.Error("a limit of 0 was accepted")
	}
	// A spill that cannot be made costs the file, never the output.
	tail, err := NewTail(2, Spill{Dir: t.TempDir() + "/gone", Max: 100})
	must(t, err)
	if n, err := tail.Write([]byte("abcd")); n != 4 || err != nil {
		t.Errorf("Write = %d, %v", n, err)
	}
	if o := tail.Output(); string(o.Data) != "cd" || o.SpillPath != "" {
		t.Errorf("got %+v", o)
	}
}

func FuzzTail(f *testing.F) {
	f.Add([]byte("hello world, this is some output"), uint8(5), uint8(3))
	f.Fuzz(func(t *testing.T, data []byte, limit, chunk uint8) {
		tail, err := NewTail(int(limit)+1, Spill{Dir: t.TempDir(), Max: 1 << 20})
		must(t, err)
		for rest := data; len(rest) > 0; {
			n := min(len(rest), int(chunk)+1)
			_, _ = tail.Write(rest[:n])
			rest = rest[n:]
		}
		must(t, tail.Close())
		o := tail.Output()
		want := data[max(0, len(data)-int(limit)-1):]
		if !bytes.Equal(o.Data, want) || o.Total != int64(len(data)) || o.Truncated != (len(data) > int(limit)+1) {
			t.Fatalf("tail %q of %q, limit %d", o.Data, data, limit)
		}
		if o.Truncated {
			if all, err := os.ReadFile(o.SpillPath); err != nil || !bytes.Equal(all, data) {
				t.Fatalf("spill %q, %v, want %q", all, err, data)
			}
		}
	})
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

//go:build unix

package fskit

import (
	"bytes"
	"fmt"
	"os"
	"testing"

	"github.com/cordon-host/cordon/capability/sandbox"
)

// BenchmarkWrite compares a fenced write with the plain sequence it cannot do without: write, fsync, rename.
func BenchmarkWrite(b *testing.B) {
	for _, size := range []int{1 << 10, 10 << 20} {
		data := bytes.Repeat([]byte("x"), size)
		b.Run(fmt.Sprintf("plain/%d", size), func(b *testing.B) {
			dir := benchDir(b)
			for b.Loop() {
				f, err := os.Create(dir + "/t.tmp")
				must(b, err)
				_, err = f.Write(data)
				must(b, err)
				must(b, f.Sync())
				must(b, f.Close())
				must(b, os.Rename(dir+"/t.tmp", dir+"/t"))
			}
		})
		b.Run(fmt.Sprintf("fenced/%d", size), func(b *testing.B) {
			dir := benchDir(b)
			var fs FS
			p := Policy{Mode: sandbox.WorkspaceWrite, Root: dir, Protected: []string{dir + "/compose.yml", dir + "/.git/hooks"}, Hidden: []string{dir + "/state"}}
			for b.Loop() {
				_, err := fs.Write(b.Context(), p, "t", data, Precondition{})
				must(b, err)
			}
		})
	}
}

// BenchmarkRead is a window in the middle of a file of 100,000 lines.
func BenchmarkRead(b *testing.B) {
	dir := benchDir(b)
	text := bytes.Repeat([]byte("a line of ordinary length, as in most files of source code\n"), 100_000)
	must(b, os.WriteFile(dir+"/t", text, 0o600))
	var fs FS
	b.SetBytes(int64(len(text)))
	for b.Loop() {
		_, err := fs.Read(b.Context(), Policy{Mode: sandbox.ReadOnly, Root: dir}, "t", wide(50_000, 2000))
		must(b, err)
	}
}

func benchDir(b *testing.B) string {
	b.Helper()
	dir, err := os.MkdirTemp(".", "bench-")
	must(b, err)
	b.Cleanup(func() { must(b, os.RemoveAll(dir)) })
	return sandbox.CanonicalPath(dir)
}

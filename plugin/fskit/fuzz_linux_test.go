package fskit

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

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

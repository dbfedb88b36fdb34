package fskit

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cordon-host/cordon/capability/fs"
	"github.com/cordon-host/cordon/capability/sandbox"
)

// swaps is how often each race is run: few on every change, the 10,000 of the promise where time allows.
func swaps() int {
	if os.Getenv("CORDON_TEST_TIER") == "nightly" {
		return 10_000
	}
	return 300
}

// maxSwaps bounds the wait for a race that shows all its outcomes.
const maxSwaps = 100_000

// exchange swaps two names in one step, so that a path always leads somewhere.
func exchange(a, b string) error {
	return unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE)
}

// While somebody swaps what is on the way for a link to the outside, writes land inside or are denied, and nothing outside
// ever changes. Each race also sees both outcomes, or it has not raced.
func TestRace(t *testing.T) {
	for _, c := range []struct {
		name string
		// x and y are swapped; path is written.
		x, y, path string
		prepare    func(a *arena)
	}{
		{"a directory", "ws/d", "ws/d-link", "d/file.txt", func(a *arena) {
			must(a.t, os.Mkdir(a.ws+"/d", 0o755))
			must(a.t, os.Symlink(a.base+"/outside", a.ws+"/d-link"))
		}},
		{"a directory far up", "ws/p", "ws/p-link", "p/q/r/s/file.txt", func(a *arena) {
			must(a.t, os.MkdirAll(a.ws+"/p/q/r/s", 0o755))
			must(a.t, os.MkdirAll(a.base+"/outside/q/r/s", 0o755))
			must(a.t, os.Symlink(a.base+"/outside", a.ws+"/p-link"))
		}},
		{"a directory that is made", "ws/d", "ws/d-link", "d/new/deep/file.txt", func(a *arena) {
			must(a.t, os.Mkdir(a.ws+"/d", 0o755))
			must(a.t, os.Symlink(a.base+"/outside", a.ws+"/d-link"))
		}},
		{"the file itself", "ws/file.txt", "ws/file-link", "file.txt", func(a *arena) {
			must(a.t, os.WriteFile(a.ws+"/file.txt", []byte("old\n"), 0o644))
			must(a.t, os.Symlink(a.base+"/outside/file.txt", a.ws+"/file-link"))
		}},
		{"a link that is followed", "ws/good", "ws/bad", "good/file.txt", func(a *arena) {
			must(a.t, os.Symlink("sub", a.ws+"/good"))
			must(a.t, os.Symlink("../outside", a.ws+"/bad"))
		}},
		{"a directory for a protected one", "ws/d", "ws/d-link", "d/pre-commit", func(a *arena) {
			must(a.t, os.Mkdir(a.ws+"/d", 0o755))
			must(a.t, os.Symlink(".git/hooks", a.ws+"/d-link"))
		}},
		{"the session's temp", "state/tmp/s1/d", "state/tmp/s1/d-link", "/tmp/d/file.txt", func(a *arena) {
			must(a.t, os.Mkdir(a.temp+"/d", 0o755))
			must(a.t, os.Symlink(a.base+"/outside", a.temp+"/d-link"))
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := newArena(t)
			c.prepare(a)
			if err := exchange(filepath.Join(a.base, c.x), filepath.Join(a.base, c.y)); err != nil {
				t.Skipf("no exchange of names here: %v", err)
			}
			outside := func() string {
				var all []string
				for p, what := range a.tree() {
					if strings.HasPrefix(p, "/outside") || strings.HasPrefix(p, "/state/key") || strings.HasPrefix(p, "/ws/.git") {
						all = append(all, p+" "+what)
					}
				}
				return fmt.Sprint(len(all), strings.Count(strings.Join(all, "\n"), "evil"))
			}
			before := outside()
			p := a.policy(sandbox.WorkspaceWrite)
			stop := make(chan struct{})
			var swapping, writing sync.WaitGroup
			swapping.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
						_ = exchange(filepath.Join(a.base, c.x), filepath.Join(a.base, c.y))
					}
				}
			})
			rounds := swaps()
			if c.path == "file.txt" && rounds > 1000 {
				rounds /= 10 // each lost round has synced its content first
			}
			var mu sync.Mutex
			seen := map[string]int{}
			both := func() bool {
				mu.Lock()
				defer mu.Unlock()
				return seen[""] > 0 && seen[fs.SandboxDenied] > 0
			}
			for range 2 {
				writing.Go(func() {
					for i := 0; i < rounds/2 || i < maxSwaps && !both(); i++ {
						_, err := a.fs.Write(t.Context(), p, c.path, []byte("evil\n"), Precondition{})
						if i%3 == 0 && err == nil {
							_, err = a.fs.Edit(t.Context(), p, c.path, "evil", "evil evil", false, Precondition{})
						}
						mu.Lock()
						seen[reason(err)]++
						mu.Unlock()
					}
				})
			}
			writing.Wait()
			close(stop)
			swapping.Wait()
			if after := outside(); after != before {
				t.Errorf("outside changed: %s, before %s\n%v", after, before, a.tree())
			}
			if seen[""] == 0 || seen[fs.SandboxDenied] == 0 {
				t.Errorf("outcomes %v: not a race", seen)
			}
			t.Logf("outcomes %v", seen)
			for r := range seen {
				switch r {
				case "", fs.SandboxDenied, fs.IOError, fs.StaleVersion, fs.EditNotFound, fs.AmbiguousEdit, fs.NotFound:
				default:
					t.Errorf("outcome %s", r)
				}
			}
			if left, _ := filepath.Glob(a.base + "/*/.*.tmp"); len(left) > 0 {
				t.Errorf("left behind: %q", left)
			}
		})
	}
}

// What a hidden directory holds is not read through a swap either.
func TestRaceReads(t *testing.T) {
	a := newArena(t)
	must(t, os.Mkdir(a.ws+"/d", 0o755))
	must(t, os.WriteFile(a.ws+"/d/key", []byte("mine\n"), 0o644))
	must(t, os.Symlink(a.base+"/state", a.ws+"/d-link"))
	p := a.policy(sandbox.ReadOnly)
	stop := make(chan struct{})
	var swapping sync.WaitGroup
	swapping.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				_ = exchange(a.ws+"/d", a.ws+"/d-link")
			}
		}
	})
	seen := map[string]int{}
	for i := 0; i < swaps() || i < maxSwaps && (seen[""] == 0 || seen[fs.SandboxDenied] == 0); i++ {
		got, err := a.fs.Read(t.Context(), p, "d/key", wide(1, 9))
		seen[reason(err)]++
		if err == nil && got.Lines[0].Text != "mine" {
			t.Fatalf("read %q", got.Lines[0].Text)
		}
	}
	close(stop)
	swapping.Wait()
	if seen[""] == 0 || seen[fs.SandboxDenied] == 0 {
		t.Errorf("outcomes %v: not a race", seen)
	}
}

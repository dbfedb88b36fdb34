//go:build linux

package main

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/cordon-host/cordon/internal/testenv"
)

// TestProbeAmongVanishingSockets probes while other programs' sockets come and go: the verdict is about the machine, not the moment.
func TestProbeAmongVanishingSockets(t *testing.T) {
	testenv.Require(t, "bwrap")
	dir, err := os.MkdirTemp("/var/lib", "cordon-vanish-")
	if err != nil {
		t.Skip("only root has a place outside the hidden directories: ", err)
	}
	defer os.RemoveAll(dir)
	ctx, stop := context.WithCancel(t.Context())
	var others sync.WaitGroup
	others.Go(func() {
		for n := 0; ctx.Err() == nil; n++ {
			l, err := net.Listen("unix", filepath.Join(dir, "s"))
			if err != nil {
				t.Error(err)
				return
			}
			time.Sleep(20 * time.Millisecond) // how long other programs keep one is theirs to say
			l.Close()
			time.Sleep(20 * time.Millisecond)
		}
	})
	defer others.Wait()
	defer stop()
	for range 5 {
		c, report := bwrapRunner{in: surroundings{root: dir, getenv: os.Getenv}}.probe(t.Context())
		if c == nil {
			t.Fatalf("not usable: %s", report.GetReason())
		}
	}
}

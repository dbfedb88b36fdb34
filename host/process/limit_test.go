package process_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cordon-host/cordon/host/process"
	"github.com/cordon-host/cordon/internal/testenv"
)

func itoa(n int) string { return strconv.Itoa(n) }

const mebi = 1 << 20

// eat uses so many mebibytes, and writes down that it could.
func eat() {
	n, err := strconv.Atoi(os.Getenv("CORDON_TEST_EAT"))
	if err != nil {
		panic(err)
	}
	var all [][]byte
	for range n {
		b := make([]byte, mebi)
		for i := 0; i < len(b); i += os.Getpagesize() {
			b[i] = 1
		}
		all = append(all, b)
	}
	if err := os.WriteFile(os.Getenv("CORDON_TEST_FILE"), []byte(fmt.Sprint(len(all))), 0o600); err != nil {
		panic(err)
	}
}

// breed starts a hundred processes and writes down each that it could. They leave their group, as what hides from a stop does. A shell
// does it: a Go program that gets no thread dies of it, whatever it was about to do.
func breed() {
	script := `i=0; while [ $i -lt 100 ]; do setsid sleep 300 & echo $! >> "$CORDON_TEST_FILE"; i=$((i+1)); done`
	_ = exec.Command("sh", "-c", script).Run() // it ends early at the limit
}

// cgroup skips the test where this process may not make control groups with these controllers.
func cgroup(t *testing.T, l process.Limits) {
	t.Helper()
	testenv.Require(t, "cgroup", func() error { return process.Limitable(l) })
}

// noLeaves holds that no group of a generation is left.
func noLeaves(t *testing.T) {
	t.Helper()
	left, err := filepath.Glob("/sys/fs/cgroup/*/cordon-*-helper-*")
	if more, merr := filepath.Glob("/sys/fs/cgroup/cordon-*-helper-*"); err == nil {
		left, err = append(left, more...), merr
	}
	if err != nil || len(left) > 0 {
		t.Errorf("control groups are left: %v %v", left, err)
	}
}

func TestMemoryLimit(t *testing.T) {
	cgroup(t, process.Limits{Memory: 1})
	for _, tt := range []struct {
		limit, eats int
		dies        bool
	}{{512, 100, false}, {64, 100, true}} {
		s, _ := spec(t, "eat")
		s.Name, s.Limits.Memory = "helper-1", int64(tt.limit*mebi)
		s.Env = append(s.Env, "CORDON_TEST_EAT="+itoa(tt.eats))
		g, err := process.Start(t.Context(), s)
		if g != nil {
			if err := g.Stop(context.Background()); err != nil {
				t.Error(err)
			}
		}
		var failed *process.StartError
		switch {
		case !tt.dies && err != nil:
			t.Errorf("the control: %d MiB of %d: %v", tt.eats, tt.limit, err)
		case tt.dies && !errors.As(err, &failed):
			t.Errorf("%d MiB of %d: not killed: %v", tt.eats, tt.limit, err)
		case tt.dies && (!strings.Contains(failed.Exit, "SIGKILL") || !strings.Contains(failed.Exit, "out of memory")):
			t.Errorf("the exit is %q", failed.Exit)
		}
		noLeaves(t)
	}
}

func TestPidsLimit(t *testing.T) {
	cgroup(t, process.Limits{Pids: 1})
	for _, tt := range []struct {
		limit int
		held  bool
	}{{1000, false}, {40, true}} {
		s, _ := spec(t, "breed")
		s.Name, s.Limits.Pids = "helper-2", tt.limit
		// Whether the plugin itself gets through is up to what is left for it.
		g, err := process.Start(t.Context(), s)
		var exit string
		var failed *process.StartError
		switch {
		case err == nil:
			if err := g.Stop(context.Background()); err != nil && !tt.held { // it may have died of it by now
				t.Error(err)
			}
			exit = g.Exit()
		case errors.As(err, &failed):
			exit = failed.Exit
		default:
			t.Fatal(err)
		}
		text, err := os.ReadFile(filepath.Join(s.RunDir, "file"))
		if err != nil {
			t.Fatal(err)
		}
		pids := strings.Fields(string(text))
		if !tt.held && len(pids) != 100 || tt.held && (len(pids) == 0 || len(pids) >= tt.limit) {
			t.Errorf("%d processes under a limit of %d", len(pids), tt.limit)
		}
		if strings.Contains(exit, "limits.pids") != tt.held {
			t.Errorf("the exit under a limit of %d is %q", tt.limit, exit)
		}
		// They left the process group; the control group ended them.
		for _, p := range pids {
			pid, err := strconv.Atoi(p)
			if err != nil {
				t.Fatal(err)
			}
			gone(t, pid)
		}
		noLeaves(t)
	}
}

// TestLimitsWithoutControlGroups: what cannot be enforced is not started, and the error says what is missing.
func TestLimitsWithoutControlGroups(t *testing.T) {
	if process.Limitable(process.Limits{Memory: 1}) == nil {
		t.Skip("limits can be enforced here")
	}
	s, _ := spec(t, "")
	start(t, s) // the control
	s.Limits, s.Name = process.Limits{Memory: 1 << 30}, "helper-3"
	begin := time.Now()
	g, err := process.Start(t.Context(), s)
	var missing *process.LimitError
	if g != nil || !errors.As(err, &missing) || missing.Missing == "" || missing.Fix == "" {
		t.Errorf("started, or not typed after %s: %v", time.Since(begin), err)
	}
}

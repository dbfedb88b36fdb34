package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	sandboxv1 "github.com/cordon-host/cordon/api/sandbox/v1"
)

func code(n int) *int { return &n }

func TestClassifyRunnerFailure(t *testing.T) {
	bwrap := []*sandboxv1.RunnerFailureRule{{FatalSignatures: []string{"bwrap: "}}}
	landlock := []*sandboxv1.RunnerFailureRule{{
		AllowedExitCodes:   []int32{125},
		FatalSignatures:    []string{"landlock-run: "},
		InformationalLines: []string{"landlock-run: partial enforcement (older Landlock ABI)"},
	}}
	for _, c := range []struct {
		name   string
		exit   *int
		stderr string
		rules  []*sandboxv1.RunnerFailureRule
		want   string
	}{
		{"plain", code(1), "bwrap: setting up uid map: Permission denied\n", bwrap, "bwrap: setting up uid map: Permission denied"},
		{"original spelling", code(1), "x\r\nBWRAP: No\r\ny", bwrap, "BWRAP: No"},
		{"exit zero", code(0), "bwrap: x", bwrap, ""},
		{"signal", nil, "bwrap: x", bwrap, ""},
		{"across lines", code(1), "bwrap:\n x", bwrap, ""},
		{"no rules", code(1), "bwrap: x", nil, ""},
		{"exit in the gate", code(125), "landlock-run: usage error", landlock, "landlock-run: usage error"},
		{"exit outside the gate", code(1), "landlock-run: usage error", landlock, ""},
		{"125 alone", code(125), "something else", landlock, ""},
		{"notice alone", code(125), "Landlock-run: PARTIAL enforcement (older Landlock ABI)\n", landlock, ""},
		{"notice then failure", code(125), "landlock-run: partial enforcement (older Landlock ABI)\nlandlock-run: exec failed: x\n", landlock, "landlock-run: exec failed: x"},
		{"notice with more on its line", code(125), "landlock-run: partial enforcement (older Landlock ABI)!\n", landlock, "landlock-run: partial enforcement (older Landlock ABI)!"},
		{"blank signature", code(1), "anything", []*sandboxv1.RunnerFailureRule{{FatalSignatures: []string{"", "  "}}}, ""},
		{"second rule", code(1), "b", []*sandboxv1.RunnerFailureRule{{FatalSignatures: []string{"a"}}, {FatalSignatures: []string{"B"}}}, "b"},
		{"no stderr", code(1), "", bwrap, ""},
	} {
		line, failed := ClassifyRunnerFailure(c.exit, c.stderr, c.rules)
		if line != c.want || failed != (c.want != "") {
			t.Errorf("%s: %q, %v, want %q", c.name, line, failed, c.want)
		}
	}
}

func TestClassifyDenial(t *testing.T) {
	erofs := []string{"read-only file system"}
	for _, c := range []struct {
		name       string
		exit       *int
		stderr     string
		signatures []string
		want       bool
	}{
		{"denied", code(1), "sh: 1: cannot create a: Read-only file system", erofs, true},
		{"over lines", code(1), "first\nREAD-ONLY FILE SYSTEM\n", erofs, true},
		{"clean exit", code(0), "Read-only file system", erofs, false},
		{"signal", nil, "Read-only file system", erofs, false},
		{"another dialect", code(1), "Permission denied", erofs, false},
		{"no signatures", code(1), "Read-only file system", nil, false},
		{"blank signature", code(1), "x", []string{"", " "}, false},
		{"127 with the words", code(127), "read-only file system", erofs, true},
	} {
		if got := ClassifyDenial(c.exit, c.stderr, c.signatures); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

func TestIsRunnerSpawnFailure(t *testing.T) {
	dir := t.TempDir()
	file := dir + "/file"
	must(t, os.WriteFile(file, []byte("#!/gone\n"), 0o644))
	start := func(argv0, dir string) error {
		cmd := exec.Cmd{Path: argv0, Args: []string{argv0}, Dir: dir}
		return cmd.Run()
	}
	for _, c := range []struct {
		name            string
		err             error
		runner, workdir string
		want            bool
	}{
		{"real: runner missing", start(dir+"/gone", dir), dir + "/gone", dir, true},
		{"real: runner not executable", start(file, dir), file, dir, true},
		{"real: workdir missing", start("/bin/sh", dir+"/gone"), "/bin/sh", dir + "/gone", false},
		{"real: workdir is a file", start("/bin/sh", file), "/bin/sh", file, false},
		{"not on PATH", &exec.Error{Name: "bwrap", Err: exec.ErrNotFound}, "bwrap", dir, true},
		{"wrapped", fmt.Errorf("start: %w", &fs.PathError{Op: "fork/exec", Path: "bwrap", Err: syscall.ENOENT}), "bwrap", dir, true},
		{"another program", &fs.PathError{Op: "fork/exec", Path: "other", Err: syscall.ENOENT}, "bwrap", dir, false},
		{"another operation", &fs.PathError{Op: "chdir", Path: "bwrap", Err: syscall.ENOENT}, "bwrap", dir, false},
		{"another error", &fs.PathError{Op: "fork/exec", Path: "bwrap", Err: syscall.E2BIG}, "bwrap", dir, false},
		{"no name", syscall.ENOENT, "bwrap", dir, false},
		{"no error", nil, "bwrap", dir, false},
		{"no runner", &fs.PathError{Op: "fork/exec", Path: "", Err: syscall.ENOENT}, "", dir, false},
		{"current directory", &exec.Error{Name: "bwrap", Err: exec.ErrNotFound}, "bwrap", "", true},
		{"other", errors.New("boom"), "bwrap", dir, false},
	} {
		if got := IsRunnerSpawnFailure(c.err, c.runner, c.workdir); got != c.want {
			t.Errorf("%s: %v for %v", c.name, got, c.err)
		}
	}
}

func FuzzClassify(f *testing.F) {
	f.Add(125, "landlock-run: x\ny", "landlock-run: ", "landlock-run: x", int32(125))
	f.Add(1, "a\r\nb", "\n", "", int32(0))
	f.Fuzz(func(t *testing.T, exit int, stderr, fatal, info string, allowed int32) {
		rules := []*sandboxv1.RunnerFailureRule{{AllowedExitCodes: []int32{allowed}, FatalSignatures: []string{fatal}, InformationalLines: []string{info}}}
		line, failed := ClassifyRunnerFailure(&exit, stderr, rules)
		if failed {
			low := strings.ToLower(line)
			switch {
			case exit == 0, int32(exit) != allowed:
				t.Fatal("failed outside the exit gate")
			case strings.TrimSpace(fatal) == "", !strings.Contains(low, strings.ToLower(fatal)):
				t.Fatalf("line %q does not carry %q", line, fatal)
			case low == strings.ToLower(info):
				t.Fatal("an informational line was blamed")
			case strings.Contains(line, "\n"), !strings.Contains(stderr, line):
				t.Fatalf("line %q is not one of stderr", line)
			}
		}
		if _, failed := ClassifyRunnerFailure(nil, stderr, rules); failed || ClassifyDenial(nil, stderr, []string{fatal}) {
			t.Fatal("a death by signal was classified")
		}
	})
}

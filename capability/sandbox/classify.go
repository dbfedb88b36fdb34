package sandbox

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"

	sandboxv1 "github.com/cordon-host/cordon/api/sandbox/v1"
)

// A failed confined command is explained in a fixed order, and the first explanation wins: the runner could not be
// started (IsRunnerSpawnFailure), the runner failed before the command ran (ClassifyRunnerFailure), the sandbox refused
// something (ClassifyDenial). A nil exit is a death by signal: neither a runner failure nor a denial.

// ClassifyRunnerFailure finds the line of stderr by which a runner reports that it failed itself, in its original
// spelling. Matching is by line, so that a signature never spans two of them, and informational lines are taken out
// first, by exact comparison.
func ClassifyRunnerFailure(exit *int, stderr string, rules []*sandboxv1.RunnerFailureRule) (line string, failed bool) {
	if exit == nil || *exit == 0 {
		return "", false
	}
	for _, rule := range rules {
		if codes := rule.GetAllowedExitCodes(); len(codes) > 0 && !slices.Contains(codes, int32(*exit)) {
			continue
		}
		for line := range strings.Lines(stderr) {
			line = strings.TrimRight(line, "\r\n")
			low := strings.ToLower(line)
			if slices.ContainsFunc(rule.GetInformationalLines(), func(s string) bool { return strings.ToLower(s) == low }) {
				continue
			}
			if containsAny(low, rule.GetFatalSignatures()) {
				return line, true
			}
		}
	}
	return "", false
}

// ClassifyDenial reports whether a command failed because the sandbox refused something, in the dialect of the runner
// that confined it. It reads what the command printed, so a program that prints the same words looks alike and one that
// swallows them is missed.
func ClassifyDenial(exit *int, stderr string, signatures []string) bool {
	return exit != nil && *exit != 0 && containsAny(strings.ToLower(stderr), signatures)
}

// containsAny reports whether low, in lower case, has one of the signatures in it. A blank signature would match
// everything and is ignored.
func containsAny(low string, signatures []string) bool {
	return slices.ContainsFunc(signatures, func(s string) bool {
		return strings.TrimSpace(s) != "" && strings.Contains(low, strings.ToLower(s))
	})
}

// IsRunnerSpawnFailure reports whether a failed start is the runner's fault: it does not exist or may not be executed.
// A missing or closed working directory fails with the same error numbers, so workdir must be a directory this process
// can enter for the blame to fall on the runner; and the error must name the runner. An empty workdir is the current
// one.
func IsRunnerSpawnFailure(err error, runner, workdir string) bool {
	if err == nil || runner == "" || !enterable(workdir) {
		return false
	}
	if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.EACCES) && !errors.Is(err, exec.ErrNotFound) {
		return false
	}
	var path *fs.PathError
	if errors.As(err, &path) {
		return path.Path == runner && (path.Op == "fork/exec" || path.Op == "exec")
	}
	var look *exec.Error
	return errors.As(err, &look) && look.Name == runner
}

func enterable(dir string) bool {
	if dir == "" {
		dir = "."
	}
	fi, err := os.Stat(dir)
	return err == nil && fi.IsDir() && searchable(dir)
}

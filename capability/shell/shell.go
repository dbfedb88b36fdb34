// Package shell holds the rules of the shell capability that providers, tools and front ends share: what a provider
// publishes about itself, and the marker lines by which a rendered result says how a command ended. Nothing here starts a
// process.
//
// The markers come from the reference system's shell seam. Models, replays and front ends match on them; they stay as
// they are.
package shell

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/cordon-host/cordon/capability/sandbox"
)

// Facts are what a provider of the shell capability publishes about itself.
type Facts struct {
	// SandboxMode is the deployment's default mode; empty for a provider that does not confine.
	SandboxMode sandbox.Mode `json:"sandboxMode,omitempty"`
	// Confines says that every command runs as the policy capability resolves it.
	Confines bool `json:"confines"`
}

// Marker lines of a rendered result.
const (
	Stderr   = "[stderr]"    // what follows was written to standard error
	NoOutput = "(no output)" // both streams were empty
)

// Truncated is the line after a stream of which only the tail is shown. Path is where all of it is; empty when it could
// not be kept.
func Truncated(path string) string {
	if path == "" {
		path = "(unavailable)"
	}
	return "[output truncated; full output: " + path + "]"
}

// NotText is the line after a stream, stdout or stderr, whose bytes are not all UTF-8.
func NotText(stream string) string {
	return "[" + stream + " is not valid UTF-8; each undecodable byte is shown as U+FFFD]"
}

// TimedOut is the line of a command that was ended by its time limit, in milliseconds.
func TimedOut(limit int64) string { return fmt.Sprintf("[timed out after %dms]", limit) }

// ExitStatus is how a command ended.
type ExitStatus struct {
	Code   int    // not meaningful when Signal is set
	Signal string // e.g. SIGKILL; empty when the command exited
}

const (
	signalPrefix = "\n[killed by signal: "
	exitPrefix   = "\n[exit code: "
)

// Marker is the line that says how a command ended; empty for exit code 0, which goes without saying.
func (s ExitStatus) Marker() string {
	switch {
	case s.Signal != "":
		return signalPrefix[1:] + s.Signal + "]"
	case s.Code != 0:
		return exitPrefix[1:] + strconv.Itoa(s.Code) + "]"
	}
	return ""
}

// ParseExitStatus splits the marker of an ExitStatus from the end of a rendered result: a line of its own, after another one,
// with nothing behind it. Without one the command exited with 0 and body is text.
//
// It is the inverse of how a result is rendered as long as nothing but the renderer can put a marker at the very end; see
// [Unmistakable]. When the text is at hand together with the result's own data, use those.
func ParseExitStatus(text string) (body string, s ExitStatus) {
	if body, name, ok := cutMarker(text, signalPrefix); ok && signalName(name) {
		return body, ExitStatus{Signal: name}
	}
	if body, digits, ok := cutMarker(text, exitPrefix); ok {
		if code, err := strconv.Atoi(digits); err == nil && code != 0 && strconv.Itoa(code) == digits {
			return body, ExitStatus{Code: code}
		}
	}
	return text, ExitStatus{}
}

// cutMarker takes the last line apart: everything before prefix, and what stands between it and the closing bracket.
func cutMarker(text, prefix string) (body, value string, ok bool) {
	line := strings.LastIndexByte(text, '\n')
	if line < 0 {
		return "", "", false
	}
	value, ok = strings.CutPrefix(text[line:], prefix)
	if !ok {
		return "", "", false
	}
	value, ok = strings.CutSuffix(value, "]")
	return text[:line], value, ok
}

// signalName: SIG, letters, digits, and the +/- of real-time signals.
func signalName(s string) bool {
	rest, ok := strings.CutPrefix(s, "SIG")
	return ok && rest != "" && strings.Trim(rest, "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-") == ""
}

// Unmistakable is a rendered result that ParseExitStatus reads as s. A command that exited with 0 may have printed what looks
// like a marker as its last words; a line end after them takes their meaning away.
func Unmistakable(text string, s ExitStatus) string {
	if s == (ExitStatus{}) {
		if _, parsed := ParseExitStatus(text); parsed != s {
			return text + "\n"
		}
	}
	return text
}

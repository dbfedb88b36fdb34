package process

import (
	"fmt"
	"strings"
	"time"

	"github.com/cordon-host/cordon/capability/journal"
)

// CrashHead is how much of a trace travels with errors and statuses, in bytes; the log has all of it.
const CrashHead = 4 << 10

// Crash is how a process ended that nobody had told to.
type Crash struct {
	Time time.Time
	// Exit is the exit code or the signal, and what the host had against it.
	Exit string
	// Stderr is the last lines that the process wrote.
	Stderr string
	// Trace is all of what a runtime wrote as it died: a panic or fatal error with its stacks; empty if it wrote none.
	Trace string
}

// Head is the beginning of the trace.
func (c *Crash) Head() string {
	if c == nil {
		return ""
	}
	return strings.TrimRight(journal.Head(c.Trace, CrashHead), "\n")
}

// StartError is a generation that did not come up.
type StartError struct {
	Entry  string
	Phase  Phase
	Exit   string // how the process ended, if it did
	Stderr string // the last lines it wrote
	Trace  string // the panic it died of
	// Timeout is the time that was given, when that has passed.
	Timeout time.Duration
	Err     error
}

// Phase is one step of a start.
type Phase string

const (
	PhaseHash      Phase = "hash"      // the executable's bytes
	PhaseExec      Phase = "exec"      // from the fork to its first instruction
	PhaseHandshake Phase = "handshake" // until it has said where it listens
	PhaseSetup     Phase = "setup"     // its own Apply
	PhaseActivate  Phase = "activate"
)

// Timings are how long the steps of a start took. A step that was not reached has none.
type Timings struct {
	Hash, Exec, Handshake, Setup, Activate time.Duration
}

func (e *StartError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "plugin %s: %s: ", e.Entry, e.Phase)
	if e.Timeout > 0 {
		fmt.Fprintf(&b, "not done within %s, which timeouts.start of its row can raise", e.Timeout)
	} else {
		fmt.Fprintf(&b, "%v", e.Err)
	}
	if e.Exit != "" {
		fmt.Fprintf(&b, " (%s)", e.Exit)
	}
	words := e.Stderr
	if e.Trace != "" {
		words = strings.TrimRight(journal.Head(e.Trace, CrashHead), "\n")
	}
	if words != "" {
		fmt.Fprintf(&b, "; its last words:\n%s", words)
	}
	return b.String()
}

func (e *StartError) Unwrap() error { return e.Err }

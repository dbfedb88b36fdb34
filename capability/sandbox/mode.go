// Package sandbox holds the rules of the sandbox and policy capabilities that providers, executors and tools share: the
// modes and their order, writable roots, the way denials are told from other failures, escalation, and the texts a model
// reads. Nothing here starts a process.
//
// The vocabulary and every text that a model or a program may match on come from the reference system's sandbox seam;
// they are interface facts and stay as they are.
package sandbox

import (
	"fmt"
	"slices"
)

// Mode says which file effects a command may have. It says nothing about network or processes.
type Mode string

const (
	ReadOnly         Mode = "read-only"
	WorkspaceWrite   Mode = "workspace-write"
	DangerFullAccess Mode = "danger-full-access" // unconfined: no sandbox is asked
)

// Modes are all modes, narrowest first.
func Modes() []Mode { return []Mode{ReadOnly, WorkspaceWrite, DangerFullAccess} }

// ParseMode checks a mode's spelling.
func ParseMode(s string) (Mode, error) {
	if m := Mode(s); m.Valid() {
		return m, nil
	}
	return "", fmt.Errorf(`sandbox mode must be one of "read-only", "workspace-write" or "danger-full-access", got %q`, s)
}

// Valid reports whether m is one of the three modes.
func (m Mode) Valid() bool { return slices.Contains(Modes(), m) }

// Confined reports whether commands in this mode need a sandbox. Anything but danger-full-access does, an unknown mode
// included.
func (m Mode) Confined() bool { return m != DangerFullAccess }

// Wider reports whether a is strictly wider than b. An unknown mode is neither wider nor narrower than any other.
func Wider(a, b Mode) bool { return slices.Contains(WiderModes(b), a) }

// WiderModes are the modes strictly wider than m, narrowest first.
func WiderModes(m Mode) []Mode {
	all := Modes()
	i := slices.Index(all, m)
	if i < 0 {
		return nil
	}
	return all[i+1:]
}

// EscalationTargets are the modes a call can ask for: everything any session could escalate to. A tool's schema always
// lists all of them, whatever the current mode is, so that the schema stays byte-stable for a model's prompt cache;
// that a request really widens is checked when the call runs.
func EscalationTargets() []Mode { return []Mode{WorkspaceWrite, DangerFullAccess} }

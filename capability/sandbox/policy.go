package sandbox

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// PolicySection names the context contribution that carries PolicyText, and PolicyOrder is its place among the others.
const (
	PolicySection = "sandbox:policy"
	PolicyOrder   = 110
)

// PolicyText tells a model which file effects stand in mode m. It names the policy and no capability: what tools there
// are is not its business, and the text must stay the same byte for byte as long as mode and root do. The root is only
// shown where it matters, as a JSON string.
func PolicyText(m Mode, root string) string {
	switch m {
	case ReadOnly:
		return "Current Cordon file policy: read-only. Any available operation enforced by the Cordon file sandbox cannot modify files in the standing mode. Do not refuse a required modification from this policy alone: try an available tool normally and follow any denial and escalation guidance it returns."
	case WorkspaceWrite:
		return fmt.Sprintf("Current Cordon file policy: workspace-write. Any available operation enforced by the Cordon file sandbox may modify files under the session workspace: %s. Some platform temporary areas may also be writable.", jsonString(root))
	case DangerFullAccess:
		return "Current Cordon file policy: danger-full-access. The Cordon file sandbox does not restrict file modifications by available operations."
	}
	return ""
}

func jsonString(s string) string {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(s); err != nil {
		panic(fmt.Sprintf("sandbox: a string did not encode: %v", err)) // a string always does
	}
	return string(bytes.TrimSuffix(b.Bytes(), []byte("\n")))
}

// EventMode is the session event by which a session's standing mode changes. It belongs to the row that provides the
// policy capability. The last one wins.
const EventMode = "sandbox/mode"

// SourceDelegation marks a mode that a session got from the one that delegated to it.
const SourceDelegation = "delegation"

// ModeChange is the payload of sandbox/mode.
type ModeChange struct {
	Mode   Mode   `json:"mode"`
	Source string `json:"source,omitempty"`
}

// ParseModeChange reads the payload of a sandbox/mode event. An unknown mode is an error: a log must never be folded
// into a policy nobody knows.
func ParseModeChange(data []byte) (ModeChange, error) {
	var c ModeChange
	dec := json.NewDecoder(bytes.NewReader(data))
	if err := dec.Decode(&c); err != nil {
		return ModeChange{}, fmt.Errorf("sandbox/mode payload is not a JSON object: %w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return ModeChange{}, errors.New("sandbox/mode payload has something after its JSON object")
	}
	if !c.Mode.Valid() {
		return ModeChange{}, fmt.Errorf(`sandbox/mode carries unknown mode "%s"`, c.Mode)
	}
	return c, nil
}

// EffectiveMode folds a session's sandbox/mode payloads, oldest first: the last one wins, so the newest one alone is
// enough. ok is false when there is none.
func EffectiveMode(payloads ...[]byte) (m Mode, ok bool, err error) {
	for _, p := range payloads {
		c, err := ParseModeChange(p)
		if err != nil {
			return "", false, err
		}
		m, ok = c.Mode, true
	}
	return m, ok, nil
}

// Package permission holds the rules of the permission capability that its provider, the owners of the two knobs and the host
// share: what a preset is, which one a session is on, and what a switch of a knob takes. Everything here is pure.
//
// The vocabulary, the texts and the way a session's preset is derived come from the reference system's permission presets;
// they are interface facts and stay as they are.
package permission

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	"github.com/cordon-host/cordon/capability/approval"
	"github.com/cordon-host/cordon/capability/sandbox"
)

// Capability is the name of the capability. The owners of the knobs look for it in the stamp of a call: its provider pins.
const Capability = "permission"

// Custom is the preset of a session whose settings match no table entry. It is derived, never recorded and never selectable.
const (
	Custom            = "custom"
	CustomDescription = "Current sandbox and approval settings do not match a preset."
)

// EventPreset is the session event that records which preset was chosen. It belongs to the row that provides the permission
// capability. The last one wins, as long as the knobs are still where it put them.
const EventPreset = "permission/preset"

// Change is the payload of permission/preset.
type Change struct {
	Preset string `json:"preset"`
}

// ParseChange reads the payload of a permission/preset event.
func ParseChange(data []byte) (Change, error) {
	var c Change
	if err := json.Unmarshal(data, &c); err != nil {
		return Change{}, fmt.Errorf("permission/preset payload is not a JSON object: %w", err)
	}
	if c.Preset == "" {
		return Change{}, errors.New("permission/preset names no preset")
	}
	return c, nil
}

// Pair is the two knobs of a session.
type Pair struct {
	Mode   sandbox.Mode
	Policy approval.Policy
}

// Preset is a named pair.
type Preset struct {
	Name string
	Pair
	Description string
}

// Table is the presets of a deployment, in the order they are shown and matched in.
type Table []Preset

// Validate says what is wrong with a table.
func (t Table) Validate() error {
	for i, p := range t {
		switch {
		case p.Name == "":
			return errors.New("a preset must have a name")
		case p.Name == Custom:
			return errors.New(`"custom" is reserved for the derived not-a-preset state and cannot name a table entry`)
		case slices.ContainsFunc(t[:i], func(q Preset) bool { return q.Name == p.Name }):
			return fmt.Errorf("preset %q is in the table twice", p.Name)
		}
		if _, err := sandbox.ParseMode(string(p.Mode)); err != nil {
			return fmt.Errorf("preset %q: %w", p.Name, err)
		}
		if _, err := approval.ParsePolicy(string(p.Policy)); err != nil {
			return fmt.Errorf("preset %q: %w", p.Name, err)
		}
	}
	return nil
}

// Find is the entry with a name.
func (t Table) Find(name string) (Preset, bool) {
	return t.first(func(p Preset) bool { return p.Name == name })
}

// Match is the first entry with a pair.
func (t Table) Match(pair Pair) (Preset, bool) {
	return t.first(func(p Preset) bool { return p.Pair == pair })
}

func (t Table) first(is func(Preset) bool) (Preset, bool) {
	i := slices.IndexFunc(t, is)
	if i < 0 {
		return Preset{}, false
	}
	return t[i], true
}

// Names lists the entries for people: "a, b".
func (t Table) Names() string {
	names := make([]string, len(t))
	for i, p := range t {
		names[i] = p.Name
	}
	return strings.Join(names, ", ")
}

// Current is the preset of a session: the recorded one if its pair still is the effective one, else the first entry with
// that pair, else Custom. Recorded is empty for a session that recorded none; a name the table does not have counts as none.
func (t Table) Current(recorded string, effective Pair) Preset {
	if p, ok := t.Find(recorded); ok && p.Pair == effective {
		return p
	}
	if p, ok := t.Match(effective); ok {
		return p
	}
	return Preset{Name: Custom, Pair: effective, Description: CustomDescription}
}

// ModeLevel is the authority that a switch of a session's mode takes. Narrowing takes none, whoever asks, and read-only is never a
// widening; unconfined access takes the owner, any other wider mode a human. Nothing is narrower than a mode nobody knows.
func ModeLevel(from, to sandbox.Mode) kernelv1.Level {
	switch {
	case from == to, to == sandbox.ReadOnly, sandbox.Wider(from, to):
		return kernelv1.Level_NONE
	case to == sandbox.DangerFullAccess:
		return kernelv1.Level_OWNER
	}
	return kernelv1.Level_HUMAN
}

// PolicyLevel is the authority that a switch of a session's approval policy takes. Questions bother a person and can be granted:
// going back to them is a widening and takes a human. Going silent never is.
func PolicyLevel(from, to approval.Policy) kernelv1.Level {
	if from != to && to != approval.Never {
		return kernelv1.Level_HUMAN
	}
	return kernelv1.Level_NONE
}

// Level is the authority that a switch of both takes: a narrower mode does not pay for a wider policy, nor the other way round.
func Level(from, to Pair) kernelv1.Level {
	return max(ModeLevel(from.Mode, to.Mode), PolicyLevel(from.Policy, to.Policy))
}

package sandbox

import "fmt"

// Subject is what an escalation would retry, as models read it: the family of the tool.
type Subject string

const (
	Command   Subject = "command"   // shells
	Operation Subject = "operation" // file tools
)

// DenialMarker is the line a tool adds to a result when the sandbox refused something.
func DenialMarker(m Mode) string {
	return fmt.Sprintf("[sandbox: file access denied under %s mode]", m)
}

// EscalationHint is the line that follows a DenialMarker wherever the composition offers escalation at all. It does not
// depend on the current mode.
func EscalationHint(s Subject) string {
	return fmt.Sprintf("[sandbox: escalation available — retry this exact %s once with sandbox_permissions (the narrowest wider mode that suffices) + justification; the approval prompt asks the user]", s)
}

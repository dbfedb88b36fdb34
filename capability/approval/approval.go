// Package approval holds the rules of the approval capability that its provider, its consumers and the host share:
// the closed vocabularies, the event, the session events and how much an answer must be worth.
package approval

import (
	"fmt"
	"slices"

	approvalv1 "github.com/cordon-host/cordon/api/approval/v1"
	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	"github.com/cordon-host/cordon/capability/event"
	"github.com/cordon-host/cordon/capability/sandbox"
)

// Outcome is how a question ended. The vocabulary is closed: there is no "always", and nothing is remembered.
type Outcome string

const (
	AllowedOnce Outcome = "allowed-once"
	Rejected    Outcome = "rejected"
	Cancelled   Outcome = "cancelled"
	Unavailable Outcome = "unavailable" // nobody who may answer was there
)

// Valid reports whether o is one of the four outcomes.
func (o Outcome) Valid() bool {
	return slices.Contains([]Outcome{AllowedOnce, Rejected, Cancelled, Unavailable}, o)
}

// Policy is a session's standing answer to being asked at all.
type Policy string

const (
	Ask   Policy = "ask"
	Never Policy = "never" // rejected inside the service, before any listener hears of it
)

// ParsePolicy checks a policy's spelling.
func ParsePolicy(s string) (Policy, error) {
	switch p := Policy(s); p {
	case Ask, Never:
		return p, nil
	}
	return "", fmt.Errorf(`approval policy must be one of "ask" or "never", got %q`, s)
}

// Request is the waterfall through which a question looks for somebody to answer it. It fails closed, and nobody on the
// way may change the question: what a person answers must be what was asked.
var Request = event.Event[*approvalv1.Question, *approvalv1.Verdict]{
	Name:         "approval/request",
	FailClosed:   true,
	FixedRequest: true,
}

// Session event types. They belong to the row that provides the approval capability.
const (
	EventAsked   = "approval/asked"
	EventDecided = "approval/decided"
	EventPolicy  = "approval/policy"
)

// Asked is the payload of approval/asked.
type Asked struct {
	ID       string    `json:"id"`
	ToolName string    `json:"toolName"`
	CallID   string    `json:"callId,omitempty"`
	Reason   string    `json:"reason,omitempty"`
	Widening *Widening `json:"widening,omitempty"`
	Subject  *Subject  `json:"subject,omitempty"`
}

// Widening is the wider mode a question is about.
type Widening struct {
	From       string `json:"from"`
	To         string `json:"to"`
	Capability string `json:"capability"` // whose provider redeems the grant
}

// Subject is what the question is about, in the model's words.
type Subject struct {
	Kind string `json:"kind"`
	Text string `json:"text"`
	Cwd  string `json:"cwd,omitempty"`
}

// Decided is the payload of approval/decided.
type Decided struct {
	ID      string  `json:"id"`
	Outcome Outcome `json:"outcome"`
	// DecidedBy is written by the host from the stamp of the answer; a provider leaves it empty.
	DecidedBy *DecidedBy `json:"decidedBy,omitempty"`
	Note      string     `json:"note,omitempty"`
}

// DecidedBy says whose decision it was.
type DecidedBy struct {
	Policy  string `json:"policy,omitempty"` // "never" when the policy decided
	Entry   string `json:"entry,omitempty"`
	Channel string `json:"channel,omitempty"`
	Level   string `json:"level,omitempty"`
}

// PolicyChange is the payload of approval/policy.
type PolicyChange struct {
	Policy Policy `json:"policy"`
	Source string `json:"source,omitempty"`
}

// Required is the least an answer must be worth to allow a question. A widening needs a human, unconfined access its
// owner; a question without a widening allows nothing that the standing mode does not reach.
func Required(w *approvalv1.Widening) kernelv1.Level {
	switch {
	case w == nil:
		return kernelv1.Level_CLIENT
	case w.GetTo() == string(sandbox.WorkspaceWrite):
		return kernelv1.Level_HUMAN
	default:
		return kernelv1.Level_OWNER
	}
}

// LevelName is how a level is spelled in logs and in compose rows.
func LevelName(l kernelv1.Level) string {
	switch l {
	case kernelv1.Level_CLIENT:
		return "client"
	case kernelv1.Level_HUMAN:
		return "human"
	case kernelv1.Level_OWNER:
		return "owner"
	}
	return "none"
}

// ParseLevel reads a level as a compose row spells it. Rows can raise a listener to client or human; owner is only ever
// a typed confirmation.
func ParseLevel(s string) (kernelv1.Level, error) {
	switch s {
	case "":
		return kernelv1.Level_NONE, nil
	case "client":
		return kernelv1.Level_CLIENT, nil
	case "human":
		return kernelv1.Level_HUMAN, nil
	}
	return kernelv1.Level_NONE, fmt.Errorf("answers must be client or human, got %q", s)
}

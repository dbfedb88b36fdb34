package sandbox

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"unicode"
)

// ValidateEscalation checks the argument pair of a tool call: both fields or neither, and a justification that a person
// can read. A nil pointer is an absent field. Justifications of nothing but spaces and invisible characters are blank:
// they would reach the person as an empty line.
func ValidateEscalation(permissions, justification *string) error {
	switch {
	case permissions != nil && justification == nil:
		return errors.New("invalid escalation: sandbox_permissions requires a justification")
	case permissions == nil && justification != nil:
		return errors.New("invalid escalation: justification is only valid together with sandbox_permissions")
	case justification != nil && !strings.ContainsFunc(*justification, visible):
		return errors.New("invalid justification: expected a non-empty sentence")
	}
	return nil
}

func visible(r rune) bool { return unicode.IsGraphic(r) && !unicode.IsSpace(r) }

// Escalation is one request of one call for a wider mode.
type Escalation struct {
	Effective     Mode // the call's mode without the escalation
	Requested     Mode
	Subject       Subject
	Justification string
	HasAgent      bool // the call belongs to an agent whose session can carry the question
}

// Reason is the audit reason an approver is asked with.
func (e Escalation) Reason() string {
	return fmt.Sprintf("escalate sandbox to %s: %s", e.Requested, e.Justification)
}

// Answer is how an approver answered. Its outcome is the approval capability's closed vocabulary, spelled out there;
// it comes from another process, so anything else is possible and refused.
type Answer struct {
	Outcome string // allowed-once, rejected, cancelled or unavailable
	Grant   string // with allowed-once: what the executor redeems for the wider mode
}

// Approver asks whoever may decide. An error means the question could not be put at all.
type Approver interface {
	ApproveEscalation(ctx context.Context, e Escalation, reason string) (Answer, error)
}

// Refusal says why an escalation was not granted. Its text is what the model reads.
type Refusal struct {
	Kind RefusalKind
	text string
}

// RefusalKind is why an escalation was refused.
type RefusalKind string

const (
	NotWider    RefusalKind = "not-wider"    // nobody was asked
	NoApproval  RefusalKind = "no-approval"  // no approval service in the composition
	NoAgent     RefusalKind = "no-agent"     // nothing to route the question through
	WasRejected RefusalKind = "rejected"     // a person or the policy said no
	WasCanceled RefusalKind = "cancelled"    // the question was withdrawn
	NoChannel   RefusalKind = "unavailable"  // nobody who may answer was there
	BadAnswer   RefusalKind = "unrecognized" // an outcome outside the vocabulary, or an allowance without a grant
)

func (r *Refusal) Error() string { return r.text }

func refuse(kind RefusalKind, format string, args ...any) error {
	return &Refusal{Kind: kind, text: fmt.Sprintf(format, args...)}
}

// Approve decides an escalation and returns the grant for it. The first rule that matches wins:
//
//  1. a request that does not strictly widen the call's mode fails, and nobody is ever asked;
//  2. a composition without an approval service (a nil approver) cannot grant;
//  3. nor can a call without an agent;
//  4. the approver is asked, and only allowed-once with a grant is a yes.
//
// Every no is a *Refusal; an error of the approver itself is returned as it came. A grant is good for this call alone.
func Approve(ctx context.Context, e Escalation, approver Approver) (grant string, err error) {
	switch {
	case !Wider(e.Requested, e.Effective):
		return "", refuse(NotWider, `sandbox escalation to "%s" is not strictly wider than this call's current "%s" mode`, e.Requested, e.Effective)
	case approver == nil:
		return "", refuse(NoApproval, `sandbox escalation to "%s" requires approval, but no approval service is composed`, e.Requested)
	case !e.HasAgent:
		return "", refuse(NoAgent, `sandbox escalation to "%s" requires approval, but the call has no agent to route it through`, e.Requested)
	}
	answer, err := approver.ApproveEscalation(ctx, e, e.Reason())
	if err != nil {
		return "", err
	}
	switch answer.Outcome {
	case "allowed-once":
		if answer.Grant == "" {
			return "", refuse(BadAnswer, `approval for escalating to "%s" came without a grant`, e.Requested)
		}
		return answer.Grant, nil
	case "rejected":
		return "", refuse(WasRejected, `the user rejected escalating this %s to "%s"`, e.Subject, e.Requested)
	case "cancelled":
		return "", refuse(WasCanceled, `approval for escalating to "%s" was cancelled`, e.Requested)
	case "unavailable":
		return "", refuse(NoChannel, `sandbox escalation to "%s" requires approval, but no approval channel is available`, e.Requested)
	}
	return "", refuse(BadAnswer, "unreachable variant in EscalationOutcome")
}

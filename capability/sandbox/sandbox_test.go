package sandbox

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/cordon-host/cordon/capability/fault"
)

func TestWiderLadder(t *testing.T) {
	want := map[Mode][]Mode{
		ReadOnly:         {WorkspaceWrite, DangerFullAccess},
		WorkspaceWrite:   {DangerFullAccess},
		DangerFullAccess: {},
		"bogus":          nil,
	}
	for from, wider := range want {
		if got := WiderModes(from); !slices.Equal(got, wider) {
			t.Errorf("WiderModes(%s) = %v, want %v", from, got, wider)
		}
		for _, to := range append(Modes(), "bogus", "") {
			if got := Wider(to, from); got != slices.Contains(wider, to) {
				t.Errorf("Wider(%q, %q) = %v", to, from, got)
			}
		}
	}
	if got := EscalationTargets(); !slices.Equal(got, []Mode{WorkspaceWrite, DangerFullAccess}) {
		t.Errorf("EscalationTargets() = %v", got)
	}
	// A caller that edits the list must not change the next one's schema.
	EscalationTargets()[0] = "edited"
	WiderModes(ReadOnly)[0] = "edited"
	if EscalationTargets()[0] != WorkspaceWrite || WiderModes(ReadOnly)[0] != WorkspaceWrite {
		t.Error("an edited copy changed the closed set")
	}
}

func TestParseMode(t *testing.T) {
	for _, m := range Modes() {
		if got, err := ParseMode(string(m)); err != nil || got != m {
			t.Errorf("ParseMode(%q) = %q, %v", m, got, err)
		}
	}
	for _, s := range []string{"", "Read-Only", " read-only", "none", "workspace_write"} {
		if _, err := ParseMode(s); err == nil || !strings.Contains(err.Error(), "read-only") {
			t.Errorf("ParseMode(%q) = %v, want an error that lists the modes", s, err)
		}
	}
	if !ReadOnly.Confined() || !WorkspaceWrite.Confined() || DangerFullAccess.Confined() || !Mode("bogus").Confined() {
		t.Error("only danger-full-access may go unconfined")
	}
}

func TestValidateEscalation(t *testing.T) {
	p := func(s string) *string { return &s }
	const (
		missing = "invalid escalation: sandbox_permissions requires a justification"
		alone   = "invalid escalation: justification is only valid together with sandbox_permissions"
		blank   = "invalid justification: expected a non-empty sentence"
	)
	for _, c := range []struct {
		name                       string
		permissions, justification *string
		want                       string
	}{
		{"neither", nil, nil, ""},
		{"both", p("workspace-write"), p("needs to save"), ""},
		{"no justification", p("workspace-write"), nil, missing},
		{"no permissions", nil, p("because"), alone},
		{"no permissions, blank", nil, p(" "), alone},
		{"empty", p("workspace-write"), p(""), blank},
		{"spaces", p("workspace-write"), p(" \t\n\u00a0\ufeff"), blank},
		{"invisible", p("workspace-write"), p("\u200b\u200d\u2060\x00\x1b"), blank},
		{"one letter", p("workspace-write"), p(" x "), ""},
	} {
		err := ValidateEscalation(c.permissions, c.justification)
		if got := text(err); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

func TestMarkers(t *testing.T) {
	for _, c := range []struct{ got, want string }{
		{DenialMarker(ReadOnly), "[sandbox: file access denied under read-only mode]"},
		{DenialMarker(WorkspaceWrite), "[sandbox: file access denied under workspace-write mode]"},
		{EscalationHint(Command), "[sandbox: escalation available — retry this exact command once with sandbox_permissions (the narrowest wider mode that suffices) + justification; the approval prompt asks the user]"},
		{EscalationHint(Operation), "[sandbox: escalation available — retry this exact operation once with sandbox_permissions (the narrowest wider mode that suffices) + justification; the approval prompt asks the user]"},
	} {
		if c.got != c.want {
			t.Errorf("got  %s\nwant %s", c.got, c.want)
		}
	}
}

type approverFunc func(Escalation, string) (Answer, error)

func (f approverFunc) ApproveEscalation(_ context.Context, e Escalation, reason string) (Answer, error) {
	return f(e, reason)
}

func TestApprove(t *testing.T) {
	base := Escalation{Effective: ReadOnly, Requested: WorkspaceWrite, Subject: Command, Justification: "save the report", HasAgent: true}
	answer := func(a Answer) *Answer { return &a }
	for _, c := range []struct {
		name   string
		edit   func(*Escalation)
		answer *Answer // nil: no approval service
		grant  string
		want   string
		kind   RefusalKind
		asked  bool
	}{
		{name: "granted", answer: answer(Answer{"allowed-once", "g1"}), grant: "g1", asked: true},
		{name: "not wider", edit: func(e *Escalation) { e.Effective = WorkspaceWrite }, answer: answer(Answer{"allowed-once", "g1"}),
			want: `sandbox escalation to "workspace-write" is not strictly wider than this call's current "workspace-write" mode`, kind: NotWider},
		{name: "narrower", edit: func(e *Escalation) { e.Effective = DangerFullAccess }, answer: answer(Answer{"allowed-once", "g1"}),
			want: `sandbox escalation to "workspace-write" is not strictly wider than this call's current "danger-full-access" mode`, kind: NotWider},
		{name: "unknown target", edit: func(e *Escalation) { e.Requested = "root" }, answer: answer(Answer{"allowed-once", "g1"}),
			want: `sandbox escalation to "root" is not strictly wider than this call's current "read-only" mode`, kind: NotWider},
		{name: "not wider comes before no service and no agent", edit: func(e *Escalation) { e.Effective, e.HasAgent = WorkspaceWrite, false },
			want: `sandbox escalation to "workspace-write" is not strictly wider than this call's current "workspace-write" mode`, kind: NotWider},
		{name: "no service", want: `sandbox escalation to "workspace-write" requires approval, but no approval service is composed`, kind: NoApproval},
		{name: "no service comes before no agent", edit: func(e *Escalation) { e.HasAgent = false },
			want: `sandbox escalation to "workspace-write" requires approval, but no approval service is composed`, kind: NoApproval},
		{name: "no agent", edit: func(e *Escalation) { e.HasAgent = false }, answer: answer(Answer{"allowed-once", "g1"}),
			want: `sandbox escalation to "workspace-write" requires approval, but the call has no agent to route it through`, kind: NoAgent},
		{name: "rejected", answer: answer(Answer{"rejected", ""}), asked: true,
			want: `the user rejected escalating this command to "workspace-write"`, kind: WasRejected},
		{name: "rejected operation", edit: func(e *Escalation) { e.Subject = Operation }, answer: answer(Answer{"rejected", ""}), asked: true,
			want: `the user rejected escalating this operation to "workspace-write"`, kind: WasRejected},
		{name: "cancelled", answer: answer(Answer{"cancelled", ""}), asked: true,
			want: `approval for escalating to "workspace-write" was cancelled`, kind: WasCanceled},
		{name: "unavailable", answer: answer(Answer{"unavailable", ""}), asked: true,
			want: `sandbox escalation to "workspace-write" requires approval, but no approval channel is available`, kind: NoChannel},
		{name: "outside the union", answer: answer(Answer{"allowed-always", "g1"}), asked: true,
			want: "unreachable variant in EscalationOutcome", kind: BadAnswer},
		{name: "empty outcome", answer: answer(Answer{"", "g1"}), asked: true,
			want: "unreachable variant in EscalationOutcome", kind: BadAnswer},
		{name: "allowed without a grant", answer: answer(Answer{"allowed-once", ""}), asked: true,
			want: `approval for escalating to "workspace-write" came without a grant`, kind: BadAnswer},
		{name: "a grant with a rejection is no grant", answer: answer(Answer{"rejected", "g1"}), asked: true,
			want: `the user rejected escalating this command to "workspace-write"`, kind: WasRejected},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := base
			if c.edit != nil {
				c.edit(&e)
			}
			var reasons []string
			var approver Approver
			if c.answer != nil {
				approver = approverFunc(func(got Escalation, reason string) (Answer, error) {
					if got != e {
						t.Errorf("asked about %+v, want %+v", got, e)
					}
					reasons = append(reasons, reason)
					return *c.answer, nil
				})
			}
			grant, err := Approve(t.Context(), e, approver)
			if grant != c.grant || text(err) != c.want {
				t.Errorf("Approve = %q, %v\nwant %q, %s", grant, err, c.grant, c.want)
			}
			var r *Refusal
			if errors.As(err, &r) != (c.want != "") || r != nil && r.Kind != c.kind {
				t.Errorf("refusal = %+v, want kind %q", r, c.kind)
			}
			if c.asked != (len(reasons) == 1) {
				t.Errorf("asked %d times", len(reasons))
			}
			if c.asked && reasons[0] != "escalate sandbox to workspace-write: save the report" {
				t.Errorf("asked with reason %q", reasons[0])
			}
		})
	}
	broken := errors.New("the approval provider is gone")
	_, err := Approve(t.Context(), base, approverFunc(func(Escalation, string) (Answer, error) { return Answer{"allowed-once", "g"}, broken }))
	if !errors.Is(err, broken) {
		t.Errorf("an approver's error came back as %v", err)
	}
}

func TestUnavailable(t *testing.T) {
	const base = `sandbox mode "read-only" is requested but no sandbox backend is usable on this host; refusing to run the command unconfined. Install bubblewrap or run a Landlock-enforcing kernel (Linux), ensure sandbox-exec is usable (macOS), or ensure the ACL restricted-token runner can start (Windows) — otherwise switch the consumer to danger-full-access.`
	err := Unavailable(ReadOnly, "")
	if status.Code(err) != codes.FailedPrecondition || fault.Reason(err) != "SANDBOX_UNAVAILABLE" || fault.Message(err) != base {
		t.Errorf("Unavailable = %v", err)
	}
	err = Unavailable(ReadOnly, "bwrap: 100%d of it failed")
	if got := fault.Message(err); got != base+" Runner failure: bwrap: 100%d of it failed" {
		t.Errorf("with a detail: %s", got)
	}
}

func TestPolicyText(t *testing.T) {
	for _, c := range []struct {
		mode Mode
		want string
	}{
		{ReadOnly, "Current Cordon file policy: read-only. Any available operation enforced by the Cordon file sandbox cannot modify files in the standing mode. Do not refuse a required modification from this policy alone: try an available tool normally and follow any denial and escalation guidance it returns."},
		{WorkspaceWrite, `Current Cordon file policy: workspace-write. Any available operation enforced by the Cordon file sandbox may modify files under the session workspace: "/w/a \"b\" <c>\n". Some platform temporary areas may also be writable.`},
		{DangerFullAccess, "Current Cordon file policy: danger-full-access. The Cordon file sandbox does not restrict file modifications by available operations."},
		{"bogus", ""},
	} {
		if got := PolicyText(c.mode, "/w/a \"b\" <c>\n"); got != c.want {
			t.Errorf("%s:\ngot  %s\nwant %s", c.mode, got, c.want)
		}
	}
}

func TestModeEvents(t *testing.T) {
	b := func(s string) []byte { return []byte(s) }
	for _, c := range []struct {
		name     string
		payloads [][]byte
		mode     Mode
		ok       bool
		err      string
	}{
		{"none", nil, "", false, ""},
		{"last wins", [][]byte{b(`{"mode":"read-only"}`), b(`{"mode":"workspace-write","source":"delegation"}`)}, WorkspaceWrite, true, ""},
		{"unknown mode", [][]byte{b(`{"mode":"root"}`)}, "", false, `sandbox/mode carries unknown mode "root"`},
		{"no mode", [][]byte{b(`{}`)}, "", false, `sandbox/mode carries unknown mode ""`},
		{"trailing", [][]byte{b(`{"mode":"read-only"} {}`)}, "", false, "sandbox/mode payload has something after its JSON object"},
	} {
		m, ok, err := EffectiveMode(c.payloads...)
		if m != c.mode || ok != c.ok || text(err) != c.err {
			t.Errorf("%s: %q %v %v", c.name, m, ok, err)
		}
	}
	if _, err := ParseModeChange(b(`"read-only"`)); err == nil {
		t.Error("a bare string was taken for a payload")
	}
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

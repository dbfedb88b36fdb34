package host

import (
	"testing"

	"github.com/cordon-host/cordon/capability/approval"
	"github.com/cordon-host/cordon/capability/sandbox"
	"github.com/cordon-host/cordon/host/session"
	"github.com/cordon-host/cordon/host/session/store/memory"
)

// TestWidest is what anything of a session may ever have written to: its standing modes and what was allowed once.
func TestWidest(t *testing.T) {
	sessions, err := session.Open(t.Context(), memory.New(), session.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer sessions.Close()
	for _, tt := range []struct {
		name     string
		standing sandbox.Mode
		modes    []sandbox.Mode
		to       string
		outcome  approval.Outcome
		want     sandbox.Mode
	}{
		{"never more than read-only", sandbox.ReadOnly, nil, "", "", sandbox.ReadOnly},
		{"the deployment's default", sandbox.WorkspaceWrite, nil, "", "", sandbox.WorkspaceWrite},
		{"a mode it had once", sandbox.ReadOnly, []sandbox.Mode{sandbox.WorkspaceWrite, sandbox.ReadOnly}, "", "", sandbox.WorkspaceWrite},
		{"narrower than the default from the start", sandbox.WorkspaceWrite, []sandbox.Mode{sandbox.ReadOnly}, "", "", sandbox.WorkspaceWrite},
		{"one call allowed", sandbox.ReadOnly, nil, "workspace-write", approval.AllowedOnce, sandbox.WorkspaceWrite},
		{"one unconfined call allowed", sandbox.ReadOnly, nil, "danger-full-access", approval.AllowedOnce, sandbox.DangerFullAccess},
		{"one call refused", sandbox.ReadOnly, nil, "danger-full-access", approval.Rejected, sandbox.ReadOnly},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, err := sessions.Create(t.Context(), session.Spec{Cwd: t.TempDir()})
			if err != nil {
				t.Fatal(err)
			}
			add := func(typ string, turn int64, data any) {
				t.Helper()
				if _, err := s.Append(t.Context(), session.Draft{Type: typ, Turn: turn, Data: data}); err != nil {
					t.Fatal(err)
				}
			}
			for _, m := range tt.modes {
				add(sandbox.EventMode, 0, sandbox.ModeChange{Mode: m})
			}
			if tt.to != "" {
				turn, err := s.BeginTurn(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				add(approval.EventAsked, turn, approval.Asked{ID: "q", ToolName: "bash", Widening: &approval.Widening{From: "read-only", To: tt.to, Capability: "shell"}})
				add(approval.EventDecided, turn, approval.Decided{ID: "q", Outcome: tt.outcome})
			}
			if got := widest(s, tt.standing); got != tt.want {
				t.Errorf("widest is %s, want %s", got, tt.want)
			}
		})
	}
}

package grant_test

import (
	"testing"

	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/host/grant"
)

func TestRedeem(t *testing.T) {
	shell := func(c string) bool { return c == "shell" }
	for _, tt := range []struct {
		name   string
		call   string
		offers func(string) bool
		before func(*grant.Store, string)
		reason string
	}{
		{name: "once by the provider in its call", call: "c1", offers: shell},
		{name: "twice", call: "c1", offers: shell, reason: "GRANT_USED", before: func(s *grant.Store, id string) {
			if _, err := s.Redeem(id, "c1", shell); err != nil {
				t.Fatal(err)
			}
		}},
		{name: "in another call", call: "c2", offers: shell, reason: "GRANT_FOREIGN"},
		{name: "by another plugin", call: "c1", offers: func(string) bool { return false }, reason: "GRANT_FOREIGN"},
		{name: "after its call", call: "c1", offers: shell, reason: "GRANT_UNKNOWN", before: func(s *grant.Store, _ string) { s.EndCall("c1") }},
		{name: "after another call ended", call: "c1", offers: shell, before: func(s *grant.Store, _ string) { s.EndCall("c2") }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := grant.NewStore()
			id := s.Mint(grant.Grant{Call: "c1", Capability: "shell", Scope: grant.ScopeMode, Value: "workspace-write", Approval: "a1"})
			if tt.before != nil {
				tt.before(s, id)
			}
			g, err := s.Redeem(id, tt.call, tt.offers)
			if got := fault.Reason(err); got != tt.reason {
				t.Fatalf("reason = %q, want %q (%v)", got, tt.reason, err)
			}
			if err == nil && g.Value != "workspace-write" {
				t.Fatalf("value = %q", g.Value)
			}
		})
	}
}

func TestRefusedAttemptKeepsTheGrant(t *testing.T) {
	s := grant.NewStore()
	id := s.Mint(grant.Grant{Call: "c1", Capability: "shell"})
	if _, err := s.Redeem(id, "c1", func(string) bool { return false }); err == nil {
		t.Fatal("a stranger redeemed the grant")
	}
	if _, err := s.Redeem(id, "c1", func(string) bool { return true }); err != nil {
		t.Fatalf("the provider was refused after a stranger's attempt: %v", err)
	}
}

package builtin

import (
	"context"
	"encoding/json"
	"testing"

	"google.golang.org/protobuf/proto"

	approvalv1 "github.com/cordon-host/cordon/api/approval/v1"
	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	sessionv1 "github.com/cordon-host/cordon/api/session/v1"
	"github.com/cordon-host/cordon/capability/approval"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/ctxsvc"
	"github.com/cordon-host/cordon/host/bus"
	"github.com/cordon-host/cordon/host/grant"
	"github.com/cordon-host/cordon/host/route"
	"github.com/cordon-host/cordon/host/session"
	"github.com/cordon-host/cordon/host/session/store/memory"
	"github.com/cordon-host/cordon/plugin"
)

// desk is the session capability over a real log and a real bus, with an approval row, a thief's row and one open turn.
type desk struct {
	*testing.T
	server *sessionServer
	root   *ctxsvc.Context
	log    *session.Session
	turn   int64
	tree   *route.Tree
	answer func() (*approvalv1.Verdict, *kernelv1.Answer)
}

var manifests = map[string]*kernelv1.Manifest{
	"approval": {
		Offers:  []*kernelv1.Offer{{Capability: "approval"}},
		Appends: []string{"approval/"},
		Events:  []*kernelv1.EventDecl{{Event: approval.Request.Name, FailClosed: true, FixedRequest: true}},
	},
	"thief": {Appends: []string{"approval/", "sandbox/mode", "tool/call", "thief/"}},
}

func newDesk(t *testing.T) *desk {
	sessions, err := session.Open(t.Context(), memory.New(), session.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { sessions.Close() })
	log, err := sessions.Create(t.Context(), session.Spec{Cwd: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	turn, err := log.BeginTurn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	b := bus.New()
	d := &desk{
		T: t, root: ctxsvc.New(), log: log, turn: turn,
		tree: route.NewTree(route.Call{Session: log.ID(), Turn: turn}),
		server: &sessionServer{deps: SessionDeps{
			Log: sessions, Grants: grant.NewStore(), Bus: b,
			Manifest: func(entry string) (*kernelv1.Manifest, bool) { m, ok := manifests[entry]; return m, ok },
			Owns:     func(entry, capability string) bool { return entry == capability },
		}},
	}
	t.Cleanup(func() { _ = d.root.Fiber().Dispose(context.Background()) })
	if err := b.Declare("approval", manifests["approval"].GetEvents()[0]); err != nil {
		t.Fatal(err)
	}
	err = b.Terminal(d.root, approval.Request.Name, InboxEntry, func(context.Context, *bus.Request, func(context.Context, *bus.Request) (*bus.Reply, error)) (*bus.Reply, error) {
		v, a := d.answer()
		raw, err := proto.Marshal(v)
		return &bus.Reply{Payload: raw, Answer: a}, err
	})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// as is the context of a call that an entry makes in the desk's call tree.
func (d *desk) as(entry string) context.Context {
	return plugin.WithCall(d.Context(), plugin.Call{Caller: entry, Session: d.log.ID(), Turn: d.turn, ID: d.tree.ID})
}

func (d *desk) append(entry, typ string, data any, answer string) (*sessionv1.AppendReply, error) {
	d.Helper()
	raw, err := json.Marshal(data)
	if err != nil {
		d.Fatal(err)
	}
	return d.server.Append(d.as(entry), &sessionv1.AppendRequest{Type: typ, Data: raw, Answer: answer})
}

// ask logs a question and gets it answered; it returns the id of the host's stamp.
func (d *desk) ask(id, to, text string) string {
	d.Helper()
	_, err := d.append("approval", approval.EventAsked, approval.Asked{
		ID: id, ToolName: "bash", Widening: &approval.Widening{From: "read-only", To: to, Capability: "shell"},
		Subject: &approval.Subject{Kind: "command", Text: "true"},
	}, "")
	if err != nil {
		d.Fatal(err)
	}
	return d.emit(id, to, text)
}

func (d *desk) emit(id, to, text string) string {
	d.Helper()
	raw, err := proto.Marshal(&approvalv1.Question{
		Id: id, Tool: "bash", Widening: &approvalv1.Widening{From: "read-only", To: to, Capability: "shell"},
		Subject: &approvalv1.Subject{Kind: "command", Text: text},
	})
	if err != nil {
		d.Fatal(err)
	}
	caller := &route.Provider{Entry: "approval", Manifest: manifests["approval"]}
	reply, err := d.server.deps.Bus.Emit(d.Context(), d.root, caller, &route.Leg{Tree: d.tree}, &kernelv1.EmitRequest{
		Event: approval.Request.Name, Mode: kernelv1.EmitRequest_WATERFALL, Payload: raw,
	})
	if err != nil {
		d.Fatal(err)
	}
	return reply.GetAnswer().GetId()
}

func says(outcome approval.Outcome, level kernelv1.Level) func() (*approvalv1.Verdict, *kernelv1.Answer) {
	return func() (*approvalv1.Verdict, *kernelv1.Answer) {
		return &approvalv1.Verdict{Outcome: string(outcome)}, &kernelv1.Answer{Entry: InboxEntry, Channel: "terminal", Level: level}
	}
}

// TestAllowance is every way to an allowed-once, and the only one that leads to a grant.
func TestAllowance(t *testing.T) {
	allowed := approval.Decided{ID: "q1", Outcome: approval.AllowedOnce}
	for _, tt := range []struct {
		name   string
		answer func() (*approvalv1.Verdict, *kernelv1.Answer)
		to     string
		do     func(*desk, string) (*sessionv1.AppendReply, error) // with the stamp of the answer to q1
		reason string
	}{
		{name: "a person's answer, cited", reason: ""},
		{name: "no answer cited", reason: "NOT_ALLOWED", do: func(d *desk, _ string) (*sessionv1.AppendReply, error) {
			return d.append("approval", approval.EventDecided, allowed, "")
		}},
		{name: "a made-up answer", reason: "ANSWER_UNKNOWN", do: func(d *desk, _ string) (*sessionv1.AppendReply, error) {
			return d.append("approval", approval.EventDecided, allowed, "a-MADEUP")
		}},
		{name: "the person said no", answer: says(approval.Rejected, kernelv1.Level_OWNER), reason: "NOT_ALLOWED"},
		{name: "a client's word for a widening", answer: says(approval.AllowedOnce, kernelv1.Level_CLIENT), reason: "NOT_ALLOWED"},
		{name: "a listener's word without a row's leave", answer: says(approval.AllowedOnce, kernelv1.Level_NONE), reason: "NOT_ALLOWED"},
		{name: "full access without its owner", to: "danger-full-access", reason: "NOT_ALLOWED"},
		{name: "full access with its owner", to: "danger-full-access", answer: says(approval.AllowedOnce, kernelv1.Level_OWNER)},
		{name: "an answer to another question", reason: "NOT_ALLOWED", do: func(d *desk, _ string) (*sessionv1.AppendReply, error) {
			return d.append("approval", approval.EventDecided, allowed, d.ask("q2", "workspace-write", "true"))
		}},
		{name: "another text shown than logged", reason: "NOT_ALLOWED", do: func(d *desk, _ string) (*sessionv1.AppendReply, error) {
			return d.append("approval", approval.EventDecided, allowed, d.emit("q1", "workspace-write", "something harmless"))
		}},
		{name: "another mode asked than logged", reason: "NOT_ALLOWED", answer: says(approval.AllowedOnce, kernelv1.Level_OWNER), do: func(d *desk, _ string) (*sessionv1.AppendReply, error) {
			return d.append("approval", approval.EventDecided, allowed, d.emit("q1", "danger-full-access", "true"))
		}},
		{name: "by another plugin", reason: "RESERVED_EVENT", do: func(d *desk, stamp string) (*sessionv1.AppendReply, error) {
			return d.append("thief", approval.EventDecided, allowed, stamp)
		}},
		{name: "in another call", reason: "ANSWER_UNKNOWN", do: func(d *desk, stamp string) (*sessionv1.AppendReply, error) {
			d.tree = route.NewTree(route.Call{Session: d.log.ID(), Turn: d.turn})
			return d.append("approval", approval.EventDecided, allowed, stamp)
		}},
		{name: "a decider named by the plugin", reason: "ANSWER_UNKNOWN", do: func(d *desk, _ string) (*sessionv1.AppendReply, error) {
			forged := allowed
			forged.DecidedBy = &approval.DecidedBy{Channel: "terminal", Level: "owner"}
			return d.append("approval", approval.EventDecided, forged, "")
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := newDesk(t)
			d.answer = tt.answer
			if d.answer == nil {
				d.answer = says(approval.AllowedOnce, kernelv1.Level_HUMAN)
			}
			to := tt.to
			if to == "" {
				to = "workspace-write"
			}
			stamp := d.ask("q1", to, "true")
			do := tt.do
			if do == nil {
				do = func(d *desk, stamp string) (*sessionv1.AppendReply, error) {
					return d.append("approval", approval.EventDecided, allowed, stamp)
				}
			}
			reply, err := do(d, stamp)
			if got := fault.Reason(err); got != tt.reason {
				t.Fatalf("reason = %q, want %q (%v)", got, tt.reason, err)
			}
			decided, logged := d.log.Last(approval.EventDecided)
			if logged != (tt.reason == "") || (reply.GetGrant() != "") != logged {
				t.Fatalf("logged %v, grant %q", logged, reply.GetGrant())
			}
			if !logged {
				return
			}
			var by approval.Decided
			if err := json.Unmarshal(decided.Data, &by); err != nil || by.DecidedBy == nil || by.DecidedBy.Channel != "terminal" || by.DecidedBy.Level == "" {
				t.Errorf("decided by %s", decided.Data)
			}
			if _, err := d.append("approval", approval.EventDecided, allowed, stamp); err == nil {
				t.Error("one answer was cited twice")
			}
			g, err := d.server.deps.Grants.Redeem(reply.GetGrant(), d.tree.ID, func(c string) bool { return c == "shell" })
			if err != nil || g.Value != to || g.Scope != grant.ScopeMode {
				t.Errorf("grant %v, %v", g, err)
			}
		})
	}
}

func TestOwnership(t *testing.T) {
	d := newDesk(t)
	for _, tt := range []struct{ entry, typ, reason string }{
		{"thief", "thief/own", ""},
		{"thief", "other/type", "NOT_DECLARED"},
		{"thief", "sandbox/mode", "RESERVED_EVENT"},
		{"thief", "approval/policy", "RESERVED_EVENT"},
		{"thief", "tool/call", "RESERVED_EVENT"},
		{"approval", "approval/policy", ""},
		{"approval", "sandbox/mode", "NOT_DECLARED"},
		{"stranger", "thief/own", "NOT_DECLARED"},
	} {
		_, err := d.append(tt.entry, tt.typ, map[string]string{"policy": "never"}, "")
		if got := fault.Reason(err); got != tt.reason {
			t.Errorf("%s appends %s: %q, want %q (%v)", tt.entry, tt.typ, got, tt.reason, err)
		}
	}
	_, err := d.server.Append(plugin.WithCall(t.Context(), plugin.Call{Caller: "thief"}), &sessionv1.AppendRequest{Type: "thief/own", Data: []byte("{}")})
	if fault.Reason(err) != "NO_SESSION" {
		t.Errorf("a call without a session: %v", err)
	}
}

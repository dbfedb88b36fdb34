package main

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	approvalv1 "github.com/cordon-host/cordon/api/approval/v1"
	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	sessionv1 "github.com/cordon-host/cordon/api/session/v1"
	"github.com/cordon-host/cordon/capability/approval"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/plugin"
	"github.com/cordon-host/cordon/plugin/plugintest"
)

type answer = func(ctx context.Context, q *approvalv1.Question) (*approvalv1.Verdict, *kernelv1.Answer, error)

// fixture is a session with an open turn and somebody who answers.
type fixture struct {
	*plugintest.Plugin
	client  approvalv1.ApprovalClient
	log     *plugintest.Log
	session *plugintest.Session
	turn    int64
}

func start(t *testing.T, fn answer, opts ...plugintest.Option) *fixture {
	t.Helper()
	f := &fixture{log: plugintest.NewLog()}
	f.session = f.log.Session("s", "/")
	f.turn = f.session.OpenTurn()
	if fn != nil {
		opts = append(opts, plugintest.Answers(approval.Request, fn))
	}
	f.Plugin = plugintest.Start(t, Plugin, append(opts, f.log.Fake())...)
	f.client = approvalv1.NewApprovalClient(f.Conn())
	return f
}

func (f *fixture) ctx(ctx context.Context) context.Context {
	return f.Stamp(ctx, plugin.Call{Session: "s", Agent: "a", Turn: f.turn, ID: "call-1"})
}

func (f *fixture) at(ctx context.Context, level kernelv1.Level) context.Context {
	return f.Stamp(ctx, plugin.Call{Session: "s", Authority: level})
}

// pair is the audit pair of the only question.
func (f *fixture) pair(t *testing.T) (approval.Asked, approval.Decided) {
	t.Helper()
	events := f.session.Events(approval.EventAsked, approval.EventDecided)
	if len(events) != 2 || events[0].GetType() != approval.EventAsked || events[1].GetType() != approval.EventDecided {
		t.Fatalf("log has %v, want one asked and one decided event", events)
	}
	var asked approval.Asked
	var decided approval.Decided
	if err := errors.Join(json.Unmarshal(events[0].GetData(), &asked), json.Unmarshal(events[1].GetData(), &decided)); err != nil {
		t.Fatal(err)
	}
	if asked.ID == "" || asked.ID != decided.ID {
		t.Fatalf("asked %q, decided %q", asked.ID, decided.ID)
	}
	for _, e := range events {
		if e.GetTurn() != f.turn {
			t.Errorf("%s is in turn %d", e.GetType(), e.GetTurn())
		}
	}
	return asked, decided
}

func widening() *approvalv1.ApprovalRequest {
	return &approvalv1.ApprovalRequest{
		Tool: "bash", Reason: "escalate sandbox to workspace-write: to write",
		Widening: &approvalv1.Widening{From: "read-only", To: "workspace-write", Capability: "shell"},
		Subject:  &approvalv1.Subject{Kind: "command", Text: "touch x", Cwd: "/w"},
	}
}

func full() *approvalv1.ApprovalRequest {
	r := widening()
	r.Widening.To = "danger-full-access"
	return r
}

func plain() *approvalv1.ApprovalRequest { return &approvalv1.ApprovalRequest{Tool: "bash"} }

func says(outcome string, stamp *kernelv1.Answer) answer {
	return func(context.Context, *approvalv1.Question) (*approvalv1.Verdict, *kernelv1.Answer, error) {
		return &approvalv1.Verdict{Outcome: outcome}, stamp, nil
	}
}

func TestRequestOutcomes(t *testing.T) {
	at := func(l kernelv1.Level) *kernelv1.Answer {
		return &kernelv1.Answer{Entry: "inbox", Channel: "terminal", Level: l}
	}
	const none, client, human, owner = kernelv1.Level_NONE, kernelv1.Level_CLIENT, kernelv1.Level_HUMAN, kernelv1.Level_OWNER
	for _, tt := range []struct {
		name    string
		request *approvalv1.ApprovalRequest
		answer  answer
		want    approval.Outcome
		grant   bool
	}{
		{"fails closed to unavailable when nobody listens, auditing the asked/decided pair", widening(), nil, approval.Unavailable, false},
		{"lets a non-owning listener delegate via next() down to the fail-closed default", plain(), func(context.Context, *approvalv1.Question) (*approvalv1.Verdict, *kernelv1.Answer, error) {
			return nil, nil, nil
		}, approval.Unavailable, false},
		{"returns the first answering listener outcome: allowed-once", widening(), says("allowed-once", at(human)), approval.AllowedOnce, true},
		{"returns the first answering listener outcome: rejected", widening(), says("rejected", at(human)), approval.Rejected, false},
		{"returns the first answering listener outcome: cancelled", widening(), says("cancelled", at(human)), approval.Cancelled, false},
		{"returns the first answering listener outcome: unavailable", widening(), says("unavailable", at(human)), approval.Unavailable, false},
		{"anybody may reject", widening(), says("rejected", at(none)), approval.Rejected, false},
		{"contains a throwing answerer as unavailable", plain(), func(context.Context, *approvalv1.Question) (*approvalv1.Verdict, *kernelv1.Answer, error) {
			return nil, nil, errors.New("boom")
		}, approval.Unavailable, false},
		{"contains a dead listener as unavailable", widening(), func(context.Context, *approvalv1.Question) (*approvalv1.Verdict, *kernelv1.Answer, error) {
			return nil, nil, fault.New(codes.Unavailable, "PLUGIN_CRASHED", "gone")
		}, approval.Unavailable, false},
		{"normalizes a rogue non-vocabulary answer to unavailable", plain(), says("always-allow", at(owner)), approval.Unavailable, false},
		{"normalizes an empty answer", plain(), says("", at(owner)), approval.Unavailable, false},
		{"normalizes another spelling", plain(), says("Allowed-Once", at(owner)), approval.Unavailable, false},
		{"an allowance without the host's stamp", plain(), says("allowed-once", nil), approval.Unavailable, false},
		{"an allowance of a listener that may not", plain(), says("allowed-once", at(none)), approval.Unavailable, false},
		{"a client may allow what the mode reaches", plain(), says("allowed-once", at(client)), approval.AllowedOnce, false},
		{"a client may not widen", widening(), says("allowed-once", at(client)), approval.Unavailable, false},
		{"a human may not open everything", full(), says("allowed-once", at(human)), approval.Unavailable, false},
		{"an owner may", full(), says("allowed-once", at(owner)), approval.AllowedOnce, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := start(t, tt.answer)
			r, err := f.client.Request(f.ctx(t.Context()), tt.request)
			if err != nil {
				t.Fatal(err)
			}
			if r.GetOutcome() != string(tt.want) || (r.GetGrant() != "") != tt.grant {
				t.Errorf("reply %v, want %s and grant %v", r, tt.want, tt.grant)
			}
			asked, decided := f.pair(t)
			if decided.Outcome != tt.want || decided.DecidedBy != nil {
				t.Errorf("decided %+v; whose decision it was is for the host to write", decided)
			}
			want := approval.Asked{ID: asked.ID, ToolName: "bash", CallID: "call-1", Reason: tt.request.GetReason()}
			if w := tt.request.GetWidening(); w != nil {
				want.Widening = &approval.Widening{From: w.GetFrom(), To: w.GetTo(), Capability: "shell"}
				want.Subject = &approval.Subject{Kind: "command", Text: "touch x", Cwd: "/w"}
			}
			if d := cmp.Diff(want, asked); d != "" {
				t.Errorf("asked (-want +got):\n%s", d)
			}
		})
	}
}

func TestQuestionCarriesTheRequest(t *testing.T) {
	var got *approvalv1.Question
	f := start(t, func(_ context.Context, q *approvalv1.Question) (*approvalv1.Verdict, *kernelv1.Answer, error) {
		got = q
		return &approvalv1.Verdict{Outcome: "rejected", Note: "not today"}, &kernelv1.Answer{Entry: "x"}, nil
	})
	r, err := f.client.Request(f.ctx(t.Context()), widening())
	if err != nil {
		t.Fatal(err)
	}
	asked, decided := f.pair(t)
	if got.GetId() != asked.ID || got.GetTool() != "bash" || got.GetReason() != asked.Reason ||
		got.GetWidening().GetTo() != "workspace-write" || got.GetSubject().GetText() != "touch x" {
		t.Errorf("question %v", got)
	}
	if decided.Note != "not today" {
		t.Errorf("note %q", decided.Note)
	}
	if r.GetDecidedBy() != "x none" {
		t.Errorf("decided by %q", r.GetDecidedBy())
	}
}

func TestOmitsAbsentFields(t *testing.T) { // omits absent optional fields from the asked audit event
	f := start(t, nil)
	ctx := f.Stamp(t.Context(), plugin.Call{Session: "s", Turn: f.turn, ID: "c"})
	if _, err := f.client.Request(ctx, plain()); err != nil {
		t.Fatal(err)
	}
	var raw map[string]any
	if err := json.Unmarshal(f.session.Events(approval.EventAsked)[0].GetData(), &raw); err != nil {
		t.Fatal(err)
	}
	delete(raw, "id")
	if d := cmp.Diff(map[string]any{"toolName": "bash", "callId": "c"}, raw); d != "" {
		t.Error(d)
	}
}

func TestFreshIDs(t *testing.T) { // issues a fresh id per request
	f := start(t, nil)
	seen := map[string]bool{}
	for range 50 {
		if _, err := f.client.Request(f.ctx(t.Context()), plain()); err != nil {
			t.Fatal(err)
		}
	}
	for _, e := range f.session.Events(approval.EventAsked) {
		var a approval.Asked
		if err := json.Unmarshal(e.GetData(), &a); err != nil {
			t.Fatal(err)
		}
		if seen[a.ID] || len(a.ID) < 22 {
			t.Fatalf("id %q is used twice or can be guessed", a.ID)
		}
		seen[a.ID] = true
	}
}

func TestOpenTurn(t *testing.T) {
	const text = "approval.request() outside an open turn: the approval/asked + approval/decided audit pair must be turn-enclosed (a bare event between turns is crash-tail garbage on reload). Ask from inside the turn that needs the decision."
	asked := false
	f := start(t, func(context.Context, *approvalv1.Question) (*approvalv1.Verdict, *kernelv1.Answer, error) {
		asked = true
		return &approvalv1.Verdict{Outcome: "allowed-once"}, &kernelv1.Answer{Level: kernelv1.Level_OWNER}, nil
	})
	other := f.session.OpenTurn()
	f.session.CloseTurn(f.turn)
	for name, turn := range map[string]int64{
		"throws before appending anything when no turn has ever opened (idle ask)":         0,
		"throws between turns — a closed turn does not satisfy the enclosure precondition": f.turn,
		"a turn that never was": 99,
	} {
		t.Run(name, func(t *testing.T) {
			_, err := f.client.Request(f.Stamp(t.Context(), plugin.Call{Session: "s", Turn: turn}), plain())
			if status.Code(err) != codes.FailedPrecondition || fault.Reason(err) != "NO_OPEN_TURN" || fault.Message(err) != text {
				t.Errorf("error %v", err)
			}
		})
	}
	if n := len(f.session.Events()); n != 0 || asked {
		t.Errorf("%d events, asked %v", n, asked)
	}
	// The positive control: several turns may be open, the call's own one counts.
	if _, err := f.client.Request(f.Stamp(t.Context(), plugin.Call{Session: "s", Turn: other}), plain()); err != nil || !asked {
		t.Errorf("in the open turn: %v", err)
	}
	_, err := f.client.Request(f.Stamp(t.Context(), plugin.Call{}), plain())
	if fault.Reason(err) != "NO_SESSION" {
		t.Errorf("without a session: %v", err)
	}
}

func TestBadQuestions(t *testing.T) {
	f := start(t, nil)
	for name, r := range map[string]*approvalv1.ApprovalRequest{
		"tool must be non-empty":   {},
		`widening.from "yolo"`:     {Tool: "t", Widening: &approvalv1.Widening{From: "yolo", To: "workspace-write", Capability: "shell"}},
		`widening.to ""`:           {Tool: "t", Widening: &approvalv1.Widening{From: "read-only", Capability: "shell"}},
		"not strictly wider":       {Tool: "t", Widening: &approvalv1.Widening{From: "workspace-write", To: "workspace-write", Capability: "shell"}},
		"widening.capability must": {Tool: "t", Widening: &approvalv1.Widening{From: "read-only", To: "workspace-write"}},
	} {
		_, err := f.client.Request(f.ctx(t.Context()), r)
		if fault.Reason(err) != "BAD_QUESTION" || status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if n := len(f.session.Events()); n != 0 {
		t.Errorf("%d events", n)
	}
}

// never is unbypassable: whoever listens is not even asked.
func TestNever(t *testing.T) {
	for _, tt := range []struct {
		name, config string
		event        string
		rejected     bool
	}{
		{"a never config rejects deterministically without consulting any answerer", `{"policy":"never"}`, "", true},
		{"a session override outranks the configured default: never over ask", `{"policy":"ask"}`, "never", true},
		{"a session override outranks the configured default: ask over never", `{"policy":"never"}`, "ask", false},
		{"defaults to ask", ``, "", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			asked := false
			f := start(t, func(context.Context, *approvalv1.Question) (*approvalv1.Verdict, *kernelv1.Answer, error) {
				asked = true
				return &approvalv1.Verdict{Outcome: "allowed-once"}, &kernelv1.Answer{Level: kernelv1.Level_OWNER}, nil
			}, plugintest.Config(tt.config))
			if tt.event != "" {
				f.session.Record(approval.EventPolicy, approval.PolicyChange{Policy: approval.Policy(tt.event)})
			}
			r, err := f.client.Request(f.ctx(t.Context()), widening())
			if err != nil {
				t.Fatal(err)
			}
			_, decided := f.pair(t)
			if asked == tt.rejected {
				t.Errorf("asked: %v", asked)
			}
			if !tt.rejected {
				if decided.Outcome != approval.AllowedOnce || r.GetGrant() == "" {
					t.Errorf("decided %+v, reply %v", decided, r)
				}
				return
			}
			want := approval.Decided{ID: decided.ID, Outcome: approval.Rejected, DecidedBy: &approval.DecidedBy{Policy: "never"}}
			if d := cmp.Diff(want, decided); d != "" {
				t.Error(d)
			}
			if r.GetOutcome() != "rejected" || r.GetGrant() != "" || r.GetDecidedBy() != "policy" {
				t.Errorf("reply %v", r)
			}
		})
	}
}

func TestUnknownPolicyInTheLog(t *testing.T) {
	f := start(t, says("allowed-once", &kernelv1.Answer{Level: kernelv1.Level_OWNER}))
	f.session.Record(approval.EventPolicy, map[string]any{"policy": "sometimes"})
	if _, err := f.client.Request(f.ctx(t.Context()), plain()); fault.Reason(err) != "UNKNOWN_POLICY" {
		t.Errorf("error %v", err)
	}
	if n := len(f.session.Events(approval.EventAsked)); n != 0 {
		t.Errorf("%d questions", n)
	}
	if _, err := f.client.SetPolicy(f.at(t.Context(), kernelv1.Level_NONE), &approvalv1.SetPolicyRequest{Policy: "never"}); err != nil {
		t.Errorf("the way out: %v", err)
	}
}

// resolves cancelled when the signal aborts mid-question and discards the late answer
func TestCancelled(t *testing.T) {
	asked, late := make(chan struct{}), make(chan struct{})
	f := start(t, func(context.Context, *approvalv1.Question) (*approvalv1.Verdict, *kernelv1.Answer, error) {
		close(asked)
		<-late // an answerer that does not notice
		return &approvalv1.Verdict{Outcome: "allowed-once"}, &kernelv1.Answer{Level: kernelv1.Level_OWNER}, nil
	})
	committed := make(chan struct{})
	f.log.Refuse(func(_ context.Context, r *sessionv1.AppendRequest) error {
		if r.GetType() == approval.EventDecided {
			close(committed)
		}
		return nil
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := f.client.Request(f.ctx(ctx), widening())
		done <- err
	}()
	<-asked
	cancel()
	if err := <-done; status.Code(err) != codes.Canceled {
		t.Errorf("error %v", err)
	}
	<-committed // although the caller is gone and the answerer still thinks
	close(late)
	if err := f.Stop(); err != nil {
		t.Fatal(err)
	}
	if _, decided := f.pair(t); decided.Outcome != approval.Cancelled {
		t.Errorf("decided %+v", decided)
	}
}

// settles cancelled immediately on an already-aborted signal without asking anyone: the server has nobody to ask
func TestCancelledBeforeAsking(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, policy := range []approval.Policy{approval.Ask, approval.Never} {
		if d := new(approvalServer).decide(ctx, ctx, policy, &approvalv1.Question{Id: "q"}); d.Outcome != approval.Cancelled || d.DecidedBy != nil {
			t.Errorf("%s: decided %+v", policy, d)
		}
	}
}

// propagates an append failure that prevented audit log growth
func TestAppendFailures(t *testing.T) {
	down := fault.New(codes.Unavailable, "LOG_FAILED", "disk full")
	for _, tt := range []struct {
		name   string
		fail   func(r *sessionv1.AppendRequest, n int) bool
		answer string
		err    bool
		asked  bool
		want   approval.Outcome
	}{
		{"the question is not in the log: nobody is asked", func(r *sessionv1.AppendRequest, _ int) bool { return r.GetType() == approval.EventAsked }, "allowed-once", true, false, ""},
		{"no decision without its event: allowed", func(r *sessionv1.AppendRequest, _ int) bool { return r.GetType() == approval.EventDecided }, "allowed-once", true, true, ""},
		{"no decision without its event: rejected", func(r *sessionv1.AppendRequest, _ int) bool { return r.GetType() == approval.EventDecided }, "rejected", true, true, ""},
		{"an allowance the host refuses is a no, and the pair is whole", func(r *sessionv1.AppendRequest, n int) bool {
			return r.GetType() == approval.EventDecided && strings.Contains(string(r.GetData()), "allowed-once")
		}, "allowed-once", false, true, approval.Unavailable},
		{"a rejection whose answer the host does not know is still one", func(r *sessionv1.AppendRequest, _ int) bool {
			return r.GetAnswer() != ""
		}, "rejected", false, true, approval.Rejected},
	} {
		t.Run(tt.name, func(t *testing.T) {
			asked := false
			f := start(t, func(context.Context, *approvalv1.Question) (*approvalv1.Verdict, *kernelv1.Answer, error) {
				asked = true
				return &approvalv1.Verdict{Outcome: tt.answer}, &kernelv1.Answer{Level: kernelv1.Level_OWNER}, nil
			})
			n := 0
			f.log.Refuse(func(_ context.Context, r *sessionv1.AppendRequest) error {
				n++
				if tt.fail(r, n) {
					return down
				}
				return nil
			})
			r, err := f.client.Request(f.ctx(t.Context()), widening())
			if asked != tt.asked {
				t.Errorf("asked: %v", asked)
			}
			if tt.err {
				if fault.Reason(err) != "LOG_FAILED" {
					t.Errorf("reply %v, error %v", r, err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if _, decided := f.pair(t); decided.Outcome != tt.want || r.GetOutcome() != string(tt.want) || r.GetGrant() != "" {
				t.Errorf("decided %+v, reply %v", decided, r)
			}
		})
	}
}

// A switch to never ends the questions of that session, and no other's, even while somebody is about to allow.
func TestNeverEndsOpenQuestions(t *testing.T) {
	asked, go2 := make(chan string, 2), make(chan struct{})
	f := start(t, func(ctx context.Context, q *approvalv1.Question) (*approvalv1.Verdict, *kernelv1.Answer, error) {
		asked <- q.GetTool()
		<-go2
		return &approvalv1.Verdict{Outcome: "allowed-once"}, &kernelv1.Answer{Level: kernelv1.Level_OWNER}, nil
	})
	other := f.log.Session("other", "/")
	turn := other.OpenTurn()
	replies := map[string]chan *approvalv1.ApprovalReply{"s": make(chan *approvalv1.ApprovalReply, 1), "other": make(chan *approvalv1.ApprovalReply, 1)}
	var both sync.WaitGroup
	for session, turn := range map[string]int64{"s": f.turn, "other": turn} {
		both.Go(func() {
			r, err := f.client.Request(f.Stamp(t.Context(), plugin.Call{Session: session, Turn: turn}), widening())
			if err != nil {
				t.Error(err)
			}
			replies[session] <- r
		})
	}
	<-asked
	<-asked
	if _, err := f.client.SetPolicy(f.at(t.Context(), kernelv1.Level_NONE), &approvalv1.SetPolicyRequest{Policy: "never"}); err != nil {
		t.Fatal(err)
	}
	r := <-replies["s"] // before anybody answered
	if r.GetOutcome() != "rejected" || r.GetGrant() != "" || r.GetDecidedBy() != "policy" {
		t.Errorf("reply %v", r)
	}
	if _, decided := f.pair(t); decided.DecidedBy == nil || decided.DecidedBy.Policy != "never" {
		t.Errorf("decided %+v", decided)
	}
	close(go2)
	if r := <-replies["other"]; r.GetOutcome() != "allowed-once" {
		t.Errorf("the other session: %v", r)
	}
	both.Wait()
}

// Another generation of the row may have switched: an allowance holds against the log, not against what this process saw.
func TestPolicyIsReadAgain(t *testing.T) {
	var f *fixture
	f = start(t, func(context.Context, *approvalv1.Question) (*approvalv1.Verdict, *kernelv1.Answer, error) {
		f.session.Record(approval.EventPolicy, approval.PolicyChange{Policy: approval.Never})
		return &approvalv1.Verdict{Outcome: "allowed-once"}, &kernelv1.Answer{Level: kernelv1.Level_OWNER}, nil
	})
	r, err := f.client.Request(f.ctx(t.Context()), widening())
	if err != nil || r.GetOutcome() != "rejected" || r.GetGrant() != "" {
		t.Errorf("reply %v, %v", r, err)
	}
}

// drops a disposed plugin listener from the chain (HMR safety): stopping ends the questions and leaves no half pair.
func TestStopEndsQuestions(t *testing.T) {
	asked := make(chan struct{})
	f := start(t, func(ctx context.Context, _ *approvalv1.Question) (*approvalv1.Verdict, *kernelv1.Answer, error) {
		close(asked)
		<-ctx.Done()
		return nil, nil, ctx.Err()
	})
	done := make(chan *approvalv1.ApprovalReply, 1)
	go func() {
		r, err := f.client.Request(f.ctx(t.Context()), widening())
		if err != nil {
			t.Error(err)
		}
		done <- r
	}()
	<-asked
	// The host stops a generation that did not drain in time.
	if _, err := kernelv1.NewPluginClient(f.Conn()).Stop(t.Context(), &kernelv1.StopRequest{}); err != nil {
		t.Fatal(err)
	}
	if _, decided := f.pair(t); decided.Outcome != approval.Cancelled {
		t.Errorf("decided %+v", decided)
	}
	if r := <-done; r.GetOutcome() != "cancelled" {
		t.Errorf("reply %v", r)
	}
}

func TestSetPolicy(t *testing.T) {
	const none, client, human, owner = kernelv1.Level_NONE, kernelv1.Level_CLIENT, kernelv1.Level_HUMAN, kernelv1.Level_OWNER
	for _, tt := range []struct {
		name, from, to string
		level          kernelv1.Level
		changed        bool
		reason         string
	}{
		{"never is for anybody", "", "never", none, true, ""},
		{"unchanged appends nothing", "never", "never", none, false, ""},
		{"the default is unchanged, too", "", "ask", none, false, ""},
		{"asking again needs a human: none", "never", "ask", none, false, "AUTHORITY_REQUIRED"},
		{"asking again needs a human: client", "never", "ask", client, false, "AUTHORITY_REQUIRED"},
		{"asking again: human", "never", "ask", human, true, ""},
		{"asking again: owner", "never", "ask", owner, true, ""},
		{"rejects a policy outside the closed vocabulary before appending", "never", "always", owner, false, "BAD_POLICY"},
		{"rejects an empty policy", "never", "", owner, false, "BAD_POLICY"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := start(t, nil)
			if tt.from != "" {
				f.session.Record(approval.EventPolicy, approval.PolicyChange{Policy: approval.Policy(tt.from)})
			}
			before := len(f.session.Events())
			r, err := f.client.SetPolicy(f.at(t.Context(), tt.level), &approvalv1.SetPolicyRequest{Policy: tt.to})
			n := len(f.session.Events()) - before
			if fault.Reason(err) != tt.reason || (err != nil) != (tt.reason != "") {
				t.Fatalf("error %v, want %q", err, tt.reason)
			}
			if (n == 1) != tt.changed || r.GetChanged() != tt.changed {
				t.Errorf("%d events, reply %v", n, r)
			}
			if err != nil {
				return
			}
			got, err := f.client.GetPolicy(f.at(t.Context(), none), &approvalv1.GetPolicyRequest{})
			if err != nil || got.GetPolicy() != tt.to {
				t.Errorf("policy %v, %v", got, err)
			}
		})
	}
	f := start(t, nil, plugintest.Config(`{"policy":"never"}`))
	got, err := f.client.GetPolicy(f.Stamp(t.Context(), plugin.Call{}), &approvalv1.GetPolicyRequest{})
	if err != nil || got.GetPolicy() != "never" || got.GetSource() != "default" {
		t.Errorf("without a session %v, %v", got, err)
	}
	_, err = f.client.SetPolicy(f.Stamp(t.Context(), plugin.Call{Authority: owner}), &approvalv1.SetPolicyRequest{Policy: "ask"})
	if fault.Reason(err) != "NO_SESSION" {
		t.Errorf("without a session: %v", err)
	}
	var facts Facts
	if _, err := f.Facts("approval", &facts); err != nil || facts.DefaultPolicy != approval.Never {
		t.Errorf("facts %+v, %v", facts, err)
	}
}

// A provider of presets that was not asked by the host to pin has no authority of its own.
func TestNoPinOutsideThePin(t *testing.T) {
	f := start(t, nil, plugintest.Config(`{"policy":"never"}`))
	before := len(f.session.Events())
	ctx := f.Stamp(t.Context(), plugin.Call{Caller: "row", Provides: []string{"permission"}, Session: "s"})
	_, err := f.client.SetPolicy(ctx, &approvalv1.SetPolicyRequest{Policy: "ask"})
	if fault.Reason(err) != "AUTHORITY_REQUIRED" || len(f.session.Events()) != before {
		t.Errorf("%v, %d events", err, len(f.session.Events())-before)
	}
}

// Presets pin what a session does not say, without anybody's authority and the default included. Elsewhere they have the
// authority of whoever asked for the call tree, as anybody.
func TestPresetsPin(t *testing.T) {
	const none, human = kernelv1.Level_NONE, kernelv1.Level_HUMAN
	presets, other := []string{"tools", "permission"}, []string{"tools", "permissions"}
	for _, tt := range []struct {
		name, from, to string // from empty: no event, the default is never
		provides       []string
		level          kernelv1.Level
		changed        bool
		reason         string
	}{
		{"pins ask", "", "ask", presets, none, true, ""},
		{"pins the default itself", "", "never", presets, none, true, ""},
		{"nobody else does: ask", "", "ask", other, none, false, "AUTHORITY_REQUIRED"},
		{"nobody else does: the default", "", "never", other, none, false, ""},
		{"a policy that is there is no pin's business", "never", "ask", presets, none, false, "AUTHORITY_REQUIRED"},
		{"a preset switch of a human", "never", "ask", presets, human, true, ""},
		{"a preset switch that narrows", "ask", "never", presets, none, true, ""},
		{"a policy that is there is not appended again", "ask", "ask", presets, none, false, ""},
		{"an unknown policy is a fact, too", "maybe", "ask", presets, none, false, "AUTHORITY_REQUIRED"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := start(t, nil, plugintest.Config(`{"policy":"never"}`))
			if tt.from != "" {
				f.session.Record(approval.EventPolicy, approval.PolicyChange{Policy: approval.Policy(tt.from)})
			}
			before := len(f.session.Events())
			ctx := f.Stamp(t.Context(), plugin.Call{Caller: "row", Provides: tt.provides, Purpose: kernelv1.PurposePin, Session: "s", Authority: tt.level})
			r, err := f.client.SetPolicy(ctx, &approvalv1.SetPolicyRequest{Policy: tt.to})
			if fault.Reason(err) != tt.reason || (err != nil) != (tt.reason != "") {
				t.Fatalf("error %v, want %q", err, tt.reason)
			}
			if n := len(f.session.Events()) - before; (n == 1) != tt.changed || n > 1 || r.GetChanged() != tt.changed {
				t.Errorf("%d events, reply %v", n, r)
			}
		})
	}
}

// contributes the complete current ask or never policy as cache-safe context; reflects the latest durable switch
func TestContext(t *testing.T) {
	f := start(t, nil)
	ctx := f.at(t.Context(), kernelv1.Level_HUMAN)
	texts := map[string]string{
		"ask":   "Approval policy: ask. Operations that require approval may ask through the configured answerers; without an available answerer, the request fails closed.",
		"never": "Approval prompts are disabled in this session: actions that require approval are rejected automatically — do not request sandbox escalation (do not set `sandbox_permissions`).",
	}
	for _, policy := range []string{"ask", "never", "ask"} {
		if _, err := f.client.SetPolicy(ctx, &approvalv1.SetPolicyRequest{Policy: policy}); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if got, err := f.Context(ctx, "approval:policy"); err != nil || got != texts[policy] {
				t.Errorf("%s: %q, %v", policy, got, err)
			}
		}
	}
	if got, err := f.Context(f.Stamp(t.Context(), plugin.Call{}), "approval:policy"); err != nil || got != "" {
		t.Errorf("without a session: %q, %v", got, err)
	}
	f.session.Record(approval.EventPolicy, map[string]string{"policy": "maybe"})
	if _, err := f.Context(ctx, "approval:policy"); fault.Reason(err) != "UNKNOWN_POLICY" {
		t.Errorf("a policy nobody knows: %v", err)
	}
	if m := f.Manifest().GetContexts(); len(m) != 1 || m[0].GetOrder() != 115 {
		t.Errorf("contributions %v", m)
	}
}

func TestLoad(t *testing.T) {
	if _, err := plugintest.Load(t, Plugin, plugintest.NewLog().Fake(), plugintest.Config(`{"policy":"maybe"}`)); err == nil {
		t.Error("policy maybe loads")
	}
	p := Plugin
	p.Default = nil // bypasses the schema's default
	if _, err := plugintest.Load(t, p, plugintest.NewLog().Fake()); err == nil || !strings.Contains(err.Error(), `user-approval: policy: approval policy must be one of "ask" or "never", got ""`) {
		t.Errorf("loads with %v", err)
	}
}

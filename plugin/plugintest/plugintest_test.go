package plugintest_test

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	approvalv1 "github.com/cordon-host/cordon/api/approval/v1"
	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	policyv1 "github.com/cordon-host/cordon/api/policy/v1"
	sessionv1 "github.com/cordon-host/cordon/api/session/v1"
	toolsv1 "github.com/cordon-host/cordon/api/tools/v1"
	"github.com/cordon-host/cordon/capability/approval"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/plugin"
	"github.com/cordon-host/cordon/plugin/plugintest"
)

type config struct {
	Word string `json:"word,omitempty"`
	Fail bool   `json:"fail,omitempty"`
}

// probe is a plugin with one tool that does what a test hands it.
func probe(do func(ctx context.Context, c *plugin.Context) (string, error)) plugin.Plugin[config] {
	return plugin.Plugin[config]{
		Name:    "probe",
		Needs:   []plugin.Need{{Capability: "session", Desc: &sessionv1.Session_ServiceDesc}},
		Offers:  []plugin.Offer{{Capability: "policy", Desc: &policyv1.Policy_ServiceDesc}},
		Emits:   []plugin.Emit{plugin.Emits(approval.Request)},
		Appends: []string{"probe/"},
		Tools:   []string{"do"},
		Default: func() config { return config{Word: "default"} },
		Apply: func(c *plugin.Context, cfg config) error {
			if cfg.Fail {
				return errors.New("told to fail")
			}
			return errors.Join(
				c.Provide("policy", policyv1.UnimplementedPolicyServer{}, map[string]string{"word": cfg.Word}),
				c.Tool(plugin.Tool{
					Name: "do", InputSchema: json.RawMessage(`{"type":"object","additionalProperties":false,"properties":{"n":{"type":"number"}}}`),
					Call: func(ctx context.Context, _ json.RawMessage) (*toolsv1.CallReply, error) {
						s, err := do(ctx, c)
						if err != nil {
							return nil, err
						}
						return plugin.Text(s), nil
					},
				}))
		},
	}
}

func TestExample(t *testing.T) { testStrict(t) }

func nothing(context.Context, *plugin.Context) (string, error) { return "", nil }

func TestLoadReports(t *testing.T) {
	for config, want := range map[string]string{
		`{"wrod":"x"}`: "wrod", `{"word":1}`: "/word", `{"fail":true}`: "told to fail", `{`: "not JSON",
	} {
		if _, err := plugintest.Load(t, probe(nothing), plugintest.NewLog().Fake(), plugintest.Config(config)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s loads with %v, want %q", config, err, want)
		}
	}
}

func TestFactsAndConfig(t *testing.T) {
	for word, opt := range map[string]plugintest.Option{
		"default": plugintest.Config(""), "json": plugintest.Config(`{"word":"json"}`),
		"bytes": plugintest.Config([]byte(`{"word":"bytes"}`)), "struct": plugintest.Config(config{Word: "struct"}),
	} {
		p := plugintest.Start(t, probe(nothing), plugintest.NewLog().Fake(), opt)
		var got struct{ Word string }
		if ok, err := p.Facts("policy", &got); !ok || err != nil || got.Word != word {
			t.Errorf("facts %+v, %v; want %s", got, err, word)
		}
		if ok, _ := p.Facts("shell", &got); ok {
			t.Error("facts of a capability that is not offered")
		}
	}
}

func TestStampReachesPluginAndFakes(t *testing.T) {
	log := plugintest.NewLog()
	s := log.Session("s", "/w")
	turn := s.OpenTurn()
	var seen plugin.Call
	p := plugintest.Start(t, probe(func(ctx context.Context, c *plugin.Context) (string, error) {
		seen = plugin.Caller(ctx)
		conn, _ := c.Conn("session")
		_, err := sessionv1.NewSessionClient(conn).Append(ctx, &sessionv1.AppendRequest{Type: "probe/done", Data: []byte(`{"a":1}`)})
		if err != nil {
			return "", err
		}
		h, err := sessionv1.NewSessionClient(conn).Header(ctx, &sessionv1.HeaderRequest{})
		return h.GetCwd(), err
	}), log.Fake())
	call := plugin.Call{Session: "s", Agent: "a", Turn: turn, ID: "c", Authority: kernelv1.Level_HUMAN}
	r, err := p.CallTool(p.Stamp(t.Context(), call), "do", `{}`)
	if err != nil || r.GetIsError() || r.GetContent()[0].GetText() != "/w" {
		t.Fatalf("%v, %v", r, err)
	}
	if seen.Caller != "host" || seen.Session != "s" || seen.Agent != "a" || seen.Turn != turn || seen.ID != "c" || seen.Authority != kernelv1.Level_HUMAN {
		t.Errorf("stamped %+v", seen)
	}
	if e := s.Events("probe/done"); len(e) != 1 || e[0].GetTurn() != turn || string(e[0].GetData()) != `{"a":1}` {
		t.Errorf("events %v", e)
	}
}

// The kit holds a plugin to its manifest.
func TestUndeclared(t *testing.T) {
	append1 := func(ctx context.Context, c *plugin.Context) (string, error) {
		conn, _ := c.Conn("session")
		_, err := sessionv1.NewSessionClient(conn).Append(ctx, &sessionv1.AppendRequest{Type: "other/event", Data: []byte(`{}`)})
		return "", err
	}
	need := func(ctx context.Context, c *plugin.Context) (string, error) {
		conn, _ := c.Conn("session")
		_, err := policyv1.NewPolicyClient(conn).Resolve(ctx, &policyv1.ResolveRequest{})
		return "", err
	}
	emit := func(ctx context.Context, c *plugin.Context) (string, error) {
		ev := approval.Request
		ev.Name = "other/request"
		_, _, err := plugin.Waterfall(ctx, c, ev, &approvalv1.Question{}, &approvalv1.Verdict{})
		return "", err
	}
	for what, do := range map[string]func(context.Context, *plugin.Context) (string, error){"Appends": append1, "Needs": need, "Emits": emit} {
		log := plugintest.NewLog()
		log.Session("s", "/")
		p := plugintest.Start(t, probe(do), log.Fake(), plugintest.Fake("other", &policyv1.Policy_ServiceDesc, policyv1.UnimplementedPolicyServer{}))
		r, err := p.CallTool(p.Stamp(t.Context(), plugin.Call{Session: "s"}), "do", `{}`)
		if err != nil || !r.GetIsError() || r.GetErrorCode() != "NOT_DECLARED" || !strings.HasSuffix(r.GetContent()[0].GetText(), "add it to "+what) {
			t.Errorf("%s: %v, %v", what, r, err)
		}
	}
}

func TestCallTool(t *testing.T) {
	p := plugintest.Start(t, probe(nothing), plugintest.NewLog().Fake())
	r, err := p.CallTool(t.Context(), "do", map[string]any{"n": "no number"})
	if err != nil || !r.GetIsError() || r.GetErrorCode() != "INVALID_ARGUMENTS" {
		t.Errorf("%v, %v", r, err)
	}
	if r, err := p.CallTool(t.Context(), "do", map[string]any{"n": 1}); err != nil || r.GetIsError() {
		t.Errorf("%v, %v", r, err)
	}
	if _, err := p.CallTool(t.Context(), "undo", `{}`); err == nil {
		t.Error("a tool that is not there")
	}
}

func TestAnswersAndGrants(t *testing.T) {
	var answer *kernelv1.Answer
	ask := func(ctx context.Context, c *plugin.Context) (string, error) {
		v, a, err := plugin.Waterfall(ctx, c, approval.Request, &approvalv1.Question{Tool: "x"}, &approvalv1.Verdict{Outcome: "base"})
		answer = a
		if err != nil {
			return "", err
		}
		if _, err := plugin.Redeem(ctx, c, "g"); err != nil {
			return v.GetOutcome() + " " + fault.Reason(err), nil
		}
		return v.GetOutcome() + " redeemed", nil
	}
	listen := func(v *approvalv1.Verdict, a *kernelv1.Answer, err error) plugintest.Option {
		return plugintest.Answers(approval.Request, func(context.Context, *approvalv1.Question) (*approvalv1.Verdict, *kernelv1.Answer, error) {
			return v, a, err
		})
	}
	redeem := plugintest.Redeems(func(context.Context, string) (*kernelv1.RedeemGrantReply, error) {
		return &kernelv1.RedeemGrantReply{}, nil
	})
	for _, tt := range []struct {
		name  string
		opts  []plugintest.Option
		want  string
		stamp bool
	}{
		{"nobody", nil, "base GRANT_UNKNOWN", false},
		{"somebody who delegates", []plugintest.Option{listen(nil, nil, nil)}, "base GRANT_UNKNOWN", false},
		{"somebody", []plugintest.Option{listen(&approvalv1.Verdict{Outcome: "rejected"}, &kernelv1.Answer{Entry: "e"}, nil), redeem}, "rejected redeemed", true},
		{"a failure", []plugintest.Option{listen(nil, nil, fault.New(codes.Unavailable, "X", "gone"))}, "gone", false},
	} {
		p := plugintest.Start(t, probe(ask), append(tt.opts, plugintest.NewLog().Fake())...)
		answer = nil
		r, err := p.CallTool(t.Context(), "do", `{}`)
		if err != nil || r.GetContent()[0].GetText() != tt.want || (answer.GetId() != "") != tt.stamp {
			t.Errorf("%s: %v, %v, answer %v", tt.name, r, err, answer)
		}
	}
}

// polite answers what it knows and leaves the rest to others.
var polite = plugin.Plugin[struct{}]{
	Name: "polite", Listens: []plugin.Listen{plugin.ListenTo(approval.Request, true)},
	Apply: func(c *plugin.Context, _ struct{}) error {
		return plugin.Around(c, approval.Request, func(ctx context.Context, q *approvalv1.Question, next func(context.Context, *approvalv1.Question) (*approvalv1.Verdict, error)) (*approvalv1.Verdict, error) {
			switch q.GetTool() {
			case "rm":
				return &approvalv1.Verdict{Outcome: "rejected", Note: plugin.Caller(ctx).Session}, nil
			case "bad":
				return nil, fault.New(codes.Internal, "BAD", "bad")
			}
			return next(ctx, q)
		})
	},
}

func TestDispatch(t *testing.T) {
	p := plugintest.Start(t, polite)
	asked := 0
	rest := func(_ context.Context, q *approvalv1.Question) (*approvalv1.Verdict, error) {
		asked++
		if q.GetTool() == "fails" {
			return nil, fault.New(codes.NotFound, "REST", "the rest failed")
		}
		return &approvalv1.Verdict{Outcome: "unavailable", Note: q.GetTool()}, nil
	}
	for _, tt := range []struct {
		tool, outcome, note, reason string
		asked                       int
	}{
		{"rm", "rejected", "s", "", 0}, {"ls", "unavailable", "ls", "", 1}, {"bad", "", "", "BAD", 0}, {"fails", "", "", "REST", 1},
	} {
		asked = 0
		v, err := plugintest.Dispatch(t.Context(), p, plugin.Call{Session: "s"}, approval.Request, &approvalv1.Question{Tool: tt.tool}, rest)
		if v.GetOutcome() != tt.outcome || v.GetNote() != tt.note || fault.Reason(err) != tt.reason || asked != tt.asked {
			t.Errorf("%s: %v, %v, rest asked %d times", tt.tool, v, err, asked)
		}
	}
	other := approval.Request
	other.Name = "other/request"
	if _, err := plugintest.Dispatch(t.Context(), p, plugin.Call{}, other, &approvalv1.Question{}, rest); err == nil {
		t.Error("dispatch to a listener that is not there")
	}
}

func TestStopUndoes(t *testing.T) {
	var undone []string
	p := plugin.Plugin[struct{}]{Name: "p", Apply: func(c *plugin.Context, _ struct{}) error {
		for _, name := range []string{"first", "second"} {
			if err := c.Effect(name, func(context.Context) error { undone = append(undone, name); return nil }); err != nil {
				return err
			}
		}
		return nil
	}}
	run := plugintest.Start(t, p)
	for range 2 {
		if err := run.Stop(); err != nil {
			t.Fatal(err)
		}
	}
	if !slices.Equal(undone, []string{"second", "first"}) {
		t.Errorf("undone %v", undone)
	}
}

func TestLogKeepsTheRules(t *testing.T) {
	log := plugintest.NewLog()
	s := log.Session("s", "/")
	turn := s.OpenTurn()
	in := plugin.WithCall(t.Context(), plugin.Call{Session: "s", Turn: turn})
	out := plugin.WithCall(t.Context(), plugin.Call{Session: "s"})
	add := func(ctx context.Context, typ, data, answer string) (string, error) {
		r, err := log.Append(ctx, &sessionv1.AppendRequest{Type: typ, Data: []byte(data), Answer: answer})
		return r.GetGrant(), err
	}
	if _, err := add(out, approval.EventAsked, `{"id":"q"}`, ""); fault.Reason(err) != "APPEND_REFUSED" {
		t.Errorf("outside a turn: %v", err)
	}
	if _, err := add(in, "x/y", `[]`, ""); fault.Reason(err) != "BAD_EVENT" {
		t.Errorf("no object: %v", err)
	}
	if _, err := add(in, approval.EventAsked, `{"id":"q","widening":{"to":"workspace-write"}}`, ""); err != nil {
		t.Error(err)
	}
	if _, err := add(in, approval.EventDecided, `{"id":"q","outcome":"allowed-once"}`, ""); fault.Reason(err) != "NOT_ALLOWED" {
		t.Errorf("an allowance without an answer: %v", err)
	}
	if g, err := add(in, approval.EventDecided, `{"id":"q","outcome":"allowed-once"}`, "a"); err != nil || g == "" {
		t.Errorf("an allowance: %q, %v", g, err)
	}
	s.CloseTurn(turn)
	if _, err := add(in, approval.EventAsked, `{"id":"q2"}`, ""); fault.Reason(err) != "APPEND_REFUSED" {
		t.Errorf("in a closed turn: %v", err)
	}
	if _, err := add(plugin.WithCall(t.Context(), plugin.Call{Session: "gone"}), "x/y", `{}`, ""); fault.Reason(err) != "SESSION_NOT_FOUND" {
		t.Errorf("another session: %v", err)
	}
	if _, err := add(t.Context(), "x/y", `{}`, ""); fault.Reason(err) != "NO_SESSION" {
		t.Errorf("no session: %v", err)
	}
}

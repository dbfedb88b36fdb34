package main

import (
	"context"
	"testing"

	approvalv1 "github.com/cordon-host/cordon/api/approval/v1"
	"github.com/cordon-host/cordon/capability/approval"
	"github.com/cordon-host/cordon/plugin"
	"github.com/cordon-host/cordon/plugin/plugintest"
)

func TestHello(t *testing.T) {
	p := plugintest.Start(t, Plugin, plugintest.Config(`{"greeting": "Moin"}`))
	r, err := p.CallTool(t.Context(), "hello", `{"name": "Ada"}`)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := r.GetContent()[0].GetText(), "Moin, Ada!"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	r, err = p.CallTool(t.Context(), "hello", `{"nmae": "Ada"}`)
	if err != nil {
		t.Fatal(err)
	}
	if got := r.GetErrorCode(); got != "INVALID_ARGUMENTS" {
		t.Errorf("a misspelt argument: code %q", got)
	}
}

func TestJudge(t *testing.T) {
	p := plugintest.Start(t, Plugin, plugintest.Config(Config{Greeting: "Hello", Refuse: []string{"sudo"}}))
	for command, want := range map[string]approval.Outcome{
		"sudo ls": approval.Rejected,
		"ls":      approval.Unavailable, // what the rest of the chain says
	} {
		q := &approvalv1.Question{Id: "q1", Tool: "bash", Subject: &approvalv1.Subject{Kind: "command", Text: command}}
		v, err := plugintest.Dispatch(t.Context(), p, plugin.Call{Session: "s1", Turn: 1}, approval.Request, q,
			func(context.Context, *approvalv1.Question) (*approvalv1.Verdict, error) {
				return &approvalv1.Verdict{Outcome: string(approval.Unavailable)}, nil
			})
		if err != nil {
			t.Fatal(err)
		}
		if v.GetOutcome() != string(want) {
			t.Errorf("%s: %s, want %s", command, v.GetOutcome(), want)
		}
	}
}

func TestConfig(t *testing.T) {
	for _, bad := range []string{`{"greeting": ""}`, `{"greet": "Hi"}`, `{"refuse": [""]}`} {
		if _, err := plugintest.Load(t, Plugin, plugintest.Config(bad)); err == nil {
			t.Errorf("%s: loaded", bad)
		}
	}
}

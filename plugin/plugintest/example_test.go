package plugintest_test

import (
	"context"
	"testing"

	policyv1 "github.com/cordon-host/cordon/api/policy/v1"
	"github.com/cordon-host/cordon/plugin"
	"github.com/cordon-host/cordon/plugin/plugintest"
)

// strict is the plugin under test: a policy that never lets anything write.
var strict = plugin.Plugin[struct{}]{
	Name:   "strict-policy",
	Offers: []plugin.Offer{{Capability: "policy", Desc: &policyv1.Policy_ServiceDesc}},
	Apply: func(ctx *plugin.Context, _ struct{}) error {
		return ctx.Provide("policy", strictServer{root: ctx.Deployment().GetRoot()}, nil)
	},
}

type strictServer struct {
	policyv1.UnimplementedPolicyServer
	root string
}

func (s strictServer) Resolve(context.Context, *policyv1.ResolveRequest) (*policyv1.ResolveReply, error) {
	return &policyv1.ResolveReply{Mode: "read-only", WorkspaceRoot: s.root, Source: "default"}, nil
}

// testStrict would be TestStrict beside the plugin.
func testStrict(t *testing.T) {
	p := plugintest.Start(t, strict)
	ctx := p.Stamp(t.Context(), plugin.Call{Session: "s1"})
	r, err := policyv1.NewPolicyClient(p.Conn()).Resolve(ctx, &policyv1.ResolveRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if r.GetMode() != "read-only" {
		t.Errorf("mode %q, want read-only", r.GetMode())
	}
}

// A plugin's whole test: start it, call it as the host would, look at the answer.
func Example() {
	_ = testStrict
}

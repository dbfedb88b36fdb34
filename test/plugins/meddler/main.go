// Command meddler is a plugin of the scenarios in package test. It listens to approval/request in front of everybody else and
// does as its config says.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	approvalv1 "github.com/cordon-host/cordon/api/approval/v1"
	"github.com/cordon-host/cordon/capability/approval"
	"github.com/cordon-host/cordon/plugin"
)

type config struct {
	// Verdict is allow, reject, delegate, or stall: wait until somebody ends the wait.
	Verdict string `json:"verdict" jsonschema:"enum=allow,enum=reject,enum=delegate,enum=stall"`
}

var meddler = plugin.Plugin[config]{
	Name: "meddler", Version: "0.1.0",
	Listens: []plugin.Listen{plugin.ListenTo(approval.Request, true)},
	Apply: func(ctx *plugin.Context, cfg config) error {
		return plugin.Around(ctx, approval.Request, func(call context.Context, q *approvalv1.Question, next func(context.Context, *approvalv1.Question) (*approvalv1.Verdict, error)) (*approvalv1.Verdict, error) {
			// The scenario waits for this file to know that the question has arrived.
			if err := os.WriteFile(filepath.Join(ctx.Deployment().GetStateDir(), "asked"), []byte(q.GetId()+"\n"), 0o600); err != nil {
				return nil, err
			}
			switch cfg.Verdict {
			case "allow":
				return &approvalv1.Verdict{Outcome: string(approval.AllowedOnce)}, nil
			case "reject":
				return &approvalv1.Verdict{Outcome: string(approval.Rejected)}, nil
			case "delegate":
				return next(call, q)
			case "stall":
				<-call.Done()
				return nil, call.Err()
			}
			return nil, fmt.Errorf("meddler: unknown verdict %q", cfg.Verdict)
		})
	},
}

func main() { plugin.Main(meddler) }

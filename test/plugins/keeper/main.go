// Command keeper is a plugin of the scenarios in package test. It has a secret in its config and one in its environment, tells
// neither, and fails in the ways that make a host speak of it.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	toolsv1 "github.com/cordon-host/cordon/api/tools/v1"
	"github.com/cordon-host/cordon/plugin"
)

type config struct {
	Secret string `json:"secret" jsonschema:"writeOnly=true,minLength=8"`
	Label  string `json:"label" jsonschema:"maxLength=40"`
	// Fail makes Apply fail: error, panic or exit.
	Fail string `json:"fail,omitempty" jsonschema:"enum=error,enum=panic,enum=exit"`
}

var keeper = plugin.Plugin[config]{
	Name: "keeper", Version: "0.1.0", Tools: []string{"keep"}, Contexts: []plugin.Contribution{{Name: "tool:keep", Order: 300}}, Apply: apply,
}

func main() { plugin.Main(keeper) }

func apply(ctx *plugin.Context, cfg config) error {
	if err := fail(cfg.Fail); err != nil {
		return err
	}
	return errors.Join(ctx.Contribute("tool:keep", func(context.Context) (string, error) { return "The label is " + cfg.Label + ".", nil }), ctx.Tool(plugin.Tool{
		Name: "keep", Description: "Keeps a secret labelled " + cfg.Label + ".",
		InputSchema: json.RawMessage(`{"type":"object","properties":{"do":{"type":"string"}},"required":["do"],"additionalProperties":false}`),
		Call: func(_ context.Context, raw json.RawMessage) (*toolsv1.CallReply, error) {
			var args struct{ Do string }
			if err := json.Unmarshal(raw, &args); err != nil {
				return nil, err
			}
			switch args.Do {
			case "prove": // the secrets did arrive; the scenario looks for the file
				return plugin.Text("proved"), os.WriteFile(filepath.Join(ctx.Deployment().GetStateDir(), "lengths"), fmt.Appendf(nil, "%d %d\n", len(cfg.Secret), len(os.Getenv("KEEPER_TOKEN"))), 0o600)
			case "environ":
				var names []string
				for _, kv := range os.Environ() {
					name, _, _ := strings.Cut(kv, "=")
					names = append(names, name)
				}
				return plugin.Text(strings.Join(names, " ")), nil
			}
			fmt.Println("keeper", cfg.Label, "is asked to", args.Do)
			return plugin.Text("kept for " + cfg.Label), fail(args.Do)
		},
	}))
}

func fail(how string) error {
	switch how {
	case "error":
		return errors.New("keeper failed as it was told")
	case "panic":
		panic("keeper panics as it was told")
	case "exit":
		fmt.Fprintln(os.Stderr, "keeper ends as it was told")
		os.Exit(3)
	}
	return nil
}

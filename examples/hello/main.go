// Command hello is the smallest useful plugin: a tool with a config, a text for the model's context, and a listener that turns
// down some requests for approval. See docs/plugins.md.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	approvalv1 "github.com/cordon-host/cordon/api/approval/v1"
	toolsv1 "github.com/cordon-host/cordon/api/tools/v1"
	"github.com/cordon-host/cordon/capability/approval"
	"github.com/cordon-host/cordon/plugin"
)

// Config is the row's config.
type Config struct {
	Greeting string   `json:"greeting,omitempty" jsonschema:"minLength=1,default=Hello" jsonschema_description:"What stands in front of a name."`
	Refuse   []string `json:"refuse,omitempty" jsonschema_description:"Requests for approval whose command has one of these words in it are rejected."`
}

// Plugin is the plugin.
var Plugin = plugin.Plugin[Config]{
	Name: "hello", Version: "0.1.0",
	Tools:    []string{"hello"},
	Contexts: []plugin.Contribution{{Name: "tool:hello", Order: 200}},
	Listens:  []plugin.Listen{plugin.ListenTo(approval.Request, false)},
	Default:  func() Config { return Config{Greeting: "Hello"} },
	Apply:    apply,
}

func main() { plugin.Main(Plugin) }

const schema = `{
  "type": "object",
  "properties": {"name": {"type": "string", "minLength": 1, "description": "Whom to greet."}},
  "required": ["name"],
  "additionalProperties": false
}`

func apply(ctx *plugin.Context, cfg Config) error {
	for _, word := range cfg.Refuse {
		if word == "" {
			return errors.New("hello: refuse: an empty word is in every command")
		}
	}
	hello := func(_ context.Context, raw json.RawMessage) (*toolsv1.CallReply, error) {
		var args struct {
			Name string `json:"name"`
		}
		if err := json.Unmarshal(raw, &args); err != nil {
			return nil, err
		}
		return plugin.Text(fmt.Sprintf("%s, %s!", cfg.Greeting, args.Name)), nil
	}
	// A no is worth something from anybody, a yes only from a row with `answers:`. What is not ours goes on with next.
	judge := func(ctx context.Context, q *approvalv1.Question, next func(context.Context, *approvalv1.Question) (*approvalv1.Verdict, error)) (*approvalv1.Verdict, error) {
		for _, word := range cfg.Refuse {
			if strings.Contains(q.GetSubject().GetText(), word) {
				return &approvalv1.Verdict{Outcome: string(approval.Rejected), Note: "the deployment refuses " + word}, nil
			}
		}
		return next(ctx, q)
	}
	return errors.Join(
		ctx.Tool(plugin.Tool{Name: "hello", Description: "Greet somebody.", InputSchema: json.RawMessage(schema), Call: hello}),
		ctx.Contribute("tool:hello", func(context.Context) (string, error) { return "Greet people by name.", nil }),
		plugin.Around(ctx, approval.Request, judge),
	)
}

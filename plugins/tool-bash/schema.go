package main

import (
	"encoding/json"
	"strings"

	"github.com/cordon-host/cordon/capability/sandbox"
)

// description tells a model what the tool does and what a result looks like.
func description(confines bool) string {
	lines := []string{
		"Run a shell command with `bash -c` and return what it printed.",
		"Each call is a new shell: no directory, variable or function carries over from the last one. Use `workdir` instead of `cd`.",
		"The result is stdout, then stderr after a [stderr] line. A failed command ends in [exit code: N] or [killed by signal: X]; check it and investigate failures before moving on. Long output is cut to its end, and the result names a file with all of it.",
		"There is no terminal and stdin is empty: commands that wait for input fail. Commands are ended at their time limit, together with everything they started.",
	}
	if confines {
		lines = append(lines, "Commands run in a file sandbox. When one is refused access, the result says so and how to ask for more.")
	}
	return strings.Join(lines, "\n")
}

// property is one argument of the schema.
type property struct {
	Type        string         `json:"type"`
	Description string         `json:"description"`
	Enum        []sandbox.Mode `json:"enum,omitempty"`
}

// inputSchema is the schema of the arguments. The escalation fields are there when the shell confines, whatever the current
// mode is, so that the schema stays the same byte for byte while modes change. Values are checked by the tool, whose texts
// say more than a validator's.
func inputSchema(confines bool) (json.RawMessage, error) {
	properties := map[string]property{
		"command":     {Type: "string", Description: "The command line for bash."},
		"description": {Type: "string", Description: "What the command does, in a few words, for the person who watches."},
		"timeoutMs":   {Type: "number", Description: "Time limit in milliseconds. The shell's default without it; its maximum is the most there is."},
		"workdir":     {Type: "string", Description: "Directory to run in: absolute, or relative to the workspace root, which is the default."},
	}
	if confines {
		properties["sandbox_permissions"] = property{
			Type: "string", Enum: sandbox.EscalationTargets(),
			Description: "Ask for a wider sandbox mode, for this call only. Use it for a retry after a denial, with the narrowest mode that suffices; a person is asked to approve. Needs justification.",
		}
		properties["justification"] = property{
			Type:        "string",
			Description: "Why the wider mode is needed, as one sentence for the person who approves. Only together with sandbox_permissions.",
		}
	}
	return json.Marshal(struct {
		Schema     string              `json:"$schema"`
		Type       string              `json:"type"`
		Properties map[string]property `json:"properties"`
		Required   []string            `json:"required"`
		Additional bool                `json:"additionalProperties"`
	}{"https://json-schema.org/draft/2020-12/schema", "object", properties, []string{"command"}, false})
}

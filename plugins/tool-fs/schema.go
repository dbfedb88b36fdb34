package main

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/cordon-host/cordon/capability/sandbox"
)

// The tools, and what an approver is told asks.
const (
	toolRead  = "read"
	toolWrite = "write"
	toolEdit  = "edit"
)

// What a model is told beside the descriptions. The first one is the reference system's text.
const (
	readHabit  = "Use the read tool — not shell commands like cat — to inspect text files. Results include line numbers. Use offset and limit to continue reading large files."
	writeHabit = "Use the write tool to create files or to replace their whole content. It overwrites what is there: read an existing file first, and prefer edit for targeted changes."
	editHabit  = "Use the edit tool for targeted changes to existing text files. It replaces literal old_string by new_string, and old_string must be there exactly once unless replace_all is set. Read the file first, unless you just wrote or edited it."
)

// description tells a model what a tool does and what a result looks like.
func description(tool string, confines bool) string {
	var lines []string
	switch tool {
	case toolRead:
		return strings.Join([]string{
			"Read a text file and return its lines with their numbers.",
			"The numbers and the text around the lines are not part of the file. A last line says whether there is more, and with which offset to go on.",
		}, "\n")
	case toolWrite:
		lines = append(lines,
			"Create a text file, or replace all of its content.",
			"Missing directories are made. An existing file keeps its permissions.")
	case toolEdit:
		lines = append(lines,
			"Replace text in an existing text file.",
			"old_string is literal and must match exactly, spaces included; the line numbers that read shows are not part of it. The file keeps its line ends.")
	}
	if confines {
		lines = append(lines, "Files are changed in a file sandbox. When a change is refused, the result says so and how to ask for more.")
	}
	return strings.Join(lines, "\n")
}

// property is one argument of a schema.
type property struct {
	Type        string         `json:"type"`
	Description string         `json:"description"`
	Enum        []sandbox.Mode `json:"enum,omitempty"`
}

// inputSchema is the schema of a tool's arguments. The escalation fields of write and edit are there when the file system
// confines, whatever the current mode is, so that the schema stays the same byte for byte while modes change. Values are
// checked by the tool, whose texts say more than a validator's.
func inputSchema(tool string, cfg Config, confines bool) (json.RawMessage, error) {
	const path = "absolute, or relative to the workspace root."
	var properties map[string]property
	var required []string
	switch tool {
	case toolRead:
		properties = map[string]property{
			"file_path": {Type: "string", Description: "File to read: " + path},
			"offset":    {Type: "number", Description: "First line to return, from 1, which is the default."},
			"limit":     {Type: "number", Description: fmt.Sprintf("How many lines to return at most; %d without it, which is also the most there is.", cfg.ReadLimit)},
		}
		required = []string{"file_path"}
	case toolWrite:
		properties = map[string]property{
			"file_path": {Type: "string", Description: "File to write: " + path},
			"content":   {Type: "string", Description: "The whole content of the file. May be empty."},
		}
		required = []string{"file_path", "content"}
	case toolEdit:
		properties = map[string]property{
			"file_path":   {Type: "string", Description: "File to edit: " + path},
			"old_string":  {Type: "string", Description: "Literal text to replace."},
			"new_string":  {Type: "string", Description: "Text to put in its place; empty to delete it."},
			"replace_all": {Type: "boolean", Description: "Replace every place where old_string is. Without it, old_string must be there exactly once."},
		}
		required = []string{"file_path", "old_string", "new_string"}
	}
	if confines && tool != toolRead {
		properties["sandbox_permissions"] = property{
			Type: "string", Enum: sandbox.EscalationTargets(),
			Description: "Ask for a wider sandbox mode, for this operation only. Use it for a retry after a denial, with the narrowest mode that suffices; a person is asked to approve. Needs justification.",
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
	}{"https://json-schema.org/draft/2020-12/schema", "object", properties, required, false})
}

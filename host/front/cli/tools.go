package cli

import (
	"bytes"
	"encoding/json"

	"github.com/spf13/cobra"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
)

func (a *app) toolsCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "tools",
		Short: "list the tools as a model sees them",
		Long: `List the tools of the deployment with what a model is told about them: name,
description and schema of the arguments.`,
		Example: "  cordon tools",
		Args:    exactly(),
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			ctx := cmd.Context()
			h, err := a.attach(ctx, "")
			if err != nil {
				return err
			}
			defer a.detach(h, &err)
			r, err := h.ListTools(ctx, &controlv1.ListToolsRequest{})
			if err != nil {
				return err
			}
			return a.printTools(r.GetTools())
		},
	}
}

func (a *app) printTools(tools []*controlv1.Tool) error {
	if a.json {
		type tool struct {
			Name        string          `json:"name"`
			Description string          `json:"description"`
			InputSchema json.RawMessage `json:"inputSchema"`
			Entry       string          `json:"entry"`
		}
		doc := struct {
			Tools []tool `json:"tools"`
		}{[]tool{}}
		for _, t := range tools {
			doc.Tools = append(doc.Tools, tool{t.GetName(), t.GetDescription(), t.GetInputSchema(), t.GetEntry()})
		}
		return a.printJSON(doc)
	}
	for i, t := range tools {
		if i > 0 {
			if err := a.print("\n"); err != nil {
				return err
			}
		}
		var schema bytes.Buffer
		if err := json.Indent(&schema, t.GetInputSchema(), "", "  "); err != nil {
			return err
		}
		err := a.print("%s (of entry %s)\n%s  arguments:\n%s", t.GetName(), t.GetEntry(),
			indent(t.GetDescription(), "  "), indent(schema.String(), "    "))
		if err != nil {
			return err
		}
	}
	return nil
}

package cli

import (
	"context"

	"github.com/spf13/cobra"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
)

func (a *app) promptCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "prompt [SESSION]",
		Short: "print what a model is told about the deployment's policies",
		Long: `Print what the model of a session would be told at this moment about what it
may do, or what every model is told. SESSION is an id or "last". With --json
the parts are listed with the entry that each comes from.`,
		Example: "  cordon prompt last",
		Args:    between(0, "SESSION"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.prompt(cmd.Context(), args)
		},
	}
}

func (a *app) prompt(ctx context.Context, args []string) (err error) {
	h, err := a.attach(ctx, "")
	if err != nil {
		return err
	}
	defer a.detach(h, &err)
	req := &controlv1.PromptRequest{}
	if len(args) > 0 {
		if req.Session, err = h.session(ctx, args[0]); err != nil {
			return err
		}
	}
	r, err := h.Prompt(ctx, req)
	if err != nil {
		return err
	}
	if a.json {
		type section struct {
			Name  string `json:"name"`
			Order int32  `json:"order"`
			Entry string `json:"entry"`
			Text  string `json:"text"`
		}
		doc := struct {
			Text     string    `json:"text"`
			Sections []section `json:"sections"`
		}{r.GetText(), []section{}}
		for _, s := range r.GetSections() {
			doc.Sections = append(doc.Sections, section{s.GetName(), s.GetOrder(), s.GetEntry(), s.GetText()})
		}
		return a.printJSON(doc)
	}
	if r.GetText() == "" {
		return nil
	}
	return a.print("%s\n", r.GetText())
}

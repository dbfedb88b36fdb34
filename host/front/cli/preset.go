package cli

import (
	"context"

	"github.com/spf13/cobra"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
)

func (a *app) presetCommand() *cobra.Command {
	var confirm, code string
	var all bool
	cmd := &cobra.Command{
		Use:   "preset SESSION [PRESET]",
		Short: "show or switch mode and approval policy of a session together",
		Long: `Show or switch the preset of a session: a named pair of a sandbox mode and an
approval policy. SESSION is an id or "last". A session whose settings match
no preset is on custom, which cannot be switched to.

Narrowing is always possible. A wider mode, and asking again after never,
need a person: whoever started the host, or its one-use code where it runs
already. danger-full-access also needs --confirm danger-full-access.`,
		Example: "  cordon preset --list\n  cordon preset last read-only",
		Args: func(cmd *cobra.Command, args []string) error {
			if all {
				return exactly()(cmd, args)
			}
			return between(1, "SESSION", "PRESET")(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if all {
				return a.presets(cmd.Context())
			}
			if err := checkConfirm(confirm); err != nil {
				return err
			}
			return a.knob(cmd.Context(), "preset", args, confirm, code)
		},
	}
	cmd.Flags().BoolVar(&all, "list", false, "list the presets of the deployment instead")
	cmd.Flags().StringVar(&confirm, "confirm", "", "`danger-full-access` typed out, to switch to that")
	cmd.Flags().StringVar(&code, "code", "", "the one-use `code` of the running host")
	return cmd
}

// presets lists what sessions can be switched to.
func (a *app) presets(ctx context.Context) (err error) {
	h, err := a.attach(ctx, "")
	if err != nil {
		return err
	}
	defer a.detach(h, &err)
	r, err := h.Presets(ctx, &controlv1.PresetsRequest{})
	if err != nil {
		return err
	}
	if a.json {
		type preset struct {
			Name        string `json:"name"`
			Sandbox     string `json:"sandbox"`
			Approval    string `json:"approval"`
			Description string `json:"description"`
		}
		doc := struct {
			Presets       []preset `json:"presets"`
			DefaultPreset string   `json:"defaultPreset"`
		}{[]preset{}, r.GetDefaultPreset()}
		for _, p := range r.GetPresets() {
			doc.Presets = append(doc.Presets, preset{p.GetName(), p.GetSandbox(), p.GetApproval(), p.GetDescription()})
		}
		return a.printJSON(doc)
	}
	var rows [][]string
	for _, p := range r.GetPresets() {
		initial := ""
		if p.GetName() == r.GetDefaultPreset() {
			initial = "yes"
		}
		rows = append(rows, []string{p.GetName(), initial, p.GetSandbox(), p.GetApproval(), p.GetDescription()})
	}
	return a.table([]string{"PRESET", "DEFAULT", "MODE", "APPROVAL", "DESCRIPTION"}, rows)
}

package cli

import (
	"github.com/spf13/cobra"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
)

func (a *app) reloadCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "reload ENTRY",
		Short: "have the running host look at an entry again, now",
		Long: `Have the running host look at its files again, as a change of them would, and
wait for the outcome. Sessions stay live: calls in progress end on what they
began with. What cannot be accepted changes nothing, and the reason is printed.
With --json the generation and digest that serve now are printed.`,
		Example: "  cordon reload bash",
		Args:    exactly("ENTRY"),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			h, err := a.running(cmd.Context(), "")
			if err != nil {
				return err
			}
			defer a.detach(h, &err)
			r, err := h.Reload(cmd.Context(), &controlv1.ReloadRequest{Entry: args[0]})
			if err != nil {
				return err
			}
			if !a.json {
				return nil
			}
			return a.printJSON(struct {
				Entry      string `json:"entry"`
				Generation uint64 `json:"generation"`
				Digest     string `json:"digest"`
				Changed    bool   `json:"changed"`
			}{args[0], r.GetGeneration(), r.GetDigest(), r.GetChanged()})
		},
	}
}

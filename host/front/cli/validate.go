package cli

import (
	"errors"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/cordon-host/cordon/host"
	"github.com/cordon-host/cordon/host/compose"
)

func (a *app) validateCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "validate",
		Short: "check the composition without starting it",
		Long: `Check the compose file and everything it names: syntax, plugins, their
configuration, and whether what each needs is offered. All problems are
reported at once. Plugins are built and asked for their manifest, nothing is
activated; in a tree that nobody trusted not even that (exit code 5). With
--json what each row would run is printed besides.`,
		Example: "  cordon validate",
		Args:    exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			p, err := a.place(slog.LevelWarn)
			if err != nil {
				return err
			}
			diags, rows, err := a.open(p).validate(cmd.Context())
			code := exitComposition
			var unlocked *host.LockError
			if errors.As(err, &unlocked) {
				diags, code, err = unlocked.Diagnostics, exitTrust, nil
			}
			if err != nil {
				return err
			}
			if a.json {
				err = a.printJSON(validateDocument{append(compose.Diagnostics{}, diags...), append([]host.Runs{}, rows...)})
			} else {
				err = diags.Text(a.stderr)
			}
			if err != nil {
				return err
			}
			if diags.HasErrors() {
				return exit(code)
			}
			return nil
		},
	}
}

// validateDocument is what `validate --json` prints.
type validateDocument struct {
	Diagnostics compose.Diagnostics `json:"diagnostics"`
	Entries     []host.Runs         `json:"entries"` // what the rows would run; empty if that cannot be told
}

func (a *app) trustCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "trust",
		Short: "trust this tree: let what its compose file names be built and run",
		Long: `Record, outside the tree, that the compose file and everything it leads to
may be built and run on this machine as you. Read it first. When any of it
changes, it has to be trusted again.`,
		Example: "  cordon trust",
		Args:    exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			p, err := a.place(slog.LevelWarn)
			if err != nil {
				return err
			}
			t, err := a.open(p).trust(cmd.Context())
			switch {
			case err != nil:
				return err
			case a.json:
				return a.printJSON(t)
			case a.verbose:
				return a.print("%s  %s and what it leads to, %d files\n", t.Digest, t.Compose, t.Files)
			}
			return nil
		},
	}
}

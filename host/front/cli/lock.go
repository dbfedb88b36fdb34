package cli

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/cordon-host/cordon/host/front/cli/printable"
	"github.com/cordon-host/cordon/host/lock"
	"github.com/cordon-host/cordon/host/trust"
)

func (a *app) lockCommand() *cobra.Command {
	var check, yes bool
	cmd := &cobra.Command{
		Use:   "lock",
		Short: "accept the code that runs now: write its digests to compose.lock",
		Long: `Write down, in compose.lock beside the compose file, which code the rows may
run: for each the digest of its executable and manifest, its version, its
contracts, and what built it. With --locked a host runs nothing else.

What would change is shown first, and you are asked on a terminal; --yes
accepts without a question. With --check nothing is written: exit code 5 says
that something would change. Digests are cut; --json prints them whole.`,
		Example: "  cordon lock --yes",
		Args:    exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case a.locked:
				return usagef("lock: --locked would refuse what is to be accepted").hint("leave it out")
			case check && yes:
				return usagef("lock: --check writes nothing, --yes does").hint("use one of them")
			}
			return a.lock(cmd.Context(), check, yes)
		},
	}
	cmd.Flags().BoolVar(&check, "check", false, "write nothing; exit with 5 if something would change")
	cmd.Flags().BoolVar(&yes, "yes", false, "accept without a question")
	return cmd
}

// lockDocument is what `lock --json` prints.
type lockDocument struct {
	Path    string        `json:"path"`
	Changes []lock.Change `json:"changes"`
	Written bool          `json:"written"`
}

func (a *app) lock(ctx context.Context, check, yes bool) error {
	p, err := a.place(slog.LevelWarn)
	if err != nil {
		return err
	}
	l, err := a.open(p).lock(ctx)
	if err != nil {
		return err
	}
	doc := lockDocument{Path: l.path, Changes: l.changes}
	if doc.Changes == nil {
		doc.Changes = []lock.Change{}
	}
	if len(l.changes) == 0 {
		if a.json {
			return a.printJSON(doc)
		}
		return nil
	}
	for _, c := range l.changes {
		switch {
		case !a.json:
			err = a.print("%s", c.Text())
		case !check && !yes: // whoever is asked sees what about
			_, err = io.WriteString(a.stderr, printable.Text(c.Text()))
		}
		if err != nil {
			return err
		}
	}
	var refused error
	switch {
	case check:
		refused = failf(exitTrust, "%s does not accept what is there", l.path).hint("look at it, then run  %s", trust.Command("lock", p.compose))
	case !yes:
		refused = a.agree(ctx)
	}
	if refused == nil {
		if err := l.write(); err != nil {
			return err
		}
		doc.Written = true
	}
	if a.json {
		if err := a.printJSON(doc); err != nil {
			return err
		}
	}
	return refused
}

// agree asks the person at the terminal.
func (a *app) agree(ctx context.Context) error {
	if !a.inTTY || !a.errTTY {
		return failf(exitFailed, "nobody is here to accept this").hint("on a terminal you are asked; --yes accepts without a question")
	}
	in := &lines{file: a.stdin}
	in.discard()
	if _, err := io.WriteString(a.stderr, "cordon: accept this code? [y/N] "); err != nil {
		return err
	}
	line, err := in.next(ctx)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, os.ErrClosed) {
		return err
	}
	switch strings.TrimSpace(line) {
	case "y", "Y", "yes":
		return nil
	}
	return failf(exitFailed, "not accepted; nothing was written")
}

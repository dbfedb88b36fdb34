// Package cli is Cordon's command line. It holds no rules of its own: every command talks to a host through the control
// service, the one that runs or one it starts for its own duration.
//
// What it prints follows these rules. Results go to stdout. Everything else goes to stderr, begins with "cordon: ", is
// lower case and ends without a full stop; a hint says what to do. A command that succeeded and was not asked for anything
// prints nothing. Text that a model or a command wrote reaches a terminal, or a person who is asked, only through package
// printable. With --json stdout has one document on one line, or one line per event where a command streams.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/cordon-host/cordon/plugin/launch"
)

// Exit codes. Scripts rely on them.
const (
	exitFailed      = 1   // the tool or command failed or was refused
	exitUsage       = 2   // the command line itself
	exitComposition = 3   // the compose file or what it names
	exitEnvironment = 4   // this machine: no runner, no permission
	exitTrust       = 5   // nobody trusted this tree yet
	exitRun         = 125 // every failure of `cordon run` that is not the command's
	exitNoExec      = 126 // `cordon run`: the command cannot be executed
	exitNotFound    = 127 // `cordon run`: there is no such command
	exitSignal      = 128 // plus the number of the signal that ended cordon, or the command of `cordon run`
)

// Main runs the command line of this process and returns its exit code.
func Main() int {
	// Whatever this process inherited by accident would go on into plugins and commands.
	if err := launch.CloseOnExec(); err != nil {
		fmt.Fprintf(os.Stderr, "cordon: error: inherited descriptors: %v\n", err)
		return exitEnvironment
	}
	wd, err := os.Getwd()
	if err != nil {
		wd = "" // a command that needs it says so
	}
	w := world{
		stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr,
		inTTY: isTerminal(os.Stdin), outTTY: isTerminal(os.Stdout), errTTY: isTerminal(os.Stderr),
		dir: wd, environ: os.Environ(), open: openDeployment,
	}
	return w.run(context.Background(), os.Args[1:])
}

func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// world is what a command line works with besides its arguments.
type world struct {
	stdin                 *os.File
	stdout, stderr        io.Writer
	inTTY, outTTY, errTTY bool
	dir                   string // the working directory; empty when it cannot be told
	environ               []string
	open                  func(place) deployment
}

// app is one run of the command line.
type app struct {
	world
	interrupts *interrupts
	began      bool // a command's own code runs: what fails from here on is no mistake of usage

	file, state   string
	json, verbose bool
	locked        bool
}

func (w world) run(ctx context.Context, args []string) int {
	a := &app{world: w}
	ctx, a.interrupts = catchInterrupts(ctx)
	defer a.interrupts.stop()

	root := a.root()
	root.SetArgs(args)
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return 0
	}
	if ctx.Err() != nil && !isExit(err) {
		err = context.Cause(ctx)
	}
	if !a.began {
		err = a.usage(cmd, err)
	}
	code := a.report(err)
	if cmd.Name() == "run" && !isExit(err) && code < exitRun {
		return exitRun // the codes below are the command's
	}
	return code
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "cordon COMMAND",
		Short: "a plugin host that runs an agent's tool calls behind trust, permission, sandbox and network",
		Long: `Cordon runs the tool calls of an AI agent under four layers: trust,
permission, sandbox and network. A deployment is one compose.yml, found
upward from the current directory. The commands talk to the host that runs
it; when none does, they start one for as long as they take.

Exit codes: 0 done, 1 the tool or command failed or was refused, 2 usage,
3 composition, 4 environment, 5 trust.`,
		Example: `  cordon trust
  cordon call bash '{"command":"echo hello"}'`,
		Version:       version(),
		SilenceErrors: true,
		SilenceUsage:  true,
		PersistentPreRunE: func(*cobra.Command, []string) error {
			a.began = true
			return nil
		},
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return a.unknown(cmd, args[0])
			}
			return cmd.Help()
		},
	}
	root.SetIn(a.stdin)
	root.SetOut(a.stdout)
	root.SetErr(a.stderr)
	root.SetVersionTemplate("{{.Version}}\n")
	root.SuggestionsMinimumDistance = 2 // one letter wrong, or two exchanged
	root.SetUsageTemplate(usageTemplate)
	root.SetHelpCommand(&cobra.Command{Hidden: true})
	root.CompletionOptions.HiddenDefaultCmd = true
	flags := root.PersistentFlags()
	flags.SortFlags = false
	flags.StringVarP(&a.file, "file", "f", "", "the compose `file` (default: the nearest compose.yml)")
	flags.StringVar(&a.state, "state", "", "the `directory` for state (default: below $XDG_STATE_HOME)")
	flags.BoolVar(&a.json, "json", false, "print JSON")
	flags.BoolVar(&a.locked, "locked", false, "run nothing that compose.lock does not accept")
	flags.BoolVarP(&a.verbose, "verbose", "v", false, "print the host's log on stderr")
	root.AddGroup(
		&cobra.Group{ID: "work", Title: "Work:"},
		&cobra.Group{ID: "sessions", Title: "Sessions and approvals:"},
		&cobra.Group{ID: "deployment", Title: "Deployment:"},
	)
	add := func(group string, cmds ...*cobra.Command) {
		for _, c := range cmds {
			c.GroupID = group
			root.AddCommand(c)
		}
	}
	add("work", a.upCommand(), a.callCommand(), a.runCommand(), a.toolsCommand(), a.promptCommand())
	add("sessions", a.sessionsCommand(), a.logCommand(), a.modeCommand(), a.approvalCommand(), a.presetCommand(), a.approveCommand())
	add("deployment", a.validateCommand(), a.trustCommand(), a.lockCommand(), a.statusCommand(), a.logsCommand(), a.reloadCommand(), a.doctorCommand())
	return root
}

const usageTemplate = `Usage:
  {{.UseLine}}

Examples:
{{.Example}}
{{- range $group := .Groups}}

{{.Title}}
{{- range $.Commands}}{{if and (eq .GroupID $group.ID) .IsAvailableCommand}}
  {{rpad .Name .NamePadding}} {{.Short}}{{end}}{{end}}{{end}}

Flags:
{{.LocalFlags.FlagUsages | trimTrailingWhitespaces}}
{{- if .HasAvailableInheritedFlags}}

Flags of every command:
{{.InheritedFlags.FlagUsages | trimTrailingWhitespaces}}{{end}}
`

// unknown is the error for a word that is no command.
func (a *app) unknown(cmd *cobra.Command, word string) error {
	err := usagef("unknown command %q", word)
	if near := cmd.SuggestionsFor(word); len(near) > 0 {
		return err.hint("did you mean %s?", strings.Join(near, " or "))
	}
	return err.hint("see cordon --help")
}

// usage makes a usage error of what cobra says about a command line.
func (a *app) usage(cmd *cobra.Command, err error) error {
	var f *failure
	if errors.As(err, &f) {
		return err
	}
	return usagef("%s", strings.TrimSpace(err.Error())).hint("see %s --help", cmd.CommandPath())
}

// exactly wants one argument for each of the names.
func exactly(names ...string) cobra.PositionalArgs { return between(len(names), names...) }

// between wants the first min of the named arguments, and takes the others.
func between(min int, names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		switch {
		case len(args) < min:
			return usagef("%s: %s is missing", cmd.Name(), names[len(args)]).hint("see %s --help", cmd.CommandPath())
		case len(args) > len(names):
			return usagef("%s: unexpected argument %q", cmd.Name(), args[len(names)]).hint("see %s --help", cmd.CommandPath())
		}
		return nil
	}
}

// logLevel is what of the host's log reaches stderr: with -v everything, else what a person must know.
func (a *app) logLevel(quiet slog.Level) slog.Level {
	if a.verbose {
		return slog.LevelDebug
	}
	return quiet
}

// version is this build's version.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" || info.Main.Version == "(devel)" {
		return "devel"
	}
	return info.Main.Version
}

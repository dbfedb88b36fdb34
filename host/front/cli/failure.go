package cli

import (
	"errors"
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/sandbox"
	"github.com/cordon-host/cordon/host/front/cli/printable"
)

// failure is an error with the exit code it ends the command with.
type failure struct {
	code  int
	err   error
	text  string // printed as it is instead of err, for what brings its own layout
	hints []string
}

func (f *failure) Error() string { return f.err.Error() }
func (f *failure) Unwrap() error { return f.err }

func (f *failure) hint(format string, args ...any) *failure {
	f.hints = append(f.hints, fmt.Sprintf(format, args...))
	return f
}

func failf(code int, format string, args ...any) *failure {
	return &failure{code: code, err: fmt.Errorf(format, args...)}
}

func usagef(format string, args ...any) *failure { return failf(exitUsage, format, args...) }

// exit ends a command with a code and nothing to say: whatever there was to say is a result.
type exit int

func (e exit) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

func isExit(err error) bool {
	var e exit
	return errors.As(err, &e)
}

// report prints an error and returns the exit code that goes with it.
func (a *app) report(err error) int {
	var e exit
	if errors.As(err, &e) {
		return int(e)
	}
	var sig *interrupted
	if errors.As(err, &sig) {
		a.say("%v", sig)
		return exitSignal + int(sig.signal)
	}
	f := classify(err)
	if f.text != "" {
		fmt.Fprintln(a.stderr, strings.TrimRight(f.text, "\n"))
	} else {
		// An error may go on: with details, which are indented, and with hints of its own.
		lead := "error: "
		for line := range strings.Lines(fault.Message(f.err)) {
			a.say("%s%s", lead, printable.Line(strings.TrimRight(line, "\n")))
			lead = ""
		}
	}
	for _, h := range f.hints {
		a.say("hint: %s", h)
	}
	return f.code
}

// say prints a line about what happens.
func (a *app) say(format string, args ...any) {
	fmt.Fprintf(a.stderr, "cordon: %s\n", fmt.Sprintf(format, args...))
}

// classify finds the exit code of an error, and hints where the error has none.
func classify(err error) *failure {
	var f *failure
	if errors.As(err, &f) {
		return f
	}
	if _, ok := status.FromError(err); !ok {
		return &failure{code: exitFailed, err: err}
	}
	f = &failure{code: exitFailed, err: err}
	switch fault.Reason(err) {
	case sandbox.ReasonUnavailable:
		f.code = exitEnvironment
		return f.hint("cordon doctor says why no runner is usable")
	case "LOG_FAILED":
		f.code = exitEnvironment
		return f
	case "LOGIN_REQUIRED":
		return f.hint("repeat with --code and the one-use code that the host shows on its terminal")
	case "AUTHORITY_REQUIRED":
		return f.hint("repeat with --code and the one-use code of the running host; danger-full-access also takes --confirm danger-full-access")
	}
	switch code := status.Code(err); {
	case code == codes.InvalidArgument:
		f.code = exitUsage
	case code == codes.Unavailable && fault.Reason(err) == "":
		// Nobody wrote this text: it is the transport's.
		return failf(exitEnvironment, "the host is gone: %s", fault.Message(err)).hint("cordon up shows why when it is started again")
	case code == codes.Unavailable:
		f.code = exitEnvironment
	}
	return f
}

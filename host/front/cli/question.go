package cli

import (
	"fmt"
	"io"
	"iter"
	"strings"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
	"github.com/cordon-host/cordon/capability/sandbox"
	"github.com/cordon-host/cordon/host/front/cli/printable"
)

// show writes a question in full: first what would change, then what would run, where, why and for whom. Everything in it
// that is not a word of ours comes from a model.
func show(w io.Writer, q *controlv1.Question) {
	tool, from, to := printable.Line(q.GetTool()), printable.Line(q.GetFrom()), printable.Line(q.GetTo())
	if to == "" {
		fmt.Fprintf(w, "%s asks to go ahead\n", tool)
	} else {
		fmt.Fprintf(w, "%s asks for %s instead of %s, for this call only\n", tool, to, from)
	}
	switch sandbox.Mode(q.GetTo()) {
	case sandbox.WorkspaceWrite:
		fmt.Fprintln(w, "  it could change files in the session's workspace")
	case sandbox.DangerFullAccess:
		fmt.Fprintln(w, "  NO SANDBOX: it could do whatever you can do")
	}
	if q.GetText() != "" {
		kind := printable.Line(q.GetKind())
		if kind == "" {
			kind = "what"
		}
		if n := 1 + strings.Count(strings.TrimSuffix(q.GetText(), "\n"), "\n"); n >= longText {
			kind += fmt.Sprintf(" (%d lines)", n)
		}
		field(w, kind, printable.Folded(q.GetText()), true)
	}
	if q.GetCwd() != "" {
		field(w, "in", printable.Line(q.GetCwd()), false)
	}
	if words, ok := strings.CutPrefix(q.GetReason(), "escalate sandbox to "+q.GetTo()+": "); ok && q.GetTo() != "" {
		field(w, "the model's words", "\u201c"+printable.Folded(words)+"\u201d", false)
	} else if q.GetReason() != "" {
		field(w, "why", printable.Folded(q.GetReason()), false)
	}
	field(w, "for", fmt.Sprintf("%s, session %s", printable.Line(q.GetAgent()), printable.Line(q.GetSession())), false)
}

// longText is the number of lines from which a question says how many there are: its beginning may have scrolled away.
const longText = 20

// lineWidth is where lines of a question are broken, in columns. A terminal would break them at its own edge, and what
// follows there begins in its first column, as a line of ours does.
const lineWidth = 72

// field writes one part of a question. What does not fit on a line of its own becomes a block, whose lead shows that its lines
// are the text's: none of them can pass for one of the question's.
func field(w io.Writer, label, text string, block bool) {
	if !block && !strings.Contains(text, "\n") && len(label)+len(text) <= lineWidth {
		fmt.Fprintf(w, "  %s: %s\n", label, text)
		return
	}
	fmt.Fprintf(w, "  %s:\n", label)
	for line := range strings.SplitSeq(strings.TrimSuffix(text, "\n"), "\n") {
		lead := "    | "
		for part := range broken(line) {
			fmt.Fprintf(w, "%s%s\n", lead, part)
			lead = "    : " // the same line goes on
		}
	}
}

// broken is a line in parts of at most lineWidth columns. Counting every letter beyond the first scripts as two is never too
// little.
func broken(line string) iter.Seq[string] {
	return func(yield func(string) bool) {
		start, width := 0, 0
		for i, r := range line {
			columns := 1
			switch {
			case r == '\t':
				columns = 8
			case r >= '\u1100':
				columns = 2
			}
			if width+columns > lineWidth {
				if !yield(line[start:i]) {
					return
				}
				start, width = i, 0
			}
			width += columns
		}
		yield(line[start:])
	}
}

// ask is the question of a terminal for the answer.
func ask(q *controlv1.Question) string {
	if sandbox.Mode(q.GetTo()) == sandbox.DangerFullAccess {
		return fmt.Sprintf("to allow it once type %s, anything else rejects: ", sandbox.DangerFullAccess)
	}
	return "allow it once? [y/N] "
}

// answer is what a typed line means.
func answer(q *controlv1.Question, line string) *controlv1.AnswerRequest {
	a := &controlv1.AnswerRequest{Id: q.GetId(), Outcome: "rejected"}
	line = strings.TrimSpace(line)
	if sandbox.Mode(q.GetTo()) == sandbox.DangerFullAccess {
		if line == string(sandbox.DangerFullAccess) {
			a.Outcome, a.Confirm = "allowed-once", line
		}
		return a
	}
	if line == "y" || line == "Y" || line == "yes" {
		a.Outcome = "allowed-once"
	}
	return a
}

package main

import (
	"fmt"
	"strings"

	fsv1 "github.com/cordon-host/cordon/api/fs/v1"
)

// envelope is a result about one file. The form is the reference system's.
func envelope(path, body string) string {
	return "<path>" + path + "</path>\n<type>file</type>\n<content>\n" + body + "\n</content>"
}

// renderRead is a window of lines with their numbers, and a last line that says how to go on.
func renderRead(path string, offset, maxLine int64, r *fsv1.ReadReply) string {
	var body strings.Builder
	end := max(0, offset-1)
	for _, l := range r.GetLines() {
		end = l.GetNumber()
		fmt.Fprintf(&body, "%d: %s", l.GetNumber(), l.GetText())
		if l.GetCut() {
			fmt.Fprintf(&body, "... (line truncated to %d chars)", maxLine)
		}
		body.WriteByte('\n')
	}
	if body.Len() > 0 {
		body.WriteByte('\n')
	}
	switch total := r.GetTotalLines(); {
	case r.GetCapped():
		fmt.Fprintf(&body, "(Output capped. Showing lines %d-%d. Use offset=%d to continue.)", offset, end, end+1)
	case end < total:
		fmt.Fprintf(&body, "(Showing lines %d-%d of %d. Use offset=%d to continue.)", offset, end, total, end+1)
	default:
		fmt.Fprintf(&body, "(End of file - total %d lines)", total)
	}
	return envelope(path, body.String())
}

func renderWrite(path string, created bool) string {
	if created {
		return envelope(path, "Created file")
	}
	return envelope(path, "Updated file")
}

func renderEdit(path string, all bool) string {
	if all {
		return "The file " + path + " has been updated. All occurrences were successfully replaced."
	}
	return "The file " + path + " has been updated successfully."
}

// maxShown is how much of a text a person who approves is shown, in bytes. What a change does must be seen, and a whole
// generated file must not bury the question.
const maxShown = 8 << 10

// renderQuestion is an operation as the person who approves it is shown it: the path, where it leads if that is elsewhere,
// and the change. Whoever shows it escapes it.
func renderQuestion(tool, path, leadsTo string, parts ...string) string {
	var b strings.Builder
	b.WriteString(tool + " " + path)
	if leadsTo != path {
		b.WriteString("\n(which is " + leadsTo + ")")
	}
	for i, part := range parts {
		sign := "+ "
		if tool == toolEdit && i == 0 {
			sign = "- "
		}
		shown := part
		if len(shown) > maxShown {
			shown = strings.ToValidUTF8(shown[:maxShown], "")
		}
		for line := range strings.Lines(shown) {
			b.WriteString("\n" + sign + strings.TrimSuffix(line, "\n"))
		}
		if left := len(part) - len(shown); left > 0 {
			fmt.Fprintf(&b, "\n(%d more bytes are not shown)", left)
		}
	}
	return b.String()
}

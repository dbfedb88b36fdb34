package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/cordon-host/cordon/host/front/cli/printable"
)

// printJSON prints a document on one line.
func (a *app) printJSON(v any) error {
	enc := json.NewEncoder(a.stdout)
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

// print writes text that may hold words of others.
func (a *app) print(format string, args ...any) error {
	text := fmt.Sprintf(format, args...)
	if a.outTTY {
		text = printable.Text(text)
	}
	_, err := io.WriteString(a.stdout, text)
	return err
}

// table prints rows under a header, in columns. Cells are single lines.
func (a *app) table(header []string, rows [][]string) error {
	w := tabwriter.NewWriter(a.stdout, 0, 0, 2, ' ', 0)
	for _, row := range append([][]string{header}, rows...) {
		cells := make([]string, len(row))
		for i, c := range row {
			if cells[i] = printable.Line(c); c == "" {
				cells[i] = "-"
			}
		}
		if _, err := fmt.Fprintln(w, strings.Join(cells, "\t")); err != nil {
			return err
		}
	}
	return w.Flush()
}

// clock is a time of the log, in the reader's zone.
func clock(ms int64) string { return time.UnixMilli(ms).Format("2006-01-02 15:04:05.000") }

// list is never null in JSON.
func list(s []string) []string {
	if s == nil {
		return []string{}
	}
	return s
}

// indent puts lead in front of each line of text.
func indent(text, lead string) string {
	var b strings.Builder
	for line := range strings.SplitSeq(strings.TrimSuffix(text, "\n"), "\n") {
		b.WriteString(lead + line + "\n")
	}
	return b.String()
}

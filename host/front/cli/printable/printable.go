// Package printable makes text of others fit to be shown to a person.
//
// What a model or a command wrote can hold characters that a terminal acts on or that nobody can see: control sequences that
// repaint what was printed before, marks that reverse the order of letters, spaces of no width. A person who is asked
// whether a command may run must see that command and nothing else. Here every such character is written out as its code
// point, in every field alike.
package printable

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Limits beyond which Folded counts padding instead of showing it. Both are more than honest code uses: a deep indentation
// is a few dozen columns, a paragraph break a few lines.
const (
	maxSpaces = 40
	maxBlank  = 3
)

// Text is s with every character that is invisible or acts on a terminal written as \u{200b} (or \x9f for a byte that is not
// UTF-8). Newlines, and tabs, stay.
func Text(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, s[i])
		case r == '\n' || r == '\t' || visible(r):
			b.WriteString(s[i : i+n])
		default:
			fmt.Fprintf(&b, `\u{%x}`, r)
		}
		i += n
	}
	return b.String()
}

// Line is s as one line: like Text, with newlines and tabs written as \n and \t. For names, paths and other short fields.
func Line(s string) string {
	return strings.NewReplacer("\n", `\n`, "\t", `\t`).Replace(Text(s))
}

// Folded is Text for a question: padding that would push the rest out of sight is replaced by its measure.
func Folded(s string) string {
	var out []string
	blank := 0
	flush := func() {
		if blank > maxBlank {
			out = append(out, fmt.Sprintf("[%d blank lines]", blank))
		} else {
			out = append(out, make([]string, blank)...)
		}
		blank = 0
	}
	for line := range strings.SplitSeq(Text(s), "\n") {
		if strings.Trim(line, " \t") == "" {
			blank++
			continue
		}
		flush()
		out = append(out, foldSpaces(line))
	}
	flush()
	return strings.Join(out, "\n")
}

func foldSpaces(line string) string {
	var b strings.Builder
	for i := 0; i < len(line); {
		run := 0
		for i+run < len(line) && (line[i+run] == ' ' || line[i+run] == '\t') {
			run++
		}
		switch {
		case run > maxSpaces:
			fmt.Fprintf(&b, "[%d spaces]", run)
		case run > 0:
			b.WriteString(line[i : i+run])
		default:
			b.WriteByte(line[i])
			run = 1
		}
		i += run
	}
	return b.String()
}

// visible reports whether r leaves its own mark where it stands. Beyond what package unicode calls printable (which leaves
// out controls, format characters, private and unassigned code points, and all spaces but U+0020), these have no mark:
// fillers, the blank Braille pattern, and variation selectors and joiners outside the Cf category, with which text can
// be hidden in text.
func visible(r rune) bool {
	switch {
	case !unicode.IsPrint(r):
		return false
	case r == '\u115f', r == '\u1160', r == '\u3164', r == '\uffa0', r == '\u2800':
		return false
	case r == '\u034f', r == '\u17b4', r == '\u17b5', r >= '\u180b' && r <= '\u180f':
		return false
	case r >= '\ufe00' && r <= '\ufe0f', r >= '\U000e0100' && r <= '\U000e01ef':
		return false
	}
	return true
}

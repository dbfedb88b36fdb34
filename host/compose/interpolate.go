package compose

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// maxInterpolated bounds, in bytes, what one scalar may become: defaults can repeat a variable any number of times.
const maxInterpolated = MaxFileSize

// maxInterpolationDepth bounds how deep defaults may nest.
const maxInterpolationDepth = 32

// maxInterpolationErrors is how many mistakes of one value are told.
const maxInterpolationErrors = 5

// interpolationError is one mistake in a scalar: where in it (byte offset and length), what, and what to do.
type interpolationError struct {
	offset, length int
	code           Code
	message        string
	hint           string
}

// interpolate replaces variables by the convention of Docker Compose:
//
//	$VAR ${VAR}       the value; unset is an error here, where Compose only warns
//	${VAR:-text}      text if VAR is unset or empty; ${VAR-text} if unset
//	${VAR:?message}   an error with message if VAR is unset or empty; ${VAR?message} if unset
//	${VAR:+text}      text if VAR is set and not empty, else nothing; ${VAR+text} if set
//	$$                a dollar sign
//
// Texts may hold variables in turn, which count only where the text is used. Values are inserted as they are.
func interpolate(s string, env func(string) (string, bool)) (string, []interpolationError) {
	if !strings.Contains(s, "$") {
		return s, nil
	}
	p := &interpolation{in: s, env: env}
	out, _ := p.text(0, true, 0)
	if p.size > maxInterpolated {
		p.fail(0, len(s), CodeInterpolation, "value grows beyond limits", fmt.Sprintf("at most %d bytes", maxInterpolated))
	}
	if len(p.errs) > 0 {
		return "", p.errs
	}
	return out, nil
}

type interpolation struct {
	in   string
	env  func(string) (string, bool)
	errs []interpolationError
	size int
}

func (p *interpolation) fail(offset, length int, code Code, message, hint string) {
	if len(p.errs) >= maxInterpolationErrors {
		return
	}
	p.errs = append(p.errs, interpolationError{offset, length, code, message, hint})
}

// text reads from offset i up to the closing brace of depth > 0, or to the end. It returns the text and the offset of
// that brace; live is false in a branch that is not taken.
func (p *interpolation) text(i int, live bool, depth int) (string, int) {
	var b strings.Builder
	put := func(s string) {
		if p.size += len(s); p.size <= maxInterpolated {
			b.WriteString(s)
		}
	}
	for i < len(p.in) {
		switch c := p.in[i]; {
		case c == '}' && depth > 0:
			return b.String(), i
		case c != '$':
			j := i + 1
			for j < len(p.in) && p.in[j] != '$' && (depth == 0 || p.in[j] != '}') {
				j++
			}
			put(p.in[i:j])
			i = j
		case strings.HasPrefix(p.in[i:], "$$"):
			put("$")
			i += 2
		case strings.HasPrefix(p.in[i:], "${"):
			var value string
			value, i = p.braced(i, live, depth+1)
			put(value)
		default:
			name := variableName(p.in[i+1:])
			if name == "" {
				p.fail(i, 1, CodeInterpolation, "a dollar sign that names no variable", "write $$ for a dollar sign, ${NAME} for a variable")
				i++
				break
			}
			put(p.lookup(name, i, len(name)+1, live))
			i += 1 + len(name)
		}
	}
	return b.String(), i
}

// braced reads ${…} at offset i and returns its value and the offset after it.
func (p *interpolation) braced(i int, live bool, depth int) (string, int) {
	name := variableName(p.in[i+2:])
	at := i + 2 + len(name) // the operator
	head := p.in[i:at]      // what may be shown: never a default, which may be a secret
	if depth > maxInterpolationDepth {
		p.fail(i, len(head), CodeInterpolation, "variables are nested too deeply", fmt.Sprintf("at most %d levels", maxInterpolationDepth))
		return "", len(p.in)
	}
	if name == "" {
		p.fail(i, 2, CodeInterpolation, "a variable without a name", "write ${NAME}, with letters, digits and _; $$ for a dollar sign")
		return "", skipBraced(p.in, i)
	}
	op, colon := "", false
	rest := p.in[at:]
	if strings.HasPrefix(rest, ":") {
		colon = true
		rest = rest[1:]
	}
	if rest != "" && strings.ContainsRune("-?+", rune(rest[0])) {
		op = rest[:1]
	}
	if op == "" {
		switch {
		case rest == "":
			p.fail(i, len(head), CodeInterpolation, fmt.Sprintf("${%s is not closed", name), "add the closing }")
			return "", len(p.in)
		case rest[0] != '}' || colon:
			p.fail(i, len(head), CodeInterpolation, fmt.Sprintf("${%s is followed by something that is no operator", name),
				"known are :- - :? ? :+ +, as in ${"+name+":-default}")
			return "", skipBraced(p.in, i)
		}
		return p.lookup(name, i, len(head)+1, live), at + 1
	}
	body := at + len(op)
	if colon {
		body++
	}
	value, set := p.env(name)
	filled := set && (value != "" || !colon)
	takeText := live && (op == "-" && !filled || op == "+" && filled)
	text, end := p.text(body, takeText, depth)
	if end >= len(p.in) {
		p.fail(i, len(head), CodeInterpolation, fmt.Sprintf("${%s is not closed", name), "add the closing }")
		return "", end
	}
	if !live {
		return "", end + 1
	}
	switch {
	case op == "?" && !filled:
		message := fmt.Sprintf("variable %s is not set", name)
		if set {
			message = fmt.Sprintf("variable %s is empty", name)
		}
		if own := strings.TrimSpace(p.in[body:end]); own != "" {
			message += ": " + own
		}
		p.fail(i, len(head), CodeUnsetVariable, message, "set it in the environment of cordon")
	case takeText:
		return text, end + 1
	case op != "+":
		return p.lookup(name, i, len(head), live), end + 1
	}
	return "", end + 1
}

func (p *interpolation) lookup(name string, offset, length int, live bool) string {
	if !live {
		return ""
	}
	value, set := p.env(name)
	switch {
	case !set:
		p.fail(offset, length, CodeUnsetVariable, fmt.Sprintf("variable %s is not set", name),
			fmt.Sprintf("set it in the environment of cordon, or give a default: ${%s:-…}", name))
	case !utf8.ValidString(value) || strings.ContainsRune(value, 0):
		p.fail(offset, length, CodeUnsetVariable, fmt.Sprintf("variable %s is not UTF-8 text", name), "the file's values are text")
	default:
		return value
	}
	return ""
}

// variableName is the longest prefix of s that can name a variable.
func variableName(s string) string {
	i := 0
	for i < len(s) && (s[i] == '_' || s[i]|0x20 >= 'a' && s[i]|0x20 <= 'z' || i > 0 && s[i] >= '0' && s[i] <= '9') {
		i++
	}
	return s[:i]
}

// skipBraced is the offset after the brace that closes the one at i+1, so that one mistake is reported once.
func skipBraced(s string, i int) int {
	depth := 0
	for ; i < len(s); i++ {
		switch s[i] {
		case '{':
			depth++
		case '}':
			if depth--; depth == 0 {
				return i + 1
			}
		}
	}
	return len(s)
}

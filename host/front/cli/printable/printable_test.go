package printable

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func TestText(t *testing.T) {
	for _, tt := range []struct{ name, in, want string }{
		{"plain", "echo hi > a.txt", "echo hi > a.txt"},
		{"newline and tab", "if x\n\ty", "if x\n\ty"},
		{"letters of any script", "naïve 日本語 עברית 🙂", "naïve 日本語 עברית 🙂"},
		{"escape sequence", "\x1b[2K\rls", `\u{1b}[2K\u{d}ls`},
		{"c1 control", "a\u009b31m", `a\u{9b}31m`},
		{"bell and delete", "\a\x7f", `\u{7}\u{7f}`},
		{"right-to-left override", "rm \u202etxt.exe", `rm \u{202e}txt.exe`},
		{"isolates", "\u2066a\u2069", `\u{2066}a\u{2069}`},
		{"zero width", "r\u200bm\u200d\ufeff", `r\u{200b}m\u{200d}\u{feff}`},
		{"odd spaces", "a\u00a0b\u2003c\u3000d", `a\u{a0}b\u{2003}c\u{3000}d`},
		{"line separators", "a\u2028b\u2029", `a\u{2028}b\u{2029}`},
		{"tag characters", "\U000e0041", `\u{e0041}`},
		{"variation selectors", "a\ufe0f\U000e0101", `a\u{fe0f}\u{e0101}`},
		{"fillers", "\u3164\u2800\u034f", `\u{3164}\u{2800}\u{34f}`},
		{"private use", "\ue000", `\u{e000}`},
		{"not utf-8", "a\xffb\xc0\xaf", `a\xffb\xc0\xaf`},
		{"replacement character", "\ufffd", "\ufffd"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := Text(tt.in); got != tt.want {
				t.Errorf("Text(%q) = %q, want %q", tt.in, got, tt.want)
			}
		})
	}
}

func TestLine(t *testing.T) {
	if got, want := Line("a\n\tb\x1b"), `a\n\tb\u{1b}`; got != want {
		t.Errorf("Line = %q, want %q", got, want)
	}
}

func TestFolded(t *testing.T) {
	pad := strings.Repeat(" ", 400)
	for _, tt := range []struct{ name, in, want string }{
		{"honest indentation", "if x:\n" + strings.Repeat(" ", 24) + "y\n\n\nz", "if x:\n" + strings.Repeat(" ", 24) + "y\n\n\nz"},
		{"padding sideways", "ls" + pad + "; rm -rf ~", "ls[400 spaces]; rm -rf ~"},
		{"padding in front", pad + "rm", "[400 spaces]rm"},
		{"tabs", "ls" + strings.Repeat("\t", 50) + "; rm", "ls[50 spaces]; rm"},
		{"padding downwards", "ls\n" + strings.Repeat(" \n", 90) + "rm -rf ~", "ls\n[90 blank lines]\nrm -rf ~"},
		{"padding at the end", "ls" + strings.Repeat("\n", 90), "ls\n[90 blank lines]"},
		{"final newline", "ls\n", "ls\n"},
		{"escaped first", "ls\x1b[8m", `ls\u{1b}[8m`},
		{"empty", "", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := Folded(tt.in); got != tt.want {
				t.Errorf("Folded(%q) = %q, want %q", tt.in, got, tt.want)
			}
		})
	}
}

func FuzzText(f *testing.F) {
	f.Add("echo \x1b[1m \u202e \xff")
	f.Add("plain")
	f.Fuzz(func(t *testing.T, s string) {
		for _, shown := range []string{Text(s), Folded(s)} {
			if !utf8.ValidString(shown) {
				t.Fatalf("%q is not UTF-8", shown)
			}
			for _, r := range shown {
				if r != '\n' && r != '\t' && !visible(r) {
					t.Fatalf("%q still has %U", shown, r)
				}
			}
		}
		if again := Text(Text(s)); again != Text(s) {
			t.Fatalf("Text changed what it had made: %q, then %q", Text(s), again)
		}
		if line := Line(s); strings.ContainsAny(line, "\n\t") {
			t.Fatalf("Line(%q) = %q", s, line)
		}
	})
}

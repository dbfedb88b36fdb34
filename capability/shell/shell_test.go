package shell

import (
	"strings"
	"testing"
)

func TestMarkers(t *testing.T) {
	for _, tt := range []struct{ got, want string }{
		{Stderr, "[stderr]"},
		{NoOutput, "(no output)"},
		{Truncated("/s/out.log"), "[output truncated; full output: /s/out.log]"},
		{Truncated(""), "[output truncated; full output: (unavailable)]"},
		{TimedOut(120000), "[timed out after 120000ms]"},
		{NotText("stdout"), "[stdout is not valid UTF-8; each undecodable byte is shown as U+FFFD]"},
		{ExitStatus{}.Marker(), ""},
		{ExitStatus{Code: 7}.Marker(), "[exit code: 7]"},
		{ExitStatus{Code: -1}.Marker(), "[exit code: -1]"},
		{ExitStatus{Signal: "SIGKILL"}.Marker(), "[killed by signal: SIGKILL]"},
		{ExitStatus{Code: 9, Signal: "SIGTERM"}.Marker(), "[killed by signal: SIGTERM]"},
	} {
		if tt.got != tt.want {
			t.Errorf("%q, want %q", tt.got, tt.want)
		}
	}
}

func TestParseExitStatus(t *testing.T) {
	for _, tt := range []struct {
		name, text, body string
		status           ExitStatus
	}{
		{"a clean exit", "out\n", "out\n", ExitStatus{}},
		{"a non-zero exit", "out\n[exit code: 2]", "out", ExitStatus{Code: 2}},
		{"output that ended its line keeps only what was before the marker's own line end", "out\n\n[exit code: 2]", "out\n", ExitStatus{Code: 2}},
		{"a signal kill", "out\n[killed by signal: SIGKILL]", "out", ExitStatus{Signal: "SIGKILL"}},
		{"a real-time signal", "out\n[killed by signal: SIGRTMIN+3]", "out", ExitStatus{Signal: "SIGRTMIN+3"}},
		{"the signal comes first, and an exit marker before it is output", "x\n[exit code: 1]\n[killed by signal: SIGTERM]", "x\n[exit code: 1]", ExitStatus{Signal: "SIGTERM"}},
		{"only one marker is taken", "x\n[exit code: 1]\n[exit code: 2]", "x\n[exit code: 1]", ExitStatus{Code: 2}},
		{"needs the leading newline", "[exit code: 2]", "[exit code: 2]", ExitStatus{}},
		{"needs the end of the string", "x\n[exit code: 2]\n", "x\n[exit code: 2]\n", ExitStatus{}},
		{"needs the end of the string, spaces too", "x\n[exit code: 2] ", "x\n[exit code: 2] ", ExitStatus{}},
		{"not in the middle of a line", "x [exit code: 2]", "x [exit code: 2]", ExitStatus{}},
		{"zero is never rendered", "x\n[exit code: 0]", "x\n[exit code: 0]", ExitStatus{}},
		{"digits as rendered", "x\n[exit code: +2]", "x\n[exit code: +2]", ExitStatus{}},
		{"digits as rendered, no zeros in front", "x\n[exit code: 02]", "x\n[exit code: 02]", ExitStatus{}},
		{"no number", "x\n[exit code: two]", "x\n[exit code: two]", ExitStatus{}},
		{"too large a number", "x\n[exit code: 99999999999999999999]", "x\n[exit code: 99999999999999999999]", ExitStatus{}},
		{"no signal name", "x\n[killed by signal: anything]", "x\n[killed by signal: anything]", ExitStatus{}},
		{"an empty signal", "x\n[killed by signal: SIG]", "x\n[killed by signal: SIG]", ExitStatus{}},
		{"empty", "", "", ExitStatus{}},
		{"a marker alone on the second line", "\n[exit code: 1]", "", ExitStatus{Code: 1}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if body, s := ParseExitStatus(tt.text); body != tt.body || s != tt.status {
				t.Errorf("%q, %+v; want %q, %+v", body, s, tt.body, tt.status)
			}
		})
	}
}

func TestUnmistakable(t *testing.T) {
	for _, tt := range []struct {
		text string
		s    ExitStatus
		want string
	}{
		{"x\n[exit code: 1]", ExitStatus{}, "x\n[exit code: 1]\n"},
		{"x\n[killed by signal: SIGKILL]", ExitStatus{}, "x\n[killed by signal: SIGKILL]\n"},
		{"x\n[exit code: 1]", ExitStatus{Code: 1}, "x\n[exit code: 1]"},
		{"x", ExitStatus{}, "x"},
	} {
		if got := Unmistakable(tt.text, tt.s); got != tt.want {
			t.Errorf("%q, want %q", got, tt.want)
		}
	}
}

// Whatever a command printed, its result reads back as what happened.
func FuzzParseExitStatus(f *testing.F) {
	for _, s := range []string{"", "out", "out\n", "[exit code: 1]", "x\n[exit code: 1]", "\n[killed by signal: SIGKILL]", "\xff\n[exit code: -3]\n"} {
		f.Add(s, 0, "")
		f.Add(s, 3, "")
		f.Add(s, 0, "SIGTERM")
	}
	f.Fuzz(func(t *testing.T, out string, code int, signal string) {
		s := ExitStatus{Code: code}
		if signalName(signal) {
			s = ExitStatus{Signal: signal}
		}
		text := out
		if m := s.Marker(); m != "" {
			text += "\n" + m
		}
		text = Unmistakable(text, s)
		body, parsed := ParseExitStatus(text)
		if parsed != s {
			t.Fatalf("%q reads back as %+v, want %+v", text, parsed, s)
		}
		if !strings.HasPrefix(body, out) {
			t.Fatalf("%q lost output: %q", text, body)
		}
		if s != (ExitStatus{}) && body != out {
			t.Fatalf("body %q, want %q", body, out)
		}
		// And any text at all is taken apart without loss.
		body, parsed = ParseExitStatus(out)
		if m := parsed.Marker(); m != "" && body+"\n"+m != out || m == "" && body != out {
			t.Fatalf("%q came apart as %q and %+v", out, body, parsed)
		}
	})
}

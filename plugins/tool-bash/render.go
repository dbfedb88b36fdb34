package main

import (
	"encoding/json"
	"strings"
	"unicode/utf8"

	shellv1 "github.com/cordon-host/cordon/api/shell/v1"
	"github.com/cordon-host/cordon/capability/sandbox"
	"github.com/cordon-host/cordon/capability/shell"
)

// render is the text a model reads: stdout, stderr, then what there is to say about them and about the end of the command,
// each on a line of its own, the exit marker last. Hint says that the composition offers escalation.
func render(r *shellv1.RunReply, hint bool) string {
	var t text
	t.stream("stdout", r.GetStdout())
	if len(r.GetStderr().GetData()) > 0 || r.GetStderr().GetTruncated() {
		t.line(shell.Stderr)
		t.stream("stderr", r.GetStderr())
	}
	if t.Len() == 0 {
		t.line(shell.NoOutput)
	}
	if r.GetSandbox().GetDenied() {
		t.line(sandbox.DenialMarker(sandbox.Mode(r.GetSandbox().GetMode())))
		if hint {
			t.line(sandbox.EscalationHint(sandbox.Command))
		}
	}
	if r.GetTimedOut() {
		t.line(shell.TimedOut(r.GetTimeoutMs()))
	}
	status := shell.ExitStatus{Code: int(r.GetExitCode()), Signal: r.GetSignal()}
	if m := status.Marker(); m != "" {
		t.line(m)
	}
	return shell.Unmistakable(t.String(), status)
}

// text grows by whole lines and leaves the last one without its end.
type text struct{ strings.Builder }

func (t *text) line(s string) {
	if t.Len() > 0 && !strings.HasSuffix(t.String(), "\n") {
		t.WriteByte('\n')
	}
	t.WriteString(s)
}

// stream adds what a command wrote. Control bytes stay; whoever shows them to a person escapes them.
func (t *text) stream(name string, o *shellv1.Output) {
	data := o.GetData()
	if o.GetTruncated() {
		data = wholeRunes(data)
	}
	if len(data) > 0 {
		t.line(decoded(data))
	}
	if o.GetTruncated() {
		t.line(shell.Truncated(o.GetSpillPath()))
	}
	if !utf8.Valid(data) {
		t.line(shell.NotText(name))
	}
}

// wholeRunes drops the rest of a character that the start of a tail cut apart.
func wholeRunes(tail []byte) []byte {
	for i := 0; i < min(len(tail), utf8.UTFMax); i++ {
		if utf8.RuneStart(tail[i]) {
			return tail[i:]
		}
	}
	return tail
}

// decoded replaces each byte that is no UTF-8 by U+FFFD.
func decoded(data []byte) string {
	if utf8.Valid(data) {
		return string(data)
	}
	return string([]rune(string(data)))
}

// metadata is what a front end may know besides the text. An exit code is absent after a death by signal.
func metadata(r *shellv1.RunReply) (json.RawMessage, error) {
	return json.Marshal(struct {
		Mode        string `json:"mode"`
		Denied      bool   `json:"denied"`
		ExitCode    *int32 `json:"exitCode,omitempty"`
		Signal      string `json:"signal,omitempty"`
		TimedOut    bool   `json:"timedOut"`
		Runner      string `json:"runner,omitempty"`
		Enforcement string `json:"enforcement,omitempty"`
		StdoutBytes int64  `json:"stdoutBytes"`
		StderrBytes int64  `json:"stderrBytes"`
		StdoutSpill string `json:"stdoutSpillPath,omitempty"`
		StderrSpill string `json:"stderrSpillPath,omitempty"`
	}{
		Mode: r.GetSandbox().GetMode(), Denied: r.GetSandbox().GetDenied(), ExitCode: r.ExitCode, Signal: r.GetSignal(),
		TimedOut: r.GetTimedOut(), Runner: r.GetSandbox().GetRunner(), Enforcement: r.GetSandbox().GetEnforcement(),
		StdoutBytes: r.GetStdout().GetTotalBytes(), StderrBytes: r.GetStderr().GetTotalBytes(),
		StdoutSpill: r.GetStdout().GetSpillPath(), StderrSpill: r.GetStderr().GetSpillPath(),
	})
}

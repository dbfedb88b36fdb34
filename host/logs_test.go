package host

import (
	"errors"
	"log/slog"
	"strings"
	"testing"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/host/logs"
)

type record = logs.Record

var everything = logs.Query{Level: -100, Tail: -1}

// No record has a secret of the row in it, whichever way it took.
func TestLogsHideSecrets(t *testing.T) {
	const token, env = "token-of-the-config", "value-of-the-environment"
	w := newWorld(t, row{"a", "TOKEN: " + env + "|, config: {token: " + token + "}"})
	w.mustStart()
	w.poke("a", "leak")
	w.flag("a", "refuse")
	w.poke("a", "die")
	s := w.until("a", "failed", func(s *controlv1.EntryStatus) bool { return strings.Contains(s.GetProblem(), "cannot log in") })
	shown := s.String()
	var found int
	for _, l := range w.log("") {
		shown += l.String() + string(l.GetAttributes())
		if strings.Contains(l.GetMessage(), "my token is") || strings.Contains(l.GetMessage(), "on stderr") {
			found++
		}
	}
	if strings.Contains(shown, token) || strings.Contains(shown, env) {
		t.Errorf("a secret is shown:\n%s", shown)
	}
	if found != 2 || strings.Count(shown, logs.Redacted) < 3 {
		t.Errorf("%d of 2 records, so this showed little:\n%s", found, shown)
	}
}

func TestLogsOfTheControlService(t *testing.T) {
	w := newWorld(t, row{"a", ""}, row{"b", ""})
	w.mustStart()
	ctl := w.host.Control()
	for _, entry := range []string{"", "a"} {
		if _, err := ctl.SetLogLevel(t.Context(), &controlv1.SetLogLevelRequest{Entry: entry, Level: "debug"}); err != nil {
			t.Fatal(err)
		}
	}
	stream, err := ctl.Logs(t.Context(), &controlv1.LogsRequest{Follow: true, Level: "error", Tail: 0})
	if err != nil {
		t.Fatal(err)
	}
	w.poke("b", "panic")
	l, err := stream.Recv()
	if err != nil || l.GetEntry() != "b" || l.GetGeneration() != 1 || l.GetLevel() != "error" || l.GetStream() != "log" || l.GetMessage() != "handler panicked" {
		t.Errorf("record %v, %v", l, err)
	}
	for _, tt := range []struct {
		err  error
		want string
	}{
		{second(ctl.SetLogLevel(t.Context(), &controlv1.SetLogLevelRequest{Entry: "x", Level: "info"})), "NO_ENTRY"},
		{second(ctl.SetLogLevel(t.Context(), &controlv1.SetLogLevelRequest{Level: "loud"})), "BAD_LEVEL"},
		{refused(ctl.Logs(t.Context(), &controlv1.LogsRequest{Entry: "x"})), "NO_ENTRY"},
		{refused(ctl.Logs(t.Context(), &controlv1.LogsRequest{Level: "loud"})), "BAD_LEVEL"},
	} {
		if fault.Reason(tt.err) != tt.want {
			t.Errorf("%v, want %s", tt.err, tt.want)
		}
	}
	// The plugin keeps the level it was told: the host's own text log may want less than the ring.
	if level, _ := w.host.logs.Level("b"); level != slog.LevelDebug {
		t.Errorf("level %v", level)
	}
}

func second[T any](_ T, err error) error { return err }

// refused is the error of a stream.
func refused(s interface {
	Recv() (*controlv1.LogLine, error)
}, err error) error {
	if err != nil {
		return err
	}
	if _, err = s.Recv(); err == nil {
		return errors.New("it was not refused")
	}
	return err
}

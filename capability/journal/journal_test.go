package journal_test

import (
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/cordon-host/cordon/capability/journal"
)

func TestLevels(t *testing.T) {
	for _, name := range journal.Levels {
		l, err := journal.ParseLevel(name)
		if err != nil || journal.LevelName(l) != name {
			t.Errorf("%s: %v, %v", name, l, err)
		}
	}
	if _, err := journal.ParseLevel("loud"); err == nil || !strings.Contains(err.Error(), "trace, debug") {
		t.Errorf("err = %v", err)
	}
	if got := journal.LevelName(slog.LevelInfo + 2); got != "info" {
		t.Errorf("between two levels: %s", got)
	}
}

func TestAttributesAreAnObject(t *testing.T) {
	record := func(args ...any) slog.Record {
		r := slog.NewRecord(time.Now(), slog.LevelError, "a message", 0)
		r.Add(args...)
		return r
	}
	var none journal.Scope
	for _, tt := range []struct {
		name  string
		scope journal.Scope
		r     slog.Record
		want  string
	}{
		{"nothing", none, record(), ""},
		{"values", none, record("n", 1, "s", "x\ny", "err", errors.New("no"), "d", time.Second), `{"n":1,"s":"x\ny","err":"no","d":1000000000}`},
		{"names of the handler's own", none, record("msg", "mine", "level", "mine", "time", "mine"), `{"msg":"mine","level":"mine","time":"mine"}`},
		{"groups", none.Attrs([]slog.Attr{slog.Int("a", 1)}).Group("g").Attrs([]slog.Attr{slog.Int("b", 2)}).Group("h"), record("c", 3), `{"a":1,"g":{"b":2,"h":{"c":3}}}`},
		{"a group of its own", none, record(slog.Group("g", "x", 1)), `{"g":{"x":1}}`},
		{"an empty group", none.Group("g"), record(), ""},
	} {
		if got := string(tt.scope.JSON(tt.r)); got != tt.want {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
		}
	}
}

func TestScopesDoNotShare(t *testing.T) {
	base := journal.Scope{}.Attrs([]slog.Attr{slog.Int("a", 1)}).Group("g")
	left, right := base.Attrs([]slog.Attr{slog.Int("l", 1)}), base.Attrs([]slog.Attr{slog.Int("r", 1)})
	r := slog.NewRecord(time.Time{}, 0, "", 0)
	if l, r := string(left.JSON(r)), string(right.JSON(r)); l != `{"a":1,"g":{"l":1}}` || r != `{"a":1,"g":{"r":1}}` {
		t.Errorf("%s and %s", l, r)
	}
}

func TestCut(t *testing.T) {
	if m, a, cut := journal.Cut("short", []byte(`{"a":1}`)); m != "short" || string(a) != `{"a":1}` || cut {
		t.Errorf("a short record was changed: %q %s %v", m, a, cut)
	}
	m, _, cut := journal.Cut(strings.Repeat("é", journal.MaxRecord), nil)
	if !cut || len(m) > journal.MaxRecord || strings.ContainsRune(m, '\uFFFD') {
		t.Errorf("a long message: %v, %d bytes", cut, len(m))
	}
	_, a, cut := journal.Cut("m", []byte(`{"a":"`+strings.Repeat("x", journal.MaxRecord)+`"}`))
	if !cut || len(a) > 10<<10 || !strings.HasPrefix(string(a), `{"cut":"{\"a\":\"xxx`) {
		t.Errorf("long attributes: %v, %d bytes, %.60s", cut, len(a), a)
	}
	if m, _, _ := journal.Cut("a\xffb", nil); m != "a\uFFFDb" {
		t.Errorf("not UTF-8: %q", m)
	}
}

package permission

import (
	"strings"
	"testing"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	"github.com/cordon-host/cordon/capability/approval"
	"github.com/cordon-host/cordon/capability/sandbox"
)

const (
	ro    = sandbox.ReadOnly
	ww    = sandbox.WorkspaceWrite
	full  = sandbox.DangerFullAccess
	ask   = approval.Ask
	never = approval.Never
)

var table = Table{
	{"careful", Pair{ro, ask}, "one"},
	{"audit", Pair{ro, ask}, "two"},
	{"busy", Pair{ww, never}, "three"},
}

func TestCurrent(t *testing.T) {
	for _, tt := range []struct {
		recorded string
		pair     Pair
		want     string
	}{
		{"", Pair{ro, ask}, "careful"},
		{"audit", Pair{ro, ask}, "audit"},
		{"busy", Pair{ro, ask}, "careful"},
		{"gone", Pair{ro, ask}, "careful"},
		{"audit", Pair{ww, never}, "busy"},
		{"audit", Pair{ww, ask}, Custom},
		{Custom, Pair{full, ask}, Custom},
		{"", Pair{}, Custom},
	} {
		got := table.Current(tt.recorded, tt.pair)
		if got.Name != tt.want || got.Pair != tt.pair {
			t.Errorf("%q with %v: %+v, want %s", tt.recorded, tt.pair, got, tt.want)
		}
		if (got.Name == Custom) != (got.Description == "Current sandbox and approval settings do not match a preset.") {
			t.Errorf("%s is described as %q", got.Name, got.Description)
		}
	}
}

func TestValidate(t *testing.T) {
	if err := table.Validate(); err != nil {
		t.Error(err)
	}
	for want, bad := range map[string]Table{
		`"custom" is reserved for the derived not-a-preset state and cannot name a table entry`: {{Custom, Pair{ro, ask}, ""}},
		"must have a name":                           {{"", Pair{ro, ask}, ""}},
		`preset "x" is in the table twice`:           {{"x", Pair{ro, ask}, ""}, {"y", Pair{ro, ask}, ""}, {"x", Pair{ww, ask}, ""}},
		`preset "x": sandbox mode must be one of`:    {{"x", Pair{"yolo", ask}, ""}},
		`preset "x": approval policy must be one of`: {{"x", Pair{ro, "maybe"}, ""}},
	} {
		if err := bad.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	if got := table.Names(); got != "careful, audit, busy" {
		t.Errorf("names %q", got)
	}
}

func TestLevels(t *testing.T) {
	const none, human, owner = kernelv1.Level_NONE, kernelv1.Level_HUMAN, kernelv1.Level_OWNER
	for _, tt := range []struct {
		from, to sandbox.Mode
		want     kernelv1.Level
	}{
		{ro, ro, none}, {ro, ww, human}, {ro, full, owner},
		{ww, ro, none}, {ww, ww, none}, {ww, full, owner},
		{full, ro, none}, {full, ww, none}, {full, full, none},
		{"", ro, none}, {"", ww, human}, {"", full, owner},
		{"yolo", ww, human},
		{full, "yolo", human}, // not a narrowing that anybody knows of
	} {
		if got := ModeLevel(tt.from, tt.to); got != tt.want {
			t.Errorf("%q to %q needs %v, want %v", tt.from, tt.to, got, tt.want)
		}
	}
	for _, tt := range []struct {
		from, to approval.Policy
		want     kernelv1.Level
	}{
		{ask, ask, none}, {ask, never, none}, {never, never, none}, {never, ask, human}, {"", never, none}, {"", ask, human},
	} {
		if got := PolicyLevel(tt.from, tt.to); got != tt.want {
			t.Errorf("%q to %q needs %v, want %v", tt.from, tt.to, got, tt.want)
		}
	}
	if got := Level(Pair{full, never}, Pair{ro, ask}); got != human {
		t.Errorf("a narrower mode paid for a wider policy: %v", got)
	}
	if got := Level(Pair{ro, ask}, Pair{full, never}); got != owner {
		t.Errorf("a narrower policy paid for a wider mode: %v", got)
	}
}

func TestParseChange(t *testing.T) {
	if c, err := ParseChange([]byte(`{"preset":"audit"}`)); err != nil || c.Preset != "audit" {
		t.Errorf("%v, %v", c, err)
	}
	for _, data := range []string{"", "null", "{}", `{"preset":""}`, `{"preset":1}`, `"audit"`, `{"preset":"a"} {}`} {
		if c, err := ParseChange([]byte(data)); err == nil {
			t.Errorf("%s was read as %v", data, c)
		}
	}
}

package tools

import (
	"strings"
	"testing"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
)

// TestHugeNumbers gives a bounded field numbers that no float holds: the schema library cannot compare them, so they must not get there.
func TestHugeNumbers(t *testing.T) {
	r := NewRegistry()
	bounded := `{"type":"object","properties":{"a":{"type":"number","minimum":1,"multipleOf":0.5}}}`
	if err := r.Set("e", []*kernelv1.Tool{{Name: "run", InputSchema: []byte(bounded)}}, nil); err != nil {
		t.Fatal(err)
	}
	run, _ := r.lookup("run")
	for raw, good := range map[string]bool{
		`{"a":1e-99999999}`: false, `{"a":0e99999999}`: false, `{"a":0e-99999999}`: false, `{"a":1e9223372036854775808}`: false,
		`{"a":3` + strings.Repeat("0", 1000) + `}`: false, `{"a":2.5e+1}`: true, `{"a":1E2}`: true,
		`{"a":1e99999999}`: false, `{"a":-1e99999999}`: false, `{"a":1e400}`: false, `{"a":0}`: false, `{"a":2.5}`: true,
	} {
		if _, err := run.checkArguments([]byte(raw)); (err == nil) != good {
			t.Errorf("%s: %v", raw, err)
		}
	}
}

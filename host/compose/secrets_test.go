package compose

import (
	"encoding/json"
	"slices"
	"testing"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
)

func TestSecrets(t *testing.T) {
	e := &Entry{
		Env:    map[string]string{"TOKEN": "from-the-environment"},
		Config: json.RawMessage(`{"port":80,"token":"of-the-config","nested":{"secret":{"deep":["in-a-list",12345678]},"shown":"shown"},"stray":"not-described"}`),
	}
	m := &kernelv1.Manifest{ConfigSchema: []byte(`{"type":"object","properties":{"port":{"type":"integer"},"token":{"type":"string","writeOnly":true},
		"nested":{"properties":{"secret":{"writeOnly":true},"shown":{}}}},"additionalProperties":false}`)}
	got, err := e.Secrets(m)
	want := []string{"12345678", "from-the-environment", "in-a-list", "not-described", "of-the-config"}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%q, %v; want %q", got, err, want)
	}
}

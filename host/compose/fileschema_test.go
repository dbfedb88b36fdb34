package compose

import (
	"encoding/json"
	"maps"
	"os"
	"slices"
	"testing"

	"gopkg.in/yaml.v3"
)

// fileSchema is the published schema of the format, which editors use to complete and check.
func fileSchema(t *testing.T) (*schema, map[string]any) {
	t.Helper()
	text, err := os.ReadFile("../../docs/compose.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	s, err := compileSchema(text)
	if err != nil {
		t.Fatal(err)
	}
	return s, s.doc.(map[string]any)
}

// TestFileSchemaKnowsTheKeys holds the published schema to the keys the loader reads.
func TestFileSchemaKnowsTheKeys(t *testing.T) {
	_, doc := fileSchema(t)
	keys := func(name string) []string {
		def := doc["$defs"].(map[string]any)[name].(map[string]any)
		return slices.Sorted(maps.Keys(def["properties"].(map[string]any)))
	}
	known := func(of []string, not ...string) []string {
		out := slices.DeleteFunc(slices.Clone(of), func(k string) bool { return slices.Contains(not, k) })
		slices.Sort(out)
		return out
	}
	if got, want := keys("entry"), known(entryKeys, "plugins", "intercept"); !slices.Equal(got, want) {
		t.Errorf("an entry has %q, want %q", got, want)
	}
	if got, want := keys("group"), known(groupKeys, "intercept"); !slices.Equal(got, want) {
		t.Errorf("a group has %q, want %q", got, want)
	}
}

func TestFileSchemaAgreesWithTheLoader(t *testing.T) {
	s, _ := fileSchema(t)
	for _, tc := range []struct {
		text string
		ok   bool
	}{
		{"cordon: 1\nplugins: []\n", true},
		{"cordon: 1\nsession: {store: \"sqlite:\"}\nplugins:\n  - {id: a, use: ./bin/a, config: {x: 1}, disabled: \"${NO:-false}\", env: {A: b, N: 1}, limits: {memory: 1Gi, pids: 3}, timeouts: {start: 500ms, beat: 1m}, answers: human, isolate: [shell]}\n", true},
		{"cordon: 1\nplugins:\n  - {id: g, isolate: {shell: x, fs: true}, plugins: [{id: a, use: ./bin/a}]}\n", true},
		{"cordon: 2\nplugins: []\n", false},
		{"cordon: 1\n", false},
		{"cordon: 1\nplugins:\n  - {id: A, use: ./bin/a}\n", false},
		{"cordon: 1\nplugins:\n  - {id: a}\n", false},
		{"cordon: 1\nplugins:\n  - {id: a, use: ./bin/a, plugins: []}\n", false},
		{"cordon: 1\nplugins:\n  - {id: g, plugins: [], env: {}}\n", false},
		{"cordon: 1\nplugins:\n  - {id: a, use: ./bin/a, answers: owner}\n", false},
		{"cordon: 1\nplugins:\n  - {id: a, use: ./bin/a, env: {CORDON_X: y}}\n", false},
		{"cordon: 1\nplugins:\n  - {id: a, use: ./bin/a, limits: {memory: 1GB}}\n", false},
		{"cordon: 1\nplugins:\n  - {id: a, use: ./bin/a, typo: 1}\n", false},
		{"cordon: 1\ninclude: [x.yml]\nplugins: []\n", false},
	} {
		_, diags := load(t, tc.text, nil)
		var value any
		if err := yaml.Unmarshal([]byte(tc.text), &value); err != nil {
			t.Fatal(err)
		}
		asJSON, err := json.Marshal(value)
		if err != nil {
			t.Fatal(err)
		}
		violations, err := s.validate(asJSON)
		if err != nil {
			t.Fatal(err)
		}
		if loads, valid := !diags.HasErrors(), len(violations) == 0; loads != tc.ok || valid != tc.ok {
			t.Errorf("%q: loads %v, matches the schema %v, want %v\n%v\n%v", tc.text, loads, valid, tc.ok, diags.Err(), violations)
		}
	}
}

// TestDefaultComposition: the compose file of the repository is what it shows others.
func TestDefaultComposition(t *testing.T) {
	const path = "../../compose.yml"
	if _, err := os.Stat(path); err != nil {
		t.Skip("no default composition")
	}
	plan, diags := Load(path, env(map[string]string{"PWD": "/w"}))
	if len(diags) > 0 {
		t.Fatalf("%v", diags[0])
	}
	s, _ := fileSchema(t)
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var value any
	if err := yaml.Unmarshal(text, &value); err != nil {
		t.Fatal(err)
	}
	asJSON, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	if violations, err := s.validate(asJSON); err != nil || len(violations) > 0 {
		t.Errorf("%v, %v", violations, err)
	}
	if len(plan.Entries) == 0 {
		t.Error("no rows")
	}
}

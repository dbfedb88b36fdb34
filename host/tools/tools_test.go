package tools

import (
	"encoding/json"
	"strings"
	"testing"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	"github.com/cordon-host/cordon/host/route"
)

const schema = `{"type":"object","properties":{"command":{"type":"string"},"limit":{"type":"number"},"nested":{"type":"object","properties":{"a":{"type":"string"}}}},"required":["command"],"additionalProperties":false}`

func registry(t testing.TB) (*Registry, *tool) {
	r := NewRegistry()
	if err := r.Set("e", []*kernelv1.Tool{{Name: "run", InputSchema: []byte(schema)}}, nil); err != nil {
		t.Fatal(err)
	}
	run, ok := r.lookup("run")
	if !ok {
		t.Fatal("the tool is not there")
	}
	return r, run
}

func TestArguments(t *testing.T) {
	_, run := registry(t)
	for _, tt := range []struct{ name, raw, want string }{
		{"good", `{"command":"x","limit":3}`, ""},
		{"white space", " {\"command\" : \"x\"}\n", ""},
		{"empty", ``, "not JSON"},
		{"cut off", `{"command":"x`, "at byte"},
		{"two values", `{"command":"x"} {}`, "not JSON"},
		{"not an object", `["command"]`, "expected a JSON object"},
		{"missing field", `{}`, "command"},
		{"wrong type", `{"command":7}`, "command: got number, want string"},
		{"unknown field", `{"command":"x","Command":"y"}`, "Command"},
		{"nested", `{"command":"x","nested":{"a":1}}`, "nested.a: got number"},
		{"duplicate", `{"command":"safe","command":"evil"}`, "command"},
		{"invalid UTF-8", "{\"limit\":1,\"command\":\"a\xffb\"}", "byte 23 is not valid UTF-8, in command"},
		{"too large", `{"command":"` + strings.Repeat("x", 10<<20) + `"}`, "exceed the limit of 1048576"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := run.checkArguments([]byte(tt.raw))
			switch {
			case tt.want == "" && (err != nil || !json.Valid(got)):
				t.Errorf("refused: %s, %v", got, err)
			case tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)):
				t.Errorf("error is %v, want one with %q", err, tt.want)
			case err != nil && len(err.Error()) > 500:
				t.Errorf("error has %d characters", len(err.Error()))
			}
		})
	}
}

// FuzzArguments holds that what is accepted is one JSON object that says the same to every parser, and that nothing panics.
func FuzzArguments(f *testing.F) {
	_, run := registry(f)
	for _, s := range []string{`{"command":"x"}`, `{"command":"x","command":"y"}`, "{\"command\":\"\xff\"}", `{"command":"\ud800"}`, `[`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		got, err := run.checkArguments(raw)
		if err != nil {
			return
		}
		var a, b struct {
			Command string `json:"command"`
		}
		if json.Unmarshal(raw, &a) != nil || json.Unmarshal(got, &b) != nil || a != b {
			t.Errorf("%q became %q", raw, got)
		}
		again, err := run.checkArguments(got)
		if err != nil || string(again) != string(got) {
			t.Errorf("%q is not in canonical form: %q, %v", got, again, err)
		}
	})
}

func TestSet(t *testing.T) {
	r, _ := registry(t)
	names := func() (out []string) {
		for _, d := range r.List() {
			out = append(out, d.Entry+"/"+d.GetName())
		}
		return out
	}
	provider := func() (*route.Provider, error) { return nil, nil }
	tool := func(name string) *kernelv1.Tool { return &kernelv1.Tool{Name: name, InputSchema: []byte(`{}`)} }
	if err := r.Set("f", []*kernelv1.Tool{tool("other"), tool("run")}, provider); err == nil || !strings.Contains(err.Error(), "e has registered") {
		t.Errorf("a taken name: %v", err)
	}
	if got := names(); len(got) != 1 {
		t.Errorf("a refused set left %v", got)
	}
	if err := r.Set("f", []*kernelv1.Tool{{Name: "bad", InputSchema: []byte(`{"type":7}`)}}, provider); err == nil {
		t.Error("a schema that is none was accepted")
	}
	if err := r.Set("e", []*kernelv1.Tool{tool("walk")}, provider); err != nil {
		t.Fatal(err)
	}
	if err := r.Set("f", []*kernelv1.Tool{tool("run")}, provider); err != nil {
		t.Errorf("a name that was given up: %v", err)
	}
	if got := strings.Join(names(), " "); got != "f/run e/walk" {
		t.Errorf("tools are %s", got)
	}
	if err := r.Set("e", nil, nil); err != nil || len(names()) != 1 {
		t.Errorf("removing: %v, %v", names(), err)
	}
}

package compose

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
)

func noEnv(string) (string, bool) { return "", false }

func env(vars map[string]string) func(string) (string, bool) {
	return func(name string) (string, bool) {
		v, ok := vars[name]
		return v, ok
	}
}

// load reads text as the compose file of a directory with plugins.
func load(t *testing.T, text string, vars map[string]string) (*Plan, Diagnostics) {
	t.Helper()
	path := filepath.Join(plugins(t), FileName)
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return Load(path, env(vars))
}

func TestPlan(t *testing.T) {
	plan, diags := load(t, `cordon: 1
session: {store: "sqlite:/var/lib/x.db"}
plugins:
  - id: one
    use: ./pkg
    config:
      {a: 1, b: [true, null, "x"], big: 123456789012345678901234567890, f: 1.50, "k/ey": {"~": y}, d: 2020-01-01, y: yes, port: "${PORT}", n: $PORT}
    env: {TOKEN: "${TOKEN}", PORT: 80, ON: true}
    limits: {memory: 256Mi, pids: 64}
    timeouts: {start: 5s, drain: 2m, beat: 9s}
    answers: human
  - id: outer
    isolate: [shell, fs]
    plugins:
      - id: inner
        isolate: {shell: shared, net: true}
        disabled: ${OFF:-true}
        plugins:
          - {id: two, use: ./bin/a, isolate: [fs]}
      - {id: three, use: ./bin/b, required: false}
`, map[string]string{"TOKEN": "hunter2", "PORT": "8080"})
	if err := diags.Err(); err != nil {
		t.Fatal(err)
	}
	if plan.Session.Store != "sqlite:/var/lib/x.db" || len(plan.Files) != 1 || plan.Files[0].Path != plan.Path || len(plan.Files[0].SHA256) != 64 {
		t.Errorf("plan %+v", plan)
	}
	type row struct {
		ID       string
		Kind     Kind
		Target   string
		Config   string
		Isolate  map[string]string
		Disabled bool
		Required bool
		Env      map[string]string
		Limits   Limits
		Answers  Answers
		Timeouts Timeouts
		Groups   []string
		Line     int
	}
	var got []row
	for _, e := range plan.Entries {
		target, _ := filepath.Rel(plan.Dir, e.Target)
		got = append(got, row{e.ID, e.Kind, target, string(e.Config), e.Isolate, e.Disabled, e.Required, e.Env, e.Limits, e.Answers, e.Timeouts, e.Groups, e.Place.Line})
	}
	none := map[string]string{}
	want := []row{
		{"one", Package, "pkg", `{"a":1,"b":[true,null,"x"],"big":123456789012345678901234567890,"f":1.50,"k/ey":{"~":"y"},"d":"2020-01-01","y":"yes","port":"8080","n":8080}`,
			none, false, true, map[string]string{"TOKEN": "hunter2", "PORT": "80", "ON": "true"}, Limits{256 << 20, 64}, AnswersHuman,
			Timeouts{5 * time.Second, 2 * time.Minute, 9 * time.Second}, nil, 4},
		{"two", Executable, "bin/a", "{}", map[string]string{"shell": "shared", "fs": "@two", "net": "@inner"}, true, true, nil, Limits{}, "", Timeouts{}, []string{"outer", "inner"}, 19},
		{"three", Executable, "bin/b", "{}", map[string]string{"shell": "@outer", "fs": "@outer"}, false, false, nil, Limits{}, "", Timeouts{}, []string{"outer"}, 20},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("entries (-want +got):\n%s", d)
	}
	for _, e := range plan.Entries {
		if !json.Valid(e.Config) {
			t.Errorf("%s: config is not JSON: %s", e.ID, e.Config)
		}
	}
	if plan.Entry("two") != plan.Entries[1] || plan.Entry("nobody") != nil {
		t.Error("Entry finds the wrong row")
	}
}

// TestManyMistakes: one file with 25 different mistakes yields exactly those, each at its line. Every faulty line says
// in a comment which codes belong to it, as often as it has them.
func TestManyMistakes(t *testing.T) {
	const text = `cordon: 2 # C106
sesion: {store: "sqlite:"} # C101
include: other.yml # C111
session: {store: redis} # C112
plugins:
  - id: Policy # C107
    use: ./bin/a
  - id: web
    use: ./bin/none # C201
    config: {token: "hunter2", n: 017} # C112
    disabled: "no" # C104
    disabled: true # C102
  - id: web # C108
    use: ./bin/data # C202
    config: {token: "hunter2", !key x: 1, 2: y} # C103 C103
  - id: both
    use: ./bin/a
    plugins: [] # C109
  - id: group
    config: {} # C110
    plugins:
      - use: ./pkg # C105
        limits: {memory: 256MB} # C112
        timeouts: {start: 10} # C112
      - id: y
        use: ./lib # C203
        answers: owner # C112
        env: {CORDON_X: "hunter2", T: "${NOPE}"} # C112 C114
      - id: z
        use: nobody # C201
        isolate: {shell: "${REALM}"} # C115
        config: {a: "cost $5", b: !secret hunter2} # C011 C113
  - id: config
    use: ./bin/b
    config: {port: "eighty", hots: hunter2} # C301 C301
  - id: twice
    use: ./bin/c # C402 C404 C406
  - id: loop
    use: ./bin/d # C403
`
	plan, diags := load(t, text, nil)
	if plan == nil {
		t.Fatal(diags.Err())
	}
	manifest := func(m *kernelv1.Manifest) *kernelv1.Manifest {
		m.KernelMin, m.KernelMax = 1, 1
		return m
	}
	all := Join(diags, Check(plan, map[string]*kernelv1.Manifest{
		"config": manifest(&kernelv1.Manifest{
			ConfigSchema: []byte(`{"type":"object","required":["host"],"additionalProperties":false,"properties":{"host":{"type":"string","writeOnly":true},"port":{"type":"integer"}}}`),
			Offers:       []*kernelv1.Offer{{Capability: "store", Service: "s"}}, Tools: []string{"t"},
		}),
		"twice": manifest(&kernelv1.Manifest{Offers: []*kernelv1.Offer{{Capability: "store", Service: "s"}}, Tools: []string{"t"}, Appends: []string{"turn/open"}}),
		"loop": manifest(&kernelv1.Manifest{Offers: []*kernelv1.Offer{{Capability: "loop", Service: "l"}},
			Needs: []*kernelv1.Need{{Capability: "loop", Service: "l"}}}),
	}, nil))
	type mistake struct {
		line int
		code string
	}
	var want, got []mistake
	for i, line := range strings.Split(text, "\n") {
		_, codes, _ := strings.Cut(line, " # ")
		for _, code := range strings.Fields(codes) {
			want = append(want, mistake{i + 1, code})
		}
	}
	for _, d := range all {
		got = append(got, mistake{d.Place.Line, string(d.Code)})
	}
	order := func(a, b mistake) int {
		if a.line != b.line {
			return a.line - b.line
		}
		return strings.Compare(a.code, b.code)
	}
	slices.SortFunc(want, order)
	slices.SortFunc(got, order)
	if d := cmp.Diff(want, got, cmp.AllowUnexported(mistake{})); d != "" {
		t.Errorf("mistakes (-want +got):\n%s", d)
	}
	if len(want) < 25 {
		t.Errorf("only %d mistakes", len(want))
	}
	var b bytes.Buffer
	if err := errors.Join(all.Text(&b), all.JSON(&b)); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(b.String(), "hunter2") {
		t.Errorf("diagnostics show a secret:\n%s", b.String())
	}
}

func TestInterpolate(t *testing.T) {
	vars := env(map[string]string{"A": "a", "B": "b", "EMPTY": "", "DOLLAR": "$B ${B}"})
	for _, tc := range []struct{ in, want string }{
		{"plain", "plain"},
		{"$A", "a"}, {"${A}", "a"}, {"x${A}y", "xay"}, {"$A$B", "ab"}, {"$A-$B", "a-b"}, {"$A.b", "a.b"},
		{"$$", "$"}, {"$$A", "$A"}, {"$${A}", "${A}"}, {"$$$A", "$a"},
		{"${EMPTY}", ""},
		{"${NO:-d}", "d"}, {"${NO-d}", "d"}, {"${EMPTY:-d}", "d"}, {"${EMPTY-d}", ""}, {"${A:-d}", "a"}, {"${NO:-}", ""},
		{"${NO:-${B}}", "b"}, {"${NO:-${ALSO:-${B}x}y}z", "bxyz"}, {"${NO:-a:b-c?d}", "a:b-c?d"},
		{"${A:?m}", "a"}, {"${EMPTY?m}", ""}, {"${A:?${NO}}", "a"},
		{"${A:+alt}", "alt"}, {"${NO:+alt}", ""}, {"${EMPTY:+alt}", ""}, {"${EMPTY+alt}", "alt"}, {"${NO:+${NO}}", ""}, {"${A:-${NO}}", "a"},
		{"${NO:-{\"a\": 1}}", "{\"a\": 1}"}, // the first brace ends it, and the last one is text
		{"${DOLLAR}", "$B ${B}"},            // a value is not read again
		{"{}", "{}"}, {"}", "}"}, {"ünï$A", "ünïa"},
	} {
		got, errs := interpolate(tc.in, vars)
		if len(errs) > 0 || got != tc.want {
			t.Errorf("%q becomes %q, %v; want %q", tc.in, got, errs, tc.want)
		}
	}
	for _, tc := range []struct {
		in     string
		code   Code
		offset int
		text   string
	}{
		{"x$", CodeInterpolation, 1, "dollar"},
		{"$5", CodeInterpolation, 0, "dollar"},
		{"a ${}", CodeInterpolation, 2, "without a name"},
		{"${5}", CodeInterpolation, 0, "without a name"},
		{"${A", CodeInterpolation, 0, "not closed"},
		{"${A:-x", CodeInterpolation, 0, "not closed"},
		{"${A:-${B}", CodeInterpolation, 0, "not closed"},
		{"${A!}", CodeInterpolation, 0, "no operator"},
		{"${A:}", CodeInterpolation, 0, "no operator"},
		{"${A b}", CodeInterpolation, 0, "no operator"},
		{"${NO}", CodeUnsetVariable, 0, "NO is not set"},
		{"x $NO", CodeUnsetVariable, 2, "NO is not set"},
		{"${NO:-${ALSO}}", CodeUnsetVariable, 6, "ALSO is not set"},
		{"${NO:?say so}", CodeUnsetVariable, 0, "NO is not set: say so"},
		{"${EMPTY:?}", CodeUnsetVariable, 0, "EMPTY is empty"},
	} {
		got, errs := interpolate(tc.in, vars)
		if len(errs) != 1 || errs[0].code != tc.code || errs[0].offset != tc.offset || !strings.Contains(errs[0].message, tc.text) {
			t.Errorf("%q becomes %q, %+v; want %s at %d: %s", tc.in, got, errs, tc.code, tc.offset, tc.text)
		}
	}
	if _, errs := interpolate("${BIN}", env(map[string]string{"BIN": "\xff"})); len(errs) != 1 {
		t.Errorf("a value that is not text: %v", errs)
	}
	deep := strings.Repeat("${NO:-", 1000) + strings.Repeat("}", 1000)
	if _, errs := interpolate(deep, vars); len(errs) == 0 {
		t.Error("a thousand levels are accepted")
	}
	many := strings.Repeat("$BIG", 100)
	if _, errs := interpolate(many, env(map[string]string{"BIG": strings.Repeat("x", MaxFileSize/10)})); len(errs) == 0 {
		t.Error("a value may grow without limit")
	}
}

func TestFileLimits(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, FileName)
	one := func(ds Diagnostics, code Code) {
		t.Helper()
		if len(ds) != 1 || ds[0].Code != code {
			t.Errorf("got %v, want one %s", ds.Err(), code)
		}
	}
	_, diags := Load(path, noEnv)
	one(diags, CodeUnreadable)
	_, diags = Load(dir, noEnv)
	one(diags, CodeUnreadable)
	if err := os.WriteFile(path, bytes.Repeat([]byte("# text\n"), 10<<20/7), 0o644); err != nil {
		t.Fatal(err)
	}
	_, diags = Load(path, noEnv)
	one(diags, CodeTooLarge)
	if err := os.WriteFile(path, []byte(strings.Repeat("[", 500_000)), 0o644); err != nil {
		t.Fatal(err)
	}
	_, diags = Load(path, noEnv)
	one(diags, CodeSyntax)
}

// TestHostileFiles: a file within all limits must not cost more than a look. What would take minutes or all memory fails
// the test by its time limit.
func TestHostileFiles(t *testing.T) {
	row := "cordon: 1\nplugins:\n  - id: a\n    use: ./bin/a\n    config:\n"
	many := func(n int, format string) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, format, i)
		}
		return b.String()
	}
	for _, tc := range []struct {
		name, text string
		code       Code
	}{
		{"big scalar by aliases", row + "      a: &a " + strings.Repeat("x", 500_000) + "\n      b: [" + strings.Repeat("*a, ", 50_000) + "*a]\n", CodeAlias},
		{"many mistakes in one line", row + "      {" + many(40_000, "k%d: $, ") + "z: 1}\n", CodeTooMany},
		{"many mistakes in one value", row + "      a: " + strings.Repeat("$ ", 400_000) + "\n", CodeInterpolation},
		{"many unknown keys", many(40_000, "unknown-key-%d: x\n"), CodeTooMany},
		{"many rows", "cordon: 1\nplugins:\n" + many(15_000, "  - {id: r%d, use: ./bin/x}\n"), CodeTooMany},
		{"many large variables", row + "      a: [" + strings.Repeat("$BIG, ", 50_000) + "x]\n", CodeInterpolation},
		{"many keys", row + many(60_000, "      k%d: 1\n"), CodeAlias},
		{"nested brackets", strings.Repeat("[", 1_000_000), CodeSyntax},
		{"nested items", strings.Repeat("- ", 500_000), CodeSyntax},
		{"nested keys", strings.Repeat("? ", 500_000), CodeSyntax},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if len(tc.text) > MaxFileSize {
				t.Fatalf("%d bytes are too many", len(tc.text))
			}
			_, diags := load(t, tc.text, map[string]string{"BIG": strings.Repeat("x", 10_000)})
			if !slices.ContainsFunc(diags, func(d *Diagnostic) bool { return d.Code == tc.code }) || len(diags) > maxDiagnostics+1 {
				t.Errorf("%d diagnostics, none %s; first %v", len(diags), tc.code, diags[:min(1, len(diags))])
			}
		})
	}
}

func TestFind(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	deep := filepath.Join(dir, "a", "b")
	if err := os.MkdirAll(deep, 0o755); err != nil {
		t.Fatal(err)
	}
	if path, err := Find(deep); !errors.Is(err, fs.ErrNotExist) {
		t.Skipf("there is a compose file above the temporary directory: %s, %v", path, err)
	}
	outer := filepath.Join(dir, FileName)
	if err := os.WriteFile(outer, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if got, err := Find(deep); err != nil || got != outer {
		t.Errorf("found %s, %v", got, err)
	}
	inner := filepath.Join(deep, FileName)
	if err := os.WriteFile(inner, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if got, err := Find(deep); err != nil || got != inner {
		t.Errorf("found %s, %v", got, err)
	}
}

func TestNamedPlugins(t *testing.T) {
	dir := plugins(t)
	path := filepath.Join(dir, FileName)
	text := "cordon: 1\nplugins:\n  - {id: a, use: a}\n  - {id: self, use: " + filepath.Base(mustExecutable(t)) + "}\n  - {id: data, use: data}\n"
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	plan, diags := Load(path, env(map[string]string{PluginPathVariable: "relative:" + filepath.Join(dir, "bin")}))
	if len(diags) != 1 || diags[0].Code != CodePluginNotExecutable || diags[0].Entry != "" && diags[0].Entry != "data" {
		t.Errorf("diagnostics: %v", diags.Err())
	}
	for id, want := range map[string]string{"a": filepath.Join(plan.Dir, "bin", "a"), "self": mustExecutable(t)} {
		if e := plan.Entry(id); e.Kind != Named || e.Target != want {
			t.Errorf("%s is %s %s, want %s", id, e.Kind, e.Target, want)
		}
	}
}

func TestRedacted(t *testing.T) {
	plan, diags := load(t, `cordon: 1
session: {store: "postgres://me:hunter2@db/x?password=hunter2"}
plugins:
  - id: g
    isolate: [shell]
    plugins:
      - id: web
        use: ./bin/a
        config: {port: 8080, token: "${TOKEN}", nested: {secret: hunter2, shown: "yes"}, list: [{key: hunter2}], odd: hunter2}
        env: {TOKEN: "${TOKEN}"}
        limits: {memory: 1Gi}
  - {id: dark, use: ./bin/b, config: {token: hunter2}, required: false, disabled: true}
`, map[string]string{"TOKEN": "hunter2"})
	if err := diags.Err(); err != nil {
		t.Fatal(err)
	}
	got, err := plan.Redacted(map[string]*kernelv1.Manifest{"web": {ConfigSchema: []byte(`{"type":"object","properties":{"port":{"type":"integer"},"token":{"type":"string","writeOnly":true},
		"nested":{"properties":{"secret":{"writeOnly":true},"shown":{}}},"list":{"items":{"properties":{"key":{"writeOnly":true}}}}}}`)}})
	if err != nil {
		t.Fatal(err)
	}
	want := `cordon: 1
session:
  store: postgres://me:redacted@db/x?redacted
plugins:
  - id: web
    use: ./bin/a
    config:
      port: 8080
      token: <redacted>
      nested:
        secret: <redacted>
        shown: "yes"
      list:
        - key: <redacted>
      odd: <redacted>
    isolate:
      shell: '@g'
    env:
      TOKEN: <redacted>
    limits:
      memory: 1073741824
  - id: dark
    use: ./bin/b
    config: <redacted>
    disabled: true
    required: false
`
	if d := cmp.Diff(want, string(got)); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

// TestSnippetsHideSecrets puts a mistake next to a secret written in every style YAML has.
func TestSnippetsHideSecrets(t *testing.T) {
	for name, secret := range map[string]string{
		"plain":          "hunter2",
		"plain words":    "one hunter2 two",
		"plain lines":    "one\n        hunter2\n        two",
		"single quoted":  "'it''s hunter2'",
		"double quoted":  `"a \" hunter2"`,
		"quoted lines":   "\"a\n        hunter2\"",
		"literal":        "|\n        hunter2\n        more",
		"folded":         ">-\n        hunter2",
		"literal indent": "|2\n         hunter2\n        hunter2",
		"tagged":         "!!str hunter2",
		"anchored":       "&x hunter2",
		"anchored lines": "&x\n        hunter2",
		"list":           "[a, hunter2, {b: hunter2}]",
		"sequence":       "\n        - hunter2",
		"default":        "${UNSET_VARIABLE:-hunter2}",
	} {
		t.Run(name, func(t *testing.T) {
			schema := []byte(`{"type":"object","additionalProperties":false,"properties":{"secret":{"writeOnly":true,"type":"integer"},"shown":{"type":"integer"}}}`)
			plan, diags := load(t, "cordon: 1\nplugins:\n  - id: a\n    use: ./bin/a\n    config:\n      secret: "+secret+"\n      shown: text\n", nil)
			if err := diags.Err(); err != nil {
				t.Fatal(err)
			}
			m := map[string]*kernelv1.Manifest{"a": {KernelMin: 1, KernelMax: 1, ConfigSchema: schema}}
			diags = Check(plan, m, nil)
			var b bytes.Buffer
			if err := errors.Join(diags.Text(&b), diags.JSON(&b)); err != nil {
				t.Fatal(err)
			}
			if len(diags) != 2 || strings.Contains(b.String(), "hunter2") {
				t.Errorf("diagnostics:\n%s", b.String())
			}
			if !strings.Contains(b.String(), "shown: text") {
				t.Errorf("control: what is no secret is not shown:\n%s", b.String())
			}
			// Whatever line is quoted, for whatever reason.
			src := plan.sources[filepath.Join(plan.Dir, FileName)]
			if src == nil {
				src = plan.Entries[0].src
			}
			masks := plan.masks(nil)
			for line := range src.lines {
				d := &Diagnostic{span: span{line + 1, 1, line + 1, 2}}
				src.locate(d, masks[src])
				if strings.Contains(d.Snippet, "hunter2") {
					t.Errorf("line %d shows %q", line+1, d.Snippet)
				}
			}
		})
	}
}

func TestDiagnose(t *testing.T) {
	plan, diags := load(t, "cordon: 1\nplugins:\n  - {id: a, use: ./bin/a, config: {t: hunter2}}\n", nil)
	if err := diags.Err(); err != nil {
		t.Fatal(err)
	}
	d := plan.Diagnose(plan.Entry("a"), "use", CodeBuild, "does not build")
	if d.Place.Line != 3 || d.Place.Column != 18 || d.Entry != "a" || strings.Contains(d.Snippet, "hunter2") || d.Snippet == "" {
		t.Errorf("diagnostic %+v", d)
	}
	if d := plan.Diagnose(plan.Entry("a"), "limits", CodeBuild, "x"); d.Place.Column != 5 {
		t.Errorf("without the key: %+v", d)
	}
}

func TestDiagnosticsJSON(t *testing.T) {
	_, diags := load(t, "cordon: 1\nplugins:\n  - {id: a, use: ./bin/none}\n", nil)
	var b bytes.Buffer
	if err := diags.JSON(&b); err != nil {
		t.Fatal(err)
	}
	var got []map[string]any
	if err := json.Unmarshal(b.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if len(got) != 1 || got[0]["code"] != "C201" || got[0]["place"].(map[string]any)["line"] != 3.0 || got[0]["severity"] != "error" {
		t.Errorf("got %s", b.String())
	}
	b.Reset()
	if err := Diagnostics(nil).JSON(&b); err != nil || b.String() != "[]\n" {
		t.Errorf("no diagnostics are %q, %v", b.String(), err)
	}
}

// TestContract compares descriptors: what the consumer knows must mean the same to the provider.
func TestContract(t *testing.T) {
	type edit func(*descriptorpb.FileDescriptorProto)
	descriptors := func(edits ...edit) []byte {
		str := descriptorpb.FieldDescriptorProto_TYPE_STRING.Enum()
		optional := descriptorpb.FieldDescriptorProto_LABEL_OPTIONAL.Enum()
		f := &descriptorpb.FileDescriptorProto{
			Name: proto.String("s.proto"), Package: proto.String("s.v1"), Syntax: proto.String("proto3"),
			MessageType: []*descriptorpb.DescriptorProto{
				{Name: proto.String("Q"), Field: []*descriptorpb.FieldDescriptorProto{
					{Name: proto.String("key"), Number: proto.Int32(1), Type: str, Label: optional},
					{Name: proto.String("next"), Number: proto.Int32(2), Type: descriptorpb.FieldDescriptorProto_TYPE_MESSAGE.Enum(), TypeName: proto.String(".s.v1.Q"), Label: optional},
				}},
				{Name: proto.String("A")},
			},
			Service: []*descriptorpb.ServiceDescriptorProto{{Name: proto.String("Store"), Method: []*descriptorpb.MethodDescriptorProto{
				{Name: proto.String("Get"), InputType: proto.String(".s.v1.Q"), OutputType: proto.String(".s.v1.A")},
				{Name: proto.String("Put"), InputType: proto.String(".s.v1.Q"), OutputType: proto.String(".s.v1.A")},
			}}},
		}
		for _, e := range edits {
			e(f)
		}
		out, err := proto.Marshal(&descriptorpb.FileDescriptorSet{File: []*descriptorpb.FileDescriptorProto{f}})
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	noPut := func(f *descriptorpb.FileDescriptorProto) { f.Service[0].Method = f.Service[0].Method[:1] }
	noKey := func(f *descriptorpb.FileDescriptorProto) { f.MessageType[0].Field = f.MessageType[0].Field[1:] }
	renamed := func(f *descriptorpb.FileDescriptorProto) { f.MessageType[0].Field[0].Name = proto.String("name") }
	retyped := func(f *descriptorpb.FileDescriptorProto) {
		f.MessageType[0].Field[0].Type = descriptorpb.FieldDescriptorProto_TYPE_INT64.Enum()
	}
	streams := func(f *descriptorpb.FileDescriptorProto) { f.Service[0].Method[0].ServerStreaming = proto.Bool(true) }
	plan, diags := load(t, "cordon: 1\nplugins:\n  - {id: consumer, use: ./bin/a}\n  - {id: provider, use: ./bin/b}\n", nil)
	if err := diags.Err(); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name               string
		consumer, provider []byte
		want               string
	}{
		{"same", descriptors(), descriptors(), ""},
		{"provider is newer", descriptors(noPut), descriptors(), ""},
		{"provider tells nothing", descriptors(), nil, ""},
		{"method missing", descriptors(), descriptors(noPut), "method Put is missing in the provider"},
		{"field missing", descriptors(), descriptors(noKey), "field Q.key is missing in the provider"},
		{"field renamed", descriptors(), descriptors(renamed), "field Q.key is called name in the provider"},
		{"field retyped", descriptors(), descriptors(retyped), "field Q.key has another type in the provider"},
		{"method streams", descriptors(), descriptors(streams), "method Get streams differently"},
	} {
		diags := Check(plan, map[string]*kernelv1.Manifest{
			"consumer": {KernelMin: 1, KernelMax: 1, Descriptors: tc.consumer, Needs: []*kernelv1.Need{{Capability: "store", Service: "s.v1.Store"}}},
			"provider": {KernelMin: 1, KernelMax: 1, Descriptors: tc.provider, Offers: []*kernelv1.Offer{{Capability: "store", Service: "s.v1.Store"}}},
		}, nil)
		switch {
		case tc.want == "" && len(diags) > 0:
			t.Errorf("%s: %v", tc.name, diags[0])
		case tc.want != "" && (len(diags) != 1 || diags[0].Code != CodeContract || !slices.Contains(diags[0].Notes, tc.want)):
			t.Errorf("%s: %+v, want %q", tc.name, diags, tc.want)
		}
	}
}

func TestClosest(t *testing.T) {
	for _, tc := range []struct {
		word string
		of   []string
		want string
	}{
		{"memroy", []string{"memory", "pids"}, "memory"},
		{"use", []string{"id"}, ""},
		{"polcy", []string{"policy", "police"}, "policy"},
		{"x", []string{"y"}, ""},
		{"", []string{"a"}, ""},
		{"completely", []string{"different"}, ""},
	} {
		if got := closest(tc.word, tc.of); got != tc.want {
			t.Errorf("closest(%q, %q) = %q, want %q", tc.word, tc.of, got, tc.want)
		}
	}
}

// TestEveryCodeIsDocumentedAndPinned: a code that nobody can look up or that no golden file shows is a mistake of ours.
func TestEveryCodeIsDocumentedAndPinned(t *testing.T) {
	source, err := os.ReadFile("diagnostic.go")
	if err != nil {
		t.Fatal(err)
	}
	docs, err := os.ReadFile("../../docs/diagnostics.md")
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob("testdata/*.golden")
	if err != nil {
		t.Fatal(err)
	}
	var golden bytes.Buffer
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		golden.Write(data)
	}
	elsewhere := map[string]string{
		"C001": "TestFileLimits", "C002": "TestFileLimits",
		"C013": "TestHostileFiles", "C204": "package trust and the host", "C205": "the host",
		"C501": "package lock", "C502": "package lock", "C503": "package lock", "C504": "package lock", "C601": "the host",
	}
	codes := map[string]bool{}
	for _, m := range regexp.MustCompile(`Code = "(C\d+)"`).FindAllStringSubmatch(string(source), -1) {
		if codes[m[1]] {
			t.Errorf("%s is used twice", m[1])
		}
		codes[m[1]] = true
		if !bytes.Contains(docs, []byte("\n### "+m[1]+" ")) {
			t.Errorf("%s is not in docs/diagnostics.md", m[1])
		}
		if !bytes.Contains(golden.Bytes(), []byte(" "+m[1]+": ")) && elsewhere[m[1]] == "" {
			t.Errorf("%s is in no golden file", m[1])
		}
	}
	for _, m := range regexp.MustCompile(`(?m)^### (C\d+) `).FindAllStringSubmatch(string(docs), -1) {
		if !codes[m[1]] {
			t.Errorf("docs/diagnostics.md has %s, which does not exist", m[1])
		}
	}
	if len(codes) == 0 {
		t.Fatal("no codes found")
	}
}

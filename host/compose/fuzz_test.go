package compose

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
)

// FuzzLoad: whatever the file says, reading ends without a panic, every diagnostic has a place inside the file, what is
// printed speaks to no terminal, and a plan without errors can be checked and shown.
func FuzzLoad(f *testing.F) {
	files, err := filepath.Glob("testdata/*.golden")
	if err != nil {
		f.Fatal(err)
	}
	for _, name := range files {
		data, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		text, _, _ := strings.Cut(string(data), separator)
		f.Add([]byte(text))
	}
	f.Add([]byte("cordon: 1\nplugins: [{id: a, use: ./a, config: {a: \"\x1b[31m\", b: |\n 1}}]"))
	dir := f.TempDir()
	vars := env(map[string]string{"A": "a", "PWD": "/x", "MODE": "read-only"})
	f.Fuzz(func(t *testing.T, text []byte) {
		path := filepath.Join(dir, FileName)
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		plan, diags := Load(path, vars)
		lines := bytes.Count(text, []byte("\n")) + 1
		var b bytes.Buffer
		if err := errors.Join(diags.Text(&b), diags.JSON(&b)); err != nil {
			t.Fatal(err)
		}
		for _, d := range diags {
			if d.Place.Line < 0 || d.Place.Line > lines || d.Message == "" || d.Caret[0] < 0 || d.Caret[1] < 0 {
				t.Errorf("diagnostic %+v", d)
			}
			if strings.ContainsFunc(d.Snippet, func(r rune) bool { return !unicode.IsPrint(r) }) {
				t.Errorf("snippet %q", d.Snippet)
			}
		}
		if plan == nil {
			if len(diags) == 0 {
				t.Error("neither a plan nor a reason")
			}
			return
		}
		manifests := map[string]*kernelv1.Manifest{}
		for _, e := range plan.Entries {
			if !json.Valid(e.Config) {
				t.Errorf("config of %q is not JSON: %q", e.ID, e.Config)
			}
			manifests[e.ID] = &kernelv1.Manifest{KernelMax: 1, ConfigSchema: []byte(`{"properties":{"a":{"type":"string","writeOnly":true}}}`)}
		}
		Check(plan, manifests, nil)
		if !diags.HasErrors() {
			if _, err := plan.Redacted(manifests); err != nil {
				t.Errorf("redacted: %v", err)
			}
		}
	})
}

// FuzzInterpolate: no panic; a text without a dollar sign stays as it is; errors point into the text; a doubled dollar
// sign is always accepted.
func FuzzInterpolate(f *testing.F) {
	for _, s := range []string{"", "$", "${", "${A", "${A:-${B:-c}}", "$$$A", "${A:?m}", "${A:+x}", "a${}b", "${A:-}", "${A!}", "${5}"} {
		f.Add(s)
	}
	vars := env(map[string]string{"A": "a", "E": ""})
	f.Fuzz(func(t *testing.T, s string) {
		got, errs := interpolate(s, vars)
		for _, e := range errs {
			if e.offset < 0 || e.length < 0 || e.offset+e.length > len(s) || e.message == "" {
				t.Errorf("%q: error %+v", s, e)
			}
		}
		if len(errs) > 0 {
			return
		}
		if !strings.Contains(s, "$") && got != s {
			t.Errorf("%q became %q", s, got)
		}
		if utf8.ValidString(s) && !utf8.ValidString(got) {
			t.Errorf("%q became %q", s, got)
		}
		if again, errs := interpolate(strings.ReplaceAll(s, "$", "$$"), vars); len(errs) > 0 || again != s {
			t.Errorf("doubled, %q became %q, %v", s, again, errs)
		}
	})
}

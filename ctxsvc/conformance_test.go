package ctxsvc

import (
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// The container builds with the standard library alone and knows nothing of
// its users.
func TestStandardLibraryOnly(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ImportsOnly)
		if err != nil {
			t.Fatal(err)
		}
		for _, im := range f.Imports {
			if first, _, _ := strings.Cut(strings.Trim(im.Path.Value, `"`), "/"); strings.Contains(first, ".") {
				t.Errorf("%s imports %s", name, im.Path.Value)
			}
		}
	}
}

// TestConformancePage holds docs/conformance/cordis.md to its word: the tests
// it names exist, and rows 1 to 95 each have one or say what was decided.
func TestConformancePage(t *testing.T) {
	page, err := os.ReadFile("../docs/conformance/cordis.md")
	if err != nil {
		t.Fatal(err)
	}
	have := map[string]bool{}
	files, err := filepath.Glob("*_test.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		src, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`(?m)^func (Test\w+)\(`).FindAllSubmatch(src, -1) {
			have[string(m[1])] = true
		}
	}
	named := regexp.MustCompile("`(Test\\w+)`")
	for _, m := range named.FindAllSubmatch(page, -1) {
		if !have[string(m[1])] {
			t.Errorf("the page names %s, which does not exist", m[1])
		}
	}
	rows := map[int]bool{}
	for _, m := range regexp.MustCompile(`(?m)^\| (\d+) \|(.*)$`).FindAllSubmatch(page, -1) {
		n, err := strconv.Atoi(string(m[1]))
		if err != nil {
			t.Fatal(err)
		}
		rows[n] = named.Match(m[2])
	}
	for n := 1; n <= 95; n++ {
		if !rows[n] {
			t.Errorf("row %d is missing or names no test", n)
		}
	}
}

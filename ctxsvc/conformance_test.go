package ctxsvc

import (
	"go/parser"
	"go/token"
	"io/fs"
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
// it names exist, here for the container's own rows and somewhere in the
// repository for the host's, and every row has one or says what was decided.
func TestConformancePage(t *testing.T) {
	page, err := os.ReadFile("../docs/conformance/cordis.md")
	if err != nil {
		t.Fatal(err)
	}
	have := map[string]bool{}
	err = filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		src, err := os.ReadFile(path)
		for _, m := range regexp.MustCompile(`(?m)^func (Test\w+)\(`).FindAllSubmatch(src, -1) {
			have[string(m[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
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
		rows[n] = named.Match(m[2]) || n > 95 && strings.Contains(string(m[2]), "decided: ")
	}
	for n := 1; n <= 148; n++ {
		if !rows[n] {
			t.Errorf("row %d is missing, or names no test and no decision", n)
		}
	}
}

// Package house holds the house rules that a compiler does not: which package may import which.
package house

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/cordon-host/cordon/"

// rules say what a layer may import of ours, by prefix. The first one whose prefix fits a package holds for it. Imports
// point down, never up, and never sideways between plugins.
var rules = []struct {
	layer string
	may   []string
}{
	{"ctxsvc", nil},
	{"api/", []string{"api/"}},
	{"capability/", []string{"api/", "capability/"}},
	{"plugin", []string{"ctxsvc", "api/", "capability/", "plugin"}},
	{"plugins/", []string{"ctxsvc", "api/", "capability/", "plugin"}},
	{"host/builtin", []string{"ctxsvc", "api/", "capability/", "plugin", "host/"}},
	{"host/front/", []string{"ctxsvc", "api/", "capability/", "plugin", "host", "host/"}},
	// The host's root mounts the built-ins and serves the front ends, so it knows both.
	{"host/", []string{"ctxsvc", "api/", "capability/", "host/"}},
	{"host", []string{"ctxsvc", "api/", "capability/", "plugin", "host/"}},
	{"cmd/cordon", []string{"host/front/cli"}},
}

func TestImports(t *testing.T) {
	out, err := exec.Command("go", "list", "-json=ImportPath,Imports", "../../...").Output()
	if err != nil {
		t.Fatal(err)
	}
	dec := json.NewDecoder(strings.NewReader(string(out)))
	seen := 0
	for {
		var p struct {
			ImportPath string
			Imports    []string
		}
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimPrefix(p.ImportPath, module)
		i := slices.IndexFunc(rules, func(r struct {
			layer string
			may   []string
		}) bool {
			return within(name, r.layer)
		})
		if i < 0 {
			continue
		}
		seen++
		for _, imp := range p.Imports {
			own, ours := strings.CutPrefix(imp, module)
			if !ours || slices.ContainsFunc(rules[i].may, func(m string) bool { return within(own, m) }) {
				continue
			}
			t.Errorf("%s imports %s: layer %s may import %v only", name, own, rules[i].layer, rules[i].may)
		}
	}
	if seen < len(rules) {
		t.Errorf("only %d packages were looked at", seen)
	}
}

// within reports whether a package is a layer or, for one that ends in a slash or is a whole path element, below it.
func within(name, layer string) bool {
	if strings.HasSuffix(layer, "/") {
		return strings.HasPrefix(name, layer)
	}
	return name == layer || strings.HasPrefix(name, layer+"/") && layer != "host"
}

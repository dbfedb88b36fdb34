package build

import (
	"path/filepath"
	"testing"
)

// TestSameSourcesSameBinary builds the same sources in two places, from nothing, alone and with others, below a workspace and a
// repository, by a person with other settings: the binary is the same to the byte. The lock file relies on that.
func TestSameSourcesSameBinary(t *testing.T) {
	if testing.Short() {
		t.Skip("compiles the runtime twice")
	}
	files := map[string]string{
		"go.mod": "module example.test/m\n\ngo 1.26\n", "p/main.go": "package main\n\nfunc main() { println(\"p\") }\n", "q/main.go": "package main\n\nfunc main() { println(\"q\") }\n",
	}
	one := tree(t, files)
	t.Setenv("GOCACHE", filepath.Join(t.TempDir(), "go"))
	c := open(t)
	first, err := c.Build(t.Context(), inputs(t, c, filepath.Join(one, "p")))
	if err != nil {
		t.Fatal(err)
	}

	outer := map[string]string{"go.work": "go 1.26\n\nuse ./deep/er/tree\n", ".git/HEAD": "ref: refs/heads/x\n"}
	for name, text := range files {
		outer["deep/er/tree/"+name] = text
	}
	two := filepath.Join(tree(t, outer), "deep/er/tree")
	for name, value := range map[string]string{
		"GOCACHE": filepath.Join(t.TempDir(), "go"), "GOFLAGS": "-tags=other -gcflags=-N", "GOAMD64": "v3", "CGO_ENABLED": "1", "GOEXPERIMENT": "nosuchthing",
		"GOOS": "plan9", "GOARCH": "386", "GODEBUG": "gocachehash=0",
	} {
		t.Setenv(name, value)
	}
	c = open(t)
	in, other := inputs(t, c, filepath.Join(two, "p")), inputs(t, c, filepath.Join(two, "q"))
	results := c.BuildAll(t.Context(), []*Inputs{other, in})
	for _, r := range results {
		if r.Err != nil {
			t.Fatal(r.Err)
		}
	}
	if got := results[1].Binary; got.SHA256 != first.SHA256 {
		t.Errorf("the same sources made %s and %s", first.SHA256, got.SHA256)
	}
	if got := results[0].Binary; got.SHA256 == first.SHA256 {
		t.Error("the control: other sources made the same binary")
	}
	version, platform := in.Compiler()
	if again, where := inputs(t, c, filepath.Join(two, "p")).Compiler(); version == "" || again != version || where != platform {
		t.Errorf("compiler is %s for %s, then %s for %s", version, platform, again, where)
	}
}

package compose_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cordon-host/cordon/host/compose"
)

func TestReservedIDs(t *testing.T) {
	for _, id := range append(compose.ReservedIDs(), "mine") {
		path := filepath.Join(t.TempDir(), "compose.yml")
		if err := os.WriteFile(path, []byte("cordon: 1\nplugins:\n  - id: "+id+"\n    use: /bin/true\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		_, diags := compose.Load(path, os.LookupEnv)
		var text strings.Builder
		if err := diags.Text(&text); err != nil {
			t.Fatal(err)
		}
		if reserved := strings.Contains(text.String(), "C107"); reserved != (id != "mine") {
			t.Errorf("id %s: %s", id, text.String())
		}
	}
}

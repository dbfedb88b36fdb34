package testenv

import "testing"

func TestRequired(t *testing.T) {
	for _, c := range []struct {
		list, token string
		want        bool
	}{
		{"", "bwrap", false}, {"bwrap", "bwrap", true}, {"git, bwrap ,root", "bwrap", true}, {"bwrap2", "bwrap", false},
	} {
		t.Setenv(RequireVar, c.list)
		if got := Required(c.token); got != c.want {
			t.Errorf("%q names %q: %v", c.list, c.token, got)
		}
	}
}

func TestRequire(t *testing.T) {
	t.Setenv(RequireVar, "")
	skipped := true
	t.Run("missing", func(t *testing.T) {
		defer func() { skipped = t.Skipped() }()
		Require(t, "no-such-tool-anywhere")
		t.Error("went on without the tool")
	})
	if !skipped {
		t.Error("not skipped")
	}
	t.Run("there", func(t *testing.T) { Require(t, "sh") })
}

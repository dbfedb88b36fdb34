package cli

import (
	"errors"
	"strings"
	"testing"

	"github.com/cordon-host/cordon/host"
	"github.com/cordon-host/cordon/host/compose"
	"github.com/cordon-host/cordon/host/lock"
)

// bad502 is what a row that is not in the lock file is refused with.
var bad502 = compose.Diagnostics{{
	Code: compose.CodeNotLocked, Severity: compose.Error, Message: "plugin of \"bash\" is not in compose.lock",
	Place: compose.Position{File: "compose.yml", Line: 3, Column: 1},
}}

// moved is a fake whose lock file would change.
func moved() *fake {
	f := newFake()
	f.changes = []lock.Change{
		{Entry: "bash", Kind: lock.Changed, Values: []lock.Difference{{Name: "executable", Old: digest("a"), New: digest("b")}, {Name: "version", Old: "0.1.0", New: "0.2.0\x1b[2J"}}},
		{Entry: "new", Kind: lock.Added, Values: []lock.Difference{{Name: "executable", New: digest("c")}}},
		{Entry: "old", Kind: lock.Removed, Values: []lock.Difference{{Name: "executable", Old: digest("d")}}},
	}
	return f
}

func digest(c string) string { return "sha256:" + strings.Repeat(c, 64) }

func TestLock(t *testing.T) {
	for _, tt := range []struct {
		name   string
		fake   *fake
		args   string
		code   int
		wrote  int
		stdout string // a part of it; empty: nothing at all
		stderr string
	}{
		{"nothing to accept", newFake(), "lock", 0, 0, "", ""},
		{"nothing to accept, checked", newFake(), "lock --check", 0, 0, "", ""},
		{"nothing to accept, JSON", newFake(), "lock --json", 0, 0, `{"path":"/srv/compose.lock","changes":[],"written":false}`, ""},
		{"nobody to ask", moved(), "lock", 1, 0, "~ bash\n", "nobody is here to accept this"},
		{"accepted beforehand", moved(), "lock --yes", 0, 1, "    executable: sha256:aaaaaaaaaaaa… -> sha256:bbbbbbbbbbbb…\n", ""},
		{"accepted, JSON", moved(), "lock --yes --json", 0, 1, `"old":"` + digest("a") + `","new":"` + digest("b") + `"`, ""},
		{"checked", moved(), "lock --check", 5, 0, "+ new\n", "hint: look at it, then run  cordon lock -f "},
		{"checked, JSON", moved(), "lock --check --json", 5, 0, `"written":false`, "does not accept"},
		{"not written", func() *fake { f := moved(); f.writeErr = failf(exitEnvironment, "disk full"); return f }(), "lock --yes", 4, 1, "~ bash", "disk full"},
		{"check and yes", moved(), "lock --check --yes", 2, 0, "", "use one of them"},
		{"locked", moved(), "lock --locked", 2, 0, "", "leave it out"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newShell(t, tt.fake)
			if code := s.run(strings.Fields(tt.args)...); code != tt.code {
				t.Errorf("exit code %d, want %d", code, tt.code)
			}
			if tt.fake.wrote != tt.wrote {
				t.Errorf("written %d times, want %d", tt.fake.wrote, tt.wrote)
			}
			for _, o := range []struct{ got, want string }{{s.stdout.String(), tt.stdout}, {s.stderr.String(), tt.stderr}} {
				if !strings.Contains(o.got, o.want) || o.want == "" && o.got != "" {
					t.Errorf("printed %q, want %q", o.got, o.want)
				}
			}
		})
	}
}

// On a terminal the person is asked, sees what about, and only yes is yes. What a plugin calls its version does not reach the
// terminal as it is.
func TestLockAsks(t *testing.T) {
	for _, tt := range []struct {
		typed       string
		code, wrote int
	}{{"y\n", 0, 1}, {"yes\n", 0, 1}, {"n\n", 1, 0}, {"\n", 1, 0}, {"\x04", 1, 0}} {
		f := moved()
		s := newShell(t, f)
		master, slave := pty(t)
		s.world.stdin, s.world.inTTY, s.world.outTTY, s.world.errTTY = slave, true, true, true
		done := make(chan int)
		go func() { done <- s.run("lock") }()
		s.stderr.await(t, "accept this code? [y/N] ")
		if _, err := master.WriteString(tt.typed); err != nil {
			t.Fatal(err)
		}
		if code := <-done; code != tt.code || f.wrote != tt.wrote {
			t.Errorf("%q: exit code %d, written %d times", tt.typed, code, f.wrote)
		}
		if out := s.stdout.String(); !strings.Contains(out, "- old\n") || strings.Contains(out, "\x1b") {
			t.Errorf("shown %q", out)
		}
	}
}

// TestLockedReachesTheHost: a host of one's own is told, a running one is looked at.
func TestLockedReachesTheHost(t *testing.T) {
	for _, tt := range []struct {
		name            string
		running, locked bool
		args            string
		code            int
	}{
		{"own", false, false, "tools --locked", 0},
		{"own, not locked", false, false, "tools", 0},
		{"running and locked", true, true, "tools --locked", 0},
		{"running and not locked", true, false, "tools --locked", exitTrust},
		{"running, nobody minds", true, false, "tools", 0},
		{"status of one not locked", true, false, "status --locked", exitTrust},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := furnished()
			f.running, f.status.Locked = tt.running, tt.locked
			s := newShell(t, f)
			var got place
			open := s.world.open
			s.world.open = func(p place) deployment { got = p; return open(p) }
			if code := s.run(strings.Fields(tt.args)...); code != tt.code {
				t.Errorf("exit code %d, want %d: %s", code, tt.code, s.stderr)
			}
			if got.locked != strings.Contains(tt.args, "--locked") {
				t.Errorf("the host is told locked=%v", got.locked)
			}
			if tt.code != 0 && !strings.Contains(s.stderr.String(), "was not started with --locked") {
				t.Errorf("the reason is %q", s.stderr)
			}
		})
	}
}

func TestLockErrorIsTrust(t *testing.T) {
	err := coded(&host.LockError{Diagnostics: bad502})
	var f *failure
	if !errors.As(err, &f) || f.code != exitTrust || !strings.Contains(f.text, "C502") {
		t.Errorf("%#v", err)
	}
}

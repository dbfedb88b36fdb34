package sqlite_test

import (
	"path/filepath"
	"testing"

	"github.com/cordon-host/cordon/host/session"
	"github.com/cordon-host/cordon/host/session/store/sqlite"
	"github.com/cordon-host/cordon/host/session/storetest"
)

func open(t *testing.T, path string) *sqlite.Store {
	t.Helper()
	s, err := sqlite.Open(t.Context(), path, sqlite.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func TestStore(t *testing.T) {
	storetest.Run(t, func(t *testing.T) (session.Store, func() session.Store) {
		// A name that would be taken apart if it were pasted into a URI.
		path := filepath.Join(t.TempDir(), "state", "a?b=c#d%41 é.db")
		s := open(t, path)
		return s, func() session.Store {
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			s = open(t, path)
			return s
		}
	})
}

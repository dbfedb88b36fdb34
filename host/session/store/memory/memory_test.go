package memory_test

import (
	"testing"

	"github.com/cordon-host/cordon/host/session"
	"github.com/cordon-host/cordon/host/session/store/memory"
	"github.com/cordon-host/cordon/host/session/storetest"
)

func TestStore(t *testing.T) {
	storetest.Run(t, func(*testing.T) (session.Store, func() session.Store) { return memory.New(), nil })
}

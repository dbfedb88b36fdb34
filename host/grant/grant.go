// Package grant keeps what people allowed, for the one call they allowed it for.
//
// The host mints a grant when a decision is in the log, hands its id to whoever asked, and exchanges it, once, for what
// it grants. An id is worth nothing outside the call tree it was minted in, in another plugin's hands, or a second time.
package grant

import (
	"crypto/rand"
	"sync"

	"google.golang.org/grpc/codes"

	"github.com/cordon-host/cordon/capability/fault"
)

// ScopeMode is the scope of a wider sandbox mode.
const ScopeMode = "sandbox-mode"

// Grant is what was allowed.
type Grant struct {
	Call       string // the call tree it is good for
	Capability string // only its provider may redeem it
	Scope      string
	Value      string
	Approval   string // id of the approval/asked event
	Subject    string // what the person was shown
	Cwd        string
}

// Store holds the grants of the calls in progress.
type Store struct {
	mu sync.Mutex
	m  map[string]*entry
}

type entry struct {
	Grant
	used bool
}

// NewStore makes an empty store.
func NewStore() *Store { return &Store{m: map[string]*entry{}} }

// Mint makes a grant and returns its id.
func (s *Store) Mint(g Grant) string {
	id := "g-" + rand.Text()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.m[id] = &entry{Grant: g}
	return id
}

// Redeem exchanges a grant for what it grants. Call is the call tree of whoever redeems it, offers says which capabilities
// they provide. The errors are faults with the reasons GRANT_UNKNOWN, GRANT_FOREIGN and GRANT_USED; a refused attempt
// leaves the grant as it was.
func (s *Store) Redeem(id, call string, offers func(capability string) bool) (Grant, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e, ok := s.m[id]
	switch {
	case !ok:
		return Grant{}, fault.New(codes.PermissionDenied, "GRANT_UNKNOWN", "grant is unknown: it was never minted, or its call has ended")
	case e.Call != call:
		return Grant{}, fault.New(codes.PermissionDenied, "GRANT_FOREIGN", "grant belongs to another call")
	case !offers(e.Capability):
		return Grant{}, fault.New(codes.PermissionDenied, "GRANT_FOREIGN", "grant can be redeemed by the provider of %s only", e.Capability)
	case e.used:
		return Grant{}, fault.New(codes.PermissionDenied, "GRANT_USED", "grant was used already: an approval holds for one operation")
	}
	e.used = true
	return e.Grant, nil
}

// EndCall forgets the grants of a call.
func (s *Store) EndCall(call string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, e := range s.m {
		if e.Call == call {
			delete(s.m, id)
		}
	}
}

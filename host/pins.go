package host

import (
	"context"
	"errors"
	"sync"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	permissionv1 "github.com/cordon-host/cordon/api/permission/v1"
	rules "github.com/cordon-host/cordon/capability/session"
	"github.com/cordon-host/cordon/host/route"
	"github.com/cordon-host/cordon/host/session"
)

// pins are the swaps of this host's life, and how many of them each live session has heard of. A session with an open turn hears of
// one at once, an idle one with its next turn.
type pins struct {
	mu    sync.Mutex
	all   []rules.Pin
	heard map[string]int // by session
}

func newPins() *pins { return &pins{heard: map[string]int{}} }

// begin makes a new session know nothing of what was before it.
func (p *pins) begin(session string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.heard[session] = len(p.all)
}

// due are the pins a session has not heard of; told says that they are in its log.
func (p *pins) due(_ context.Context, s *session.Session) (due []session.Draft, told func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := len(p.all)
	for _, pin := range p.all[min(p.heard[s.ID()], n):] {
		due = append(due, session.Draft{Type: rules.TypePin, Data: pin})
	}
	return due, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.heard[s.ID()] = max(p.heard[s.ID()], n)
	}
}

// add records a swap and tells the sessions that are in the middle of a turn.
func (p *pins) add(ctx context.Context, pin rules.Pin, live []*session.Session) error {
	p.mu.Lock()
	p.all = append(p.all, pin)
	p.mu.Unlock()
	var errs []error
	for _, s := range live {
		if len(s.OpenTurns()) == 0 {
			continue
		}
		due, told := p.due(ctx, s)
		if _, err := s.AppendAll(ctx, due...); err != nil {
			errs = append(errs, err)
			continue
		}
		told()
	}
	return errors.Join(errs...)
}

// pinPermissions lets the provider of presets, if there is one, fill in what a session does not say.
func (h *Host) pinPermissions(ctx context.Context, session string) error {
	if _, err := (resolver{h}).Resolve(route.HostEntry, "permission"); err != nil {
		return err
	}
	tree := route.NewTree(route.Call{Session: session, Purpose: kernelv1.PurposePin})
	defer h.endTree(tree)
	_, err := permissionv1.NewPermissionClient(h.router.Conn(tree, "permission")).Pin(ctx, &permissionv1.PinRequest{})
	return err
}

// sweep pins every live session: presets that come late fill in what is missing and change nothing else.
func (h *Host) sweep(ctx context.Context) {
	for _, s := range h.sessions.Live() {
		if err := h.pinPermissions(ctx, s.ID()); err != nil {
			h.log.Warn("session not pinned", "session", s.ID(), "error", err)
		}
	}
}

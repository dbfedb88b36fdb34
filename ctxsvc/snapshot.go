package ctxsvc

import (
	"errors"
	"fmt"
	"sort"
	"strings"
)

// Snapshot is the container at one moment, as data.
type Snapshot struct {
	Root      FiberInfo     `json:"root"`
	Services  []ServiceInfo `json:"services,omitempty"`
	Events    []EventInfo   `json:"events,omitempty"`
	Cycles    [][]string    `json:"cycles,omitempty"`    // fiber names, the first repeated at the end
	Abandoned int           `json:"abandoned,omitempty"` // calls given up on that still run
}

// FiberInfo describes one fiber and everything below it.
type FiberInfo struct {
	UID      uint64       `json:"uid"`
	Name     string       `json:"name"`
	State    State        `json:"state"`
	Err      string       `json:"error,omitempty"`
	Needs    []NeedInfo   `json:"needs,omitempty"`
	Waiting  []WaitReason `json:"waiting,omitempty"`
	Effects  []EffectInfo `json:"effects,omitempty"` // oldest first
	Children []FiberInfo  `json:"children,omitempty"`
}

// NeedInfo describes one need of a fiber.
type NeedInfo struct {
	Name     string `json:"name"`
	Optional bool   `json:"optional,omitempty"`
	Realm    string `json:"realm,omitempty"`
	Provider uint64 `json:"provider,omitempty"` // uid of the fiber that meets it now
	Met      bool   `json:"met"`                // an optional need whose provider has an availability check shows false
}

// WaitReason says why a need is not met.
type WaitReason struct {
	Name   string `json:"name"`
	Realm  string `json:"realm,omitempty"`
	Reason string `json:"reason"`
}

func (w WaitReason) String() string { return fmt.Sprintf("service %q: %s", w.Name, w.Reason) }

// EffectInfo describes one effect.
type EffectInfo struct {
	Label    string       `json:"label"`
	Kind     string       `json:"kind"` // effect, group, plugin, service, listener
	State    string       `json:"state"`
	Fiber    uint64       `json:"fiber,omitempty"` // of a plugin effect
	Children []EffectInfo `json:"children,omitempty"`
}

// ServiceInfo describes one provided service.
type ServiceInfo struct {
	Name         string      `json:"name"`
	Realm        string      `json:"realm,omitempty"`
	Provider     uint64      `json:"provider"`
	ProviderName string      `json:"providerName"`
	Available    bool        `json:"available"`
	Generation   uint64      `json:"generation"`
	Facts        any         `json:"facts,omitempty"`
	Dependents   []Dependent `json:"dependents,omitempty"` // in the order they were created
}

// Dependent is a fiber that needs a service.
type Dependent struct {
	UID      uint64 `json:"uid"`
	Name     string `json:"name"`
	Optional bool   `json:"optional,omitempty"`
	Running  bool   `json:"running"` // its present load runs with the service
}

// EventInfo describes one event that has listeners.
type EventInfo struct {
	Name       string         `json:"name"`
	Contract   string         `json:"contract"`
	FailClosed bool           `json:"failClosed,omitempty"`
	Listeners  []ListenerInfo `json:"listeners"` // outermost first
}

// ListenerInfo describes one listener.
type ListenerInfo struct {
	Label    string `json:"label"`
	Kind     string `json:"kind"` // around, answer, map, tap
	Fiber    uint64 `json:"fiber"`
	Name     string `json:"name"` // of the fiber
	Subject  string `json:"subject,omitempty"`
	Prepend  bool   `json:"prepend,omitempty"`
	Once     bool   `json:"once,omitempty"`
	Global   bool   `json:"global,omitempty"`
	Terminal bool   `json:"terminal,omitempty"`
}

// Snapshot describes the whole container.
func (x *Context) Snapshot() Snapshot {
	c := x.c()
	c.mu.Lock()
	defer c.mu.Unlock()
	s := Snapshot{Root: c.root.info(), Abandoned: int(c.abandoned.Load())}
	for im := range c.impls {
		s.Services = append(s.Services, im.info())
	}
	sort.Slice(s.Services, func(i, j int) bool {
		a, b := s.Services[i], s.Services[j]
		if a.Name != b.Name {
			return a.Name < b.Name
		}
		if a.Realm != b.Realm {
			return a.Realm < b.Realm
		}
		return a.Provider < b.Provider
	})
	if tables := c.events.Load(); tables != nil {
		for _, t := range *tables {
			if t.any() {
				s.Events = append(s.Events, t.info())
			}
		}
	}
	sort.Slice(s.Events, func(i, j int) bool { return s.Events[i].Name < s.Events[j].Name })
	s.Cycles = c.cycles()
	return s
}

func (f *Fiber) info() FiberInfo {
	out := FiberInfo{UID: f.uid, Name: f.Name(), State: f.state}
	if f.err != nil {
		out.Err = f.err.Error()
	}
	for i := range f.needs {
		n := &f.needs[i]
		im, ok, _ := n.visible()
		ni := NeedInfo{Name: n.Name, Optional: n.Optional, Realm: n.realm.String(), Met: ok}
		if ok {
			ni.Provider = im.fiber.uid
		}
		out.Needs = append(out.Needs, ni)
	}
	out.Waiting = f.reasons()
	ep := f.live.Load()
	out.Effects, out.Children = ep.root.members()
	return out
}

func (e *Effect) members() (effects []EffectInfo, fibers []FiberInfo) {
	for m := e.first; m != nil; m = m.next {
		ei := EffectInfo{Label: m.label, Kind: kindNames[m.kind], State: effectStateNames[m.state]}
		if m.kind == kindFiber {
			ei.Label, ei.Fiber = m.child.Name(), m.child.uid
			fibers = append(fibers, m.child.info())
		}
		var below []FiberInfo
		ei.Children, below = m.members()
		fibers = append(fibers, below...)
		effects = append(effects, ei)
	}
	return effects, fibers
}

func (im *impl) info() ServiceInfo {
	p := im.now.Load()
	s := ServiceInfo{
		Name: im.name, Realm: im.realm.String(), Provider: im.fiber.uid, ProviderName: im.fiber.Name(),
		Available: !im.withdrawn && im.fiber.state == Active, Generation: p.generation, Facts: p.facts,
	}
	for el := im.realm.dependents.Front(); el != nil; el = el.Next() {
		n := el.Value.(*need)
		s.Dependents = append(s.Dependents, Dependent{
			UID: n.fiber.uid, Name: n.fiber.Name(), Optional: n.Optional,
			Running: n.bound == im || n.Optional && n.fiber.loaded,
		})
	}
	return s
}

func (t *eventTable) info() EventInfo {
	k := t.contract.Load()
	out := EventInfo{Name: t.name, Contract: k.typ.String(), FailClosed: k.failClosed}
	add := func(l *listener) {
		out.Listeners = append(out.Listeners, ListenerInfo{
			Label: l.label, Kind: listenerKindNames[l.kind], Fiber: l.ctx.fiber.uid, Name: l.ctx.fiber.Name(),
			Subject: l.subject, Prepend: l.prepend, Once: l.once, Global: l.global, Terminal: l.terminal,
		})
	}
	for el := t.order.Front(); el != nil; el = el.Next() {
		add(el.Value.(*listener))
	}
	if t.terminal != nil {
		add(t.terminal)
	}
	return out
}

// Waiting returns the names of the needs that hold up the fiber's load.
func (f *Fiber) Waiting() []string {
	var out []string
	for _, r := range f.WaitReasons() {
		out = append(out, r.Name)
	}
	return out
}

// WaitReasons returns what holds up the fiber's load, and why.
func (f *Fiber) WaitReasons() []WaitReason {
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	return f.reasons()
}

// reasons explains unmet needs. The lock is held.
func (f *Fiber) reasons() []WaitReason {
	if f.loaded || f.disposing {
		return nil
	}
	var out []WaitReason
	for i := range f.needs {
		n := &f.needs[i]
		if n.Optional {
			continue
		}
		im, ok, known := n.visible()
		if ok {
			continue
		}
		w := WaitReason{Name: n.Name, Realm: n.realm.String()}
		switch {
		case im == nil:
			w.Reason = f.c.missing(n)
		case !known:
			w.Reason = fmt.Sprintf("%s is being asked whether it is available", im.fiber.Name())
		case im.withdrawn:
			w.Reason = fmt.Sprintf("%s is withdrawing it", im.fiber.Name())
		case im.fiber.state != Active:
			w.Reason = fmt.Sprintf("%s is %s", im.fiber.Name(), im.fiber.state)
		default:
			w.Reason = fmt.Sprintf("%s says it is not available here", im.fiber.Name())
		}
		out = append(out, w)
	}
	return out
}

// missing explains a need nobody provides for. The lock is held.
func (c *container) missing(n *need) string {
	if path := c.cycleFrom(n.fiber); path != nil {
		return "waits for itself: " + strings.Join(path, " → ")
	}
	if gs := c.promising(n); len(gs) > 0 {
		g := gs[0]
		if g.err != nil {
			return fmt.Sprintf("%s, which offers it, is %s: %v", g.Name(), g.state, g.err)
		}
		return fmt.Sprintf("%s, which offers it, is %s", g.Name(), g.state)
	}
	for im := range c.impls {
		if im.name == n.Name {
			return fmt.Sprintf("no provider in %s; %s provides it in %s: check isolate",
				place(n.realm), im.fiber.Name(), place(im.realm))
		}
	}
	return "no provider: is a plugin that offers it loaded?"
}

func place(r *realm) string {
	if s := r.String(); s != "" {
		return "realm " + s
	}
	return "the common realm"
}

// promising returns the fibers whose plugin says it provides what n needs, in
// n's realm, by age. The lock is held.
func (c *container) promising(n *need) []*Fiber {
	var out []*Fiber
	for g := range c.promises[n.Name] {
		if g.mount.realmOf(n.Name) == n.realm {
			out = append(out, g)
		}
	}
	sort.Slice(out, func(i, j int) bool { return out[i].uid < out[j].uid })
	return out
}

// blockers returns the fibers f waits for: those that hold or promise a
// service it lacks. The lock is held.
func (c *container) blockers(f *Fiber) []*Fiber {
	var out []*Fiber
	if f.loaded || f.disposing {
		return nil
	}
	for i := range f.needs {
		n := &f.needs[i]
		if n.Optional {
			continue
		}
		if im, ok, _ := n.visible(); ok {
			continue
		} else if im != nil {
			out = append(out, im.fiber)
			continue
		}
		out = append(out, c.promising(n)...)
	}
	return out
}

// cycleFrom returns a path of waiting fibers from f back to f, as names, or
// nil. The lock is held.
func (c *container) cycleFrom(f *Fiber) []string {
	seen := map[*Fiber]bool{}
	var path []string
	var visit func(g *Fiber) bool
	visit = func(g *Fiber) bool {
		if seen[g] {
			return false
		}
		seen[g] = true
		path = append(path, g.Name())
		for _, b := range c.blockers(g) {
			if b == f || visit(b) {
				return true
			}
		}
		path = path[:len(path)-1]
		return false
	}
	if !visit(f) {
		return nil
	}
	return append(path, f.Name())
}

// cycles returns every fiber cycle once, starting at its oldest member. The
// lock is held.
func (c *container) cycles() [][]string {
	var uids []uint64
	for uid, f := range c.fibers {
		if f.state == Pending && len(f.needs) > 0 && len(f.plugin.Provides) > 0 {
			uids = append(uids, uid)
		}
	}
	sort.Slice(uids, func(i, j int) bool { return uids[i] < uids[j] })
	var out [][]string
	told := map[string]bool{}
	for _, uid := range uids {
		path := c.cycleFrom(c.fibers[uid])
		if path == nil {
			continue
		}
		members := append([]string(nil), path[:len(path)-1]...)
		sort.Strings(members)
		key := strings.Join(members, "\x00")
		if !told[key] {
			told[key] = true
			out = append(out, path)
		}
	}
	return out
}

// Audit returns an error that joins everything in the container that is not
// running: a [CycleError] for each dependency cycle, an [UnmetError] for each
// fiber that waits, the error of each fiber that failed. It is nil when all
// fibers are active. Call it after [Context.Quiesce].
func (x *Context) Audit() error {
	c := x.c()
	c.mu.Lock()
	defer c.mu.Unlock()
	var uids []uint64
	for uid := range c.fibers {
		uids = append(uids, uid)
	}
	sort.Slice(uids, func(i, j int) bool { return uids[i] < uids[j] })
	var errs []error
	for _, path := range c.cycles() {
		errs = append(errs, &CycleError{Path: path})
	}
	for _, uid := range uids {
		f := c.fibers[uid]
		switch {
		case f.err != nil && !f.loaded:
			errs = append(errs, f.err)
		case f.state == Pending:
			if rs := f.reasons(); len(rs) > 0 {
				errs = append(errs, &UnmetError{Fiber: f.Name(), Reasons: rs})
			}
		}
	}
	return errors.Join(errs...)
}

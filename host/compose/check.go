package compose

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"gopkg.in/yaml.v3"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	rules "github.com/cordon-host/cordon/capability/session"
)

// KernelVersion is the minor version of the kernel protocol the host speaks.
const KernelVersion = 1

// Names the rules below are about.
const (
	policyCapability = "policy"
	approvalEvent    = "approval/request"
)

// part is something that takes part in the composition: a row or a built-in of the host.
type part struct {
	name     string
	entry    *Entry // nil for a built-in
	manifest *kernelv1.Manifest
}

func (p part) realm(capability string) string {
	if p.entry == nil {
		return RootRealm
	}
	return p.entry.Realm(capability)
}

func (p part) offers(capability string) *kernelv1.Offer {
	for _, o := range p.manifest.GetOffers() {
		if o.GetCapability() == capability {
			return o
		}
	}
	return nil
}

// Check decides whether a plan holds together. manifests are those of the rows, by id; builtins those of what the host
// itself mounts in the root realm, by name. A row without a manifest is one that could not be described: what depends
// on what it may offer is then left undecided, which is no licence to start anything, since its own error stands.
func Check(plan *Plan, manifests, builtins map[string]*kernelv1.Manifest) Diagnostics {
	c := &checker{plan: plan, schemas: map[string]*schema{}, complete: true}
	for _, name := range slices.Sorted(maps.Keys(builtins)) {
		c.parts = append(c.parts, part{name, nil, builtins[name]})
	}
	for _, e := range plan.Entries {
		m := manifests[e.ID]
		if m == nil {
			c.complete = c.complete && e.Disabled
			continue
		}
		p := part{e.ID, e, m}
		c.config(p)
		c.known = append(c.known, m)
		if e.Disabled {
			c.disabled = append(c.disabled, p)
			continue
		}
		c.parts = append(c.parts, p)
	}
	for _, m := range builtins {
		c.known = append(c.known, m)
	}
	c.kernel()
	c.providers()
	c.needs()
	c.cycles()
	c.tools()
	c.events()
	c.finish(plan.masks(c.schemas))
	return c.diags
}

type checker struct {
	collector
	plan     *Plan
	parts    []part // enabled ones, built-ins first
	disabled []part
	known    []*kernelv1.Manifest
	schemas  map[string]*schema // by row id
	// complete is set if the manifest of every enabled row is known.
	complete bool
	offered  map[offerKey]part
}

type offerKey struct{ capability, realm string }

// fail reports about a row at one of its keys, or at the row.
func (c *checker) fail(e *Entry, key string, code Code, format string, args ...any) *Diagnostic {
	n := e.row
	if f, ok := e.keys[key]; ok {
		n = f.value
	}
	return c.failAt(e, n, code, format, args...)
}

func (c *checker) failAt(e *Entry, n *yaml.Node, code Code, format string, args ...any) *Diagnostic {
	d := c.report(e.src, n, Error, code, format, args...)
	d.Entry = e.ID
	return d
}

// where names a part with its line, for use inside a sentence.
func where(p part) string {
	if p.entry == nil {
		return fmt.Sprintf("%q (built into cordon)", p.name)
	}
	return fmt.Sprintf("%q (line %d)", p.name, p.entry.Place.Line)
}

func realmName(label string) string {
	if label == RootRealm {
		return "the root realm"
	}
	if id, private := strings.CutPrefix(label, "@"); private {
		return fmt.Sprintf("the realm of %q", id)
	}
	return fmt.Sprintf("realm %q", label)
}

// config checks a row's config against the schema of its plugin.
func (c *checker) config(p part) {
	e := p.entry
	s, err := compileSchema(p.manifest.GetConfigSchema())
	if err != nil {
		d := c.fail(e, "use", CodeSchema, "config schema of %q cannot be used", e.ID).hint("this is a mistake of the plugin")
		for line := range strings.Lines(err.Error()) {
			d.note("%s", strings.TrimSpace(line))
		}
		return
	}
	c.schemas[e.ID] = s
	if e.broken {
		return
	}
	violations, err := s.validate(e.Config)
	if err != nil {
		c.fail(e, "config", CodeConfig, "config of %q cannot be checked", e.ID)
		return
	}
	for _, v := range violations {
		n := c.configPlace(e, v)
		text := v.message
		if at := pathText(v.pointer, v.onKey && strings.Contains(v.message, "unknown key")); at != "" {
			text = at + ": " + text
		}
		d := c.failAt(e, n, CodeConfig, "config of %q: %s", e.ID, text)
		d.Hints = append(d.Hints, v.hints...)
	}
}

func (c *checker) configPlace(e *Entry, v violation) *yaml.Node {
	for pointer := v.pointer; ; pointer = pointer[:strings.LastIndexByte(pointer, '/')] {
		if node, ok := e.nodes[pointer]; ok {
			if v.onKey && node.key != nil {
				return node.key
			}
			if pointer == "" {
				return e.keys["config"].key
			}
			return node.value
		}
		if pointer == "" {
			if f, ok := e.keys["config"]; ok {
				return f.key
			}
			if f, ok := e.keys["use"]; ok {
				return f.value
			}
			return e.row
		}
	}
}

// pathText is a JSON pointer as people write it: a.b[2].c; without its last element if parent.
func pathText(pointer string, parent bool) string {
	if parent {
		pointer = pointer[:strings.LastIndexByte(pointer, '/')]
	}
	var b strings.Builder
	for token := range strings.SplitSeq(strings.TrimPrefix(pointer, "/"), "/") {
		name := strings.NewReplacer("~1", "/", "~0", "~").Replace(token)
		switch {
		case name == "":
		case strings.Trim(name, "0123456789") == "":
			fmt.Fprintf(&b, "[%s]", name)
		case b.Len() > 0:
			b.WriteString("." + name)
		default:
			b.WriteString(name)
		}
	}
	return b.String()
}

func (c *checker) kernel() {
	for _, p := range c.parts {
		if p.entry == nil {
			continue
		}
		if low, high := p.manifest.GetKernelMin(), p.manifest.GetKernelMax(); KernelVersion < low || KernelVersion > high {
			d := c.fail(p.entry, "use", CodeKernel, "%q speaks versions %d to %d of the kernel protocol, this cordon %d", p.name, low, high, KernelVersion)
			if KernelVersion > high {
				d.hint("build the plugin against the current SDK")
			} else {
				d.hint("the plugin needs a newer cordon")
			}
		}
		if p.entry.Answers != AnswersNone && !slices.ContainsFunc(p.manifest.GetListeners(), func(l *kernelv1.Listener) bool { return l.GetEvent() == approvalEvent }) {
			c.fail(p.entry, "answers", CodeAnswers, "%q answers nothing: its plugin does not listen to %s", p.name, approvalEvent).hint("remove the key")
		}
	}
}

func (c *checker) providers() {
	c.offered = map[offerKey]part{}
	for _, p := range c.parts {
		for _, o := range p.manifest.GetOffers() {
			key := offerKey{o.GetCapability(), p.realm(o.GetCapability())}
			first, taken := c.offered[key]
			if !taken {
				c.offered[key] = p
				continue
			}
			if p.entry == nil || first.name == p.name {
				continue // the host's own business, or a manifest that repeats itself
			}
			d := c.fail(p.entry, "use", CodeTwoProviders, "%q offers %q in %s, which %q offers already", p.name, key.capability, realmName(key.realm), first.name)
			if first.entry == nil {
				d.note("%q is built into cordon", first.name).hint("isolate it:  isolate: [%s]", key.capability)
				continue
			}
			d.related(first.entry.Place, "%q is here", first.name)
			d.hint("remove or disable one, or give one a realm of its own:  isolate: [%s]", key.capability)
		}
	}
	for _, p := range c.parts {
		if p.entry == nil {
			continue
		}
		for _, capability := range slices.Sorted(maps.Keys(p.entry.Isolate)) {
			c.idleIsolate(p, capability)
		}
	}
}

// idleIsolate warns of a row that isolates a capability nothing in its reach has to do with.
func (c *checker) idleIsolate(p part, capability string) {
	own, ok := p.entry.keys["isolate"]
	if !ok || !c.complete {
		return
	}
	names, _ := isolated(own.value)
	if !slices.Contains(names, capability) || p.offers(capability) != nil ||
		slices.ContainsFunc(p.manifest.GetNeeds(), func(n *kernelv1.Need) bool { return n.GetCapability() == capability }) {
		return
	}
	d := c.report(p.entry.src, own.value, Warning, CodeIdleIsolate, "%q isolates %q, but neither needs nor offers it", p.name, capability)
	d.Entry = p.name
	var touched []string
	for _, n := range p.manifest.GetNeeds() {
		touched = append(touched, n.GetCapability())
	}
	for _, o := range p.manifest.GetOffers() {
		touched = append(touched, o.GetCapability())
	}
	if best := closest(capability, touched); best != "" {
		d.hint("did you mean %q?", best)
	}
}

func isolated(n *yaml.Node) ([]string, bool) {
	switch v := deref(n); v.Kind {
	case yaml.SequenceNode:
		var names []string
		for _, item := range v.Content {
			names = append(names, deref(item).Value)
		}
		return names, true
	case yaml.MappingNode:
		names, _ := fields(v)
		return names, true
	}
	return nil, false
}

func (c *checker) needs() {
	for _, p := range c.parts {
		if p.entry == nil {
			continue
		}
		confinedBy := c.offered[offerKey{policyCapability, p.realm(policyCapability)}]
		unpoliced := p.manifest.GetConfines() && confinedBy.manifest == nil && p.offers(policyCapability) == nil
		if unpoliced && c.complete {
			d := c.fail(p.entry, "use", CodeNoPolicy, "%q (line %d) confines what it runs, but nothing offers %q in %s", p.name, p.entry.Place.Line, policyCapability, realmName(p.realm(policyCapability)))
			if !c.elsewhere(d, p, policyCapability) {
				d.hint("add a row for a policy plugin, such as sandbox-policy; without one nothing says how far a call may reach")
			}
		}
		if p.manifest.GetUnconfined() && !p.entry.Unconfined {
			c.fail(p.entry, "use", CodeUnconfined, "plugin of %q asks to run outside the confinement of plugins, and the row does not grant it", p.name).
				hint("add unconfined: true to the row if you trust this plugin as you trust cordon itself; it will be able to do what your user can")
		}
		for _, n := range p.manifest.GetNeeds() {
			c.need(p, n, unpoliced)
		}
	}
}

func (c *checker) need(p part, n *kernelv1.Need, unpoliced bool) {
	capability := n.GetCapability()
	realm := p.realm(capability)
	provider, ok := c.offered[offerKey{capability, realm}]
	if !ok {
		if n.GetOptional() || !c.complete || unpoliced && capability == policyCapability {
			return
		}
		d := c.fail(p.entry, "use", CodeUnmetNeed, "%q needs %q, nothing in %s offers it", p.name, capability, realmName(realm))
		if !p.entry.Required {
			d.Severity = Warning
			d.note("the row is not required, so it will wait")
		}
		if c.elsewhere(d, p, capability) {
			return
		}
		var names []string
		for _, o := range c.parts {
			for _, offer := range o.manifest.GetOffers() {
				names = append(names, offer.GetCapability())
			}
		}
		if best := closest(capability, names); best != "" {
			d.hint("did you mean %q?", best)
		} else {
			d.hint("add a row whose plugin offers %q", capability)
		}
		return
	}
	offer := provider.offers(capability)
	if offer.GetService() != n.GetService() {
		d := c.fail(p.entry, "use", CodeContract, "%q needs %q as %s, but %q offers it as %s", p.name, capability, n.GetService(), provider.name, offer.GetService())
		c.here(d, provider)
		d.hint("build both against the same version of the contract")
		return
	}
	c.contract(p, provider, n)
}

func (c *checker) here(d *Diagnostic, p part) {
	if p.entry != nil {
		d.related(p.entry.Place, "%q is here", p.name)
	} else {
		d.note("%q is built into cordon", p.name)
	}
}

// elsewhere notes who offers capability where p cannot see it, and how to change that.
func (c *checker) elsewhere(d *Diagnostic, p part, capability string) bool {
	found := false
	realm := p.realm(capability)
	for _, o := range c.parts {
		if o.offers(capability) == nil || o.realm(capability) == realm {
			continue
		}
		d.note("offered by %s in %s; %q is in %s", where(o), realmName(o.realm(capability)), p.name, realmName(realm))
		if label := o.realm(capability); label == RootRealm {
			d.hint("take %q out of the isolate around %q", capability, p.name)
		} else if !strings.HasPrefix(label, "@") {
			d.hint("add  isolate: {%s: %s}  to %q, or remove it from %q", capability, label, p.name, o.name)
		} else {
			d.hint("move one of them so that both are below the same isolate, or name the realm:  isolate: {%s: NAME}  on both", capability)
		}
		found = true
	}
	for _, o := range c.disabled {
		if o.offers(capability) != nil && o.realm(capability) == realm {
			d.note("offered by %s, which is disabled", where(o))
			d.hint("enable %q", o.name)
			found = true
		}
	}
	return found
}

// cycles reports each knot of rows that wait for one another, as a path. Optional needs do not make anything wait.
func (c *checker) cycles() {
	edges := map[string][]edge{}
	index := map[string]part{}
	for _, p := range c.parts {
		if p.entry == nil {
			continue
		}
		index[p.name] = p
		for _, n := range p.manifest.GetNeeds() {
			if n.GetOptional() {
				continue
			}
			if to, ok := c.offered[offerKey{n.GetCapability(), p.realm(n.GetCapability())}]; ok && to.entry != nil {
				edges[p.name] = append(edges[p.name], edge{n.GetCapability(), to.name})
			}
		}
	}
	done := map[string]bool{}
	for _, p := range c.parts {
		if p.entry == nil || done[p.name] {
			continue
		}
		path := shortestCycle(p.name, edges)
		if path == nil {
			continue
		}
		names := []string{fmt.Sprintf("%q", p.name)}
		d := c.fail(p.entry, "use", CodeCycle, "")
		from := p.name
		for _, e := range path {
			names = append(names, fmt.Sprintf("%q", e.to))
			done[e.to] = true
			d.note("%s needs %q from %s", where(index[from]), e.capability, where(index[e.to]))
			from = e.to
		}
		d.Message = "dependency cycle: " + strings.Join(names, " → ")
		d.hint("make one of these needs optional, or move what both sides use into a plugin of its own")
	}
}

type edge struct{ capability, to string }

// shortestCycle is the shortest way from a row back to itself.
func shortestCycle(start string, edges map[string][]edge) []edge {
	type step struct {
		edge
		from int // index of the step before
	}
	var steps []step
	seen := map[string]bool{}
	extend := func(name string, from int) int {
		for _, e := range edges[name] {
			if e.to == start || !seen[e.to] {
				seen[e.to] = true
				steps = append(steps, step{e, from})
				if e.to == start {
					return len(steps) - 1
				}
			}
		}
		return -1
	}
	last := extend(start, -1)
	for i := 0; last < 0 && i < len(steps); i++ {
		last = extend(steps[i].to, i)
	}
	var path []edge
	for i := last; i >= 0; i = steps[i].from {
		path = append(path, steps[i].edge)
	}
	slices.Reverse(path)
	return path
}

func (c *checker) tools() {
	owner := map[string]part{}
	for _, p := range c.parts {
		for _, tool := range p.manifest.GetTools() {
			first, taken := owner[tool]
			if !taken {
				owner[tool] = p
				continue
			}
			if p.entry == nil {
				continue
			}
			d := c.fail(p.entry, "use", CodeToolTwice, "%q registers the tool %q, which %q registers already", p.name, tool, first.name)
			c.here(d, first)
			d.hint("a model calls tools by name: remove or disable one of the rows")
		}
	}
}

func (c *checker) events() {
	type declaration struct {
		part part
		decl *kernelv1.EventDecl
	}
	declared := map[string]declaration{}
	for _, p := range c.parts {
		for _, ev := range p.manifest.GetEvents() {
			c.reserved(p, ev.GetEvent(), "emits")
			first, taken := declared[ev.GetEvent()]
			if !taken {
				declared[ev.GetEvent()] = declaration{p, ev}
				continue
			}
			a, b := first.decl, ev
			if p.entry != nil && (a.GetRequest() != b.GetRequest() || a.GetReply() != b.GetReply() ||
				a.GetFailClosed() != b.GetFailClosed() || a.GetFixedRequest() != b.GetFixedRequest()) {
				d := c.fail(p.entry, "use", CodeEventTwice, "%q declares the event %q otherwise than %q", p.name, ev.GetEvent(), first.part.name)
				c.here(d, first.part)
				d.hint("build both against the same version of the contract")
			}
		}
		for _, typ := range p.manifest.GetAppends() {
			c.reserved(p, typ, "appends")
		}
	}
	if !c.complete {
		return
	}
	names := slices.Sorted(maps.Keys(declared))
	for _, m := range c.known {
		for _, ev := range m.GetEvents() {
			names = append(names, ev.GetEvent())
		}
	}
	for _, p := range c.parts {
		if p.entry == nil {
			continue
		}
		for _, l := range p.manifest.GetListeners() {
			if slices.Contains(names, l.GetEvent()) {
				continue
			}
			d := c.fail(p.entry, "use", CodeUnknownEvent, "%q listens to %q, which nothing emits", p.name, l.GetEvent())
			if !p.entry.Required {
				d.Severity = Warning
			}
			if best := closest(l.GetEvent(), names); best != "" {
				d.hint("did you mean %q?", best)
			} else {
				d.hint("add the row whose plugin emits it")
			}
		}
	}
}

// reserved refuses an event type that belongs to somebody else.
func (c *checker) reserved(p part, typ, verb string) {
	if p.entry == nil {
		return
	}
	owner, _, _ := strings.Cut(typ, "/")
	capability, host := rules.Owner(typ)
	switch {
	case owner == "":
		c.fail(p.entry, "use", CodeReservedPrefix, "%q %s %q, which names no owner", p.name, verb, typ).hint("an event type is OWNER/NAME; this is a mistake of the plugin")
	case host:
		c.fail(p.entry, "use", CodeReservedPrefix, "%q %s %q, but %s/ belongs to the host", p.name, verb, typ, owner).hint("this is a mistake of the plugin")
	case capability == "":
	case p.offers(capability) == nil:
		d := c.fail(p.entry, "use", CodeReservedPrefix, "%q %s %q, but %s/ belongs to the row that offers %q", p.name, verb, typ, owner, capability)
		if o, ok := c.offered[offerKey{capability, p.realm(capability)}]; ok {
			c.here(d, o)
		}
		d.hint("this is a mistake of the plugin")
	case p.realm(capability) != RootRealm:
		c.fail(p.entry, "use", CodeReservedPrefix, "%q %s %q, but offers %q in %s only", p.name, verb, typ, capability, realmName(p.realm(capability))).
			hint("sessions belong to no realm, so %s/ belongs to the row that offers %q in the root realm; take it out of isolate", owner, capability)
	}
}

// Package prompt puts together what a model is told about its situation.
//
// Plugins contribute parts; the registry asks for them and joins them in order. What a session was told last is an event of its
// log, so that a change is noticed by comparing, whoever made it and whenever: the model hears of it once, in front of the next
// tool result. What it is told is no boundary; a part that cannot be had is left out.
package prompt

import (
	"cmp"
	"context"
	"encoding/json"
	"log/slog"
	"slices"
	"strings"
	"sync"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	promptv1 "github.com/cordon-host/cordon/api/prompt/v1"
	"github.com/cordon-host/cordon/capability/approval"
	"github.com/cordon-host/cordon/host/route"
	"github.com/cordon-host/cordon/host/session"
)

// EventTold is the session event that holds what the model was told; the host's own. The last one counts.
const EventTold = "prompt/told"

// Told is the payload of prompt/told.
type Told struct {
	Text string `json:"text"`
}

// Texts around a change, from the reference system's runtime-context snapshots.
const (
	header = "Current runtime context. This snapshot supersedes earlier runtime-context snapshots.\n\n"
	none   = "Current runtime context: none. Earlier runtime-context snapshots no longer apply."
)

// Section is one contribution.
type Section struct {
	Name  string
	Order int32
	Entry string
	Text  string
}

// Registry holds the contributions of the entries that are active.
type Registry struct {
	router *route.Router
	end    func(*route.Tree)
	log    *slog.Logger

	mu      sync.Mutex
	next    int
	parts   []part
	version int            // changes with whatever may change a text but is not in a log
	told    map[string]int // version by session, when it was compared last
}

type part struct {
	*kernelv1.Context
	entry    string
	seq      int // registration order
	provider func() (*route.Provider, error)
}

// New makes an empty registry; end ends the call trees it starts.
func New(router *route.Router, end func(*route.Tree), log *slog.Logger) *Registry {
	return &Registry{router: router, end: end, log: log, told: map[string]int{}}
}

// Register adds a contribution of an entry.
func (r *Registry) Register(entry string, c *kernelv1.Context, provider func() (*route.Provider, error)) (remove func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.next++
	r.version++
	p := part{c, entry, r.next, provider}
	r.parts = append(r.parts, p)
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.version++
		r.parts = slices.DeleteFunc(r.parts, func(q part) bool { return q.seq == p.seq })
	}
}

// Sections are the contributions for a session, in order; those that are empty or cannot be had are left out.
func (r *Registry) Sections(ctx context.Context, session string) []Section {
	r.mu.Lock()
	parts := slices.Clone(r.parts)
	r.mu.Unlock()
	slices.SortFunc(parts, func(a, b part) int { return cmp.Or(cmp.Compare(a.GetOrder(), b.GetOrder()), cmp.Compare(a.seq, b.seq)) })
	tree := route.NewTree(route.Call{Session: session})
	defer r.end(tree)
	var out []Section
	for _, p := range parts {
		text, err := r.ask(ctx, tree, p)
		if err != nil {
			r.log.Warn("context left out", "name", p.GetName(), "entry", p.entry, "error", err)
			continue
		}
		if text != "" {
			out = append(out, Section{Name: p.GetName(), Order: p.GetOrder(), Entry: p.entry, Text: text})
		}
	}
	return out
}

func (r *Registry) ask(ctx context.Context, tree *route.Tree, p part) (string, error) {
	provider, err := route.Pin(tree, p.provider)
	if err != nil {
		return "", err
	}
	leg, end, err := r.router.Begin(tree, nil, nil, provider)
	if err != nil {
		return "", err
	}
	defer end()
	reply, err := promptv1.NewPromptClient(provider.Conn).Text(leg.Outgoing(ctx), &promptv1.TextRequest{Name: p.GetName()})
	if err != nil {
		return "", leg.CallError(err)
	}
	return reply.GetText(), nil
}

// Join is the text of sections.
func Join(sections []Section) string {
	texts := make([]string, len(sections))
	for i, s := range sections {
		texts[i] = s.Text
	}
	return strings.Join(texts, "\n\n")
}

// Moved says that a plugin has another generation, whose texts may be others.
func (r *Registry) Moved() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.version++
}

// settled reports whether nothing that a text could tell has happened since a session was told last. Calls and their questions change
// no fact.
func (r *Registry) settled(s *session.Session, told int64) (version int, settled bool) {
	r.mu.Lock()
	version = r.version
	last, compared := r.told[s.ID()]
	r.mu.Unlock()
	return version, compared && last == version && !slices.ContainsFunc(s.Events(told+1), func(e session.Event) bool {
		owner, _, _ := strings.Cut(e.Type, "/")
		return !slices.Contains([]string{"turn", "tool", "prompt"}, owner) && e.Type != approval.EventAsked && e.Type != approval.EventDecided
	})
}

// News compares what a session's model was told last with what holds now. The text is what it must be told, empty for nothing;
// record is what goes into the log with it. What it is told for the first time is recorded alone: whoever opened the session has
// told it.
func (r *Registry) News(ctx context.Context, s *session.Session) (text string, record []session.Draft) {
	var told Told
	last, ok := s.Last(EventTold)
	version, settled := r.settled(s, last.Seq)
	if ok && settled {
		return "", nil
	}
	now := Join(r.Sections(ctx, s.ID()))
	r.mu.Lock()
	r.told[s.ID()] = version
	r.mu.Unlock()
	if ok {
		if err := json.Unmarshal(last.Data, &told); err != nil {
			r.log.Error("what the model was told cannot be read", "session", s.ID(), "error", err)
			ok = false
		}
	}
	switch {
	case ok && told.Text == now:
		return "", nil
	case !ok:
	case now == "":
		text = none
	default:
		text = header + now
	}
	return text, []session.Draft{{Type: EventTold, Data: Told{Text: now}}}
}

package ctxsvc

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"testing"
)

// seeker is a consumer of "db" that notes which provider it starts with.
func seeker(j *journal, id string) Plugin {
	return Plugin{Name: id, Inject: inject("db"), Apply: func(x *Context, _ any) error {
		v, err := Get[string](x, "db")
		if err != nil {
			return err
		}
		j.add("%s=%s", id, v)
		return x.Defer("stop", j.undo(id+"-"))
	}}
}

func TestFreshRealmsAreIndependent(t *testing.T) {
	h := open(t)
	var j journal
	places := []*Context{h.Context, h.Isolate("db", ""), h.Isolate("db", "")}
	for i, x := range places {
		h.plug(x, seeker(&j, fmt.Sprint("c", i)), nil)
	}
	for i, x := range places {
		h.plug(x, provider("db", fmt.Sprint("p", i)), nil)
		h.quiet()
	}
	j.want(t, "c0=p0 c1=p1 c2=p2")
}

func TestSharedLabel(t *testing.T) {
	h := open(t)
	var j journal
	f := h.plug(h.Isolate("db", "red"), seeker(&j, "c"), nil)
	other := h.plug(h.Isolate("db", "blue"), seeker(&j, "other"), nil)
	h.plug(h.Isolate("db", "red"), provider("db", "red"), nil)
	var de *DuplicateServiceError
	h.quiet()
	if err := h.Isolate("db", "red").Provide("db", "second"); !errors.As(err, &de) || de.Realm != "red" {
		t.Errorf("Provide = %v", err)
	}
	h.state(f, Active)
	h.state(other, Pending)
	j.want(t, "c=red")
}

func TestEventsOfAnIsolatedServiceStayInside(t *testing.T) {
	h := open(t)
	var j journal
	ev := Event[int, int]{Name: "db/changed"}
	inside := h.Isolate("db", "")
	tap := func(x *Context, name string, opts ...ListenOption) {
		h.ok(Tap(x, ev, func(context.Context, int) error { j.add("%s", name); return nil }, opts...))
	}
	tap(h.Context, "outer")
	tap(inside, "inner")
	tap(h.Context, "global", Global())
	Emit(h.ctx, inside, ev, 1, Within("db"))
	j.want(t, "inner global")
	Emit(h.ctx, h.Context, ev, 1, Within("db"))
	j.want(t, "inner global outer global")
	Emit(h.ctx, inside, ev, 1) // control: without the restriction all hear it
	j.want(t, "inner global outer global outer inner global")
}

// The eight cases of adding and removing an isolation: on the consumer's or
// the provider's place, with and without another provider where it goes.
func TestRemap(t *testing.T) {
	type labels = map[string]string
	red := labels{"db": "red"}
	for _, tt := range []struct {
		name           string
		onProvider     bool
		from, to       labels
		other          string // realm of a second provider, "" the common one, "-" none
		before, after  string
		providerStarts string
	}{
		{"consumer leaves the common realm", false, nil, red, "-", "c=main", "c=main c-", "main"},
		{"consumer leaves for another provider", false, nil, red, "red", "c=main", "c=main c- c=other", "main"},
		{"consumer comes back", false, red, nil, "-", "", "c=main", "main"},
		{"consumer comes back from another provider", false, red, nil, "red", "c=other", "c=other c- c=main", "main"},
		{"provider leaves", true, nil, red, "-", "c=main", "c=main c-", "main"},
		{"provider comes back", true, red, nil, "-", "", "c=main", "main"},
		{"provider changes realms unseen", true, red, labels{"db": "blue"}, "-", "", "", "main"},
		{"nothing changes", false, red, red, "red", "c=other", "c=other", "main"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := open(t)
			var j, starts journal
			place := h.Realms(tt.from)
			at := map[bool]*Context{tt.onProvider: place, !tt.onProvider: h.Context}
			p := h.plug(at[true], Plugin{Name: "p", Apply: func(x *Context, _ any) error {
				starts.add("main")
				return x.Provide("db", "main")
			}}, nil)
			if tt.other != "-" {
				h.plug(h.Isolate("db", tt.other), provider("db", "other"), nil)
			}
			h.quiet()
			h.plug(at[false], seeker(&j, "c"), nil)
			h.quiet()
			j.want(t, tt.before)
			h.ok(place.Remap(tt.to))
			h.quiet()
			j.want(t, tt.after)
			starts.want(t, tt.providerStarts)
			h.state(p, Active)
			h.ok(place.Remap(tt.to)) // the same again: nothing happens
			h.quiet()
			j.want(t, tt.after)
		})
	}
}

func TestRemapRefusesToMeetAnotherProvider(t *testing.T) {
	h := open(t)
	var j journal
	place := h.Realms(map[string]string{"db": "red"})
	h.plug(place, provider("db", "inside"), nil)
	h.plug(place, seeker(&j, "c"), nil)
	h.plug(h.Context, provider("db", "outside"), nil)
	h.quiet()
	var de *DuplicateServiceError
	if err := place.Remap(nil); !errors.As(err, &de) || de.Owner != "provider-db" {
		t.Errorf("Remap = %v", err)
	}
	h.quiet()
	j.want(t, "c=inside")
	var pe *PluginError
	if err := h.Remap(nil); !errors.As(err, &pe) {
		t.Errorf("Remap of a context without realms = %v", err)
	}
	var ie *InactiveError
	f := h.plug(h.Context, Plugin{Name: "p", Apply: nop}, nil)
	h.quiet()
	late := f.Scope().Realms(nil)
	h.ok(f.Dispose(h.ctx))
	if err := late.Remap(nil); !errors.As(err, &ie) {
		t.Errorf("Remap of a dead context = %v", err)
	}
}

// A group of rows shares its local realm, a labelled one reaches across
// groups, and what is outside of both resolves nothing.
func TestGroupWideRealms(t *testing.T) {
	h := open(t)
	var j journal
	local := h.Isolate("db", "")
	h.plug(local, provider("db", "alpha"), nil)
	h.plug(local, seeker(&j, "l"), nil)
	h.plug(h.Isolate("db", "shared"), provider("db", "beta"), nil)
	h.quiet()
	h.plug(h.Isolate("db", "shared"), seeker(&j, "s"), nil)
	outside := h.plug(h.Context, seeker(&j, "o"), nil)
	h.quiet()
	h.state(outside, Pending)
	j.want(t, "l=alpha s=beta")
}

// Provider and consumer below a place that is isolated anew move together:
// nobody restarts, whether the inner place has a realm of its own or not.
func TestNestedRealmsMoveWithoutRestart(t *testing.T) {
	for _, inner := range []map[string]string{nil, {"db": "inner"}} {
		h := open(t)
		var j journal
		outer := h.Realms(map[string]string{"db": "outer"})
		place := outer.Realms(inner)
		h.plug(place, provider("db", "p"), nil)
		h.quiet()
		f := h.plug(place, seeker(&j, "c"), nil)
		h.quiet()
		for _, labels := range []map[string]string{{"db": "elsewhere"}, {"db": ""}, nil, {"db": "outer"}} {
			h.ok(outer.Remap(labels))
			h.quiet()
		}
		h.state(f, Active)
		j.want(t, "c=p")
	}
}

func TestRemapTellsWatchers(t *testing.T) {
	h := open(t)
	var common, red journal
	watch := func(x *Context, j *journal) {
		h.ok(x.Watch("db", func(_ context.Context, ch ServiceChange) { j.add("%s", ch.Change) }))
	}
	watch(h.Context, &common)
	watch(h.Isolate("db", "red"), &red)
	place := h.Realms(nil)
	h.plug(place, provider("db", 1), nil)
	h.quiet()
	h.ok(place.Remap(map[string]string{"db": "red"}))
	h.quiet()
	common.want(t, "available withdrawn")
	red.want(t, "available")
}

func TestRemapOfSeveralNames(t *testing.T) {
	h := open(t)
	a := h.Realms(map[string]string{"x": "red", "y": "blue"})
	h.plug(a, Plugin{Name: "p", Apply: func(x *Context, _ any) error {
		h.ok(x.Provide("x", "x"))
		return x.Provide("y", "y")
	}}, nil)
	h.quiet()
	h.ok(a.Remap(map[string]string{"x": "blue"}))
	for _, tt := range []struct {
		place *Context
		name  string
		want  bool
	}{
		{h.Isolate("x", "red"), "x", false}, {h.Isolate("x", "blue"), "x", true}, {h.Context, "x", false},
		{h.Isolate("y", "blue"), "y", false}, {h.Context, "y", true},
	} {
		if _, ok := Lookup[string](tt.place, tt.name); ok != tt.want {
			t.Errorf("%s: found %v, want %v", tt.name, ok, tt.want)
		}
	}
}

// Moving a provider or a consumer between groups: it stops and starts only if
// what it sees is another provider there.
func TestMove(t *testing.T) {
	h := open(t)
	var j journal
	group := func(name string, labels map[string]string) *Context {
		f := h.plug(h.Realms(labels), Plugin{Name: name, Apply: nop}, nil)
		h.quiet()
		return f.Scope()
	}
	plain, same := group("plain", nil), group("same", nil)
	red := group("red", map[string]string{"db": "red"})
	h.plug(red, provider("db", "red"), nil)
	p := h.plug(plain, provider("db", "main"), nil)
	h.quiet()
	c := h.plug(plain, seeker(&j, "c"), nil)
	h.quiet()
	j.want(t, "c=main")

	h.ok(c.Move(same)) // sees the same provider: nothing happens
	h.quiet()
	j.want(t, "c=main")
	if c.Parent() != same.Fiber() {
		t.Errorf("parent is %s", c.Parent().Name())
	}
	h.ok(c.Move(red)) // another one: one stop, one start
	h.quiet()
	j.want(t, "c=main c- c=red")
	h.ok(c.Move(h.Context)) // out again
	h.quiet()
	j.want(t, "c=main c- c=red c- c=main")
	h.ok(p.Move(same)) // a provider moves within its realm
	h.quiet()
	j.want(t, "c=main c- c=red c- c=main")
	var de *DuplicateServiceError
	if err := p.Move(red); !errors.As(err, &de) {
		t.Errorf("Move into a taken realm = %v", err)
	}
	blue := group("blue", map[string]string{"db": "blue"})
	h.ok(p.Move(blue)) // out of the consumer's sight
	h.quiet()
	h.state(c, Pending)
	h.state(p, Active)
	h.ok(c.Move(blue)) // and together again
	h.quiet()
	j.want(t, "c=main c- c=red c- c=main c- c=main")

	// Who is moved ends with its new place, not with its old one.
	h.ok(plain.Fiber().Dispose(h.ctx))
	h.ok(same.Fiber().Dispose(h.ctx))
	h.state(c, Active)
	h.ok(blue.Fiber().Dispose(h.ctx))
	h.state(c, Disposed)
	h.state(p, Disposed)
}

func TestMoveRefusals(t *testing.T) {
	h := open(t)
	var inner *Context
	f := h.plug(h.Context, Plugin{Name: "outer", Apply: func(x *Context, _ any) error {
		g, err := x.Plugin(Plugin{Name: "inner", Apply: func(x *Context, _ any) error { inner = x; return nil }}, nil)
		h.ok(err)
		return g.Wait(x.Context())
	}}, nil)
	h.quiet()
	var pe *PluginError
	if err := f.Move(inner); !errors.As(err, &pe) {
		t.Errorf("below itself: %v", err)
	}
	if err := h.Fiber().Move(inner); !errors.As(err, &pe) {
		t.Errorf("the root: %v", err)
	}
	if err := f.Move(New()); !errors.As(err, &pe) {
		t.Errorf("to another container: %v", err)
	}
	var ie *InactiveError
	g := h.plug(h.Context, Plugin{Name: "g", Apply: nop}, nil)
	h.quiet()
	old := g.Scope()
	h.ok(g.Dispose(h.ctx))
	if err := f.Move(old); !errors.As(err, &ie) {
		t.Errorf("to a dead place: %v", err)
	}
	if err := g.Move(h.Context); !errors.As(err, &ie) {
		t.Errorf("a dead fiber: %v", err)
	}
	// Out of a place that is being undone: the fiber goes with it.
	var late error
	var child *Fiber
	place := h.plug(h.Context, Plugin{Name: "place", Apply: func(x *Context, _ any) error {
		_, err := x.Group("group", func(x *Context) (err error) {
			child, err = x.Plugin(Plugin{Name: "child", Apply: nop}, nil)
			h.ok(err)
			return x.Defer("newer", func(context.Context) error { late = child.Move(h.Context); return nil })
		})
		return err
	}}, nil)
	h.quiet()
	h.ok(place.Dispose(h.ctx))
	if !errors.As(late, &ie) {
		t.Errorf("out of a dying place: %v", late)
	}
	h.state(child, Disposed)
}

// Labels may be made per session: those nobody uses are forgotten.
func TestUnusedLabelsAreForgotten(t *testing.T) {
	h := open(t)
	keep := h.Isolate("db", "kept")
	h.ok(keep.Provide("db", 1))
	for i := range 10_000 {
		h.Isolate("db", fmt.Sprint("session-", i))
		if i%1000 == 0 {
			runtime.GC()
		}
	}
	h.c().mu.Lock()
	n := len(h.c().shared)
	h.c().mu.Unlock()
	if n > 9_000 {
		t.Errorf("%d labels are remembered", n)
	}
	if v, ok := Lookup[int](h.Isolate("db", "kept"), "db"); !ok || v != 1 {
		t.Error("a label in use was forgotten")
	}
}

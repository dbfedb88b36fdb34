package ctxsvc

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

func TestConsumerWaitsForActiveProvider(t *testing.T) {
	h := open(t)
	var j journal
	provided, gate := make(chan struct{}), make(chan struct{})
	h.plug(h.Context, Plugin{Name: "p", Apply: func(x *Context, _ any) error {
		h.ok(x.Provide("db", 1))
		if v, err := Get[int](x, "db"); v != 1 || err != nil {
			t.Errorf("the provider reads its own service: %v, %v", v, err)
		}
		close(provided)
		<-gate
		j.add("provider")
		return nil
	}}, nil)
	c := h.plug(h.Context, consumer(&j, "c", "db"), nil)
	recv(h, provided)
	h.ok(c.Wait(h.ctx))
	h.state(c, Pending)
	if _, ok := Lookup[int](h.Context, "db"); ok {
		t.Error("Lookup sees a provider that is still loading")
	}
	if r := c.WaitReasons(); len(r) != 1 || !strings.Contains(r[0].Reason, "LOADING") {
		t.Errorf("reasons: %v", r)
	}
	close(gate)
	h.quiet()
	h.state(c, Active)
	j.want(t, "provider c+")
}

func TestProviderFailsAfterProviding(t *testing.T) {
	h := open(t)
	p := h.plug(h.Context, Plugin{Name: "p", Apply: func(x *Context, _ any) error {
		h.ok(x.Provide("db", 1))
		return errors.New("no")
	}}, nil)
	c := h.plug(h.Context, Plugin{Name: "c", Inject: inject("db"), Apply: func(*Context, any) error { t.Error("started"); return nil }}, nil)
	h.quiet()
	h.state(p, Failed)
	h.state(c, Pending)
}

func TestSeveralNeedsStartOnce(t *testing.T) {
	h := open(t)
	var j journal
	c := h.plug(h.Context, consumer(&j, "c", "x", "y", "z"), nil)
	for _, n := range []string{"z", "x", "y"} {
		h.state(c, Pending)
		h.plug(h.Context, provider(n, n), nil)
		h.quiet()
	}
	h.state(c, Active)
	j.want(t, "c+")
}

func TestDuplicateProvider(t *testing.T) {
	h := open(t)
	var j journal
	h.plug(h.Context, provider("db", 1), nil)
	c := h.plug(h.Context, consumer(&j, "c", "db"), nil)
	h.quiet()
	second := h.plug(h.Context, provider("db", 2), nil)
	var de *DuplicateServiceError
	if err := second.Wait(h.ctx); !errors.As(err, &de) || de.Owner != "provider-db" {
		t.Errorf("Wait = %v", err)
	}
	h.state(second, Failed)
	h.state(c, Active)
	j.want(t, "c+")
	if v, ok := Lookup[int](h.Context, "db"); !ok || v != 1 {
		t.Errorf("Lookup = %v, %v", v, ok)
	}
}

func TestProviderSwapRestartsConsumer(t *testing.T) {
	h := open(t)
	var j journal
	c := h.plug(h.Context, Plugin{Name: "c", Inject: inject("db"), Apply: func(x *Context, _ any) error {
		v, err := Get[string](x, "db")
		h.ok(err)
		j.add("start-%s", v)
		return x.Defer("stop", j.undo("stop"))
	}}, nil)
	a := h.plug(h.Context, provider("db", "A"), nil)
	h.quiet()
	h.ok(a.Dispose(h.ctx))
	h.plug(h.Context, provider("db", "B"), nil)
	h.quiet()
	h.state(c, Active)
	j.want(t, "start-A stop start-B")
}

func TestSetIsTheOwnersAndRestartsNobody(t *testing.T) {
	h := open(t)
	var j journal
	var owner, reader *Context
	h.plug(h.Context, Plugin{Name: "p", Apply: func(x *Context, _ any) error {
		owner = x
		return x.Provide("db", 1, WithFacts("v1"))
	}}, nil)
	h.quiet()
	h.plug(h.Context, Plugin{Name: "c", Inject: inject("db"), Apply: func(x *Context, _ any) error {
		reader = x
		j.add("start")
		return nil
	}}, nil)
	h.quiet()
	handle, err := Hold[int](reader, "db")
	h.ok(err)
	pinned := handle.Pin()
	h.ok(owner.Set("db", 2))
	h.ok(owner.Set("db", 3, WithFacts("v1")))
	h.quiet()
	j.want(t, "start")
	if v, err := Get[int](reader, "db"); v != 3 || err != nil {
		t.Errorf("Get = %v, %v", v, err)
	}
	if v, err := handle.Get(); v != 3 || err != nil || handle.Generation() != 3 {
		t.Errorf("a handle follows its entry: %v, %v, generation %d", v, err, handle.Generation())
	}
	var se *StaleError
	if _, err := pinned.Get(); !errors.As(err, &se) || se.Held != 1 || se.Current != 3 {
		t.Errorf("a pinned handle: %v", err)
	}
	var no *NotOwnerError
	for what, err := range map[string]error{
		"set": reader.Set("db", 9), "facts": reader.SetFacts("db", 9), "recheck": reader.Recheck("db"), "nobody's": owner.Set("nowhere", 1),
	} {
		if !errors.As(err, &no) {
			t.Errorf("%s: %v", what, err)
		}
	}
	h.ok(owner.Set("db", 4, WithFacts("v2"))) // control: changed facts do restart
	h.quiet()
	j.want(t, "start start")
}

func TestFacts(t *testing.T) {
	h := open(t)
	var j journal
	var owner *Context
	type facts struct {
		Mode  string
		Paths []string
	}
	h.plug(h.Context, Plugin{Name: "p", Apply: func(x *Context, _ any) error {
		owner = x
		return x.Provide("shell", 1, WithFacts(facts{"read-only", []string{"/a"}}))
	}}, nil)
	h.plug(h.Context, Plugin{Name: "c", Inject: inject("shell"), Apply: func(x *Context, _ any) error {
		f, ok := x.Facts("shell")
		j.add("%v-%v", f.(facts).Mode, ok)
		return nil
	}}, nil)
	h.plug(h.Context, Plugin{Name: "o", Inject: []Need{{Name: "shell", Optional: true}}, Apply: func(x *Context, _ any) error {
		j.add("optional")
		return nil
	}}, nil)
	h.quiet()
	h.ok(owner.SetFacts("shell", facts{"read-only", []string{"/a"}}))
	h.quiet()
	if got := j.String(); strings.Count(got, "read-only") != 1 {
		t.Errorf("equal facts restarted somebody: %s", got)
	}
	h.ok(owner.SetFacts("shell", facts{"read-only", []string{"/a", "/b"}}))
	h.ok(owner.SetFacts("shell", facts{"workspace-write", nil}))
	h.quiet()
	got := j.String()
	if !strings.HasSuffix(got, "workspace-write-true") || strings.Count(got, "optional") != 1 {
		t.Errorf("journal: %s", got)
	}
	if f, ok := h.Facts("shell"); !ok || f.(facts).Mode != "workspace-write" {
		t.Errorf("Facts at the root: %v, %v", f, ok)
	}
	if _, ok := h.Facts("nowhere"); ok {
		t.Error("facts of a service nobody provides")
	}
}

func TestReadingRules(t *testing.T) {
	h := open(t)
	const (
		readable    = "<nil>"
		notDeclared = "*ctxsvc.NotDeclaredError"
		inactive    = "*ctxsvc.InactiveError"
		notFound    = "*ctxsvc.NotFoundError"
		mistyped    = "*ctxsvc.TypeError"
	)
	h.plug(h.Context, provider("sibling", 1), nil)
	h.quiet()
	var consumerCtx *Context
	check := func(x *Context, name, want string) {
		t.Helper()
		if _, err := Get[int](x, name); fmt.Sprintf("%T", err) != want {
			t.Errorf("Get %s: %v, want %s", name, err, want)
		}
	}
	parent := h.plug(h.Context, Plugin{Name: "parent", Inject: inject("sibling"), Apply: func(x *Context, _ any) error {
		consumerCtx = x
		h.ok(x.Provide("from-parent", 2))
		h.ok(x.Provide("text", "no number"))
		check(x, "text", mistyped)
		child := Plugin{Name: "child", Inject: []Need{{Name: "absent", Optional: true}}, Apply: func(x *Context, _ any) error {
			check(x, "sibling", readable)     // what the parent needs
			check(x, "from-parent", readable) // what an ancestor provides
			check(x, "absent", notFound)
			check(x, "other", notDeclared)
			return nil
		}}
		f, err := x.Plugin(child, nil)
		h.ok(err)
		h.ok(f.Wait(x.Context()))
		isolated := Plugin{Name: "isolated", Apply: func(x *Context, _ any) error {
			check(x, "sibling", notDeclared)
			return nil
		}}
		f, err = x.Isolate("sibling", "").Plugin(isolated, nil)
		h.ok(err)
		check(x.Isolate("sibling", ""), "sibling", notDeclared)
		return f.Wait(x.Context())
	}}, nil)
	h.ok(parent.Wait(h.ctx))
	h.plug(h.Context, Plugin{Name: "stranger", Apply: func(x *Context, _ any) error {
		check(x, "sibling", notDeclared)
		if v, ok := Lookup[int](x, "sibling"); !ok || v != 1 {
			t.Errorf("Lookup needs no declaration: %v, %v", v, ok)
		}
		if _, ok := Lookup[int](x.Isolate("sibling", ""), "sibling"); ok {
			t.Error("Lookup ignores the realm")
		}
		if _, ok := Lookup[string](x, "sibling"); ok {
			t.Error("Lookup ignores the type")
		}
		return nil
	}}, nil)
	h.quiet()
	check(h.Context, "sibling", readable) // the root reads everything
	check(h.Context, "nowhere", notFound)
	pending := h.plug(h.Context, Plugin{Name: "pending", Inject: inject("nowhere"), Apply: nop}, nil)
	check(pending.Scope(), "nowhere", inactive)
	check(consumerCtx, "sibling", readable)
	h.ok(parent.Dispose(h.ctx))
	check(consumerCtx, "sibling", inactive) // declared, but over
}

// A service's own methods use the service's context, and what they register
// for a caller belongs to the caller's.
func TestServiceMethods(t *testing.T) {
	h := open(t)
	var j journal
	h.plug(h.Context, provider("disk", "the disk"), nil)
	h.plug(h.Context, Plugin{Name: "store", Inject: inject("disk"), Apply: func(x *Context, _ any) error {
		return x.Provide("store", &storeService{x, &j})
	}}, nil)
	var stale *storeService
	var held Handle[*storeService]
	c := h.plug(h.Context, Plugin{Name: "c", Inject: inject("store"), Apply: func(x *Context, _ any) error {
		s, err := Get[*storeService](x, "store")
		h.ok(err)
		stale = s
		held, err = Hold[*storeService](x, "store")
		h.ok(err)
		if _, err := Get[string](x, "disk"); err == nil {
			t.Error("the caller reads what only the service needs")
		}
		h.ok(s.open(x, "table"))
		return nil
	}}, nil)
	h.quiet()
	j.want(t, "open-table-on-the-disk")
	old := c.Scope()
	h.ok(c.Dispose(h.ctx))
	j.want(t, "open-table-on-the-disk close-table")
	var ie *InactiveError
	if err := stale.open(old, "again"); !errors.As(err, &ie) {
		t.Errorf("registering for a dead caller: %v", err)
	}
	if _, err := held.Get(); err == nil {
		t.Error("a handle outlives its holder")
	}
}

type storeService struct {
	x *Context
	j *journal
}

func (s *storeService) open(caller *Context, name string) error {
	disk, err := Get[string](s.x, "disk")
	if err != nil {
		return err
	}
	return caller.Effect("open "+name, func() (Disposer, error) {
		s.j.add("open-%s-on-%s", name, strings.ReplaceAll(disk, " ", "-"))
		return s.j.undo("close-" + name), nil
	})
}

func TestHandleOfWithdrawnService(t *testing.T) {
	h := open(t)
	p := h.plug(h.Context, provider("db", 1), nil)
	h.quiet()
	held, err := Hold[int](h.Context, "db")
	h.ok(err)
	h.ok(p.Dispose(h.ctx))
	var se *StaleError
	if _, err := held.Get(); !errors.As(err, &se) || se.Current != 0 {
		t.Errorf("Get = %v", err)
	}
	if _, err := Hold[int](h.Context, "db"); err == nil {
		t.Error("Hold of nothing")
	}
}

func TestAvailabilityCheck(t *testing.T) {
	h := open(t)
	var asked atomic.Int32
	var owner *Context
	var answer atomic.Pointer[string]
	say := func(s string) { answer.Store(&s) }
	say("no")
	h.plug(h.Context, Plugin{Name: "p", Apply: func(x *Context, _ any) error {
		owner = x
		return x.Provide("db", 1, WithCheck(func(x *Context) bool {
			asked.Add(1)
			switch *answer.Load() {
			case "panic":
				panic("check")
			case "only-a":
				return x.Fiber().Name() == "a"
			}
			return *answer.Load() == "yes"
		}))
	}}, nil)
	a := h.plug(h.Context, Plugin{Name: "a", Inject: inject("db"), Apply: nop}, nil)
	b := h.plug(h.Context, Plugin{Name: "b", Inject: inject("db"), Apply: nop}, nil)
	o := h.plug(h.Context, Plugin{Name: "o", Inject: []Need{{Name: "db", Optional: true}}, Apply: nop}, nil)
	h.quiet()
	h.state(a, Pending)
	if r := a.WaitReasons(); len(r) != 1 || !strings.Contains(r[0].Reason, "not available here") {
		t.Errorf("reasons: %v", r)
	}
	n := asked.Load()
	say("only-a") // nobody is told: nothing changes
	h.quiet()
	h.state(a, Pending)
	if asked.Load() != n {
		t.Error("asked without being told")
	}
	h.ok(owner.Recheck("db"))
	h.quiet()
	h.state(a, Active)
	h.state(b, Pending)
	var nf *NotFoundError
	if _, err := Get[int](o.Scope(), "db"); !errors.As(err, &nf) {
		t.Errorf("an optional need asks too: %v", err)
	}
	say("panic")
	h.ok(owner.Recheck("db"))
	h.quiet()
	h.state(a, Pending)
	if got := h.log.errors(); len(got) != 2 || !strings.Contains(got[0], "fiber=p") {
		t.Errorf("log: %q", got)
	}
	say("yes")
	h.ok(owner.Recheck("db"))
	h.quiet()
	h.state(b, Active)
	if v, err := Get[int](o.Scope(), "db"); v != 1 || err != nil {
		t.Errorf("Get = %v, %v", v, err)
	}
}

func TestOptionalNeed(t *testing.T) {
	h := open(t)
	var j journal
	var x *Context
	f := h.plug(h.Context, Plugin{Name: "c", Inject: []Need{{Name: "db", Optional: true}}, Apply: func(y *Context, _ any) error {
		x = y
		j.add("start")
		return y.Watch("db", func(_ context.Context, ch ServiceChange) { j.add("%s-%d", ch.Change, ch.Generation) })
	}}, nil)
	h.quiet()
	h.state(f, Active)
	var nf *NotFoundError
	if _, err := Get[int](x, "db"); !errors.As(err, &nf) {
		t.Errorf("Get = %v", err)
	}
	var owner *Context
	p := h.plug(h.Context, Plugin{Name: "p", Apply: func(x *Context, _ any) error { owner = x; return x.Provide("db", 1) }}, nil)
	h.plug(h.Context, provider("other", 1), nil)
	h.plug(h.Isolate("db", ""), provider("db", 1), nil) // another realm's is not ours
	h.quiet()
	if v, err := Get[int](x, "db"); v != 1 || err != nil {
		t.Errorf("Get = %v, %v", v, err)
	}
	h.ok(owner.Set("db", 2))
	h.ok(owner.SetFacts("db", "f"))
	h.ok(owner.SetFacts("db", "f"))
	h.ok(p.Dispose(h.ctx))
	h.quiet()
	j.want(t, "start available-1 replaced-2 facts-2 withdrawn-2")
	// The nested form: a child that comes and goes alone.
	parent := h.plug(h.Context, Plugin{Name: "parent", Apply: func(x *Context, _ any) error {
		_, err := x.Plugin(consumer(&j, "child", "db"), nil)
		return err
	}}, nil)
	p = h.plug(h.Context, provider("db", 1), nil)
	h.quiet()
	h.ok(p.Dispose(h.ctx))
	h.quiet()
	h.state(parent, Active)
	if got := j.String(); !strings.Contains(got, "child+") || !strings.Contains(got, "child-") {
		t.Errorf("journal: %s", got)
	}
}

func TestWatchFromAPlaceWithASubject(t *testing.T) {
	h := open(t)
	var j journal
	h.ok(h.WithSubject("mcp/a").Watch("db", func(_ context.Context, ch ServiceChange) { j.add("%s", ch.Change) }))
	h.ok(h.Provide("db", 1))
	h.quiet()
	j.want(t, "available")
}

func TestCycleIsReported(t *testing.T) {
	h := open(t)
	chain := func(name, need string) Plugin {
		return Plugin{Name: name, Inject: inject(need), Provides: []string{name}, Apply: nop}
	}
	a := h.plug(h.Context, chain("a", "c"), nil)
	h.plug(h.Context, chain("b", "a"), nil)
	h.plug(h.Context, chain("c", "b"), nil)
	outside := h.plug(h.Context, Plugin{Name: "d", Inject: inject("a"), Apply: nop}, nil)
	h.quiet()
	h.state(a, Pending)
	if r := a.WaitReasons(); len(r) != 1 || r[0].Reason != "waits for itself: a → c → b → a" {
		t.Errorf("reasons: %v", r)
	}
	if r := outside.WaitReasons(); len(r) != 1 || !strings.Contains(r[0].Reason, "a, which offers it, is PENDING") {
		t.Errorf("reasons: %v", r)
	}
	if c := h.Snapshot().Cycles; len(c) != 1 {
		t.Errorf("cycles: %v", c)
	}
}

func TestCascade(t *testing.T) {
	h := open(t)
	var j journal
	link := func(name, need string) Plugin {
		p := consumer(&j, name, need)
		apply := p.Apply
		p.Apply = func(x *Context, c any) error { h.ok(apply(x, c)); return x.Provide(name, name) }
		return p
	}
	base := h.plug(h.Context, provider("base", 1), nil)
	a := h.plug(h.Context, link("a", "base"), nil)
	h.plug(h.Context, link("b", "a"), nil)
	c := h.plug(h.Context, link("c", "b"), nil)
	h.quiet()
	j.want(t, "a+ b+ c+")
	h.ok(base.Restart(h.ctx))
	h.quiet()
	h.state(c, Active)
	j.want(t, "a+ b+ c+ c- b- a- a+ b+ c+")
	h.ok(a.Dispose(h.ctx))
	h.quiet()
	j.want(t, "a+ b+ c+ c- b- a- a+ b+ c+ c- b- a-")
}

// The provider's other effects, registered before or after the service, wait
// for the consumers too: in the reference they do not.
func TestProviderEffectsOutliveItsConsumers(t *testing.T) {
	h := open(t)
	var j journal
	p := h.plug(h.Context, Plugin{Name: "p", Apply: func(x *Context, _ any) error {
		h.ok(x.Defer("older", j.undo("older")))
		h.ok(x.Provide("db", 1))
		return x.Defer("newer", j.undo("newer"))
	}}, nil)
	h.plug(h.Context, consumer(&j, "c", "db"), nil)
	h.quiet()
	h.ok(p.Dispose(h.ctx))
	j.want(t, "c+ c- newer older")
}

// A fiber that needs what a child plugged in before its load provides: the two
// do not wait for each other, whichever is disposed first.
func TestProviderBelowItsConsumer(t *testing.T) {
	for _, childFirst := range []bool{false, true} {
		h := open(t, WithQuietTimeout(time.Hour), WithStopTimeout(time.Hour))
		var j journal
		c := h.plug(h.Context, consumer(&j, "c", "db"), nil)
		p := h.plug(c.Scope(), provider("db", 1), nil)
		h.quiet()
		h.state(c, Active)
		if childFirst {
			h.ok(p.Dispose(h.ctx))
			h.quiet()
			h.state(c, Pending)
		}
		h.ok(c.Dispose(h.ctx))
		h.state(p, Disposed)
		j.want(t, "c+ c-")
	}
}

func TestResourceAndServiceInOneGroup(t *testing.T) {
	h := open(t)
	var j journal
	var e *Effect
	p := h.plug(h.Context, Plugin{Name: "p", Apply: func(x *Context, _ any) (err error) {
		e, err = x.Group("db", func(x *Context) error {
			h.ok(x.Defer("connection", j.undo("closed")))
			return x.Provide("db", 1)
		})
		return err
	}}, nil)
	h.plug(h.Context, consumer(&j, "c", "db"), nil)
	h.quiet()
	h.ok(e.Dispose(h.ctx)) // the service alone goes; its provider stays
	j.want(t, "c+ c- closed")
	h.state(p, Active)
}

func TestSlowConsumerIsNotWaitedForForever(t *testing.T) {
	h := open(t, WithQuietTimeout(time.Millisecond))
	gate := make(chan struct{})
	var read error
	p := h.plug(h.Context, provider("db", 1), nil)
	c := h.plug(h.Context, Plugin{Name: "c", Inject: inject("db"), Apply: func(x *Context, _ any) error {
		return x.Defer("deaf", func(context.Context) error {
			<-gate
			_, read = Get[int](x, "db")
			return nil
		})
	}}, nil)
	h.quiet()
	err := p.Dispose(h.ctx)
	var te *TimeoutError
	if !errors.As(err, &te) || te.What != "consumers" {
		t.Errorf("Dispose = %v", err)
	}
	h.state(p, Disposed)
	h.state(c, Unloading)
	close(gate)
	h.quiet()
	h.state(c, Pending)
	var se *StaleError
	if !errors.As(read, &se) {
		t.Errorf("reading what is gone: %v", read)
	}
}

func TestServiceEvents(t *testing.T) {
	h := open(t)
	var outer, inner journal
	tap := func(x *Context, j *journal) {
		h.ok(Tap(x, ServiceEvent, func(_ context.Context, ch ServiceChange) error {
			j.add("%s-%s", ch.Name, ch.Change)
			return nil
		}))
	}
	inside := h.Isolate("db", "inside")
	tap(h.Context, &outer)
	tap(inside, &inner)
	a := h.plug(h.Context, provider("db", 1), nil)
	b := h.plug(inside, provider("db", 1), nil)
	h.quiet()
	h.ok(a.Dispose(h.ctx))
	h.quiet()
	outer.want(t, "db-available db-withdrawn")
	inner.want(t, "db-available")
	h.ok(b.Dispose(h.ctx))
	h.quiet()
	inner.want(t, "db-available db-withdrawn")
}

func TestDottedAndCallableServices(t *testing.T) {
	h := open(t)
	h.plug(h.Context, Plugin{Name: "p", Apply: func(x *Context, _ any) error {
		h.ok(x.Provide("a", "outer"))
		return x.Provide("a.b", func(n int) int { return 2 * n })
	}}, nil)
	h.quiet()
	f := h.plug(h.Context, Plugin{Name: "c", Inject: inject("a.b"), Apply: func(x *Context, _ any) error {
		double, err := Get[func(int) int](x, "a.b")
		h.ok(err)
		if double(21) != 42 {
			t.Error("wrong function")
		}
		var nd *NotDeclaredError
		if _, err := Get[string](x, "a"); !errors.As(err, &nd) {
			t.Errorf("a needs a declaration of its own: %v", err)
		}
		return nil
	}}, nil)
	h.ok(f.Wait(h.ctx))
	h.state(f, Active)
}

func TestNamesAreFreedWithTheirOwner(t *testing.T) {
	h := open(t)
	for i := range 3 {
		f := h.plug(h.Context, provider("db", i), nil)
		h.ok(f.Wait(h.ctx))
		if v, _ := Lookup[int](h.Context, "db"); v != i {
			t.Errorf("Lookup = %d, want %d", v, i)
		}
		h.ok(f.Dispose(h.ctx))
		if _, ok := Lookup[int](h.Context, "db"); ok {
			t.Error("still there")
		}
	}
	var pe *PluginError
	if err := h.Provide("", 1); !errors.As(err, &pe) {
		t.Errorf("Provide without a name = %v", err)
	}
}

func TestInterceptLayers(t *testing.T) {
	h := open(t)
	outer := h.Intercept("log", map[string]any{"level": "outer", "outer": 1})
	need := Need{Name: "log", Intercept: map[string]any{"level": "need", "need": 1}}
	var got map[string]any
	h.ok(h.Provide("log", 1))
	f := h.plug(outer, Plugin{Name: "c", Inject: []Need{need}, Apply: func(x *Context, _ any) error {
		x = x.Intercept("log", map[string]any{"level": "inner", "inner": 1})
		layers := append([]any{map[string]any{"level": "base", "base": 1}}, x.Layers("log")...)
		got = Merge(append(layers, "not a map", map[string]any{"level": "call"})...)
		if len(x.Layers("other")) != 0 {
			t.Error("layers of another service")
		}
		return nil
	}}, nil)
	h.ok(f.Wait(h.ctx))
	want := map[string]any{"level": "call", "base": 1, "outer": 1, "need": 1, "inner": 1}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("merged %v, want %v", got, want)
	}
}

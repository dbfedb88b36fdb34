package ctxsvc

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"
)

// The model is a set of specifications: what is plugged in, below what, with
// which needs. What should be running follows from it as a least fixed point.
// The world is the container built from it, whose plugins keep a ledger of
// everything they registered.

const modelNames = "abcde"

type spec struct {
	id       int
	parent   *spec
	children []*spec
	label    string // realm label of every name at a top-level spec, inherited
	needs    []string
	optional []string
	provides string
	effects  int // disposers registered before and after the children
	badUndo  int // 0 none, 1 error, 2 panic

	// Changed by operations.
	fails bool // Apply returns an error with the present configuration
	facts int
	shut  atomic.Bool // its service says it is not available
	place *Context    // of a top-level spec

	// Known about the world.
	failed  bool // Fail was called and nothing has cleared it
	scarred bool // still shows the error of the last try until a load succeeds

	mu    sync.Mutex
	fiber *Fiber
	ctx   *Context
	loads int
	open  []*entry // what the present load registered and has not undone
}

// entry is one disposer in the ledger.
type entry struct {
	spec *spec
	n    int
}

// thing is the value a spec provides. It is closed by the disposer that was
// registered before the service.
type thing struct {
	mu     sync.Mutex
	closed bool
}

func (s *spec) realm() string {
	for ; s.parent != nil; s = s.parent {
	}
	return s.label
}

func (s *spec) String() string { return fmt.Sprintf("s%d", s.id) }

// offers lists the names provided by s and everything below it.
func (s *spec) offers(names []string) []string {
	if s.provides != "" {
		names = append(names, s.provides)
	}
	for _, c := range s.children {
		names = c.offers(names)
	}
	return names
}

// labels puts all names into one labelled realm, or into the common one.
func labels(label string) map[string]string {
	out := map[string]string{}
	for _, n := range modelNames {
		if label != "" {
			out[string(n)] = label
		}
	}
	return out
}

type world struct {
	t     *rapid.T
	root  *Context
	specs []*spec // all that exist in the model, parents first
	next  int
	burst map[string]bool // names promised to specs that were disposed in this burst

	mu   sync.Mutex
	bugs []string
}

func (w *world) bug(format string, args ...any) {
	w.mu.Lock()
	w.bugs = append(w.bugs, fmt.Sprintf(format, args...))
	w.mu.Unlock()
}

func (w *world) check() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.bugs) > 0 {
		w.t.Fatalf("ledger:\n%s", strings.Join(w.bugs, "\n"))
	}
}

// plugin turns a spec into what the container runs.
func (w *world) plugin(s *spec) Plugin {
	p := Plugin{Name: fmt.Sprintf("s%d", s.id), Inject: inject(s.needs...)}
	for _, n := range s.optional {
		p.Inject = append(p.Inject, Need{Name: n, Optional: true})
	}
	if s.provides != "" {
		p.Provides = []string{s.provides}
	}
	p.Apply = func(x *Context, config any) error {
		s.mu.Lock()
		s.loads++
		s.ctx = x
		if len(s.open) > 0 {
			w.bug("s%d loads with %d effects of the last load not undone", s.id, len(s.open))
		}
		s.mu.Unlock()
		var used []*thing
		for _, n := range s.needs {
			v, err := Get[*thing](x, n)
			if err != nil {
				w.bug("s%d loads without %s: %v", s.id, n, err)
				continue
			}
			used = append(used, v)
		}
		n := 0
		register := func(count int) error {
			for range count {
				n++
				en := &entry{spec: s, n: n}
				s.mu.Lock()
				s.open = append(s.open, en)
				s.mu.Unlock()
				if err := x.Defer(fmt.Sprint(n), func(context.Context) error { return w.undo(x, en, used) }); err != nil {
					s.mu.Lock()
					s.open = s.open[:len(s.open)-1]
					s.mu.Unlock()
					return err
				}
			}
			return nil
		}
		own := &thing{}
		if s.provides != "" {
			err := x.Defer("close", func(context.Context) error {
				own.mu.Lock()
				own.closed = true
				own.mu.Unlock()
				return nil
			})
			if err != nil {
				return err
			}
		}
		if err := register(s.effects); err != nil {
			return err
		}
		if s.provides != "" {
			s.mu.Lock()
			facts := s.facts
			s.mu.Unlock()
			if err := x.Provide(s.provides, own, WithFacts(facts), WithCheck(func(*Context) bool { return !s.shut.Load() })); err != nil {
				return err
			}
		}
		for _, ch := range s.children {
			f, err := x.Plugin(w.plugin(ch), ch.fails)
			if err != nil {
				return err
			}
			ch.mu.Lock()
			ch.fiber = f
			ch.mu.Unlock()
		}
		if err := register(s.effects); err != nil {
			return err
		}
		if config == true {
			return errors.New("told to fail")
		}
		return nil
	}
	return p
}

// undo checks the ledger when a disposer runs: it runs once, it is the newest
// one open, and what its load uses still works.
func (w *world) undo(x *Context, en *entry, used []*thing) error {
	s := en.spec
	s.mu.Lock()
	if n := len(s.open); n == 0 {
		w.bug("s%d effect %d undone twice", s.id, en.n)
	} else if s.open[n-1] != en {
		w.bug("s%d effect %d undone before %d", s.id, en.n, s.open[n-1].n)
	} else {
		s.open = s.open[:n-1]
	}
	s.mu.Unlock()
	for i, v := range used {
		v.mu.Lock()
		closed := v.closed
		v.mu.Unlock()
		if closed {
			w.bug("s%d undoes effect %d after its %s was closed", s.id, en.n, s.needs[i])
		}
		if got, err := Get[*thing](x, s.needs[i]); err != nil || got != v {
			w.bug("s%d cannot read %s while unloading: %v", s.id, s.needs[i], err)
		}
	}
	if err := x.Defer("late", nil); err == nil {
		w.bug("s%d registered an effect while unloading", s.id)
	}
	switch {
	case s.badUndo == 1 && en.n == 1:
		return errors.New("undo told to fail")
	case s.badUndo == 2 && en.n == 1:
		panic("undo told to panic")
	}
	return nil
}

// taken lists the names the model's specs provide, by realm.
func (w *world) taken() map[string]bool {
	out := map[string]bool{}
	for k := range w.burst {
		out[k] = true
	}
	for _, s := range w.specs {
		if s.provides != "" {
			out[s.realm()+"/"+s.provides] = true
		}
	}
	return out
}

func (w *world) grow(parent *spec, depth int) *spec {
	s := &spec{id: w.next, parent: parent}
	w.next++
	if parent == nil {
		s.label = rapid.SampledFrom([]string{"", "", "blue"}).Draw(w.t, "realm")
	}
	w.specs = append(w.specs, s)
	taken := w.taken()
	names := strings.Split(modelNames, "")
	if name := rapid.SampledFrom(append(names, "", "")).Draw(w.t, "provides"); name != "" && !taken[s.realm()+"/"+name] {
		s.provides = name
	}
	for _, n := range names {
		if n == s.provides {
			continue
		}
		switch rapid.IntRange(0, 9).Draw(w.t, "need") {
		case 0, 1:
			s.needs = append(s.needs, n)
		case 2:
			s.optional = append(s.optional, n)
		}
	}
	s.effects = rapid.IntRange(0, 3).Draw(w.t, "effects")
	s.badUndo = rapid.SampledFrom([]int{0, 0, 0, 1, 2}).Draw(w.t, "badUndo")
	s.fails = rapid.IntRange(0, 9).Draw(w.t, "fails") == 0
	if depth < 2 {
		for range rapid.SampledFrom([]int{0, 0, 1, 2}).Draw(w.t, "children") {
			s.children = append(s.children, w.grow(s, depth+1))
		}
	}
	return s
}

// forget takes a spec and everything below it out of the model.
func (w *world) forget(s *spec) {
	gone := map[*spec]bool{}
	var mark func(*spec)
	mark = func(s *spec) {
		gone[s] = true
		if s.provides != "" {
			w.burst[s.realm()+"/"+s.provides] = true
		}
		for _, c := range s.children {
			mark(c)
		}
	}
	mark(s)
	kept := w.specs[:0:0]
	for _, s := range w.specs {
		if !gone[s] {
			kept = append(kept, s)
		}
	}
	w.specs = kept
}

// active computes what should run: nothing runs that does not have to be
// assumed.
func (w *world) active() map[*spec]bool {
	on := map[*spec]bool{}
	for changed := true; changed; {
		changed = false
		offered := map[string]bool{}
		for s := range on {
			if s.provides != "" && !s.shut.Load() {
				offered[s.realm()+"/"+s.provides] = true
			}
		}
		for _, s := range w.specs {
			if on[s] || s.fails || s.failed || s.parent != nil && !on[s.parent] {
				continue
			}
			met := true
			for _, n := range s.needs {
				met = met && offered[s.realm()+"/"+n]
			}
			if met {
				on[s] = true
				changed = true
			}
		}
	}
	return on
}

// agree compares the quiet world with the model.
func (w *world) agree() {
	if err := w.root.Quiesce(context.Background()); err != nil {
		w.t.Fatalf("quiesce: %v", err)
	}
	w.burst = map[string]bool{}
	w.check()
	// A fiber that failed (Fail) comes back when its providers change; whether
	// they did within a burst depends on timing, so the world is asked.
	for _, s := range w.specs {
		if s.failed && s.fiber.State() == Active {
			s.failed = false
		}
		if s.fiber != nil && s.fiber.State() == Active {
			s.scarred = false
		}
	}
	on := w.active()
	for _, s := range w.specs {
		if s.parent != nil && !on[s.parent] {
			if s.fiber != nil && s.fiber.State() != Disposed && s.fiber.Parent().State() != Loading {
				w.t.Fatalf("s%d is %s below a parent that does not run", s.id, s.fiber.State())
			}
			continue
		}
		got := s.fiber.State()
		switch {
		case on[s] && got != Active:
			w.t.Fatalf("s%d is %s (%v, waiting %v), want ACTIVE", s.id, got, s.fiber.Err(), s.fiber.WaitReasons())
		case !on[s] && got != Pending && got != Failed:
			w.t.Fatalf("s%d is %s, want PENDING or FAILED", s.id, got)
		case !on[s] && got == Failed && !s.fails && !s.failed && !s.scarred:
			w.t.Fatalf("s%d is FAILED without a reason: %v", s.id, s.fiber.Err())
		}
		s.mu.Lock()
		n := len(s.open)
		s.mu.Unlock()
		if want := 2 * s.effects; on[s] && n != want || !on[s] && n != 0 {
			w.t.Fatalf("s%d has %d effects open, active %v, registered %d", s.id, n, on[s], want)
		}
	}
	if err := w.root.Audit(); (err == nil) != (len(on) == len(w.living(on))) {
		w.t.Fatalf("audit says %v with %d of %d running", err, len(on), len(w.specs))
	}
}

// living returns the specs that have a fiber now.
func (w *world) living(on map[*spec]bool) []*spec {
	var out []*spec
	for _, s := range w.specs {
		if s.parent == nil || on[s.parent] {
			out = append(out, s)
		}
	}
	return out
}

func (w *world) loads() int {
	n := 0
	for _, s := range w.specs {
		s.mu.Lock()
		n += s.loads
		s.mu.Unlock()
	}
	return n
}

// one performs one random operation without waiting for its outcome.
func (w *world) one(ctx context.Context) {
	ops := []string{"plug", "plug", "dispose", "restart", "update", "facts", "shut", "remap"}
	op := rapid.SampledFrom(ops).Draw(w.t, "op")
	top := func() []*spec {
		var out []*spec
		for _, s := range w.specs {
			if s.parent == nil {
				out = append(out, s)
			}
		}
		return out
	}()
	if op == "plug" || len(top) == 0 {
		if len(w.specs) > 24 {
			return
		}
		s := w.grow(nil, 0)
		s.place = w.root.Realms(labels(s.label))
		f, err := s.place.Plugin(w.plugin(s), s.fails)
		if err != nil {
			w.t.Fatalf("plug: %v", err)
		}
		s.fiber = f
		return
	}
	s := rapid.SampledFrom(top).Draw(w.t, "spec")
	// A context that is over makes the call a request without waiting.
	switch op {
	case "dispose":
		w.forget(s)
		_ = s.fiber.Dispose(ctx)
	case "restart":
		s.scarred, s.failed = s.scarred || s.failed, false
		_ = s.fiber.Restart(ctx)
	case "update":
		s.failed, s.scarred = false, false
		s.fails = rapid.IntRange(0, 2).Draw(w.t, "fails") == 0
		_ = s.fiber.Update(context.WithoutCancel(ctx), s.fails)
	case "shut":
		s.shut.Store(!s.shut.Load())
		s.mu.Lock()
		x := s.ctx
		s.mu.Unlock()
		if x != nil && s.provides != "" {
			_ = x.Recheck(s.provides) // refused while it is not loaded
		}
	case "remap":
		to := rapid.SampledFrom([]string{"", "blue", "red"}).Draw(w.t, "to")
		names := s.offers(nil)
		taken := w.taken()
		for _, n := range names {
			if to == s.label || taken[to+"/"+n] {
				return // somebody may be there
			}
		}
		for _, n := range names {
			w.burst[s.label+"/"+n] = true
		}
		s.label = to
		if err := s.place.Remap(labels(to)); err != nil {
			w.t.Fatalf("remap: %v", err)
		}
	case "facts":
		s.mu.Lock()
		s.facts = rapid.IntRange(0, 3).Draw(w.t, "facts")
		x := s.ctx
		s.mu.Unlock()
		if x != nil && s.provides != "" {
			_ = x.SetFacts(s.provides, s.facts)
		}
	}
}

var modelSteps int

func modelRun(t *rapid.T) {
	w := &world{t: t, root: New(), burst: map[string]bool{}}
	over, cancel := context.WithCancel(context.Background())
	cancel()
	t.Repeat(map[string]func(*rapid.T){
		"": func(t *rapid.T) { w.t = t; w.agree() },
		"burst": func(t *rapid.T) {
			w.t = t
			for range rapid.IntRange(1, 5).Draw(t, "length") {
				modelSteps++
				w.one(over)
			}
		},
		"single": func(t *rapid.T) { w.t = t; modelSteps++; w.one(over) },
		// What does not restart anybody must not.
		"same": func(t *rapid.T) {
			w.t = t
			modelSteps++
			before := w.loads()
			for _, s := range w.specs {
				if s.provides == "" || s.ctx == nil || s.fiber == nil || s.fiber.State() != Active {
					continue
				}
				v, err := Get[*thing](s.ctx, s.provides)
				if err != nil {
					t.Fatalf("s%d reads its own %s: %v", s.id, s.provides, err)
				}
				if facts, _ := s.ctx.Facts(s.provides); facts != nil {
					_ = s.ctx.SetFacts(s.provides, facts)
				}
				if err := s.ctx.Set(s.provides, v); err != nil {
					t.Fatalf("set: %v", err)
				}
			}
			if err := w.root.Quiesce(context.Background()); err != nil {
				t.Fatal(err)
			}
			if after := w.loads(); after != before {
				t.Fatalf("%d loads for facts that did not change", after-before)
			}
		},
		"fail": func(t *rapid.T) {
			w.t = t
			modelSteps++
			on := w.active()
			for _, s := range w.specs {
				if s.parent == nil && on[s] {
					s.failed = true
					s.fiber.Fail(errors.New("found out later"))
					return
				}
			}
		},
		"empty": func(t *rapid.T) {
			w.t = t
			modelSteps++
			if rapid.IntRange(0, 9).Draw(t, "really") > 0 {
				return
			}
			for _, s := range w.specs {
				if s.parent == nil {
					w.forget(s)
				}
			}
			_ = w.root.Fiber().Dispose(context.Background())
		},
	})
	all := w.specs
	_ = w.root.Fiber().Dispose(context.Background())
	if err := w.root.Quiesce(context.Background()); err != nil {
		t.Fatal(err)
	}
	w.check()
	for _, s := range all {
		if len(s.open) > 0 {
			t.Fatalf("s%d leaked %d effects", s.id, len(s.open))
		}
	}
	if s := w.root.Snapshot(); len(s.Services)+len(s.Events)+len(s.Root.Effects) > 0 || s.Abandoned > 0 {
		t.Fatalf("left over: %+v", s)
	}
}

// TestModel drives random trees of fibers, providers and failures against the
// model. Tier ci runs some thousand steps, tier nightly one million.
func TestModel(t *testing.T) {
	goal := 5_000
	if testing.Short() {
		goal = 500
	}
	if os.Getenv("CORDON_TEST_TIER") == "nightly" {
		goal = 1_000_000
	}
	settings := map[string]string{"rapid.nofailfile": "true"} // the seed it prints is enough; nothing is written here
	if goal > 100_000 {
		settings["rapid.checks"] = "2000"
	}
	for name, value := range settings {
		if err := flag.Set(name, value); err != nil {
			t.Fatal(err)
		}
	}
	for modelSteps = 0; modelSteps < goal && !t.Failed(); {
		rapid.Check(t, modelRun)
	}
	t.Logf("%d steps", modelSteps)
}

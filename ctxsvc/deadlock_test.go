package ctxsvc

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

var probe = Event[int, int]{Name: "probe"}

// scene is a fiber in the middle of everything: below a parent, above a child,
// with a provider and a consumer, a group and listeners of every kind.
type scene struct {
	h                                 *house
	parent, self, child, consumer, by *Fiber
	mu                                sync.Mutex
	x                                 *Context // of self's present load
	group                             *Effect
	place                             *Context
	site                              string
	armed                             atomic.Bool
	call                              func(x *Context)
	done                              chan struct{}
}

// here returns the context of self's present load.
func (s *scene) here() *Context {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.x
}

func (s *scene) theGroup() *Effect {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.group
}

func (s *scene) theFiber(f **Fiber) *Fiber {
	s.mu.Lock()
	defer s.mu.Unlock()
	return *f
}

// at runs the call under test if this is the site it is meant for.
func (s *scene) at(site string, x *Context) {
	if site == s.site && s.armed.CompareAndSwap(true, false) {
		defer close(s.done)
		s.call(x)
	}
}

func (s *scene) apply(x *Context, _ any) error {
	s.mu.Lock()
	s.x = x
	s.mu.Unlock()
	if err := x.Provide("own", 1); err != nil {
		return err
	}
	if err := x.Defer("undo", func(context.Context) error { s.at("disposer", x); return nil }); err != nil {
		return err
	}
	if err := x.Defer("undo and tell", func(ctx context.Context) error {
		_, err := Waterfall(ctx, s.h.Context, probe, 2, func(context.Context, int) (int, error) { return 0, nil })
		return err
	}); err != nil {
		return err
	}
	g, err := x.Group("group", func(y *Context) error {
		s.at("set-up", y)
		return y.Defer("member", func(context.Context) error { s.at("disposer of a group", x); return nil })
	})
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.group = g
	s.mu.Unlock()
	if _, err := x.GroupAsync("async", func(y *Context) error { s.at("asynchronous set-up", y); return nil }); err != nil {
		return err
	}
	child, err := x.Plugin(Plugin{Name: "child", Apply: func(x *Context, _ any) error {
		return x.Defer("undo", func(context.Context) error { s.at("disposer of a child", x); return nil })
	}}, nil)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.child = child
	s.mu.Unlock()
	if err := On(x, probe, func(ctx context.Context, q int, next func(context.Context, int) (int, error)) (int, error) {
		if q == 0 {
			s.at("listener", x)
		}
		return next(ctx, q)
	}); err != nil {
		return err
	}
	if err := x.OnUpdate(func(ctx context.Context, c any, next func(context.Context, any) error) error {
		s.at("update hook", x)
		return next(ctx, c)
	}); err != nil {
		return err
	}
	if _, err := Waterfall(x.Context(), x, probe, 1, func(context.Context, int) (int, error) { return 0, nil }); err != nil {
		return err
	}
	if err := Parallel(context.Background(), x, probe, 3); err != nil {
		return err
	}
	s.at("apply", x)
	return nil
}

func newScene(t *testing.T, site string, call func(s *scene, x *Context)) *scene {
	// No timer may help anybody out: what would wait on itself must be seen.
	h := open(t, WithUndoTimeout(time.Hour), WithStopTimeout(time.Hour), WithQuietTimeout(time.Hour))
	s := &scene{h: h, site: site, done: make(chan struct{})}
	s.call = func(x *Context) { call(s, x) }
	h.ok(On(h.Context, probe, func(ctx context.Context, q int, next func(context.Context, int) (int, error)) (int, error) {
		sites := map[int]string{1: "listener inside apply", 2: "listener inside disposer", 3: "parallel listener inside apply"}
		if x := s.here(); x != nil {
			s.at(sites[q], x)
		}
		return next(ctx, q)
	}))
	s.by = h.plug(h.Context, Plugin{Name: "by", Apply: func(x *Context, _ any) error {
		return x.Provide("dep", 1, WithCheck(func(y *Context) bool { s.at("availability check", y); return true }))
	}}, nil)
	h.quiet()
	s.place = h.Realms(nil)
	s.parent = h.plug(s.place, Plugin{Name: "parent", Apply: func(x *Context, _ any) (err error) {
		self, err := x.Plugin(Plugin{
			Name: "self", Inject: inject("dep"), Apply: s.apply,
			Check: func(c any) (any, error) {
				if x := s.here(); x != nil {
					s.at("check", x)
				}
				return c, nil
			},
		}, nil)
		if err != nil {
			return err
		}
		s.mu.Lock()
		s.self = self
		s.mu.Unlock()
		return nil
	}}, nil)
	s.consumer = h.plug(h.Context, Plugin{Name: "consumer", Inject: inject("own"), Apply: func(x *Context, _ any) error {
		return x.Defer("undo", func(context.Context) error { s.at("disposer of a consumer", x); return nil })
	}}, nil)
	h.quiet()
	h.ok(Tap(h.Context, StatusEvent, func(context.Context, StatusChange) error { s.at("status observer", s.here()); return nil }))
	h.ok(Tap(h.Context, ConfigEvent, func(context.Context, Update) error { s.at("config listener", s.here()); return nil }))
	h.ok(Tap(h.Context, FiberEvent, func(_ context.Context, ch FiberChange) error {
		if !ch.Disposed && ch.Fiber.Name() == "late" {
			s.at("creation observer", s.here())
		}
		return nil
	}))
	h.ok(h.Watch("own", func(context.Context, ServiceChange) { s.at("watcher", s.here()) }))
	h.quiet()
	h.state(s.consumer, Active)
	h.state(s.self, Active)
	return s
}

// sites says how to make each site run.
var sites = map[string]func(s *scene){
	"apply":                          (*scene).restart,
	"disposer":                       (*scene).restart,
	"set-up":                         (*scene).restart,
	"asynchronous set-up":            (*scene).restart,
	"listener inside apply":          (*scene).restart,
	"parallel listener inside apply": (*scene).restart,
	"listener inside disposer":       (*scene).restart,
	"disposer of a child":            (*scene).restart,
	"disposer of a consumer":         (*scene).restart,
	"status observer":                (*scene).restart,
	"config listener":                (*scene).restart,
	"watcher":                        (*scene).restart,
	"check":                          (*scene).update,
	"update hook":                    (*scene).update,
	"disposer of a group":            func(s *scene) { _ = s.theGroup().Dispose(context.Background()) },
	"availability check":             func(s *scene) { _ = s.by.Scope().Recheck("dep") },
	"creation observer":              func(s *scene) { _, _ = s.here().Plugin(Plugin{Name: "late", Apply: nop}, nil) },
	"listener": func(s *scene) {
		_, _ = Waterfall(context.Background(), s.h.Context, probe, 0, func(context.Context, int) (int, error) { return 0, nil })
	},
}

func (s *scene) restart() { _ = s.theFiber(&s.self).Restart(context.Background()) }
func (s *scene) update()  { _ = s.theFiber(&s.self).Update(context.Background(), 1) }

// calls is every exported function that could take a lock or wait.
func calls() map[string]func(s *scene, x *Context, ctx context.Context) error {
	out := map[string]func(s *scene, x *Context, ctx context.Context) error{
		"Plugin": func(_ *scene, x *Context, _ context.Context) error {
			_, err := x.Plugin(Plugin{Apply: nop}, nil)
			return err
		},
		"Effect": func(_ *scene, x *Context, _ context.Context) error {
			return x.Effect("e", func() (Disposer, error) { return nil, nil })
		},
		"Defer": func(_ *scene, x *Context, _ context.Context) error { return x.Defer("d", nil) },
		"Group": func(_ *scene, x *Context, _ context.Context) error {
			_, err := x.Group("g", func(*Context) error { return nil })
			return err
		},
		"Provide": func(_ *scene, x *Context, _ context.Context) error { return x.Provide("new", 1) },
		"Set":     func(_ *scene, x *Context, _ context.Context) error { return x.Set("own", 2, WithFacts(2)) },
		"SetFacts": func(_ *scene, x *Context, _ context.Context) error {
			return x.SetFacts("own", 3)
		},
		"Recheck": func(s *scene, _ *Context, _ context.Context) error { return s.by.Scope().Recheck("dep") },
		"Watch": func(_ *scene, x *Context, _ context.Context) error {
			return x.Watch("own", func(context.Context, ServiceChange) {})
		},
		"Get":    func(_ *scene, x *Context, _ context.Context) error { _, err := Get[int](x, "dep"); return err },
		"Lookup": func(_ *scene, x *Context, _ context.Context) error { Lookup[int](x, "dep"); return nil },
		"Facts":  func(_ *scene, x *Context, _ context.Context) error { x.Facts("dep"); return nil },
		"Hold":   func(_ *scene, x *Context, _ context.Context) error { _, err := Hold[int](x, "own"); return err },
		"Isolate": func(_ *scene, x *Context, _ context.Context) error {
			x.Isolate("own", "x").Intercept("own", 1).Layers("own")
			return nil
		},
		"Remap": func(s *scene, _ *Context, _ context.Context) error {
			return s.place.Remap(map[string]string{"dep": "elsewhere"})
		},
		"Snapshot": func(_ *scene, x *Context, _ context.Context) error { x.Snapshot(); return nil },
		"Audit":    func(_ *scene, x *Context, _ context.Context) error { _ = x.Audit(); return nil },
		"Quiesce":  func(_ *scene, x *Context, ctx context.Context) error { return x.Quiesce(ctx) },
		"Scope":    func(s *scene, _ *Context, _ context.Context) error { s.theFiber(&s.self).Scope().Root(); return nil },
		"State": func(s *scene, _ *Context, _ context.Context) error {
			s.theFiber(&s.self).State()
			s.theFiber(&s.self).Err()
			s.theFiber(&s.self).Config()
			s.theFiber(&s.self).Parent()
			return nil
		},
		"WaitReasons": func(s *scene, _ *Context, _ context.Context) error { s.theFiber(&s.self).Waiting(); return nil },
		"AddNeed": func(s *scene, _ *Context, _ context.Context) error {
			return s.theFiber(&s.self).AddNeed(Need{Name: "x"})
		},
		"Fail":       func(s *scene, x *Context, _ context.Context) error { x.Fail(errors.New("x")); return nil },
		"Move":       func(s *scene, _ *Context, _ context.Context) error { return s.theFiber(&s.self).Move(s.h.Context) },
		"group.Wait": func(s *scene, _ *Context, ctx context.Context) error { return s.theGroup().Wait(ctx) },
		"group.Dispose": func(s *scene, _ *Context, ctx context.Context) error {
			return s.theGroup().Dispose(ctx)
		},
		"async wait": func(_ *scene, x *Context, ctx context.Context) error {
			e, err := x.EffectAsync("a", func(context.Context) (Disposer, error) { return nil, nil })
			if err != nil {
				return err
			}
			return e.Wait(ctx)
		},
		"On": func(_ *scene, x *Context, _ context.Context) error {
			return Tap(x, ping, func(context.Context, int) error { return nil })
		},
		"Waterfall": func(_ *scene, x *Context, ctx context.Context) error {
			_, err := Waterfall(ctx, x, probe, 9, func(context.Context, int) (int, error) { return 0, nil })
			return err
		},
		"Emit":     func(_ *scene, x *Context, ctx context.Context) error { Emit(ctx, x, probe, 9); return nil },
		"Parallel": func(_ *scene, x *Context, ctx context.Context) error { return Parallel(ctx, x, probe, 9) },
		"Serial": func(_ *scene, x *Context, ctx context.Context) error {
			_, _, err := Serial(ctx, x, probe, 9)
			return err
		},
		"Bail": func(_ *scene, x *Context, _ context.Context) error { _, _, err := Bail(x, probe, 9); return err },
	}
	for who, fiber := range map[string]func(s *scene) *Fiber{
		"self": func(s *scene) *Fiber { return s.theFiber(&s.self) }, "parent": func(s *scene) *Fiber { return s.parent },
		"child": func(s *scene) *Fiber { return s.theFiber(&s.child) }, "provider": func(s *scene) *Fiber { return s.by },
		"consumer": func(s *scene) *Fiber { return s.consumer }, "root": func(s *scene) *Fiber { return s.h.Fiber() },
	} {
		out[who+".Wait"] = func(s *scene, _ *Context, ctx context.Context) error { return fiber(s).Wait(ctx) }
		out[who+".Dispose"] = func(s *scene, _ *Context, ctx context.Context) error { return fiber(s).Dispose(ctx) }
		out[who+".Restart"] = func(s *scene, _ *Context, ctx context.Context) error { return fiber(s).Restart(ctx) }
		out[who+".Update"] = func(s *scene, _ *Context, ctx context.Context) error { return fiber(s).Update(ctx, 2) }
	}
	return out
}

// TestNothingDeadlocks calls every function from every kind of code the
// container runs. Each must return, and the container must come to rest.
func TestNothingDeadlocks(t *testing.T) {
	for site, trigger := range sites {
		t.Run(site, func(t *testing.T) {
			t.Parallel()
			for name, fn := range calls() {
				for _, own := range []bool{true, false} {
					t.Run(fmt.Sprintf("%s/own context %v", name, own), func(t *testing.T) {
						var err error
						s := newScene(t, site, func(s *scene, x *Context) {
							ctx := context.Background()
							if own {
								ctx = x.Context()
							}
							err = fn(s, x, ctx)
						})
						s.armed.Store(true)
						go trigger(s)
						recv(s.h, s.done)
						s.h.quiet()
						if err != nil {
							t.Logf("refused: %v", err)
						}
					})
				}
			}
		})
	}
}

// TestRefusedWaits pins where a wait is refused, and that the request stands.
func TestRefusedWaits(t *testing.T) {
	for _, tt := range []struct {
		site, call string
		refused    bool
	}{
		{"apply", "self.Wait", true},
		{"apply", "self.Dispose", true},
		{"apply", "self.Restart", true},
		{"apply", "self.Update", true},
		{"apply", "parent.Dispose", true},
		{"apply", "provider.Dispose", true},
		{"apply", "root.Dispose", true},
		{"apply", "Quiesce", true},
		{"apply", "child.Wait", false},
		{"apply", "child.Dispose", false},
		{"apply", "parent.Wait", false},
		{"listener inside apply", "self.Wait", true},
		{"parallel listener inside apply", "self.Wait", true},
		{"disposer", "self.Wait", true},
		{"disposer", "self.Dispose", true},
		{"disposer", "parent.Dispose", true},
		{"disposer", "provider.Dispose", true},
		{"disposer", "consumer.Wait", false},
		{"disposer of a consumer", "self.Dispose", true},
		{"disposer of a child", "parent.Dispose", true},
		{"disposer of a group", "group.Dispose", true},
		{"disposer of a group", "self.Wait", false},
		{"set-up", "self.Wait", true},
		{"asynchronous set-up", "self.Dispose", true},
		{"availability check", "self.Wait", true},
		{"creation observer", "self.Dispose", true},
		{"listener", "self.Dispose", false},
		{"listener", "root.Dispose", false},
		{"status observer", "self.Dispose", false},
		{"watcher", "root.Dispose", false},
	} {
		for _, own := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/%s/own context %v", tt.site, tt.call, own), func(t *testing.T) {
				var err error
				s := newScene(t, tt.site, func(s *scene, x *Context) {
					ctx := context.Background()
					if own {
						ctx = x.Context()
					}
					err = calls()[tt.call](s, x, ctx)
				})
				s.armed.Store(true)
				go sites[tt.site](s)
				recv(s.h, s.done)
				s.h.quiet()
				var de *DeadlockError
				if tt.refused && !errors.Is(err, ErrWouldDeadlock) && !(own && errors.Is(err, context.Canceled)) {
					t.Errorf("returned %v, want a refusal", err)
				}
				// An observer that waits with self's context, while self loads,
				// says it is self's body.
				borrowed := own && (tt.site == "status observer" || tt.site == "watcher")
				if errors.As(err, &de) && !tt.refused && !borrowed {
					t.Errorf("refused: %v", err)
				}
				switch tt.call {
				case "self.Dispose", "parent.Dispose", "root.Dispose":
					s.h.state(s.self, Disposed)
				case "provider.Dispose":
					s.h.state(s.by, Disposed)
				}
			})
		}
	}
}

// Two bodies that wait for each other: the second is refused.
func TestWaitsOnEachOther(t *testing.T) {
	h := open(t, WithUndoTimeout(time.Hour), WithStopTimeout(time.Hour), WithQuietTimeout(time.Hour))
	var fibers [2]*Fiber
	var ready sync.WaitGroup
	ready.Add(1)
	results := make(chan error, 2)
	for i := range fibers {
		fibers[i] = h.plug(h.Context, Plugin{Name: fmt.Sprint("f", i), Apply: func(*Context, any) error {
			ready.Wait()
			results <- fibers[1-i].Wait(context.Background())
			return nil
		}}, nil)
	}
	ready.Done()
	refused := 0
	for range fibers {
		if err := recv(h, results); errors.Is(err, ErrWouldDeadlock) {
			refused++
		} else if err != nil {
			t.Errorf("Wait = %v", err)
		}
	}
	if refused == 0 {
		// One may have been through before the other began.
		t.Log("nobody had to be refused")
	}
	h.quiet()
}

// A wait that was fine when it began is refused when it becomes circular: an
// asynchronous set-up may wait for its fiber to be ACTIVE, until that fiber has
// to wait for the set-up.
func TestWaitBecomesCircular(t *testing.T) {
	h := open(t, WithUndoTimeout(time.Hour), WithStopTimeout(time.Hour), WithQuietTimeout(time.Hour))
	for _, dispose := range []bool{false, true} {
		gate := make(chan struct{})
		result := make(chan error, 1)
		f := h.plug(h.Context, Plugin{Name: "f", Apply: func(x *Context, _ any) error {
			_, err := x.GroupAsync("waits", func(y *Context) error {
				result <- y.Fiber().Wait(context.Background())
				return nil
			})
			<-gate
			return err
		}}, nil)
		h.registered(f)
		if dispose {
			over, cancel := context.WithCancel(h.ctx)
			cancel()
			if err := f.Dispose(over); !errors.Is(err, context.Canceled) {
				t.Errorf("Dispose = %v", err)
			}
		}
		close(gate)
		err := recv(h, result)
		if refused := errors.Is(err, ErrWouldDeadlock); refused != dispose {
			t.Errorf("disposed %v: Wait = %v", dispose, err)
		}
		h.ok(f.Dispose(h.ctx))
	}
}

// registered waits until a wait for f from inside is under way.
func (h *house) registered(f *Fiber) {
	h.t.Helper()
	for h.ctx.Err() == nil {
		h.c().mu.Lock()
		for w := range h.c().waits {
			if w.fiber == f {
				h.c().mu.Unlock()
				return
			}
		}
		h.c().mu.Unlock()
		runtime.Gosched()
	}
	h.t.Fatal("nobody waits")
}

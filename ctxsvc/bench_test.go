package ctxsvc

import (
	"context"
	"fmt"
	"runtime"
	"testing"
)

// The benchmarks that bench/ctxsvc/compare.mjs mirrors in JavaScript are the
// dispatch ones: the same shape, one integer request, listeners that call next
// and add one.

func listeners(b *testing.B, n int) (*Context, Event[int, int]) {
	b.Helper()
	root := New()
	ev := Event[int, int]{Name: "bench"}
	for range n {
		if err := On(root, ev, func(ctx context.Context, q int, next func(context.Context, int) (int, error)) (int, error) {
			a, err := next(ctx, q)
			return a + 1, err
		}); err != nil {
			b.Fatal(err)
		}
	}
	return root, ev
}

func BenchmarkWaterfall(b *testing.B) {
	for _, n := range []int{0, 1, 4, 16} {
		b.Run(fmt.Sprint("listeners=", n), func(b *testing.B) {
			root, ev := listeners(b, n)
			ctx := context.Background()
			base := func(_ context.Context, q int) (int, error) { return q, nil }
			b.ReportAllocs()
			for b.Loop() {
				if a, err := Waterfall(ctx, root, ev, 1, base); a != n+1 || err != nil {
					b.Fatal(a, err)
				}
			}
		})
	}
}

func BenchmarkEmit(b *testing.B) {
	for _, n := range []int{0, 1, 4, 16} {
		b.Run(fmt.Sprint("listeners=", n), func(b *testing.B) {
			root := New()
			ev := Event[int, int]{Name: "bench"}
			sum := 0
			for range n {
				if err := Tap(root, ev, func(_ context.Context, q int) error { sum += q; return nil }); err != nil {
					b.Fatal(err)
				}
			}
			ctx := context.Background()
			b.ReportAllocs()
			for b.Loop() {
				Emit(ctx, root, ev, 1)
			}
		})
	}
}

func BenchmarkBail(b *testing.B) {
	for _, n := range []int{1, 4, 16} {
		b.Run(fmt.Sprint("listeners=", n), func(b *testing.B) {
			root := New()
			ev := Event[int, int]{Name: "bench"}
			for range n {
				if err := Answer(root, ev, func(_ context.Context, q int) (int, bool, error) { return 0, false, nil }); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportAllocs()
			for b.Loop() {
				if _, handled, err := Bail(root, ev, 1); handled || err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkGet(b *testing.B) {
	root := New()
	ctx := context.Background()
	must(b, root.Provide("db", 42))
	var need, ancestor *Context
	_, err := root.Plugin(Plugin{Name: "c", Inject: inject("db"), Apply: func(x *Context, _ any) error {
		need = x
		_, err := x.Plugin(Plugin{Name: "child", Apply: func(x *Context, _ any) error { ancestor = x; return nil }}, nil)
		return err
	}}, nil)
	must(b, err)
	must(b, root.Quiesce(ctx))
	held, err := Hold[int](need, "db")
	must(b, err)
	for name, get := range map[string]func() (int, error){
		"declared": func() (int, error) { return Get[int](need, "db") },
		"ancestor": func() (int, error) { return Get[int](ancestor, "db") },
		"handle":   held.Get,
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if v, err := get(); v != 42 || err != nil {
					b.Fatal(v, err)
				}
			}
		})
	}
}

// BenchmarkStart starts and ends n fibers; per fiber figures are reported.
func BenchmarkStart(b *testing.B) {
	for _, n := range []int{100, 1_000, 10_000} {
		b.Run(fmt.Sprint("fibers=", n), func(b *testing.B) {
			ctx := context.Background()
			for b.Loop() {
				root := New()
				for range n {
					_, err := root.Plugin(Plugin{Name: "p", Apply: func(x *Context, _ any) error { return x.Defer("u", nil) }}, nil)
					must(b, err)
				}
				must(b, root.Quiesce(ctx))
				must(b, root.Fiber().Dispose(ctx))
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/fiber")
		})
	}
}

// BenchmarkProviderRestart restarts one provider with n dependents: each of
// them unloads before it and loads after it.
func BenchmarkProviderRestart(b *testing.B) {
	for _, n := range []int{10, 100, 1_000, 10_000} {
		b.Run(fmt.Sprint("dependents=", n), func(b *testing.B) {
			ctx := context.Background()
			root := New()
			p, err := root.Plugin(provider("db", 1), nil)
			must(b, err)
			for range n {
				_, err := root.Plugin(Plugin{Name: "c", Inject: inject("db"), Apply: nop}, nil)
				must(b, err)
			}
			must(b, root.Quiesce(ctx))
			for b.Loop() {
				must(b, p.Restart(ctx))
				must(b, root.Quiesce(ctx))
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/dependent")
			must(b, root.Fiber().Dispose(ctx))
		})
	}
}

// BenchmarkMemory reports the live heap of one idle fiber with one need, one
// disposer and one listener.
func BenchmarkMemory(b *testing.B) {
	for _, n := range []int{1_000, 10_000} {
		b.Run(fmt.Sprint("fibers=", n), func(b *testing.B) {
			ctx := context.Background()
			ev := Event[int, int]{Name: "bench"}
			var perFiber float64
			for b.Loop() {
				var before, after runtime.MemStats
				root := New()
				must(b, root.Provide("db", 1))
				runtime.GC()
				runtime.ReadMemStats(&before)
				for range n {
					_, err := root.Plugin(Plugin{Name: "c", Inject: inject("db"), Apply: func(x *Context, _ any) error {
						if err := x.Defer("u", nil); err != nil {
							return err
						}
						return Tap(x, ev, func(context.Context, int) error { return nil })
					}}, nil)
					must(b, err)
				}
				must(b, root.Quiesce(ctx))
				runtime.GC()
				runtime.ReadMemStats(&after)
				perFiber = float64(after.HeapAlloc-before.HeapAlloc) / float64(n)
				must(b, root.Fiber().Dispose(ctx))
			}
			b.ReportMetric(perFiber, "B/fiber")
		})
	}
}

func must(b *testing.B, err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

package ctxsvc_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/cordon-host/cordon/ctxsvc"
)

// A provider and a consumer, plugged in in the wrong order.
func Example() {
	ctx := context.Background()
	root := ctxsvc.New()

	greeter, _ := root.Plugin(ctxsvc.Plugin{
		Name:   "greeter",
		Inject: []ctxsvc.Need{{Name: "clock"}},
		Apply: func(x *ctxsvc.Context, _ any) error {
			now, err := ctxsvc.Get[func() string](x, "clock")
			if err != nil {
				return err
			}
			fmt.Println("greeter: good", now())
			return x.Defer("farewell", func(context.Context) error {
				fmt.Println("greeter: good bye,", now()) // the clock still works
				return nil
			})
		},
	}, nil)
	_ = greeter.Wait(ctx)
	fmt.Println(greeter.State(), greeter.Waiting())

	clock, _ := root.Plugin(ctxsvc.Plugin{
		Name: "clock",
		Apply: func(x *ctxsvc.Context, _ any) error {
			if err := x.Defer("stop", func(context.Context) error { fmt.Println("clock: stopped"); return nil }); err != nil {
				return err
			}
			return x.Provide("clock", func() string { return "morning" })
		},
	}, nil)
	_ = root.Quiesce(ctx)
	fmt.Println(greeter.State())

	_ = clock.Dispose(ctx)
	fmt.Println(greeter.State())
	// Output:
	// PENDING [clock]
	// greeter: good morning
	// ACTIVE
	// greeter: good bye, morning
	// clock: stopped
	// PENDING
}

// An event whose listeners can veto, change the request, or work on the
// answer.
func ExampleWaterfall() {
	ctx := context.Background()
	root := ctxsvc.New()
	type request struct{ Command string }
	run := ctxsvc.Event[request, string]{Name: "shell/run", FailClosed: true}

	_ = ctxsvc.On(root, run, func(ctx context.Context, q request, next func(context.Context, request) (string, error)) (string, error) {
		if q.Command == "rm -rf /" {
			return "", errors.New("refused")
		}
		out, err := next(ctx, q)
		return "[" + out + "]", err
	}, ctxsvc.Label("guard"))
	_ = ctxsvc.Map(root, run, func(_ context.Context, q request) (request, error) {
		q.Command = "nice " + q.Command
		return q, nil
	})

	execute := func(_ context.Context, q request) (string, error) { return "ran " + q.Command, nil }
	fmt.Println(ctxsvc.Waterfall(ctx, root, run, request{"make"}, execute))
	fmt.Println(ctxsvc.Waterfall(ctx, root, run, request{"rm -rf /"}, execute))
	// Output:
	// [ran nice make] <nil>
	//  refused
}

// A question that the first listener with an answer settles. The zero value is
// an answer like any other.
func ExampleBail() {
	root := ctxsvc.New()
	limit := ctxsvc.Event[string, int]{Name: "limit"}
	_ = ctxsvc.Answer(root, limit, func(_ context.Context, user string) (int, bool, error) {
		return 0, user == "guest", nil
	})
	fmt.Println(ctxsvc.Bail(root, limit, "guest"))
	fmt.Println(ctxsvc.Bail(root, limit, "owner"))
	// Output:
	// 0 true <nil>
	// 0 false <nil>
}

// Listeners scoped to a subject hear what is dispatched for it and for what is
// below it.
func ExampleSubject() {
	ctx := context.Background()
	root := ctxsvc.New()
	called := ctxsvc.Event[string, struct{}]{Name: "tool/called"}
	_ = ctxsvc.Tap(root, called, func(_ context.Context, tool string) error {
		fmt.Println("agent 7 called", tool)
		return nil
	}, ctxsvc.Subject("mcp/editor/7"))

	ctxsvc.Emit(ctx, root, called, "bash", ctxsvc.ForSubject("mcp/editor/7"))
	ctxsvc.Emit(ctx, root, called, "read", ctxsvc.ForSubject("mcp/editor/7/reviewer"))
	ctxsvc.Emit(ctx, root, called, "edit", ctxsvc.ForSubject("mcp/editor/8"))
	// Output:
	// agent 7 called bash
	// agent 7 called read
}

// What belongs together is undone together, newest first.
func ExampleContext_Group() {
	ctx := context.Background()
	root := ctxsvc.New()
	note := func(s string) ctxsvc.Disposer {
		return func(context.Context) error { fmt.Println(s); return nil }
	}
	connection, _ := root.Group("connection", func(x *ctxsvc.Context) error {
		_ = x.Defer("socket", note("socket closed"))
		return x.Defer("login", note("logged out"))
	})
	_ = connection.Dispose(ctx)
	// Output:
	// logged out
	// socket closed
}

// Consumers restart when the facts of their provider change, not when its
// value does.
func ExampleContext_SetFacts() {
	ctx := context.Background()
	root := ctxsvc.New()
	_ = root.Provide("shell", "generation 1", ctxsvc.WithFacts("read-only"))
	_, _ = root.Plugin(ctxsvc.Plugin{
		Name:   "prompt",
		Inject: []ctxsvc.Need{{Name: "shell"}},
		Apply: func(x *ctxsvc.Context, _ any) error {
			mode, _ := x.Facts("shell")
			fmt.Println("the shell is", mode)
			return nil
		},
	}, nil)
	_ = root.Quiesce(ctx)
	_ = root.Set("shell", "generation 2")         // nobody restarts
	_ = root.SetFacts("shell", "read-only")       // nothing changed
	_ = root.SetFacts("shell", "workspace-write") // this they must know
	_ = root.Quiesce(ctx)
	// Output:
	// the shell is read-only
	// the shell is workspace-write
}

// An optional need is read when it is used and followed with Watch.
func ExampleContext_Watch() {
	ctx := context.Background()
	root := ctxsvc.New()
	_, _ = root.Plugin(ctxsvc.Plugin{
		Name:   "audit",
		Inject: []ctxsvc.Need{{Name: "mirror", Optional: true}},
		Apply: func(x *ctxsvc.Context, _ any) error {
			_, err := ctxsvc.Get[string](x, "mirror")
			fmt.Println(err)
			return x.Watch("mirror", func(_ context.Context, ch ctxsvc.ServiceChange) { fmt.Println("mirror", ch.Change) })
		},
	}, nil)
	_ = root.Quiesce(ctx)
	mirror, _ := root.Plugin(ctxsvc.Plugin{
		Name:  "mirror",
		Apply: func(x *ctxsvc.Context, _ any) error { return x.Provide("mirror", "s3://…") },
	}, nil)
	_ = root.Quiesce(ctx)
	_ = mirror.Dispose(ctx)
	_ = root.Quiesce(ctx)
	// Output:
	// service "mirror": no provider: is a plugin that offers it loaded?
	// mirror available
	// mirror withdrawn
}

// Two consumers of one name, each with its own provider.
func ExampleContext_Isolate() {
	root := ctxsvc.New()
	test := root.Isolate("shell", "test")
	_ = root.Provide("shell", "the real one")
	_ = test.Provide("shell", "a fake")
	a, _ := ctxsvc.Get[string](root, "shell")
	b, _ := ctxsvc.Get[string](test, "shell")
	fmt.Println(a, "and", b)
	// Output: the real one and a fake
}

// A plugin that takes a new configuration without restarting.
func ExampleContext_OnUpdate() {
	ctx := context.Background()
	root := ctxsvc.New()
	logger, _ := root.Plugin(ctxsvc.Plugin{
		Name: "logger",
		Apply: func(x *ctxsvc.Context, config any) error {
			fmt.Println("started with", config)
			return x.OnUpdate(func(ctx context.Context, config any, next func(context.Context, any) error) error {
				if config == "off" {
					return errors.New("logging stays on") // a veto
				}
				if config == "debug" {
					fmt.Println("now", config) // applied in place
					return nil
				}
				return next(ctx, config) // a restart
			})
		},
	}, "info")
	_ = logger.Wait(ctx)
	fmt.Println(logger.Update(ctx, "debug"))
	fmt.Println(logger.Update(ctx, "off"))
	fmt.Println(logger.Update(ctx, "file"))
	// Output:
	// started with info
	// now debug
	// <nil>
	// logging stays on
	// started with file
	// <nil>
}

// What a status page shows of a container that does not get going.
func ExampleContext_Audit() {
	root := ctxsvc.New()
	for _, p := range []ctxsvc.Plugin{
		{Name: "hen", Inject: []ctxsvc.Need{{Name: "egg"}}, Provides: []string{"hen"}},
		{Name: "egg", Inject: []ctxsvc.Need{{Name: "hen"}}, Provides: []string{"egg"}},
	} {
		p.Apply = func(*ctxsvc.Context, any) error { return nil }
		_, _ = root.Plugin(p, nil)
	}
	_ = root.Quiesce(context.Background())
	fmt.Println(root.Audit())
	// Output:
	// dependency cycle: hen → egg → hen: make one of the needs optional
	// hen: waiting: service "egg": waits for itself: hen → egg → hen
	// egg: waiting: service "hen": waits for itself: egg → hen → egg
}

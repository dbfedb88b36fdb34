package ctxsvc

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"testing"
	"time"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// The snapshot is what status pages, the console and other tools read: its
// JSON form is an interface.
func TestSnapshotJSON(t *testing.T) {
	h := open(t)
	ev := Event[int, string]{Name: "approval/request", FailClosed: true}
	h.plug(h.Context, Plugin{Name: "policy", Provides: []string{"policy"}, Apply: func(x *Context, _ any) error {
		h.ok(x.Defer("file watch", nil))
		return x.Provide("policy", 1, WithFacts(map[string]string{"mode": "read-only"}))
	}}, nil)
	h.quiet()
	needs := []Need{{Name: "policy"}, {Name: "mirror", Optional: true}}
	h.plug(h.Isolate("shell", "work"), Plugin{Name: "sandbox", Inject: needs, Apply: func(x *Context, _ any) error {
		_, err := x.Group("runner", func(x *Context) error {
			h.ok(x.Defer("helpers", nil))
			return x.Provide("shell", 1)
		})
		h.ok(err)
		h.ok(On(x, ev, func(ctx context.Context, q int, next func(context.Context, int) (string, error)) (string, error) {
			return next(ctx, q)
		}, Prepend(), Label("veto")))
		return Tap(x, ev, func(context.Context, int) error { return nil }, Subject("mcp/a"), Once())
	}}, nil)
	h.quiet()
	h.plug(h.Context, Plugin{Name: "inbox", Apply: func(x *Context, _ any) error {
		return Answer(x, ev, func(context.Context, int) (string, bool, error) { return "", true, nil }, Terminal(), Global())
	}}, nil)
	h.quiet()
	h.plug(h.Context, Plugin{Name: "tool", Inject: inject("shell"), Apply: nop}, nil)
	h.quiet()
	h.plug(h.Context, Plugin{Name: "broken", Apply: func(*Context, any) error { return errors.New("no such file") }}, nil)
	h.quiet()
	got, err := json.MarshalIndent(h.Snapshot(), "", "  ")
	h.ok(err)
	const golden = "testdata/snapshot.json"
	if *update {
		h.ok(os.MkdirAll("testdata", 0o755))
		h.ok(os.WriteFile(golden, append(got, '\n'), 0o644))
	}
	want, err := os.ReadFile(golden)
	h.ok(err)
	if string(got)+"\n" != string(want) {
		t.Errorf("snapshot differs from %s (-update rewrites it):\n%s", golden, got)
	}
}

func TestErrorTexts(t *testing.T) {
	for _, tt := range []struct {
		err  error
		want string
	}{
		{&DeadlockError{Op: "dispose", Target: "p"}, "p: dispose from here would wait on itself: return first, or wait from a goroutine of its own"},
		{&InactiveError{Fiber: "p", State: Unloading, Op: "provide db"}, "p: inactive (UNLOADING), cannot provide db: use the context given to the latest Apply"},
		{&NotDeclaredError{Fiber: "p", Name: "db"}, `p: service "db" is not declared: add it to the plugin's Inject`},
		{&NotFoundError{Name: "db"}, `service "db": no provider: is a plugin that offers it loaded?`},
		{&NotFoundError{Name: "db", Realm: "red"}, `service "db": no provider in realm "red": check isolate`},
		{&TypeError{Name: "db", Want: "int", Got: "string"}, `service "db": value is string, not int: provider and consumer disagree on the contract`},
		{&StaleError{Name: "db", Provider: "p", Held: 1, Current: 2}, `service "db": generation 1 was replaced by 2: read the service again`},
		{&StaleError{Name: "db", Provider: "p", Held: 1}, `service "db": provider p has withdrawn it: read the service again`},
		{&DuplicateServiceError{Name: "db", Owner: "p"}, `service "db": already provided by p: remove one of the two or isolate it`},
		{&NotOwnerError{Fiber: "q", Name: "db", Owner: "p"}, `q: service "db" belongs to p: only its provider may change it`},
		{&NotOwnerError{Fiber: "q", Name: "db"}, `q: does not provide service "db": call Provide first`},
		{&PluginError{Name: "p", Reason: "has no Apply: nothing to run"}, `plugin "p": has no Apply: nothing to run`},
		{&ConfigError{Fiber: "p", Err: errors.New("port: negative")}, "p: config: port: negative"},
		{&ApplyError{Fiber: "p", Err: errors.New("no")}, "p: apply: no"},
		{&EffectError{Fiber: "p", Label: "socket", Stage: "undo", Err: errors.New("no")}, `p: effect "socket": undo: no`},
		{&TimeoutError{What: "undo", After: 10 * time.Second}, "undo did not finish within 10s: abandoned"},
		{&PanicError{Fiber: "p", Where: "apply", Value: "ouch"}, "p: apply: panic: ouch"},
		{&EventTypeError{Event: "e", Have: "a", Want: "b"}, `event "e": is a, used here as b: share one Event value`},
		{&TerminalTakenError{Event: "e", Owner: "p"}, `event "e": p already answers it last: an event has one terminal listener`},
		{&ListenerGoneError{Event: "e", Listener: "l", Fiber: "p"}, `event "e": listener "l" of p went away during the dispatch: failing closed, try again`},
		{&ListenerError{Event: "e", Listener: "l", Fiber: "p", Err: errors.New("no")}, `event "e": listener "l" of p: no`},
		{&UnmetError{Fiber: "p", Reasons: []WaitReason{{Name: "a", Reason: "x"}, {Name: "b", Reason: "y"}}}, `p: waiting: service "a": x; service "b": y`},
		{&CycleError{Path: []string{"a", "b", "a"}}, "dependency cycle: a → b → a: make one of the needs optional"},
	} {
		if got := tt.err.Error(); got != tt.want {
			t.Errorf("%T:\n got %s\nwant %s", tt.err, got, tt.want)
		}
	}
	inner := errors.New("inner")
	if !errors.Is(&PanicError{Value: inner}, inner) {
		t.Error("a panic with an error does not unwrap")
	}
	if State(9).String() != "State(9)" {
		t.Errorf("unknown state: %s", State(9))
	}
}

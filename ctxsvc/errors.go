package ctxsvc

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

// ErrNextTwice is returned by a listener's next when it is called again. Every
// listener has a cursor of its own: the continuation runs at most once.
var ErrNextTwice = errors.New("next was called twice by one listener: keep its result instead of calling it again")

// ErrNextLate is returned by a next that was kept and called after its
// listener had returned: the dispatch already has that listener's answer.
var ErrNextLate = errors.New("next was called after its listener returned: call it before returning")

// ErrWouldDeadlock is what every [DeadlockError] matches with errors.Is.
var ErrWouldDeadlock = errors.New("waiting here would wait on itself")

// DeadlockError refuses a wait that could only end after the caller has
// returned, for example Dispose of a fiber from inside its own Apply. The
// request itself (to dispose, to restart, the new configuration) has been
// recorded and takes its course; only the waiting is refused.
type DeadlockError struct {
	Op     string // "dispose", "restart", "update", "wait"
	Target string // name of the fiber or label of the effect waited for
}

func (e *DeadlockError) Error() string {
	return fmt.Sprintf("%s: %s from here would wait on itself: return first, or wait from a goroutine of its own", e.Target, e.Op)
}

// Is makes errors.Is(err, ErrWouldDeadlock) true.
func (e *DeadlockError) Is(target error) bool { return target == ErrWouldDeadlock }

// InactiveError reports the use of a context whose life is over, or is being
// ended: registrations are refused while a fiber unloads and after it was
// disposed, and a service that was declared but is not there reads as
// inactive. A context belongs to one load of its fiber, so a context kept
// from before a restart is inactive too.
type InactiveError struct {
	Fiber string // display name
	State State  // at the time of the refusal
	Op    string // what was refused, for example "provide sandbox"
}

func (e *InactiveError) Error() string {
	return fmt.Sprintf("%s: inactive (%s), cannot %s: use the context given to the latest Apply", e.Fiber, e.State, e.Op)
}

// NotDeclaredError reports that a fiber read a service that neither it nor an
// ancestor in the same realm needs or provides.
type NotDeclaredError struct {
	Fiber string
	Name  string
}

func (e *NotDeclaredError) Error() string {
	return fmt.Sprintf("%s: service %q is not declared: add it to the plugin's Inject", e.Fiber, e.Name)
}

// NotFoundError reports that an optional need, or a name read from the root,
// has no provider at present.
type NotFoundError struct {
	Name  string
	Realm string // label of the realm looked in, "" for the common one
}

func (e *NotFoundError) Error() string {
	if e.Realm != "" {
		return fmt.Sprintf("service %q: no provider in realm %q: check isolate", e.Name, e.Realm)
	}
	return fmt.Sprintf("service %q: no provider: is a plugin that offers it loaded?", e.Name)
}

// TypeError reports that a service exists but its value is not of the type
// asked for.
type TypeError struct {
	Name string
	Want string
	Got  string
}

func (e *TypeError) Error() string {
	return fmt.Sprintf("service %q: value is %s, not %s: provider and consumer disagree on the contract", e.Name, e.Got, e.Want)
}

// StaleError reports the use of a handle after its provider withdrew, or of
// a pinned handle after the provider published a newer generation.
type StaleError struct {
	Name     string
	Provider string
	Held     uint64 // generation the handle was made for
	Current  uint64 // generation published now, 0 when withdrawn
}

func (e *StaleError) Error() string {
	if e.Current == 0 {
		return fmt.Sprintf("service %q: provider %s has withdrawn it: read the service again", e.Name, e.Provider)
	}
	return fmt.Sprintf("service %q: generation %d was replaced by %d: read the service again", e.Name, e.Held, e.Current)
}

// DuplicateServiceError reports a second provider of one name in one realm.
type DuplicateServiceError struct {
	Name  string
	Realm string
	Owner string // display name of the fiber that provides it
}

func (e *DuplicateServiceError) Error() string {
	return fmt.Sprintf("service %q: already provided by %s: remove one of the two or isolate it", e.Name, e.Owner)
}

// NotOwnerError reports Set, SetFacts or Recheck on a service another fiber
// provides, or nobody.
type NotOwnerError struct {
	Fiber string
	Name  string
	Owner string // "" when nobody provides it
}

func (e *NotOwnerError) Error() string {
	if e.Owner == "" {
		return fmt.Sprintf("%s: does not provide service %q: call Provide first", e.Fiber, e.Name)
	}
	return fmt.Sprintf("%s: service %q belongs to %s: only its provider may change it", e.Fiber, e.Name, e.Owner)
}

// PluginError reports a Plugin value that cannot be applied at all.
type PluginError struct {
	Name   string
	Reason string
}

func (e *PluginError) Error() string {
	return fmt.Sprintf("plugin %q: %s", e.Name, e.Reason)
}

// ConfigError carries what a plugin's Check said about a configuration.
type ConfigError struct {
	Fiber string
	Err   error
}

func (e *ConfigError) Error() string { return fmt.Sprintf("%s: config: %v", e.Fiber, e.Err) }

// Unwrap returns the error of Check.
func (e *ConfigError) Unwrap() error { return e.Err }

// ApplyError carries what a plugin's Apply returned.
type ApplyError struct {
	Fiber string
	Err   error
}

func (e *ApplyError) Error() string { return fmt.Sprintf("%s: apply: %v", e.Fiber, e.Err) }

// Unwrap returns the error of Apply.
func (e *ApplyError) Unwrap() error { return e.Err }

// EffectError attributes the failure of one effect.
type EffectError struct {
	Fiber string
	Label string
	Stage string // "set-up" or "undo"
	Err   error
}

func (e *EffectError) Error() string {
	return fmt.Sprintf("%s: effect %q: %s: %v", e.Fiber, e.Label, e.Stage, e.Err)
}

// Unwrap returns the underlying error.
func (e *EffectError) Unwrap() error { return e.Err }

// TimeoutError reports that something the container called did not return in
// time. The container goes on without it; its goroutine lives until the code
// returns and everything it still tries to register is refused.
type TimeoutError struct {
	What  string // "apply", "undo", "set-up", "consumers", "check"
	After time.Duration
}

func (e *TimeoutError) Error() string {
	return fmt.Sprintf("%s did not finish within %s: abandoned", e.What, e.After)
}

// Timeout makes the error recognisable as a timeout.
func (e *TimeoutError) Timeout() bool { return true }

// PanicError is a panic of a listener, an Apply, a check or a disposer, caught
// and attributed.
type PanicError struct {
	Fiber string // whose code panicked
	Where string // "apply", "listener approval/request (audit)", …
	Value any
	Stack []byte
}

func (e *PanicError) Error() string {
	return fmt.Sprintf("%s: %s: panic: %v", e.Fiber, e.Where, e.Value)
}

// Unwrap returns the panic value when it is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// errGoexit is what a body that ended its goroutine with runtime.Goexit (for
// instance t.FailNow) is reported as.
var errGoexit = errors.New("ended its goroutine instead of returning")

// EventTypeError reports that one event name is used with two contracts: its
// first listener fixes types and FailClosed for as long as it has listeners.
type EventTypeError struct {
	Event string
	Have  string
	Want  string
}

func (e *EventTypeError) Error() string {
	return fmt.Sprintf("event %q: is %s, used here as %s: share one Event value", e.Event, e.Have, e.Want)
}

// TerminalTakenError reports a second terminal listener of one event.
type TerminalTakenError struct {
	Event string
	Owner string // fiber that has it
}

func (e *TerminalTakenError) Error() string {
	return fmt.Sprintf("event %q: %s already answers it last: an event has one terminal listener", e.Event, e.Owner)
}

// ListenerGoneError fails a dispatch of a FailClosed event because a listener
// died while the dispatch was under way.
type ListenerGoneError struct {
	Event    string
	Listener string // its label
	Fiber    string
}

func (e *ListenerGoneError) Error() string {
	return fmt.Sprintf("event %q: listener %q of %s went away during the dispatch: failing closed, try again", e.Event, e.Listener, e.Fiber)
}

// ListenerError attributes the error of a listener where several may fail.
type ListenerError struct {
	Event    string
	Listener string
	Fiber    string
	Err      error
}

func (e *ListenerError) Error() string {
	return fmt.Sprintf("event %q: listener %q of %s: %v", e.Event, e.Listener, e.Fiber, e.Err)
}

// Unwrap returns the listener's error.
func (e *ListenerError) Unwrap() error { return e.Err }

// UnmetError names a fiber that waits and what it waits for; [Context.Audit]
// returns one for each.
type UnmetError struct {
	Fiber   string
	Reasons []WaitReason
}

func (e *UnmetError) Error() string {
	parts := make([]string, len(e.Reasons))
	for i, r := range e.Reasons {
		parts[i] = r.String()
	}
	return fmt.Sprintf("%s: waiting: %s", e.Fiber, strings.Join(parts, "; "))
}

// CycleError reports fibers that wait for each other's services.
type CycleError struct {
	Path []string // fiber names, the first repeated at the end
}

func (e *CycleError) Error() string {
	return "dependency cycle: " + strings.Join(e.Path, " → ") + ": make one of the needs optional"
}

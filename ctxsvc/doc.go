// Package ctxsvc is a hot-reloadable capability container: a tree of plugins
// that provide and need named services, listen to each other's events, and can
// be started, replaced and stopped one by one while the rest keeps running. It
// follows the model of cordis (services, fibers, waterfall events); the page
// docs/conformance/cordis.md goes through it row by row.
//
// # The life of a fiber
//
// [New] makes a container and returns its root [Context]. [Context.Plugin]
// applies a [Plugin] below a context and returns a [Fiber] at once. The fiber
// is PENDING until every service it needs has an ACTIVE provider in its realm.
// Then it is LOADING: its configuration is checked and its Apply runs, on a
// goroutine of its own, with a context made for this one load. Whatever Apply
// does that must be undone later it registers through that context: disposers
// ([Context.Effect], [Context.Defer], [Context.Group]), services
// ([Context.Provide]), listeners ([On], [Tap], [Map], [Answer]), child plugins.
// When Apply returns nil and the needs are still met by the same providers, the
// fiber is ACTIVE and its own services become visible, which may start others.
//
// A fiber unloads when it is disposed or restarted, when its parent unloads,
// when a provider it runs with goes away or changes its facts, when Apply
// fails, or when it reports itself broken ([Fiber.Fail]). UNLOADING has two
// phases. First its services are withdrawn: the fibers that use them unload,
// and everything of the provider still works while they do. Then its listeners
// leave, and its effects are undone one after the other, newest first, each
// with a deadline; a failing one is reported and keeps nothing else from being
// undone. From the first moment of UNLOADING on, its context is cancelled and
// refuses registrations. After that the fiber loads again if it should, or
// rests: PENDING without its needs, FAILED with an error, DISPOSED for good.
//
// At most one transition of a fiber is in flight. Requests made meanwhile
// (Restart, Update, Dispose, a provider that comes or goes) are not lost and do
// not interrupt: when the transition ends the fiber looks at what should be and
// goes there. The last configuration wins. Only a request that makes the
// running load pointless whatever happens next (all of them but a provider's
// coming and going) cancels the load's context, so that Apply can return early.
//
// # Services, generations, facts
//
// A service is a value under a name in a realm, provided by one fiber. A fiber
// that declared the name in [Plugin.Inject] reads it with [Get]; so does
// everything below that fiber. Who provides is the identity: a provider that
// replaces its value ([Context.Set]) publishes a new generation of the same
// entry, and its consumers keep running. They are restarted when the provider
// goes, when another one takes its place, or when the facts published beside
// the value ([WithFacts], [Context.SetFacts]) change. Optional needs restart
// nobody; they are followed with [Context.Watch].
//
// [Context.Isolate] and [Context.Realms] give a part of the tree its own
// realms, and [Context.Remap] and [Fiber.Move] change them while the tree runs.
//
// # Events
//
// An [Event] is dispatched in one of five modes. [Waterfall] nests its
// listeners around a default; [Serial] and [Bail] ask until one answers; [Emit]
// tells all in order and contains their failures; [Parallel] tells all at once
// and collects them. The four kinds of listeners work in every mode. Order is:
// prepended ones (newest first), the others as registered, the one terminal
// listener. A dispatch runs on the listeners present at its start and looks at
// each hop whether the next one is still alive.
//
// The container reports on itself through events of the same kind:
// [FiberEvent], [StatusEvent], [ServiceEvent], [ConfigEvent], [UpdateEvent],
// [DispatchEvent]. As data, [Context.Snapshot] shows the whole of it and
// [Context.Audit] what does not run, and why.
//
// # Rules for code inside
//
// No lock is held while foreign code runs, and every exported function may be
// called from everywhere: from an Apply, a listener, a check, a disposer. What
// would have to wait for its own caller returns a [DeadlockError] instead; the
// request it made stands. The container recognises its own code by goroutine
// and by context, so a helper goroutine that waits for the container should do
// so with the context it was given.
//
// Panics are caught and attributed ([PanicError]). Code that does not return in
// time ([WithUndoTimeout], [WithStopTimeout], [WithQuietTimeout]) is reported
// as [TimeoutError] and left behind: it cannot be killed, but nothing it still
// registers is accepted.
//
// The container starts goroutines only for work in flight. An idle container
// has none.
package ctxsvc

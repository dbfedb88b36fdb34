// Package ctxsvc is a hot-reloadable capability container: a tree of plugins
// that provide and need named services, listen to each other's events, and can
// be started, replaced and stopped one by one while the rest keeps running.
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
// leave, its context is over for registrations, and its effects are undone one
// after the other, newest first, each with a deadline; a failing one is
// reported and keeps nothing else from being undone. After that the fiber loads
// again if it should, or rests: PENDING without its needs, FAILED with an
// error, DISPOSED for good.
//
// At most one transition of a fiber is in flight. Requests made meanwhile
// (Restart, Update, Dispose, a provider that comes or goes) are not lost and do
// not interrupt: when the transition ends the fiber looks at what should be and
// goes there. The last configuration wins.
//
// # Rules for code inside
//
// Every exported function may be called from everywhere: from an Apply, a
// listener, a disposer. What would have to wait for its own caller returns a
// [DeadlockError] instead; the request it made stands. Panics are caught and
// attributed ([PanicError]).
package ctxsvc

// Package event names events and the types they carry, for emitters and listeners to share.
package event

import "google.golang.org/protobuf/proto"

// Event is one event of the bus: its name, the messages it carries and what holds for every dispatch of it.
type Event[Q, A proto.Message] struct {
	// Name is a path whose first element is the owner, e.g. approval/request.
	Name string

	// FailClosed makes a dead or failing listener fail the dispatch instead of being skipped.
	FailClosed bool

	// FixedRequest makes a listener that passes on a changed request fail the dispatch.
	FixedRequest bool
}

// Request is the full name of the request message.
func (e Event[Q, A]) Request() string {
	var q Q
	return string(q.ProtoReflect().Descriptor().FullName())
}

// Reply is the full name of the reply message.
func (e Event[Q, A]) Reply() string {
	var a A
	return string(a.ProtoReflect().Descriptor().FullName())
}

// NewRequest is an empty request.
func (e Event[Q, A]) NewRequest() Q {
	var q Q
	return q.ProtoReflect().New().Interface().(Q)
}

// NewReply is an empty reply.
func (e Event[Q, A]) NewReply() A {
	var a A
	return a.ProtoReflect().New().Interface().(A)
}

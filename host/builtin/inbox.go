package builtin

import (
	"context"
	"time"

	"google.golang.org/protobuf/proto"

	approvalv1 "github.com/cordon-host/cordon/api/approval/v1"
	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	"github.com/cordon-host/cordon/capability/approval"
	"github.com/cordon-host/cordon/ctxsvc"
	"github.com/cordon-host/cordon/host/bus"
	"github.com/cordon-host/cordon/host/inbox"
)

// InboxEntry is how the inbox is named in stamps and logs.
const InboxEntry = "inbox"

// Inbox makes the inbox the innermost listener of approval/request: where questions end that nobody else answered. What people
// answer is stamped with their channel and level; when nobody is there the emitter's own base answer stands.
func Inbox(b *bus.Bus, in *inbox.Inbox) ctxsvc.Plugin {
	return ctxsvc.Plugin{
		Name: InboxEntry,
		Apply: func(c *ctxsvc.Context, _ any) error {
			return b.Terminal(c, approval.Request.Name, InboxEntry, func(ctx context.Context, q *bus.Request, next func(context.Context, *bus.Request) (*bus.Reply, error)) (*bus.Reply, error) {
				question := approval.Request.NewRequest()
				if err := proto.Unmarshal(q.Payload, question); err != nil {
					return nil, err
				}
				v, answered, err := in.Ask(ctx, inbox.Question{
					Question: question, Session: q.Tree.Session, Agent: q.Tree.Agent, Call: q.Tree.ID, Tag: q.Tree.Tag, AskedAt: time.Now(),
				})
				if err != nil {
					return nil, err
				}
				if !answered {
					return next(ctx, q)
				}
				payload, err := proto.Marshal(&approvalv1.Verdict{Outcome: string(v.Outcome), Note: v.Note})
				if err != nil {
					return nil, err
				}
				return &bus.Reply{Payload: payload, Answer: &kernelv1.Answer{Entry: InboxEntry, Channel: v.Channel, Level: v.Level}}, nil
			})
		},
	}
}

package host

import (
	"context"

	"google.golang.org/grpc/codes"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	"github.com/cordon-host/cordon/capability/fault"
	rules "github.com/cordon-host/cordon/capability/session"
	"github.com/cordon-host/cordon/ctxsvc"
	"github.com/cordon-host/cordon/host/route"
)

// kernelServer is the host's own side of the kernel protocol.
type kernelServer struct {
	kernelv1.UnimplementedHostServer
	h *Host
}

// Emit dispatches in the realm of the entry that emits.
func (k kernelServer) Emit(ctx context.Context, r *kernelv1.EmitRequest) (*kernelv1.EmitReply, error) {
	caller := route.CallerFrom(ctx)
	if capability, host := rules.Owner(r.GetEvent()); host || capability != "" && !k.h.owns(caller.Entry, capability) {
		return nil, fault.New(codes.PermissionDenied, "RESERVED_EVENT", "%s emits %s, which belongs to the provider of %q in the realm of the sessions", caller.Entry, r.GetEvent(), capability)
	}
	c, err := k.h.contextOf(caller.Entry)
	if err != nil {
		return nil, err
	}
	return k.h.bus.Emit(ctx, c, caller, route.LegFrom(ctx), r)
}

func (k kernelServer) RedeemGrant(ctx context.Context, r *kernelv1.RedeemGrantRequest) (*kernelv1.RedeemGrantReply, error) {
	leg := route.LegFrom(ctx)
	if leg == nil {
		return nil, fault.New(codes.PermissionDenied, "GRANT_FOREIGN", "grant redeemed outside the call it was minted for")
	}
	g, err := k.h.grants.Redeem(r.GetGrant(), leg.Tree.ID, route.CallerFrom(ctx).Offers)
	if err != nil {
		return nil, err
	}
	return &kernelv1.RedeemGrantReply{Scope: g.Scope, Value: g.Value, Approval: g.Approval, Subject: g.Subject, Cwd: g.Cwd}, nil
}

// resolver finds providers through the container: the realm of the caller decides.
type resolver struct{ h *Host }

// Owns is what a caller's stamp says it provides.
func (r resolver) Owns(entry, capability string) bool { return r.h.owns(entry, capability) }

func (r resolver) Resolve(caller, capability string) (*route.Provider, error) {
	c := r.h.root
	if caller != route.HostEntry {
		var err error
		if c, err = r.h.contextOf(caller); err != nil {
			return nil, err
		}
	}
	e, ok := ctxsvc.Lookup[*entry](c, capability)
	if !ok {
		return nil, fault.New(codes.Unavailable, "CAPABILITY_MISSING", "%s calls %s, which nobody provides at the moment", caller, capability)
	}
	return e.provider()
}

// contextOf is the container context of an entry that is applied.
func (h *Host) contextOf(id string) (*ctxsvc.Context, error) {
	if e, ok := h.entry(id); ok {
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.ctx != nil {
			return e.ctx, nil
		}
	}
	return nil, fault.New(codes.Unavailable, "NOT_ACTIVE", "entry %s is not active", id)
}

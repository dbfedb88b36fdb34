package plugin

import (
	"context"
	"strconv"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
)

// Call is what the host says about the call being served. A plugin cannot forge any of it.
type Call struct {
	Caller    string         // the entry that called, or host
	Provides  []string       // the capabilities that entry provides to the deployment at large
	Purpose   string         // kernelv1.PurposePin, or empty
	Session   string         // empty for a call without a session
	Agent     string         // the identity a front end gave its client
	Turn      int64          // the open turn, 0 for none
	ID        string         // the tool call at the root of the call tree
	Authority kernelv1.Level // of whoever asked for the call tree

	leg string // proves, on the way back to the host, that this call is being served
}

type callKey struct{}

// Caller is the call ctx belongs to; the zero Call outside any.
func Caller(ctx context.Context) Call {
	call, _ := ctx.Value(callKey{}).(Call)
	return call
}

// WithCall is ctx as it reaches the handlers of a call. It is for hosts and test kits that serve capabilities from their own
// process: a plugin that calls it only fools itself, since the host takes nobody's word for what is being served.
func WithCall(ctx context.Context, call Call) context.Context {
	return context.WithValue(ctx, callKey{}, call)
}

// withCall reads the host's stamp from a lookup of metadata keys.
func withCall(ctx context.Context, get func(key string) string) context.Context {
	turn, _ := strconv.ParseInt(get(kernelv1.KeyTurn), 10, 64) // absent outside a turn
	level := kernelv1.Level(kernelv1.Level_value[get(kernelv1.KeyAuthority)])
	var provides []string
	if list := get(kernelv1.KeyProvides); list != "" {
		provides = strings.Split(list, ",")
	}
	return WithCall(ctx, Call{
		Caller: get(kernelv1.KeyCaller), Provides: provides, Purpose: get(kernelv1.KeyPurpose), Session: get(kernelv1.KeySession), Agent: get(kernelv1.KeyAgent), Turn: turn, ID: get(kernelv1.KeyCall),
		Authority: level, leg: get(kernelv1.KeyLeg),
	})
}

// incoming puts the stamp of a served gRPC call into its context.
func incoming(ctx context.Context) context.Context {
	md, _ := metadata.FromIncomingContext(ctx)
	return withCall(ctx, func(key string) string {
		if v := md.Get(key); len(v) > 0 {
			return v[0]
		}
		return ""
	})
}

// channelCredentials authenticates every call to the host and ties it to the call being served.
type channelCredentials struct{ token string }

func (c channelCredentials) GetRequestMetadata(ctx context.Context, _ ...string) (map[string]string, error) {
	md := map[string]string{kernelv1.KeyChannel: c.token}
	if leg := Caller(ctx).leg; leg != "" {
		md[kernelv1.KeyLeg] = leg
	}
	return md, nil
}

// RequireTransportSecurity is false: the address is a unix socket in a directory only the host's user can enter.
func (channelCredentials) RequireTransportSecurity() bool { return false }

// servedStream is a grpc.ServerStream with a context of our own.
type servedStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s servedStream) Context() context.Context { return s.ctx }

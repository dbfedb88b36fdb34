package plugin

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/hashicorp/go-hclog"
	goplugin "github.com/hashicorp/go-plugin"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
)

// Handshake is what host and plugin must agree on before anything else. The cookie keeps a person from running a plugin
// by hand; it protects nothing.
var Handshake = goplugin.HandshakeConfig{
	ProtocolVersion:  1,
	MagicCookieKey:   "CORDON_PLUGIN",
	MagicCookieValue: "cordon",
}

// orphanGrace is how long a plugin whose host is gone may take to undo its effects.
const orphanGrace = time.Second

// Main serves p as the process it runs in, until the host stops it or is gone. It does not return.
//
// The host hands a pipe over as standard input and keeps the other end. When that closes, either the host has stopped this
// generation or it is gone, however it ended; the process ends both ways.
func Main[C any](p Plugin[C]) {
	// What was open in whoever started the host must not reach anything this process starts.
	if err := unix.CloseRange(3, ^uint(0), unix.CLOSE_RANGE_CLOEXEC); err != nil {
		fmt.Fprintf(os.Stderr, "%s: close-on-exec of inherited descriptors: %v\n", p.Name, err)
		os.Exit(1)
	}
	j := newJournal(os.Stderr)
	log := slog.New(j.handler())
	j.adopt(log)
	s := newServer(p, log, j)
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // any end of it means the same
		select {
		case <-s.Stopped():
			os.Exit(0)
		default:
		}
		ctx, cancel := context.WithTimeout(context.Background(), orphanGrace)
		defer cancel()
		_ = s.Close(ctx) // nobody is left to report to
		os.Exit(1)
	}()
	goplugin.Serve(&goplugin.ServeConfig{
		HandshakeConfig: Handshake,
		Plugins:         goplugin.PluginSet{"cordon": Glue{}},
		GRPCServer: func(opts []grpc.ServerOption) *grpc.Server {
			forgetHandshake()
			return s.GRPC(opts...)
		},
		Logger: hclog.NewNullLogger(),
	})
}

// forgetHandshake drops what go-plugin passed in the environment, once it has been read: the client certificate and the socket
// directory are nothing that a command run by this process should find in its own.
func forgetHandshake() {
	for _, name := range []string{
		Handshake.MagicCookieKey, "PLUGIN_PROTOCOL_VERSIONS", "PLUGIN_CLIENT_CERT", "PLUGIN_MIN_PORT", "PLUGIN_MAX_PORT",
		goplugin.EnvUnixSocketDir, goplugin.EnvUnixSocketGroup,
	} {
		_ = os.Unsetenv(name) // fails for a malformed name only
	}
}

// Glue makes a Cordon plugin out of a go-plugin one: the client side is the bare connection, the server side is registered
// by Server.GRPC.
type Glue struct {
	goplugin.NetRPCUnsupportedPlugin
}

func (Glue) GRPCServer(*goplugin.GRPCBroker, *grpc.Server) error { return nil }

func (Glue) GRPCClient(_ context.Context, _ *goplugin.GRPCBroker, conn *grpc.ClientConn) (any, error) {
	return conn, nil
}

// Interface guard.
var _ goplugin.GRPCPlugin = Glue{}

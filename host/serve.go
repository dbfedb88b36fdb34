package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/host/front/control"
	"github.com/cordon-host/cordon/host/route"
	"github.com/cordon-host/cordon/host/trust"
)

// RunningError says that another host has this deployment.
type RunningError struct{ PID int }

func (e *RunningError) Error() string {
	return fmt.Sprintf("another host (pid %d) runs this deployment; talk to it or stop it", e.PID)
}

// ErrNotRunning is the error of Dial when no host runs this deployment.
var ErrNotRunning = errors.New("no host runs this deployment; start one with `cordon up`")

// lock makes this the only host of the deployment, until the process ends, and sweeps what a dead one left in the run directory.
func (h *Host) lock() error {
	path := filepath.Join(h.layout.StateDir, "host.lock")
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return &EnvironmentError{fmt.Errorf("host lock: %w", err)}
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		text, _ := io.ReadAll(io.LimitReader(f, 32)) // only for the message
		pid, _ := strconv.Atoi(strings.TrimSpace(string(text)))
		_ = f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return &RunningError{PID: pid}
		}
		return &EnvironmentError{fmt.Errorf("host lock: %w", err)}
	}
	h.defer_(func(context.Context) error { return f.Close() })
	if err := errors.Join(f.Truncate(0), writeAt(f, strconv.Itoa(os.Getpid()))); err != nil {
		return &EnvironmentError{fmt.Errorf("host lock: %w", err)}
	}
	left, err := os.ReadDir(h.layout.RunDir)
	if err != nil {
		return &EnvironmentError{err}
	}
	for _, e := range left {
		if err := os.RemoveAll(filepath.Join(h.layout.RunDir, e.Name())); err != nil {
			return &EnvironmentError{fmt.Errorf("sweeping the run directory: %w", err)}
		}
	}
	return nil
}

func writeAt(f *os.File, text string) error {
	_, err := f.WriteAt([]byte(text+"\n"), 0)
	return err
}

// inProcess is the size of the buffer between the host and its own front end, in bytes.
const inProcess = 1 << 20

// serve opens the ways in: the control socket for other processes and a connection for this one.
func (h *Host) serve() error {
	var err error
	if h.logins, err = newLogins(h.layout.StateDir); err != nil {
		return &EnvironmentError{err}
	}
	socket, err := control.Listen(filepath.Join(h.layout.RunDir, control.SocketName), h.log)
	if err != nil {
		return &EnvironmentError{err}
	}
	own := bufconn.Listen(inProcess)
	others := h.controlServer()
	self := h.controlServer()
	var serving sync.WaitGroup
	for server, l := range map[*grpc.Server]net.Listener{others: socket, self: own} {
		serving.Go(func() {
			if err := server.Serve(l); err != nil {
				h.log.Error("control server ended", "error", err)
			}
		})
	}
	var stop context.CancelFunc
	h.stopping, stop = context.WithCancel(context.Background())
	h.drain = func(ctx context.Context) {
		stop()
		ctx, cancel := context.WithTimeout(ctx, drainTimeout)
		defer cancel()
		if err := socket.Leave(ctx); err != nil {
			h.log.Warn("calls of others were cut off", "reason", err)
		}
	}
	h.defer_(func(context.Context) error {
		others.Stop()
		self.Stop()
		serving.Wait()
		return errors.Join(own.Close(), ignoreMissing(os.Remove(h.logins.file)))
	})
	conn, err := grpc.NewClient("passthrough:self",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return own.DialContext(ctx) }),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(route.MaxMessageSize), grpc.MaxCallSendMsgSize(route.MaxMessageSize)),
		// Whoever started this process is the person in front of it.
		grpc.WithPerRPCCredentials(loginToken(h.logins.token())),
	)
	if err != nil {
		return &EnvironmentError{err}
	}
	h.defer_(func(context.Context) error { return conn.Close() })
	h.control = controlv1.NewControlClient(conn)
	return nil
}

func (h *Host) controlServer() *grpc.Server {
	s := grpc.NewServer(grpc.MaxRecvMsgSize(route.MaxMessageSize), grpc.MaxSendMsgSize(route.MaxMessageSize),
		grpc.UnaryInterceptor(func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (reply any, err error) {
			defer h.contain(info.FullMethod, &err)
			return next(ctx, req)
		}),
		grpc.StreamInterceptor(func(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) (err error) {
			defer h.contain(info.FullMethod, &err)
			return next(srv, stream)
		}))
	controlv1.RegisterControlServer(s, controlServer{h: h})
	return s
}

// contain makes a panic of one call an error of that call: it must not end every session.
func (h *Host) contain(method string, err *error) {
	if p := recover(); p != nil {
		h.log.Error("control call panicked", "method", method, "panic", p, "stack", string(debug.Stack()))
		*err = fault.New(codes.Internal, "PANIC", "%s panicked: %v; the host's log has the stack", method, p)
	}
}

func ignoreMissing(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// Control is this host's control service for the process it runs in, with the authority of the person who started that.
func (h *Host) Control() controlv1.ControlClient { return h.control }

// loginToken shows a login to the host.
type loginToken string

func (t loginToken) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{keyLogin: string(t)}, nil
}

// RequireTransportSecurity is false: the connection does not leave this machine's kernel.
func (loginToken) RequireTransportSecurity() bool { return false }

// Dial connects to the host that runs a deployment; ErrNotRunning when none does.
func Dial(ctx context.Context, o Options) (controlv1.ControlClient, io.Closer, error) {
	layout, err := trust.LayoutOf(o.Compose, o.State)
	if err != nil {
		return nil, nil, &EnvironmentError{err}
	}
	path := filepath.Join(layout.RunDir, control.SocketName)
	// gRPC would wait and retry; a dead socket is an answer.
	var d net.Dialer
	probe, err := d.DialContext(ctx, "unix", path)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED) {
		return nil, nil, ErrNotRunning
	}
	if err != nil {
		return nil, nil, &EnvironmentError{fmt.Errorf("control socket: %w", err)}
	}
	// A host that is about to stop waits for those who are connected, so this connection is the one to keep.
	first := make(chan net.Conn, 1)
	first <- probe
	conn, err := grpc.NewClient("passthrough:control",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			select {
			case c := <-first:
				return c, nil
			default:
				return d.DialContext(ctx, "unix", path)
			}
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(route.MaxMessageSize), grpc.MaxCallSendMsgSize(route.MaxMessageSize)),
	)
	if err != nil {
		return nil, nil, &EnvironmentError{errors.Join(err, probe.Close())}
	}
	return controlv1.NewControlClient(conn), dialed{conn, probe}, nil
}

// dialed is a connection and what it is made of, which gRPC does not know before the first call.
type dialed struct {
	conn  *grpc.ClientConn
	probe net.Conn
}

func (d dialed) Close() error {
	err := d.conn.Close()
	_ = d.probe.Close() // the connection has closed it, if it ever used it
	return err
}

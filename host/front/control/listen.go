// Package control is the socket between a running host and the command line.
//
// The socket's place and mode keep other users out. What keeps a confined process of the same user out, should it ever find a way
// to the socket, is Listen: it looks at each peer through the kernel before a byte of it is read.
package control

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// SocketName is the socket's name in the run directory.
const SocketName = "control.sock"

// Listen makes the control socket. Connections that do not pass Inspect are closed unread and logged.
func Listen(path string, log *slog.Logger) (*Listener, error) {
	// The caller holds the deployment's lock, so a socket that is there is a dead host's.
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("control socket: %w", err), l.Close())
	}
	l.SetUnlinkOnClose(false) // Leave takes the name away, earlier than that
	return &Listener{UnixListener: l, path: path, log: log, changed: make(chan struct{})}, nil
}

// Listener is the control socket with those who are connected to it.
type Listener struct {
	*net.UnixListener
	path string
	log  *slog.Logger

	mu      sync.Mutex
	open    int
	changed chan struct{} // closed and replaced when a connection ends
}

// Leave closes the door behind those who are inside: nobody finds the socket any more, everybody who found it before is served, and
// Leave returns when the last of them is gone or ctx ends. The caller goes on accepting meanwhile.
func (l *Listener) Leave(ctx context.Context) error {
	aside := l.path + ".closing"
	if err := os.Rename(l.path, aside); err != nil {
		return fmt.Errorf("control socket: %w", err)
	}
	defer os.Remove(aside)
	// Connections are accepted in their order: when this one is served, everybody who came before it is inside. A server speaks first.
	var d net.Dialer
	last, err := d.DialContext(ctx, "unix", aside)
	if err != nil {
		return fmt.Errorf("control socket: %w", err)
	}
	defer context.AfterFunc(ctx, func() { _ = last.Close() })()
	_, err = last.Read(make([]byte, 1))
	if err := errors.Join(err, last.Close()); err != nil {
		return fmt.Errorf("control socket: %w", err)
	}
	for {
		l.mu.Lock()
		open, changed := l.open, l.changed
		l.mu.Unlock()
		if open == 0 {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// guest is a connection that is counted.
type guest struct {
	net.Conn
	left func()
}

func (g guest) Close() error {
	defer g.left()
	return g.Conn.Close()
}

func (l *Listener) welcome(c net.Conn) net.Conn {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open++
	return guest{c, sync.OnceFunc(func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.open--
		close(l.changed)
		l.changed = make(chan struct{})
	})}
}

// Accept waits for the next connection that passes Inspect.
func (l *Listener) Accept() (net.Conn, error) {
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			return nil, err
		}
		if err := Inspect(c); err != nil {
			l.log.Warn("control connection refused", "reason", err)
			_ = c.Close() // nothing was read or written
			continue
		}
		return l.welcome(c), nil
	}
}

// RefusedError is a peer that may not talk to this host.
type RefusedError struct {
	PID    int32
	Reason string
}

func (e *RefusedError) Error() string { return fmt.Sprintf("peer %d: %s", e.PID, e.Reason) }

// namespaces of which a peer must share ours. A confined command has its own of at least one.
var namespaces = []string{"user", "pid", "mnt", "ipc"}

// Inspect decides whether the peer of a connection may talk to this host: it must be the same user (or root), live in the same
// namespaces, carry no restriction that this process does not carry, and not have been started by this host: a plugin, or what a plugin
// runs, speaks to the host on its channel. The peer is held by a pidfd from the socket (since Linux 6.5; by
// number before), so that what /proc says is about the process that connected: it is asked before and the pidfd after.
func Inspect(c *net.UnixConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	var pidfd int
	var inner error
	err = raw.Control(func(fd uintptr) {
		if cred, inner = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); inner != nil {
			return
		}
		if pidfd, inner = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PEERPIDFD); inner == unix.ENOPROTOOPT {
			pidfd, inner = unix.PidfdOpen(int(cred.Pid), 0)
		}
	})
	if err := errors.Join(err, inner); err != nil {
		return fmt.Errorf("peer credentials: %w", err)
	}
	defer unix.Close(pidfd)
	refuse := func(format string, args ...any) error {
		return &RefusedError{PID: cred.Pid, Reason: fmt.Sprintf(format, args...)}
	}
	if me := os.Geteuid(); int(cred.Uid) != me && cred.Uid != 0 {
		return refuse("is user %d, this host belongs to user %d", cred.Uid, me)
	}
	// A pid of 0 is a process outside our pid namespace.
	if cred.Pid == 0 {
		return refuse("is not in our pid namespace")
	}
	for _, ns := range namespaces {
		theirs, err := os.Readlink(filepath.Join("/proc", strconv.Itoa(int(cred.Pid)), "ns", ns))
		if err != nil {
			return refuse("its %s namespace cannot be read: %v", ns, err)
		}
		ours, err := os.Readlink(filepath.Join("/proc/self/ns", ns))
		if err != nil {
			return err
		}
		if theirs != ours {
			return refuse("is in another %s namespace", ns)
		}
	}
	theirs, err := restrictions(strconv.Itoa(int(cred.Pid)))
	if err != nil {
		return refuse("its status cannot be read: %v", err)
	}
	ours, err := restrictions("self")
	if err != nil {
		return err
	}
	for _, key := range restricting {
		if theirs[key] > ours[key] {
			return refuse("%s is %d, ours is %d: it runs under a restriction", key, theirs[key], ours[key])
		}
	}
	for pid := theirs["PPid"]; pid > 1; {
		if pid == os.Getpid() {
			return refuse("was started by this host")
		}
		parent, err := restrictions(strconv.Itoa(pid))
		if err != nil {
			break // it ended; the peer itself is asked for below
		}
		pid = parent["PPid"]
	}
	if err := unix.PidfdSendSignal(pidfd, 0, nil, 0); err != nil {
		return refuse("is gone: %v", err)
	}
	return nil
}

// restricting are lines of /proc/PID/status that only ever grow below a sandbox.
var restricting = []string{"NoNewPrivs", "Seccomp", "Seccomp_filters"}

func restrictions(pid string) (map[string]int, error) {
	f, err := os.Open(filepath.Join("/proc", pid, "status"))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	out := map[string]int{}
	in := bufio.NewScanner(f)
	for in.Scan() {
		key, value, _ := strings.Cut(in.Text(), ":")
		if n, err := strconv.Atoi(strings.TrimSpace(value)); err == nil {
			out[key] = n
		}
	}
	return out, in.Err()
}

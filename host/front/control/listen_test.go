package control_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cordon-host/cordon/host/front/control"
	"github.com/cordon-host/cordon/internal/testenv"
)

// The test binary is the host that listens, in a process of its own, and the peers that connect to it.
func TestMain(m *testing.M) {
	socket := os.Getenv("CORDON_TEST_SOCKET")
	switch os.Getenv("CORDON_TEST_ROLE") {
	case "host":
		host(socket)
	case "peer":
		peer(socket)
	case "restricted":
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			panic(err)
		}
		os.Setenv("CORDON_TEST_ROLE", "peer")
		// exec in this thread, so that the whole process is restricted
		panic(syscall.Exec("/proc/self/exe", os.Args, os.Environ()))
	}
	os.Exit(m.Run())
}

// host answers every connection with a word, and starts a child that connects, too.
func host(socket string) {
	l, err := control.Listen(socket, slog.New(slog.NewTextHandler(os.Stderr, nil)))
	if err != nil {
		panic(err)
	}
	fmt.Println("listening")
	go func() {
		child := exec.Command("/proc/self/exe")
		child.Env = append(os.Environ(), "CORDON_TEST_ROLE=peer")
		out, _ := child.Output()
		fmt.Printf("child: %s\n", out)
	}()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	for {
		c, err := l.Accept()
		if err != nil {
			panic(err)
		}
		_, _ = c.Write([]byte("welcome"))
		_ = c.Close()
	}
}

// peer says what it was answered.
func peer(socket string) {
	c, err := net.Dial("unix", socket)
	if err != nil {
		fmt.Print("no connection")
		os.Exit(0)
	}
	word, _ := io.ReadAll(c)
	fmt.Printf("%q", word)
	os.Exit(0)
}

type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

func TestPeers(t *testing.T) {
	dir, err := os.MkdirTemp("", "cordon")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil { // what is tested is not the directory
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, control.SocketName)
	env := append(os.Environ(), "CORDON_TEST_SOCKET="+socket)
	h := exec.Command(exe)
	h.Env = append(env, "CORDON_TEST_ROLE=host")
	stdin, err := h.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := h.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var log output
	h.Stderr = &log
	if err := h.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stdin.Close(); _ = h.Wait() })
	var word, answer string
	if _, err := fmt.Fscan(stdout, &word); err != nil || word != "listening" {
		t.Fatal(word, err)
	}
	if _, err := fmt.Fscan(stdout, &word, &answer); err != nil || answer != `""` {
		t.Errorf("a child of the host was answered %s, %v", answer, err)
	}
	if info, err := os.Stat(socket); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("socket: %v, %v", info, err)
	}

	ask := func(role string, with ...string) string {
		cmd := exec.Command(exe)
		if len(with) > 0 {
			cmd = exec.Command(with[0], append(with[1:], exe)...)
		}
		cmd.Env = append(env, "CORDON_TEST_ROLE="+role)
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%s %v: %v", role, with, err)
		}
		return string(out)
	}
	if got := ask("peer"); got != `"welcome"` {
		t.Fatalf("the control: an ordinary process of this user was answered %s: %s", got, log.String())
	}
	if got := ask("restricted"); got != `""` {
		t.Errorf("a process under no_new_privs was answered %s", got)
	}
	t.Run("namespaces", func(t *testing.T) {
		testenv.Require(t, "bwrap")
		for _, ns := range []string{"--unshare-pid", "--unshare-ipc", "--unshare-user"} {
			if got := ask("peer", "bwrap", "--bind", "/", "/", "--dev", "/dev", "--proc", "/proc", ns, "--"); got != `""` {
				t.Errorf("a process in its own namespaces (%s) was answered %s", ns, got)
			}
		}
	})
	t.Run("another user", func(t *testing.T) {
		if os.Geteuid() != 0 {
			t.Skip("only root can become somebody else")
		}
		if err := os.Chmod(socket, 0o666); err != nil { // what is tested is not the socket's mode
			t.Fatal(err)
		}
		copied := filepath.Join(dir, "peer")
		text, err := os.ReadFile(exe)
		if err := errors.Join(err, os.WriteFile(copied, text, 0o755)); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(copied)
		cmd.Env = append(env, "CORDON_TEST_ROLE=peer")
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		if out, err := cmd.Output(); err != nil || string(out) != `""` {
			t.Errorf("another user was answered %s, %v", out, err)
		}
	})
	for _, reason := range []string{"was started by this host", "NoNewPrivs", "another"} {
		if !strings.Contains(log.String(), reason) {
			t.Errorf("%q is in no reason of a refusal: %s", reason, log.String())
		}
	}
}

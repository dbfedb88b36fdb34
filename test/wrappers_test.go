package test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
)

// noNamespaces runs a command that cannot make namespaces, as in many a container: unshare, setns and clone with a namespace
// flag fail with EPERM, clone3, whose flags a filter cannot see, with ENOSYS.
//
//	no-namespaces COMMAND [ARGUMENT …]
func noNamespaces() {
	runtime.LockOSThread() // a filter is a thread's
	path, err := exec.LookPath(os.Args[1])
	if err == nil {
		err = denyNamespaces()
	}
	if err == nil {
		err = unix.Exec(path, os.Args[1:], os.Environ())
	}
	fmt.Fprintln(os.Stderr, "no-namespaces:", err)
	os.Exit(125)
}

func denyNamespaces() error {
	const (
		number = 0  // offset of nr in struct seccomp_data
		arg0   = 16 // and of the low half of args[0]
		flags  = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET
	)
	load := func(offset uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
	}
	jump := func(code uint16, k uint32, yes, no uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | code | unix.BPF_K, Jt: yes, Jf: no, K: k}
	}
	end := func(action uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: action}
	}
	filter := []unix.SockFilter{
		load(number),
		jump(unix.BPF_JEQ, unix.SYS_UNSHARE, 5, 0), // to EPERM
		jump(unix.BPF_JEQ, unix.SYS_SETNS, 4, 0),
		jump(unix.BPF_JEQ, unix.SYS_CLONE3, 5, 0), // to ENOSYS
		jump(unix.BPF_JEQ, unix.SYS_CLONE, 0, 3),  // anything else to ALLOW
		load(arg0),
		jump(unix.BPF_JSET, flags, 0, 1),
		end(unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)),
		end(unix.SECCOMP_RET_ALLOW),
		end(unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)),
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	// The filter holds for this thread, which is the one that execs.
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&program)))
	if errno != 0 {
		return errno
	}
	return nil
}

// rawControl is a client of the control socket that knows nothing of the command line. It succeeds if the host answers.
//
//	raw-control SOCKET
func rawControl() {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second) // the host answers or refuses at once
	defer cancel()
	conn, err := grpc.NewClient("unix:"+os.Args[1], grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err == nil {
		var status *controlv1.StatusReply
		if status, err = controlv1.NewControlClient(conn).Status(ctx, &controlv1.StatusRequest{}); err == nil {
			fmt.Println("reached host", status.GetPid())
			os.Exit(0)
		}
	}
	fmt.Println("refused:", err)
	os.Exit(1)
}

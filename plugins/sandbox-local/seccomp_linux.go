package main

import (
	"encoding/binary"
	"fmt"
	"runtime"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// The seccomp program closes what namespaces and mounts leave open: ways to get a new user namespace and with it
// capabilities over mounts, kernel state that is not namespaced (keyrings, the module loader, the clock), reading other
// processes' memory, and typing into a terminal.
//
// It is written with x/net/bpf and not with a seccomp library: the Go one there is (elastic/go-seccomp-bpf 1.6) lets
// system calls of a foreign architecture through to its default action and compares 64 bits of ioctl's request, of which
// the kernel uses 32.

// Offsets in struct seccomp_data; see seccomp(2). Arguments are 64 bits wide, low word first on the little-endian
// machines that are supported.
const (
	offNumber = 0
	offArch   = 4
	offArgs   = 16
)

const (
	retAllow = 0x7fff0000 // SECCOMP_RET_ALLOW
	retErrno = 0x00050000 // SECCOMP_RET_ERRNO
	retKill  = 0x80000000 // SECCOMP_RET_KILL_PROCESS
)

// cloneNamespaces are the flags of clone(2) and unshare(2) that make a namespace. CLONE_NEWTIME is a signal number to
// clone and only a flag to unshare.
const cloneNamespaces = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC |
	unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET

// deniedCalls fail with EPERM whatever their arguments are.
var deniedCalls = []uint32{
	// Mounts, old and new interface.
	unix.SYS_MOUNT, unix.SYS_UMOUNT2, unix.SYS_PIVOT_ROOT, unix.SYS_CHROOT, unix.SYS_OPEN_TREE, unix.SYS_MOVE_MOUNT,
	unix.SYS_FSOPEN, unix.SYS_FSCONFIG, unix.SYS_FSMOUNT, unix.SYS_FSPICK, unix.SYS_MOUNT_SETATTR, unix.SYS_OPEN_TREE_ATTR,
	unix.SYS_SETNS,
	// Keyrings belong to the user, not to a namespace.
	unix.SYS_ADD_KEY, unix.SYS_REQUEST_KEY, unix.SYS_KEYCTL,
	// Other processes' memory and descriptors.
	unix.SYS_PTRACE, unix.SYS_PROCESS_VM_READV, unix.SYS_PROCESS_VM_WRITEV, unix.SYS_PROCESS_MADVISE, unix.SYS_KCMP,
	unix.SYS_PIDFD_GETFD,
	// Interfaces with a history of kernel bugs that no ordinary tool needs. io_uring also runs operations that no seccomp
	// program sees.
	unix.SYS_BPF, unix.SYS_PERF_EVENT_OPEN, unix.SYS_USERFAULTFD, unix.SYS_IO_URING_SETUP, unix.SYS_IO_URING_ENTER,
	unix.SYS_IO_URING_REGISTER, unix.SYS_FANOTIFY_INIT, unix.SYS_OPEN_BY_HANDLE_AT,
	// The machine as a whole.
	unix.SYS_KEXEC_LOAD, unix.SYS_KEXEC_FILE_LOAD, unix.SYS_INIT_MODULE, unix.SYS_FINIT_MODULE, unix.SYS_DELETE_MODULE,
	unix.SYS_REBOOT, unix.SYS_SWAPON, unix.SYS_SWAPOFF, unix.SYS_ACCT, unix.SYS_QUOTACTL, unix.SYS_QUOTACTL_FD,
	unix.SYS_SETTIMEOFDAY, unix.SYS_CLOCK_SETTIME, unix.SYS_SYSLOG, unix.SYS_SETHOSTNAME, unix.SYS_SETDOMAINNAME,
}

// deniedTerminal are the ioctl requests that put characters into a terminal's input. The kernel looks at the low 32 bits of
// the request only.
var deniedTerminal = []uint32{unix.TIOCSTI, unix.TIOCLINUX}

// seccompProgram is the filter in the form that bubblewrap's --seccomp takes: an array of struct sock_filter.
func seccompProgram() ([]byte, error) {
	arch, x32, err := auditArch(runtime.GOARCH)
	if err != nil {
		return nil, err
	}
	errno := func(e unix.Errno) bpf.Instruction { return bpf.RetConstant{Val: retErrno | uint32(e)} }
	prog := []bpf.Instruction{
		bpf.LoadAbsolute{Off: offArch, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: arch, SkipTrue: 1},
		bpf.RetConstant{Val: retKill}, // i386 on amd64: the same calls under other numbers
		bpf.LoadAbsolute{Off: offNumber, Size: 4},
	}
	if x32 != 0 {
		prog = append(prog,
			bpf.JumpIf{Cond: bpf.JumpGreaterOrEqual, Val: x32, SkipFalse: 1},
			errno(unix.ENOSYS))
	}
	for _, nr := range append(deniedCalls, deniedHere...) {
		prog = append(prog, bpf.JumpIf{Cond: bpf.JumpEqual, Val: nr, SkipFalse: 1}, errno(unix.EPERM))
	}
	prog = append(prog,
		// Its flags are in memory, where a filter cannot look. C libraries fall back to clone.
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.SYS_CLONE3, SkipFalse: 1}, errno(unix.ENOSYS))
	// argument checks one argument of one call; the number is still in the register if the call is another one.
	argument := func(nr uint32, arg uint32, e unix.Errno, cond bpf.JumpTest, values ...uint32) {
		block := []bpf.Instruction{bpf.LoadAbsolute{Off: offArgs + 8*arg, Size: 4}}
		for _, v := range values {
			block = append(block, bpf.JumpIf{Cond: cond, Val: v, SkipFalse: 1}, errno(e))
		}
		block = append(block, bpf.RetConstant{Val: retAllow})
		prog = append(prog, bpf.JumpIf{Cond: bpf.JumpEqual, Val: nr, SkipFalse: uint8(len(block))})
		prog = append(prog, block...)
	}
	argument(unix.SYS_CLONE, 0, unix.EPERM, bpf.JumpBitsSet, cloneNamespaces)
	argument(unix.SYS_UNSHARE, 0, unix.EPERM, bpf.JumpBitsSet, cloneNamespaces|unix.CLONE_NEWTIME)
	argument(unix.SYS_IOCTL, 1, unix.EPERM, bpf.JumpEqual, deniedTerminal...)
	// vsock is a channel to the hypervisor that no namespace covers.
	argument(unix.SYS_SOCKET, 0, unix.EAFNOSUPPORT, bpf.JumpEqual, unix.AF_VSOCK)
	prog = append(prog, bpf.RetConstant{Val: retAllow})

	raw, err := bpf.Assemble(prog)
	if err != nil {
		return nil, fmt.Errorf("seccomp program: %w", err)
	}
	var out []byte
	for _, i := range raw {
		out = binary.LittleEndian.AppendUint16(out, i.Op)
		out = append(out, i.Jt, i.Jf)
		out = binary.LittleEndian.AppendUint32(out, i.K)
	}
	return out, nil
}

// auditArch is the architecture as seccomp_data names it and, where there is one, the bit that marks x32 calls.
func auditArch(goarch string) (arch, x32 uint32, err error) {
	switch goarch {
	case "amd64":
		return unix.AUDIT_ARCH_X86_64, 0x40000000, nil
	case "arm64":
		return unix.AUDIT_ARCH_AARCH64, 0, nil
	}
	return 0, 0, fmt.Errorf("no seccomp program for %s: only amd64 and arm64 have been verified", goarch)
}

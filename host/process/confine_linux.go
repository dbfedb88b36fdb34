package process

import (
	"fmt"
	"os"

	"github.com/landlock-lsm/go-landlock/landlock"
	llsyscall "github.com/landlock-lsm/go-landlock/landlock/syscall"
	"golang.org/x/sys/unix"
)

// readable is what a plugin may read beside its own directories: what programs are made of, and nothing of a person's or the host's.
var readable = []string{"/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/opt", "/nix", "/proc", "/sys", "/dev"}

// lastCapability is above every capability that a kernel knows, so that dropping goes on until the kernel says stop.
const lastCapability = 63

// confine restricts the calling thread, for good, to what a plugin may do; a process forked from it inherits that, whatever it is written in.
// A confined plugin reads programs and system files, writes in its own state and socket directories, has no TCP, cannot signal or
// trace anybody outside and has no capabilities. What Landlock's running version cannot govern stays open: metadata, UDP, sockets with a
// path; see docs/threat-model.md. On a kernel without Landlock only the rest holds, and [Confinable] says so.
//
// The caller has locked the thread and never unlocks it (landlock(7), and go-landlock's NewRulesetFD).
func confine(exe, state, run string) error {
	fd, flags, err := landlock.V7.BestEffort().NewRulesetFD(
		landlock.RODirs(readable...).IgnoreIfMissing(),
		landlock.RWFiles("/dev/null", "/dev/zero", "/dev/full").IgnoreIfMissing(),
		landlock.ROFiles(exe),
		landlock.RWDirs(state, run),
	)
	if err != nil {
		return fmt.Errorf("plugin confinement: ruleset: %w", err)
	}
	if fd >= 0 {
		defer unix.Close(fd)
	}
	if os.Geteuid() == 0 {
		// Without a bounding set, exec gives root nothing.
		for c := uintptr(0); c <= lastCapability; c++ {
			if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err == unix.EINVAL {
				break
			} else if err != nil {
				return fmt.Errorf("plugin confinement: drop capability %d: %w", c, err)
			}
		}
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("plugin confinement: no_new_privs: %w", err)
	}
	if fd >= 0 {
		if err := llsyscall.LandlockRestrictSelf(fd, flags); err != nil {
			return fmt.Errorf("plugin confinement: restrict: %w", err)
		}
	}
	return nil
}

// Confinable says what this kernel cannot do of the confinement of plugins; empty when it can do all of it.
func Confinable() string {
	abi, err := llsyscall.LandlockGetABIVersion()
	switch {
	case err != nil:
		return fmt.Sprintf("plugins can read and write what their user can: no Landlock (%v)", err)
	case abi < 6:
		return fmt.Sprintf("plugins can reach abstract sockets and signal processes: Landlock has ABI %d, 6 is needed", abi)
	}
	return ""
}

package cli

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cordon-host/cordon/host/process"
)

// facts looks at what the kernel offers and what it forbids. It changes nothing.
func facts() []fact {
	return []fact{kernelFact(), userFact(), landlockFact(), namespaceFact(), restrictionFact(), limitsFact()}
}

func kernelFact() fact {
	f := fact{Name: "kernel", Value: "unknown"}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		f.Value = unix.ByteSliceToString(u.Sysname[:]) + " " + unix.ByteSliceToString(u.Release[:])
	}
	return f
}

func userFact() fact {
	return fact{Name: "user", Value: fmt.Sprint(os.Geteuid())}
}

// landlockFact asks for the version of the Landlock ABI; see landlock_create_ruleset(2).
func landlockFact() fact {
	f := fact{Name: "landlock"}
	abi, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	switch errno {
	case 0:
		f.Value = fmt.Sprintf("ABI %d", abi)
	case unix.EOPNOTSUPP:
		f.Value, f.Problem = "off", "the kernel has Landlock but it was not enabled at boot"
		f.Fix = "add landlock to the lsm= kernel parameter"
	default:
		f.Value, f.Problem = "missing", "this kernel has no Landlock: "+errno.Error()
		f.Fix = "use a kernel of version 5.13 or later with CONFIG_SECURITY_LANDLOCK"
	}
	return f
}

// namespaceFact looks at the three settings that keep ordinary users from making user namespaces.
func namespaceFact() fact {
	f := fact{Name: "user namespaces", Value: "allowed"}
	for _, s := range []struct{ path, forbids, problem, fix string }{
		{"/proc/sys/user/max_user_namespaces", "0", "their number is limited to none", "sysctl user.max_user_namespaces=15000"},
		{"/proc/sys/kernel/unprivileged_userns_clone", "0", "only root may make them", "sysctl kernel.unprivileged_userns_clone=1"},
		{"/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1", "AppArmor takes their capabilities away from ordinary users", "an AppArmor profile for bwrap with the rule userns, or sysctl kernel.apparmor_restrict_unprivileged_userns=0"},
	} {
		if text, err := os.ReadFile(s.path); err == nil && strings.TrimSpace(string(text)) == s.forbids {
			return fact{Name: f.Name, Value: "restricted", Problem: s.problem, Fix: s.fix}
		}
	}
	return f
}

// restrictionFact says whether this process itself runs under a filter: then what it starts does, too.
func restrictionFact() fact {
	f := fact{Name: "restrictions of this process", Value: "none"}
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		f.Value = "unknown"
		return f
	}
	var found []string
	for line := range strings.Lines(string(text)) {
		key, value, _ := strings.Cut(line, ":")
		switch value = strings.TrimSpace(value); {
		case key == "NoNewPrivs" && value == "1":
			found = append(found, "no new privileges")
		case key == "Seccomp" && value == "2":
			found = append(found, "a seccomp filter")
		}
	}
	if len(found) > 0 {
		f.Value = strings.Join(found, ", ")
		f.Problem = "a container or another sandbox may forbid what a runner needs"
		f.Fix = "run cordon outside of it if a runner above is not usable"
	}
	return f
}

// limitsFact says which limits of plugins a host that is started as this process was can enforce.
func limitsFact() fact {
	f := fact{Name: "limits of plugins"}
	var able []string
	for _, l := range []struct {
		name string
		want process.Limits
	}{{"memory", process.Limits{Memory: 1}}, {"pids", process.Limits{Pids: 1}}} {
		err := process.Limitable(l.want)
		var missing *process.LimitError
		switch {
		case err == nil:
			able = append(able, l.name)
		case errors.As(err, &missing) && f.Problem == "":
			f.Problem, f.Fix = missing.Missing, missing.Fix
		}
	}
	if f.Value = strings.Join(able, ", "); f.Value == "" {
		f.Value = "none"
	}
	return f
}

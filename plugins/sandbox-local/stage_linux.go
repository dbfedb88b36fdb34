package main

import "strings"

// stagePrefix begins every line by which the stage refuses, and stageExit is its exit code then. Together they make a
// runner failure.
const (
	stagePrefix = "cordon-sandbox: "
	stageExit   = 125
)

// stage is the first program inside the sandbox. It looks at what it has been given rather than at what was asked for,
// and runs the command only if no capability is left, privileges cannot be gained, the seccomp program is in force, it is
// pid 1 of a pid namespace and the root is read-only. (The bounding set stays full where root cannot make a user
// namespace; with no_new_privs nothing can be gained from it, see capabilities(7).) A bubblewrap of another version or build, or a kernel that
// answers differently, then costs a refusal and not a command with root's powers.
//
// It is a shell script because a shell is there already and starts in well under a millisecond. The command is passed as
// arguments and never becomes part of it. The shell stays as pid 1 and reaps: when it exits, the kernel ends whatever is
// left in the namespace before bubblewrap hears of the exit, so a call leaves no process behind. Its own stderr is
// closed while the command runs, because some shells announce there that a child was killed by a signal.
//
// A shell passes on only variables whose names are identifiers; others do not reach the command.
var stage = strings.TrimSpace(`
refuse() { printf '` + stagePrefix + `%s\n' "$*" >&2; exit 125; }
seen=0
while read -r key value rest; do
	case $key in
	CapInh:|CapPrm:|CapEff:|CapAmb:) [ "$value" = 0000000000000000 ] || refuse "capabilities are left: $key $value" ;;
	NoNewPrivs:) [ "$value" = 1 ] || refuse "privileges can be gained: $key $value" ;;
	Seccomp:) [ "$value" = 2 ] || refuse "no seccomp program: $key $value" ;;
	*) continue ;;
	esac
	seen=$((seen + 1))
	[ "$seen" = 6 ] && break
done </proc/self/status
[ "$seen" = 6 ] || refuse "/proc/self/status says too little"
[ "$$" = 1 ] || refuse "no pid namespace: pid $$"
[ -w / ] && refuse "the root is writable"
unset key value rest seen
exec 3>&2 2>/dev/null
(exec 2>&3 3>&-; exec "$@")
exit $?
`)

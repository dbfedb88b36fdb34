package sandbox

import (
	"fmt"

	"google.golang.org/grpc/codes"

	"github.com/cordon-host/cordon/capability/fault"
)

// ReasonUnavailable is the fault reason for "a sandbox is needed and this host cannot give one". The command did not run.
const ReasonUnavailable = "SANDBOX_UNAVAILABLE"

// Unavailable is the fault for a confined mode without a usable runner: code FailedPrecondition, reason
// SANDBOX_UNAVAILABLE. The detail, if any, is what the runner said; it is appended to the text.
func Unavailable(m Mode, detail string) error {
	return fault.With(codes.FailedPrecondition, ReasonUnavailable, UnavailableText(m, detail))
}

// UnavailableText is the message of Unavailable.
func UnavailableText(m Mode, detail string) string {
	text := fmt.Sprintf(`sandbox mode "%s" is requested but no sandbox backend is usable on this host; refusing to run the command unconfined. Install bubblewrap or run a Landlock-enforcing kernel (Linux), ensure sandbox-exec is usable (macOS), or ensure the ACL restricted-token runner can start (Windows) — otherwise switch the consumer to danger-full-access.`, m)
	if detail != "" {
		text += " Runner failure: " + detail
	}
	return text
}

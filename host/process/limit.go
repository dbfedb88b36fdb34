package process

import "fmt"

// Limits bound what one generation may use, the process with everything it starts. Zero means no limit.
type Limits struct {
	Memory int64 // bytes
	Pids   int
}

// LimitError says that limits cannot be enforced here. Nothing was started: a limit that does not hold is worse than none.
type LimitError struct {
	Missing string // what this machine or this process lacks
	Fix     string
}

func (e *LimitError) Error() string {
	return fmt.Sprintf("limits cannot be enforced: %s; %s", e.Missing, e.Fix)
}

//go:build !linux

package process

// Limitable is nil if limits can be enforced, else a *LimitError.
func Limitable(l Limits) error {
	if l == (Limits{}) {
		return nil
	}
	return &LimitError{Missing: "this system has no control groups", Fix: "remove limits from the row"}
}

// PrepareLimits makes this process ready to enforce limits. The error is a *LimitError.
func PrepareLimits(l Limits) error { return Limitable(l) }

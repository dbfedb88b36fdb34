//go:build unix

package sandbox

import "golang.org/x/sys/unix"

// searchable reports whether this process may enter dir.
func searchable(dir string) bool { return unix.Access(dir, unix.X_OK) == nil }

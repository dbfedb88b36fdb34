package build

import "syscall"

// times are when a file was written and when anything about it changed.
func times(st *syscall.Stat_t) (mtime, ctime syscall.Timespec) { return st.Mtim, st.Ctim }

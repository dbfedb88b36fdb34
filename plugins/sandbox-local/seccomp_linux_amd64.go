package main

import "golang.org/x/sys/unix"

// deniedHere are the denied calls that only this architecture has.
var deniedHere = []uint32{unix.SYS_IOPL, unix.SYS_IOPERM, unix.SYS_USELIB}

//go:build linux && !amd64

package main

// deniedHere are the denied calls that only this architecture has.
var deniedHere []uint32

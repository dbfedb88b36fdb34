//go:build !unix

package compose

const nonblock = 0

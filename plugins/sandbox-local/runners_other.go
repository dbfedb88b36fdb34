//go:build !linux

package main

import (
	"runtime"

	sandboxv1 "github.com/cordon-host/cordon/api/sandbox/v1"
)

func platformRunners(Config, surroundings) []runner { return nil }

func noRunner(Config) *sandboxv1.RunnerReport {
	return &sandboxv1.RunnerReport{Name: runtime.GOOS, Reason: "no sandbox runner has been verified on this platform"}
}

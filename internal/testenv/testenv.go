// Package testenv is what tests may count on: tools and kernel features that a machine may lack, and an ordinary user
// to run as.
package testenv

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// RequireVar lists, separated by commas, the tools and features whose absence is a failure and not a reason to skip. CI
// sets it, so that a suite cannot turn green by running nothing.
const RequireVar = "CORDON_TEST_REQUIRE"

// nobody is the uid and gid that every Linux distribution keeps for "no particular user".
const nobody = 65534

// Require makes sure that a tool is there: a program on PATH, or a feature that check, if given, finds missing. Without it
// the test is skipped, or failed if RequireVar names it.
func Require(t testing.TB, token string, check ...func() error) {
	t.Helper()
	var err error
	if len(check) == 0 {
		_, err = exec.LookPath(token)
	}
	for _, c := range check {
		if err == nil {
			err = c()
		}
	}
	if err == nil {
		return
	}
	if Required(token) {
		t.Fatalf("%s is required by %s: %v", token, RequireVar, err)
	}
	t.Skipf("no %s here: %v", token, err)
}

// Required reports whether RequireVar names a token.
func Required(token string) bool {
	return slices.ContainsFunc(strings.Split(os.Getenv(RequireVar), ","), func(s string) bool { return strings.TrimSpace(s) == token })
}

// User is the credential of an ordinary user other than this process's. Only root can become somebody else; without
// root the test is skipped, or failed if RequireVar names "root".
func User(t testing.TB) *syscall.Credential {
	t.Helper()
	if os.Geteuid() != 0 {
		if Required("root") {
			t.Fatalf("root is required by %s, this is uid %d", RequireVar, os.Geteuid())
		}
		t.Skip("becoming an ordinary user takes root")
	}
	return &syscall.Credential{Uid: nobody, Gid: nobody}
}

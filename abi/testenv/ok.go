// Package testenv knows the tools that tests need besides Go: how to find each, what is tested with it, and how to get
// it.
//
// A test calls [Need] before it uses a tool. Without the tool the test is skipped, and says so. With [Require] set to
// 1, as continuous integration does, it fails. `go run ./abi/testenv/internal/tools` lists what this machine lacks.
package testenv

import "testing"

// OK ends the test at an error: of what a test needs, and does not look at.
func OK(t testing.TB, err error) {
	if err != nil {
		t.Helper()
		t.Fatal(err)
	}
}

// NoError fails the test at an error of what it looks at, and goes on.
func NoError(t testing.TB, err error) {
	if err != nil {
		t.Helper()
		t.Error(err)
	}
}

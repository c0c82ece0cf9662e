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

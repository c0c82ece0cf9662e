package testenv

import "testing"

// SlowReason is why a slow test is skipped under the race detector.
const SlowReason = "slow: runs without the race detector"

// Slow is the first statement of a test of one goroutine, or of many modules, that takes seconds under the race detector: what is
// concurrent in it other tests cover. The suite finds the call in the source and runs the test in a group of its own.
func Slow(t testing.TB) {
	if RaceDetector {
		t.Helper()
		t.Skip(SlowReason)
	}
}

package testenv

import (
	"testing"
	"time"
)

// Seed returns the seed that a flag gives, or a fresh one if the flag is 0. The test's log names the flag and the seed, so that the test can
// be repeated.
func Seed(tb testing.TB, flag string, given uint64) uint64 {
	tb.Helper()
	if given == 0 {
		given = uint64(time.Now().UnixNano())
	}
	tb.Logf("-%s=%d", flag, given)
	return given
}

// FreshSeeds calls run with one fresh seed after the other until the duration is over or run returns false. A duration of 0 calls nothing.
func FreshSeeds(d time.Duration, run func(seed uint64) bool) {
	seed := uint64(time.Now().UnixNano())
	for end := time.Now().Add(d); d > 0 && time.Now().Before(end) && run(seed); {
		seed++
	}
}

package transfer

import (
	"testing"
	"time"
)

// The estimate rises with the first faster sample, and falls slowly.
func TestThroughput(t *testing.T) {
	const mb = 1 << 20
	var r throughput
	busy := time.Duration(0)
	add := func(bytes int64, took time.Duration, idle bool) float64 {
		busy += took
		r.add(bytes, busy, idle)
		return r.perSecond / mb
	}
	if got := add(10*mb, 10*time.Millisecond, false); got != 0 {
		t.Errorf("%v MB/s within the first sample", got)
	}
	if got := add(40*mb, 40*time.Millisecond, true); got != 1000 {
		t.Errorf("%v MB/s, want 1000", got)
	}
	if got := add(1*mb, 2*time.Millisecond, true); got != 1000-500.0/8 {
		t.Errorf("%v MB/s after one slow piece", got)
	}
	if got := add(200*mb, 100*time.Millisecond, false); got != 2000 {
		t.Errorf("%v MB/s, want 2000 at once", got)
	}
	if got := add(10*mb, time.Microsecond, true); got != 2000 {
		t.Errorf("%v MB/s: the rest of a longer load counted as a fast one", got)
	}
}

package transfer

import (
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
)

// The estimate rises with the first faster sample, and falls slowly.
func TestThroughput(t *testing.T) {
	const mb = 1 << 20
	var r throughput
	busy := time.Duration(0)
	add := func(bytes int64, took time.Duration, inFlight int) float64 {
		busy += took
		r.add(bytes, busy, inFlight)
		return r.perSecond / mb
	}
	if got := add(10*mb, 10*time.Millisecond, 1); got != 0 {
		t.Errorf("%v MB/s within the first sample", got)
	}
	if got := add(40*mb, 40*time.Millisecond, 0); got != 1000 {
		t.Errorf("%v MB/s, want 1000", got)
	}
	if got := add(1*mb, 2*time.Millisecond, 0); got != 1000-500.0/8 {
		t.Errorf("%v MB/s after one slow piece", got)
	}
	for n := range 4 {
		add(50*mb, 25*time.Millisecond, 1+n%2) // two and one are in flight in turns: the sample ends with the fourth
	}
	if got := r.perSecond / mb; got != 1000-500.0/8 {
		t.Errorf("%v MB/s after four pieces beside two, want nothing from so few", got)
	}
	for range 4 {
		add(50*mb, 25*time.Millisecond, 2)
	}
	if got := r.perSecond / mb; got != 2000 {
		t.Errorf("%v MB/s, want 2000 at once", got)
	}
	if got := add(10*mb, time.Microsecond, 0); got != 2000 {
		t.Errorf("%v MB/s: the rest of a longer load counted as a fast one", got)
	}
}

// A layer-wise load has all its pieces in flight until its end. Neither the first of them, which seems slow, nor the others,
// which seem to take no time, are the path's speed.
func TestThroughputOfLayers(t *testing.T) {
	const mb, pieces = 1 << 20, 64
	var r throughput
	busy := time.Duration(0)
	for range 3 {
		busy += 60 * time.Millisecond
		for left := pieces; left > 0; left-- {
			busy += 62500 * time.Nanosecond
			r.add(mb, busy, left-1)
		}
		if got := r.perSecond / mb; got < 750 || got > 1010 {
			t.Errorf("%.0f MB/s, want 64 MB in 64 ms, or a little less", got)
		}
	}
}

// TestExpectedUntilMeasured: before a root was loaded from, its own speed is what a load is estimated by, shared by all devices.
func TestExpectedUntilMeasured(t *testing.T) {
	e, err := New(Config{Threads: 1, SlotBytes: MinSlotBytes, MaxStaging: MinSlotBytes})
	testenv.OK(t, err)
	defer e.Close()
	q, err := e.Queue("a")
	testenv.OK(t, err)
	speed := func(want float64) {
		t.Helper()
		if got, _ := q.throughputOf("/r"); got != want {
			t.Errorf("%.0f bytes per second are expected, want %.0f", got, want)
		}
	}
	speed(0)
	e.Expect("/r", 1000)
	speed(1000)
	_, err = e.Queue("b")
	testenv.OK(t, err)
	speed(500)
}

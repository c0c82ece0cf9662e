package transfer

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/gds/gdstest"
	"github.com/kvhost/kvhost/host/kv"
)

// The estimate rises with the first faster sample, and falls slowly.
func TestThroughput(t *testing.T) {
	const mb = 1 << 20
	var r throughput
	busy := time.Duration(0)
	add := func(bytes int64, took time.Duration, inFlight int) float64 {
		busy += took
		r.add(bytes, busy, inFlight)
		return r.few / mb
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
	if got := r.few / mb; got != 1000-500.0/8 {
		t.Errorf("%v MB/s after four pieces beside two, want nothing from so few", got)
	}
	for range 4 {
		add(50*mb, 25*time.Millisecond, 2)
	}
	if got := r.few / mb; got != 2000 {
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
		if got := r.many / mb; got < 750 || got > 1010 {
			t.Errorf("%.0f MB/s, want 64 MB in 64 ms, or a little less", got)
		}
	}
}

// TestThroughputOfFew: two pieces say nothing of many, where something else does, and many say something of few until a few are loaded.
func TestThroughputOfFew(t *testing.T) {
	var r throughput
	var busy time.Duration
	for _, c := range []struct {
		pieces          int
		rate, few, many float64 // of the sample; the estimates after it, where 1000 are expected
	}{{0, 1, 1000, 1000}, {2, 20, 20, 1000}, {16, 500, 20, 500}, {1, 4000, 4000, 500}} {
		for left := c.pieces; left > 0; left-- {
			busy += time.Second
			r.add(int64(c.rate)*1e9, busy, left-1)
		}
		if few, many := r.of(2, 1000e9)/1e9, r.of(16, 1000e9)/1e9; few != c.few || many != c.many {
			t.Errorf("after %d pieces at %.0f GB/s: %.0f for two and %.0f for many, want %.0f and %.0f", c.pieces, c.rate, few, many, c.few, c.many)
		}
	}
	var none throughput
	none.add(1e9, time.Second, 0)
	if got := none.of(16, 0); got != 1e9 {
		t.Errorf("%.0f for many where nothing else is known, want what two had", got)
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
		if _, got := q.throughputOf("/r", 1); got != want {
			t.Errorf("%.0f bytes per second are expected, want %.0f", got, want)
		}
	}
	speed(0)
	e.Expect("/r", 1000, false)
	speed(1000)
	_, err = e.Queue("") // of the engine's scheduler
	testenv.OK(t, err)
	speed(1000)
	_, err = e.Queue("b")
	testenv.OK(t, err)
	speed(500)
	e.Expect("/r", 1000, true) // of memory, but neither is a GPU
	speed(500)
	e.buses["a"] = 5000
	speed(5000)
	e.Expect("/r", 1000, false)
	speed(500)
}

// TestBusIsMeasured: a GPU's loads from memory are estimated by its bus before there were any, however many devices there are.
func TestBusIsMeasured(t *testing.T) {
	r := newDeviceRig(t, deviceShapes["small pages"], 16, 32<<20)
	r.engine.Expect("memory:", 1, true)
	for _, device := range []string{"", "b"} {
		q, err := r.engine.Queue(device)
		testenv.OK(t, err)
		if _, got := q.throughputOf("memory:", 1); got > 1 {
			t.Errorf("%.0f bytes per second are expected on %q, want those of a processor", got, device)
		}
	}
	q, err := r.engine.Queue(r.gpu.UUID.String())
	testenv.OK(t, err)
	if _, got := q.throughputOf("memory:", 1); got < 1e6 {
		t.Errorf("%.0f bytes per second are expected on the GPU, want those of copies to it", got)
	}
}

// names gives files of a directory names.
func names(dir string) func() string {
	n := 0
	return func() string { n++; return filepath.Join(dir, strconv.Itoa(n)) }
}

// pace is a clock for a probe: from one reading to the next it goes on by cuFile if that was called meanwhile, else by
// staged. So it is no matter how fast the machine is.
func pace(double *gdstest.Double, cuFile, staged time.Duration) func() time.Time {
	now, seen := time.Unix(0, 0), 0
	return func() time.Time {
		if calls := double.Calls("cuFileWrite") + double.Calls("cuFileRead"); calls != seen {
			now, seen = now.Add(cuFile), calls
		} else {
			now = now.Add(staged)
		}
		return now
	}
}

func TestProbe(t *testing.T) {
	for name, c := range map[string]struct {
		took   [2]time.Duration // by cuFile, and staged
		rules  string
		always bool
		bytes  int64
		direct bool
		why    string
	}{
		"works": {always: true, direct: true, bytes: 1 << 20, why: "direct writes "},
		"not registered": {rules: "cuFileHandleRegister:code=5027", always: true, bytes: 1 << 20,
			why: "CU_FILE_HANDLE_NOT_REGISTERED"},
		"reads fail": {rules: "cuFileRead:errno=5", always: true, bytes: 1 << 20, why: "input/output error"},
		"reads lie":  {rules: "cuFileRead:flip=77", always: true, bytes: 1 << 20, why: "bytes come back wrong"},
		"no memory": {rules: "cuMemAlloc_v2:code=2", always: true, bytes: 1 << 20,
			why: "CUDA_ERROR_OUT_OF_MEMORY"},
		"no room": {always: true, bytes: 4096, why: "no room"},
		"slow":    {took: [2]time.Duration{2, 1}, bytes: 64 << 10, why: "staged writes"},
		"fast":    {took: [2]time.Duration{1, 2}, direct: true, bytes: 64 << 10, why: "staged writes"},
		"a draw":  {took: [2]time.Duration{1, 1}, bytes: 64 << 10, why: gds.ByCompatibility},
		"a draw, perhaps by DMA": {rules: "cuFileGetStatsL3:code=5022", took: [2]time.Duration{1, 1}, direct: true,
			bytes: 64 << 10, why: "route unknown"},
		"statistics lack": {rules: "cuFileGetStatsL3:code=5022", always: true, direct: true, bytes: 64 << 10,
			why: "route unknown"},
		"files cannot be":   {always: true, bytes: 1 << 20, why: "no such file"},
		"compat says stats": {always: true, direct: true, bytes: 64 << 10, why: gds.ByCompatibility},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("KVHOST_TEST_GPU", "")
			r := newDeviceRig(t, kv.Uniform(2, 2, 1, 4096), 16, 8<<20)
			dir := t.TempDir()
			if name == "files cannot be" {
				dir = filepath.Join(dir, "none")
			}
			r.double.Rules(c.rules)
			choice := r.engine.Probe(t.Context(), ProbeRequest{
				Direct: r.direct, FS: r.fs, Name: names(dir), Bytes: c.bytes, Always: c.always,
				now: pace(r.double, c.took[0]*time.Second, c.took[1]*time.Second),
			})
			r.double.Rules("")
			if (choice.Direct != nil) != c.direct || !strings.Contains(choice.Why, c.why) {
				t.Errorf("the probe chose %+v, want direct: %v, because %q", choice, c.direct, c.why)
			}
			if left, _ := os.ReadDir(dir); len(left) > 0 {
				t.Errorf("left %v", left)
			}
			if n := r.engine.Stats().SlotsInUse; n != 0 || r.direct.Handles.Stats().Open > 4 {
				t.Errorf("%d slots are held", n)
			}
			if out, _ := r.direct.Slots(); out != 0 {
				t.Errorf("%d slots of the GPU are held", out)
			}
		})
	}
}

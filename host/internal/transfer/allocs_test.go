//go:build !race

package transfer

import (
	"errors"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
)

// Under the race detector a pool forgets what it is given, at random, so these tests are not for it.

// wholeChunk is all of a chunk that is being stored, and a slot for it.
func wholeChunk(r *deviceRig) (ExtentRange, []byte) {
	blocks := r.shuffled(1)[0]
	put := r.put(0, blocks).Put
	slot, ok := r.engine.slots.TryAcquire()
	if !ok {
		r.t.Fatal("no slot")
	}
	r.t.Cleanup(func() {
		slot.Release()
		put.Abort(nil)
	})
	n := len(put.Plan().Extents())
	return ExtentRange{Plan: put.Plan(), Hi: n, Blocks: blocks, Table: make([]uint64, n)}, slot.Bytes()
}

// Copies between pages and a slot allocate nothing, with windows and without.
func TestCopiesAllocateNothing(t *testing.T) {
	r := newDeviceRig(t, deviceShapes["small pages"], 16, 32<<20)
	of, slot := wholeChunk(r)
	for _, windows := range []bool{true, false} {
		for i, move := range [...]func(ExtentRange, []byte) error{r.memory.Gather, r.memory.Scatter} {
			if n := testing.AllocsPerRun(50, func() {
				testenv.OK(t, move(of, slot))
			}); n > 0 {
				t.Errorf("%s, windows %t: %g objects", [...]string{"gather", "scatter"}[i], windows, n)
			}
		}
		r.gpu.DisableWindows(errors.New("to see what it is like without"))
	}
}

// The GPU's codec takes a few objects for a window, however many extents it has.
func TestCodecAllocatesByWindow(t *testing.T) {
	r := newCompressedRig(t, "bf16", deviceShapes["small pages"], 16)
	of, slot := wholeChunk(r)
	m := *r.memory
	m.flag = r.gpu.NewFlag()
	defer m.flag.Release()
	plain := fewestAllocs(func() {
		testenv.OK(t, m.Gather(of, slot))
	})
	stored, size := make([]pieceformat.Stored, of.Hi), 0
	encode := fewestAllocs(func() {
		var done bool
		var err error
		if size, _, done, err = m.encode(&of, image{host: slot}, stored); !done || err != nil {
			t.Fatal(done, err)
		}
	})
	decode := fewestAllocs(func() {
		if _, done, _, err := m.decode(&of, stored, image{host: slot[:size]}); !done || err != nil {
			t.Fatal(done, err)
		}
	})
	if encode > plain+2 || decode > plain+2 {
		t.Errorf("%g objects to encode, %g to decode, %g to gather", encode, decode, plain)
	}
}

// fewestAllocs counts the objects of the run that took the fewest: a run that waits for long takes timers, too.
func fewestAllocs(run func()) float64 {
	fewest := testing.AllocsPerRun(1, run)
	for range 24 {
		fewest = min(fewest, testing.AllocsPerRun(1, run))
	}
	return fewest
}

package store

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
)

// order is the keys by their last touch.
func (f *fixture) order(of int) (list []int) {
	number := map[uint64]int{}
	for n := range of {
		k := testKey(uint64(n))
		number[f.space.Class(0).Printer.Print(&k)] = n
	}
	for _, e := range f.root().Evictor.Snapshot() {
		list = append(list, number[e.Fingerprint])
	}
	return list
}

// TestOrderOfTouchAfterACrash kills a host some time after the order was kept: what it says holds of what is still
// there, and what was stored later is newer.
func TestOrderOfTouchAfterACrash(t *testing.T) {
	synctest.Test(t, testOrderOfTouchAfterACrash)
}

func testOrderOfTouchAfterACrash(t *testing.T) {
	f := newFixture(t, t.TempDir(), 16, 1)
	name := filepath.Join(f.cfg.Roots[0].Path, pieceformat.TouchesFile)
	f.mustPut(0, 1, 2, 3, 4)
	for _, n := range []uint64{3, 0} {
		f.lookup(n).Release()
	}
	want := []int{1, 2, 4, 3, 0}
	if got := f.order(5); !slices.Equal(got, want) {
		t.Fatalf("%v, want %v", got, want)
	}
	var list []byte
	for size := int64(32 + 5*8); ; time.Sleep(touchesEvery) { // the store does it by itself
		if info, err := os.Stat(name); err == nil && info.Size() == size {
			f.root().recovery.saveTouches() // the one before may have come between two touches
			if list, err = os.ReadFile(name); err != nil {
				t.Fatal(err)
			}
			break
		}
	}
	f.mustPut(5, 6)
	f.lookup(1).Release()
	f.drop(4)
	must(t, f.store.Close())
	must(t, os.Remove(filepath.Join(f.cfg.Roots[0].Path, pieceformat.CheckpointFile)))
	put(t, name, list)
	f.start()
	<-f.store.ScanDone()
	if got, want := f.order(7), []int{1, 2, 3, 0, 5, 6}; !slices.Equal(got, want) {
		t.Errorf("after the crash %v, want %v", got, want)
	}
}

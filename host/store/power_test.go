package store

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
	"github.com/kvhost/kvhost/staging/crashfs"
	"github.com/kvhost/kvhost/staging/faultfs"
	"golang.org/x/sys/unix"
)

var (
	powerSeed = flag.Uint64("power.seed", 0, "replay the power losses of this seed only")
	powerTime = flag.Duration("power.time", 0, "keep on with fresh seeds for so long")
)

// TestPowerLoss pulls the plug at some call, again and again on the same directories. Whatever is a hit afterwards is
// what was stored or fails its checks; what the durability promised is a hit. Some lives end in order before the power
// goes, or while they end; in some the process alone is killed, and the machine goes on.
func TestPowerLoss(t *testing.T) {
	if *powerSeed != 0 {
		losePower(t, *powerSeed)
		return
	}
	seeds := uint64(24)
	if testing.Short() {
		seeds = 6
	}
	for seed := uint64(1); seed <= seeds; seed++ {
		losePower(t, seed)
	}
	for end, seed := time.Now().Add(*powerTime), uint64(time.Now().UnixNano()); *powerTime > 0 && time.Now().Before(end); seed++ {
		losePower(t, seed)
	}
}

// losePower lives a store's life with several crashes.
func losePower(t *testing.T, seed uint64) {
	durability := []Durability{None, Batch, Strict}[seed%3]
	t.Run(fmt.Sprintf("seed=%d/%s", seed, durability), func(t *testing.T) {
		rng := rand.New(rand.NewPCG(seed, 3))
		base := t.TempDir()
		root := filepath.Join(base, "kv")
		f := &fixture{TB: t, ns: testNamespace(2)}
		stored := map[uint64]uint64{}
		var promised []uint64
		var machine *crashfs.FS
		for life := range 5 {
			var err error
			if machine == nil {
				if machine, err = crashfs.New(staging.OS(), filepath.Join(base, "grave")); err != nil {
					t.Fatal(err)
				}
			}
			end := []ending{outage, outage, orderly, killed}[rng.IntN(4)]
			faulty := faultfs.New(machine)
			f.cfg = Config{
				Roots: []RootConfig{{Path: root, Capacity: 10 * 2 * pieceBytes, MaxEntries: 80}},
				FS:    faulty, Seed: seed, Durability: durability, BatchEvery: time.Hour, HostID: "testhost", Now: fakeClock(),
			}
			if life > 0 && rng.IntN(4) == 0 { // a crash while the last one is being recovered from
				faulty.Set(unplugAt(rng, 40))
			}
			if f.store, err = Open(t.Context(), f.cfg); err != nil {
				if !errors.Is(err, crashfs.ErrPowerLost) {
					t.Fatalf("life %d: %v", life, err)
				}
				machine = nil
				continue
			}
			f.space, err = f.store.Space(t.Context(), f.ns)
			if err == nil {
				promised = f.keptPromises(life, promised)
				f.readAll(life, promised, stored)
				promised = f.live(rng, end, machine, stored, promised)
			} else if !errors.Is(err, crashfs.ErrPowerLost) {
				t.Fatalf("life %d: %v", life, err)
			}
			var left []uint64
			for _, n := range promised {
				if f.space == nil || f.has(n) { // what was evicted meanwhile is not owed any more
					left = append(left, n)
				}
			}
			promised = left
			switch end {
			case killed:
				faulty.Set(faultfs.MustRules("any **: eacces")...) // whatever the store does from now on, the process does not
				f.kill()
				if _, err := machine.Stat(root); err == nil {
					continue
				}
			case orderly:
				if faulty.Set(); rng.IntN(2) == 0 {
					faulty.Set(unplugAt(rng, 30))
				}
				_ = f.store.Close()
			}
			if err := machine.PowerLoss(rng.Uint64()); err != nil {
				t.Fatalf("life %d: %v", life, err)
			}
			_ = f.store.Close()
			machine = nil
		}
		if machine != nil { // the last was killed
			if err := machine.PowerLoss(rng.Uint64()); err != nil {
				t.Fatal(err)
			}
		}
		f.cfg.FS = staging.OS()
		f.start()
		f.readAll(5, f.keptPromises(5, promised), stored)
		if _, temporaries := usage(t, root); temporaries != 0 {
			t.Errorf("%d temporaries after recovery", temporaries)
		}
		if err := f.store.roots[0].idle(); err != nil {
			t.Error(err)
		}
		f.checkUsed()
	})
}

// keptPromises are the promised keys that are there. Evicted files whose removal was lost come back, and may have pushed
// others out when the store opened.
func (f *fixture) keptPromises(life int, promised []uint64) (kept []uint64) {
	f.Helper()
	for _, n := range promised {
		if f.has(n) {
			kept = append(kept, n)
		}
	}
	if missing, evicted := len(promised)-len(kept), f.store.Stats().Roots[0].Evictions; uint64(missing) > uint64(evicted) {
		f.Fatalf("life %d: of the promised keys %v only %v are hits, and %d were evicted", life, promised, kept, evicted)
	}
	return kept
}

// readAll reads every piece that is there, of entries too that lack the other one: what a power failure has damaged is found
// before it is told resident. Bytes that were never stored are an error; so is a failure, where it was promised.
func (f *fixture) readAll(life int, promised []uint64, stored map[uint64]uint64) {
	f.Helper()
	owed := map[uint64]bool{}
	for _, n := range promised {
		owed[n] = true
	}
	for n := range uint64(24) {
		for rank := range uint32(2) {
			l, err := f.store.Lookup(LookupRequest{Space: f.space, Keys: keys(n), Ranks: 1 << rank})
			if err != nil {
				f.Fatal(err)
			}
			if l.Hits() == 0 {
				continue
			}
			data, err := read(l, 0, rank)
			l.Release()
			switch {
			case err == nil && stored[n]&(1<<rank) == 0:
				f.Fatalf("life %d: key %d rank %d was never written", life, n, rank)
			case err == nil && !bytes.Equal(data, payload(f.space.Plan(0), testKey(n), rank)):
				f.Fatalf("life %d: key %d rank %d: other bytes than were stored", life, n, rank)
			case err == nil || errors.Is(err, crashfs.ErrPowerLost) || errors.Is(err, os.ErrNotExist):
			case owed[n]:
				f.Fatalf("life %d: key %d rank %d was promised: %v", life, n, rank, err)
			case !pieceformat.IsDamage(err) && !errors.Is(err, ErrGone) && !errors.Is(err, pieceformat.ErrWrongPiece):
				f.Logf("life %d: key %d rank %d: %v", life, n, rank, err)
			}
		}
	}
}

// live stores until the power is gone or enough was done, and says which keys are durable by promise.
func (f *fixture) live(rng *rand.Rand, end ending, machine *crashfs.FS, stored map[uint64]uint64, promised []uint64) []uint64 {
	faulty := f.cfg.FS.(*faultfs.FS)
	switch {
	case end == outage && rng.IntN(4) > 0:
		faulty.Set(unplugAt(rng, 600))
	case end == killed && rng.IntN(4) > 0:
		faulty.Set(killAt(rng, 600))
	}
	for range 60 {
		n := rng.Uint64N(24)
		for rank := range uint32(2) {
			stored[n] |= 1 << rank // bytes may be there as soon as they are written
			if err := f.put(n, rank); errors.Is(err, crashfs.ErrPowerLost) || end == killed && faulty.Injected() > 0 {
				return promised
			} else {
				if !acceptable(err) {
					f.Fatalf("put %d: %v", n, err)
				}
				if err == nil && f.cfg.Durability == Batch {
					promised = slices.DeleteFunc(promised, func(p uint64) bool { return p == n }) // it had been evicted
				}
			}
		}
		if f.cfg.Durability == Batch && rng.IntN(6) == 0 {
			f.store.roots[0].flush()
		}
		if _, err := machine.Stat(f.cfg.Roots[0].Path); err != nil {
			return promised
		}
		r := f.store.roots[0]
		r.mu.Lock()
		flushed := len(r.unsynced) == 0
		r.mu.Unlock()
		if f.cfg.Durability == Strict || f.cfg.Durability == Batch && flushed {
			promised = promised[:0]
			for n := range uint64(24) {
				if f.has(n) {
					promised = append(promised, n)
				}
			}
		}
	}
	return promised
}

// ending is how a life ends.
type ending int

const (
	outage  ending = iota // the power goes, at some call or at the end
	orderly               // the store is closed, and then the power goes
	killed                // the process ends, at some call or at the end, and the machine goes on
)

// killAt ends the process at one of the next n calls: none is made from then on.
func killAt(rng *rand.Rand, n int) faultfs.Rule {
	return faultfs.Rule{
		Op: staging.OpAny, Path: "**", When: faultfs.When{First: 1 + rng.Uint64N(uint64(n))}, Fault: faultfs.Fault{Errno: unix.EACCES},
	}
}

// unplugAt pulls the plug at one of the next n calls.
func unplugAt(rng *rand.Rand, n int) faultfs.Rule {
	return faultfs.Rule{
		Op: staging.OpAny, Path: "**", When: faultfs.When{First: 1 + rng.Uint64N(uint64(n)), Seed: rng.Uint64()}, Fault: faultfs.Fault{Power: true},
	}
}

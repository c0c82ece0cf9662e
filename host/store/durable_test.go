package store

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/kvhost/kvhost/staging"
)

// onMachine is a fixture on a machine that can lose its power, and the next machine, for after that.
func onMachine(t *testing.T, entries int, change ...func(*Config)) (f *fixture, machine *staging.VolatileFS) {
	base := t.TempDir()
	machine, err := staging.Volatile(staging.OS(), filepath.Join(base, "grave"))
	if err != nil {
		t.Fatal(err)
	}
	f = newFixture(t, filepath.Join(base, "kv"), entries, 1, append(change, func(c *Config) { c.FS = machine })...)
	return f, machine
}

// afterPowerLoss starts the store on what the machine left.
func (f *fixture) afterPowerLoss(machine *staging.VolatileFS, seed uint64) {
	f.Helper()
	if err := machine.PowerLoss(seed); err != nil {
		f.Fatal(err)
	}
	_ = f.store.Close()
	f.cfg.FS = staging.OS()
	f.start()
}

// TestPowerLossAfterAnOrderlyEnd: what the checkpoint takes for granted is durable before it is. Victims' names that came
// back would be in nobody's account.
func TestPowerLossAfterAnOrderlyEnd(t *testing.T) {
	believed := 0
	for _, durability := range []Durability{None, Batch, Strict} {
		for seed := range uint64(8) {
			t.Run(fmt.Sprintf("%s/%d", durability, seed), func(t *testing.T) {
				f, machine := onMachine(t, 6, func(c *Config) { c.Durability = durability })
				for n := range uint64(20) {
					f.mustPut(n)
				}
				left, err := f.store.Put(t.Context(), f.request(50, 0, 0))
				if err != nil {
					t.Fatal(err)
				}
				if err := write(left); err != nil {
					t.Fatal(err)
				}
				left.Abort(nil)
				if err := f.store.Close(); err != nil {
					t.Fatal(err)
				}
				f.afterPowerLoss(machine, seed)
				if f.store.Stats().Roots[0].Scanned == 0 {
					believed++
				}
				f.checkUsed()
				f.mustRead(19)
			})
		}
	}
	if believed == 0 {
		t.Error("no checkpoint was believed, so none was tested")
	}
}

// TestNoCheckpointWithoutItsFiles: when the file system cannot say that all is on disk, the next start scans.
func TestNoCheckpointWithoutItsFiles(t *testing.T) {
	f, faulty := faultyFixture(t, 4)
	f.mustPut(0, 1)
	faulty.Set(staging.MustRules("syncfs **: eio")...)
	if err := f.store.Close(); err != nil {
		t.Fatal(err)
	}
	faulty.Set()
	f.start()
	if got := f.store.Stats().Roots[0]; got.Scanned != 2 {
		t.Errorf("%d files scanned", got.Scanned)
	}
	f.mustRead(1)
}

// TestDirectoryThatNobodySynced has a piece's directory be there already: made by a process that was killed, or by a put
// that has not come to its sync. What strict acknowledges is there after a power loss all the same.
func TestDirectoryThatNobodySynced(t *testing.T) {
	for seed := range uint64(12) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			f, machine := onMachine(t, 6, func(c *Config) { c.Durability = Strict })
			if err := machine.MkdirAll(filepath.Dir(f.pieceFile(3, 0)), 0o700); err != nil {
				t.Fatal(err)
			}
			f.mustPut(3)
			f.afterPowerLoss(machine, seed)
			f.mustRead(3)
		})
	}
}

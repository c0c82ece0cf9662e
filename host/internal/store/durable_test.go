package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/staging"
)

// onMachine is a fixture on a machine that can lose its power, and the next machine, for after that.
func onMachine(t *testing.T, entries int, change ...func(*Config)) (f *fixture, machine *faultfs.Machine) {
	base := t.TempDir()
	machine, err := faultfs.NewMachine(staging.OS(), filepath.Join(base, "grave"))
	must(t, err)
	f = newFixtureIn(t, filepath.Join(base, "kv"), entries, 1, append(change, func(c *Config) { c.FS = machine })...)
	return f, machine
}

// kill ends the store without a word: nothing of its Close reaches the disk.
func (f *fixture) kill() {
	f.Helper()
	s := f.store
	s.closed.Store(true)
	s.stop()
	s.work.Wait()
	_ = errors.Join(s.closeRoots(), s.catalog.Close()) // of a machine without power, perhaps
}

// afterPowerLoss starts the store on what the machine left.
func (f *fixture) afterPowerLoss(machine *faultfs.Machine, seed uint64) {
	f.Helper()
	must(f, machine.PowerLoss(seed))
	_ = f.store.Close()
	f.cfg.FS = staging.OS()
	f.start()
}

// TestPowerLossAfterAnOrderlyEnd: what the checkpoint takes for granted is durable before it is. Victims' names that
// came back would be in nobody's account.
func TestPowerLossAfterAnOrderlyEnd(t *testing.T) {
	believed := 0
	for _, strict := range []bool{false, true} {
		for seed := range uint64(8) {
			t.Run(fmt.Sprintf("strict=%t/%d", strict, seed), func(t *testing.T) {
				f, machine := onMachine(t, 6, func(c *Config) { c.Strict = strict })
				f.mustPut(upTo(20)...)
				left, err := f.store.Put(t.Context(), f.request(50, 0, 0))
				must(t, err)
				must(t, write(left))
				left.Abort(nil)
				must(t, f.store.Close())
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
	faulty.Set(faultfs.MustRules("syncfs **: eio")...)
	must(t, f.store.Close())
	faulty.Set()
	f.start()
	if got := f.store.Stats().Roots[0]; got.Scanned != 2 {
		t.Errorf("%d files scanned", got.Scanned)
	}
	f.mustRead(1)
}

// TestDirectoryThatNobodySynced has a piece's directory be there already: made by a process that was killed, or by a
// put that has not come to its sync. What strict acknowledges is there after a power loss all the same.
func TestDirectoryThatNobodySynced(t *testing.T) {
	for seed := range uint64(12) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			f, machine := onMachine(t, 6, func(c *Config) { c.Strict = true })
			must(t, machine.MkdirAll(filepath.Dir(f.pieceFile(3, 0)), 0o700))
			f.mustPut(3)
			f.afterPowerLoss(machine, seed)
			f.mustRead(3)
		})
	}
}

// TestReturnThatIsBrokenOff: a root's return ends early, and a later one drops the entries whose files gave no answer.
func TestReturnThatIsBrokenOff(t *testing.T) {
	f := newFixture(t, 20, 1, func(c *Config) { c.UpkeepEvery = time.Hour })
	f.mustPut(0, 1, 2, 3)
	f.root().suspects.add(f.markOf(1), f.markOf(2), f.markOf(3))
	f.takeOut(0)
	early, stop := context.WithCancel(t.Context())
	stop()
	if err := f.store.Maintain(early, 0, Probe); !errors.Is(err, context.Canceled) {
		t.Errorf("a return under a context that is done: got %v, want %v", err, context.Canceled)
	}
	f.maintain(Probe)
	for n := range uint64(4) {
		equal(t, fmt.Sprintf("key %d is granted", n), f.has(n), n == 0)
	}
	f.checkUsed()
}

// TestStrictPutFindsItsPiece: the piece that a put finds under its name is another host's, of one that syncs nothing.
// When the put says that it is stored, it is durable.
func TestStrictPutFindsItsPiece(t *testing.T) {
	for seed := range uint64(12) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			f, machine := onMachine(t, 6, func(c *Config) { c.Strict = true })
			f.mustPut(3)
			name := f.pieceFile(3, 0)
			image, err := os.ReadFile(name)
			must(t, err)
			f.drop(3)
			must(t, machine.MkdirAll(filepath.Dir(name), 0o700))
			other, err := machine.OpenFile(name, os.O_WRONLY|os.O_CREATE, 0o600)
			must(t, err)
			_, err = other.WriteAt(image, 0)
			must(t, errors.Join(err, other.Close()))
			f.mustPut(3)
			f.afterPowerLoss(machine, seed)
			f.mustRead(3)
		})
	}
}

// TestFoundIsDurable: what a start finds counts as stored, also for puts. So it is made durable, where that is
// promised: a process that was killed may not have come to it.
func TestFoundIsDurable(t *testing.T) {
	for seed := range uint64(8) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			f, machine := onMachine(t, 6)
			f.mustPut(3)
			f.kill()
			f.cfg.Strict = true
			f.start()
			if err := f.put(3, 0); !errors.Is(err, ErrResident) {
				t.Fatalf("put of a piece that the scan has found: error %v, want %v", err, ErrResident)
			}
			f.afterPowerLoss(machine, seed)
			f.mustRead(3)
		})
	}
}

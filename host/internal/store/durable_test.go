package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvhost/kvhost/staging"
	"github.com/kvhost/kvhost/staging/faultfs"
)

// onMachine is a fixture on a machine that can lose its power, and the next machine, for after that.
func onMachine(t *testing.T, entries int, change ...func(*Config)) (f *fixture, machine *faultfs.Machine) {
	base := t.TempDir()
	machine, err := faultfs.NewMachine(staging.OS(), filepath.Join(base, "grave"))
	must(t, err)
	f = newFixture(t, filepath.Join(base, "kv"), entries, 1, append(change, func(c *Config) { c.FS = machine })...)
	return f, machine
}

// kill ends the store without a word: nothing of its Close reaches the disk.
func (f *fixture) kill() {
	f.Helper()
	s := f.store
	for _, r := range s.roots {
		r.batch.take()
	}
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
	for _, durability := range []Durability{None, Batch, Strict} {
		for seed := range uint64(8) {
			t.Run(fmt.Sprintf("%s/%d", durability, seed), func(t *testing.T) {
				f, machine := onMachine(t, 6, func(c *Config) { c.Durability = durability })
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
			f, machine := onMachine(t, 6, func(c *Config) { c.Durability = Strict })
			must(t, machine.MkdirAll(filepath.Dir(f.pieceFile(3, 0)), 0o700))
			f.mustPut(3)
			f.afterPowerLoss(machine, seed)
			f.mustRead(3)
		})
	}
}

// TestBatchFailsWhilePiecesCome lets a batch's sync hang and fail. The kernel tells of lost bytes once: so what was
// published meanwhile goes with the batch, and what is being written is not published, though the next sync would say
// that all is well.
func TestBatchFailsWhilePiecesCome(t *testing.T) {
	f, faulty := faultyFixture(t, 20, func(c *Config) { c.Durability, c.BatchEvery = Batch, time.Hour })
	r := f.root()
	f.mustPut(0)
	r.flush()
	f.mustPut(1)
	var writing [2]*Put // one publishes while the sync hangs, one after it has failed
	for i := range writing {
		p, err := f.store.Put(t.Context(), f.request(10+uint64(i), 0, 0))
		if err == nil {
			err = write(p)
		}
		must(t, err)
		writing[i] = p
	}
	faulty.Set(faultfs.MustRules("syncfs ** 1st: hang eio")...)
	done := make(chan struct{})
	go func() { r.flush(); close(done) }()
	must(t, faulty.AwaitHanging(t.Context(), 1))
	f.mustPut(2)
	noError(t, writing[0].Publish(t.Context()))
	faulty.Release()
	<-done
	if err := writing[1].Publish(t.Context()); !errors.Is(err, ErrSync) {
		t.Errorf("what was written before the sync failed: %v", err)
	}
	r.flush()
	for n, want := range map[uint64]bool{0: true, 1: false, 2: false, 10: false, 11: false} {
		if got := f.has(n); got != want {
			t.Errorf("key %d: hit %t", n, got)
		}
	}
	f.checkUsed()
	f.mustPut(1, 2, 10, 11)
	f.mustRead(11)
}

// TestReturnThatIsBrokenOff: a root's return ends early, and a later one drops all that was not durable when it went out.
func TestReturnThatIsBrokenOff(t *testing.T) {
	f := newFixture(t, t.TempDir(), 20, 1, func(c *Config) {
		c.Durability, c.BatchEvery, c.UpkeepEvery = Batch, time.Hour, time.Hour
	})
	f.mustPut(0)
	f.maintain(Flush)
	f.mustPut(1, 2, 3)
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
			f, machine := onMachine(t, 6, func(c *Config) { c.Durability = Strict })
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
	for _, durability := range []Durability{Batch, Strict} {
		for seed := range uint64(8) {
			t.Run(fmt.Sprintf("%s/%d", durability, seed), func(t *testing.T) {
				f, machine := onMachine(t, 6)
				f.mustPut(3)
				f.kill()
				f.cfg.Durability = durability
				f.start()
				if err := f.put(3, 0); !errors.Is(err, ErrResident) {
					t.Fatal(err)
				}
				f.afterPowerLoss(machine, seed)
				f.mustRead(3)
			})
		}
	}
}

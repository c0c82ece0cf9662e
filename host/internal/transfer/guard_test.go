package transfer

import (
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"testing"
	"testing/synctest"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

// shared maps a file of shared memory that can shrink.
func shared(t *testing.T, size int) (*os.File, []byte) {
	t.Helper()
	fd, err := unix.MemfdCreate("guard", unix.MFD_CLOEXEC)
	testenv.OK(t, err)
	f := os.NewFile(uintptr(fd), "guard")
	testenv.OK(t, f.Truncate(int64(size)))
	data, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	testenv.OK(t, err)
	t.Cleanup(func() { errors.Join(unix.Munmap(data), f.Close()) })
	return f, data
}

// A file that shrinks before or during a copy fails the copy, and nothing else.
func TestShrinkingMemory(t *testing.T) {
	const page, blocks = 1 << 20, 64
	geo := kv.Uniform(blocks, 1, 1, page)
	f, data := shared(t, page*blocks)
	m, err := NewHostMemory(geo, []HostRegion{{Data: data, Grid: Grid{Stride: page, Blocks: blocks}}})
	testenv.OK(t, err)
	plan, err := kv.NewPlan(geo, []abi.Segment{{Blocks: blocks, PageLen: page}})
	testenv.OK(t, err)
	r := ExtentRange{Plan: plan, Hi: len(plan.Extents()), Table: make([]uint64, len(plan.Extents()))}
	for i := range uint32(blocks) {
		r.Blocks = append(r.Blocks, i)
	}
	buf := make([]byte, plan.PayloadBytes())
	copies := map[string]func() error{
		"gather":  func() error { return m.Gather(r, buf) },
		"scatter": func() error { return m.Scatter(r, buf) },
	}
	for name, copying := range copies {
		if err := m.Gather(r, buf); err != nil { // a scatter needs its checksums
			t.Fatalf("%s: gather before the copy: %v", name, err)
		}
		if err := copying(); err != nil {
			t.Fatalf("%s: copy of memory that is there: %v", name, err)
		}
		testenv.OK(t, f.Truncate(page*blocks/2))
		if err := copying(); !errors.Is(err, ErrMemory) {
			t.Errorf("%s of memory that is gone: %v", name, err)
		}
		testenv.OK(t, f.Truncate(page*blocks))
		if err := m.Gather(r, buf); err != nil { // the sums are those of zeros now
			t.Errorf("%s of memory that is back: %v", name, err)
		}
		failed := 0
		for range 200 {
			done := make(chan error, 1)
			go func() { done <- copying() }()
			err := f.Truncate(0)
			if got := <-done; errors.Is(got, ErrMemory) {
				failed++
			} else if got != nil {
				t.Fatalf("%s: copy of memory that goes away: got %v, want ErrMemory or none", name, got)
			}
			testenv.OK(t, errors.Join(err, f.Truncate(page*blocks)))
		}
		if failed == 0 {
			t.Errorf("%s: no copy met the end of its memory", name)
		}
	}
	if debug.SetPanicOnFault(false) {
		t.Error("faults of this goroutine still panic")
	}
}

// A fault elsewhere is a bug, not the client's.
func TestGuardPassesOtherPanics(t *testing.T) {
	f, elsewhere := shared(t, 4096)
	testenv.OK(t, f.Truncate(0))
	_, mine := shared(t, 4096)
	for name, fn := range map[string]func() error{
		"fault": func() error { elsewhere[0] = 1; return nil },
		"panic": func() error { panic("oops") },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: swallowed", name)
				}
			}()
			t.Errorf("%s: returned %v", name, Guard([][]byte{mine}, fn))
		}()
	}
}

type heldError struct{ ended chan struct{} }

func (heldError) Error() string            { return "given up" }
func (e heldError) Ended() <-chan struct{} { return e.ended }

// TestHeldSlot: a slot that something may still be written to, as the error of its task says, is no other task's until that has ended.
func TestHeldSlot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, err := New(Config{Threads: 1, SlotBytes: MinSlotBytes, MaxStaging: MinSlotBytes, ReadRatio: 0.75})
		testenv.OK(t, err)
		held := heldError{make(chan struct{})}
		fails := fmt.Errorf("a load: %w", errors.Join(held, staging.ErrClosed))
		if err := e.withSlot(func([]byte) error { return fails }); !errors.Is(err, held) {
			t.Fatalf("%v, want %v", err, held)
		}
		if _, ok := e.slots.TryAcquire(); ok {
			t.Error("the slot was given to another while it is held")
		}
		close(held.ended)
		synctest.Wait()
		if n := e.slots.InUse(); n != 0 {
			t.Errorf("%d slots are in use after it has ended, want none", n)
		}
		testenv.OK(t, e.withSlot(func([]byte) error { return nil }))
		testenv.NoError(t, e.Close())
	})
}

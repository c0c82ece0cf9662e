package transfer

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/staging"
)

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

package transfer

import (
	"errors"

	"github.com/kvhost/kvhost/staging"
)

// withSlot runs fn with a slot.
func (e *Engine) withSlot(fn func(slot []byte) error) (err error) {
	slot, err := e.slots.Acquire(e.ctx)
	if err != nil {
		return ErrClosed
	}
	defer func() { e.release(slot, err) }()
	return fn(slot.Bytes())
}

// release gives a slot back after its task has ended with err. An abandoned read or write still uses the slot's memory,
// so the slot is given back at the end of that operation. A root that hangs therefore holds at most one slot per
// worker, because no new operation starts on it.
func (e *Engine) release(slot *staging.Slot, err error) {
	if slot == nil { // the task needed no slot
		return
	}
	var held staging.Held
	var hung *staging.HungError
	if !errors.As(err, &held) || errors.As(err, &hung) && hung.Op&(staging.OpRead|staging.OpWrite) == 0 {
		slot.Release()
		return
	}
	e.hungSlots.Add(1)
	go func() {
		<-held.Ended()
		slot.Release()
		e.hungSlots.Add(-1)
	}()
}

// closeSlots unmaps the slots. A slot that a hung system call still uses is unmapped when the call returns, and is no
// error of the engine.
func (e *Engine) closeSlots() error {
	hung := e.hungSlots.Load() // first, since a slot is released before it is subtracted here
	err := e.slots.Close()
	if errors.Is(err, staging.ErrSlotsOut) && int64(e.slots.InUse()) <= hung {
		e.cfg.Log.Warn("staging memory stays mapped: hung storage still uses some of it", "slots", hung, "error", err)
		return nil
	}
	return err
}

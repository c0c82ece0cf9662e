package transfer

import (
	"errors"

	"github.com/kvhost/kvhost/staging"
)

// releaseAfter gives a slot back after its task has ended with err. A read or write that was given up still uses the slot's
// memory: then the slot is given back when the system call returns. So a root that hangs takes slots away for as long as it
// hangs, at most one for each worker, since no operation is begun on it any more.
func releaseAfter(slot *staging.Slot, err error) {
	var hung *staging.HungError
	if !errors.As(err, &hung) || hung.Op&(staging.OpRead|staging.OpWrite) == 0 {
		slot.Release()
		return
	}
	go func() {
		<-hung.Ended()
		slot.Release()
	}()
}

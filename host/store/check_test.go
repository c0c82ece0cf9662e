package store

import (
	"fmt"

	"github.com/kvhost/kvhost/host/store/index"
)

// check compares a root's index with itself and with its account. The lock is not held.
func (r *root) check() error {
	r.Lock()
	defer r.Unlock()
	kept, release := r.Quarantine.Hold()
	defer release()
	return r.Check(kept)
}

// idle checks that nothing is pinned, in flight or leaving.
func (r *root) idle() error {
	if err := r.check(); err != nil {
		return err
	}
	r.Lock()
	defer r.Unlock()
	if n := r.InFlight(); n > 0 {
		return fmt.Errorf("%d entries are in flight", n)
	}
	var err error
	r.Index.Each(func(slot uint32, e *index.Entry) {
		if e.Pins() != 0 || e.Any(index.Evicting|index.Detached) {
			err = fmt.Errorf("slot %d: %d pins, state %#x", slot, e.Pins(), e.State())
		}
	})
	return err
}

package peers

import (
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/kvhost/kvhost/staging"
)

const (
	mostPlaced = 16                  // number of slots
	placeBytes = 4<<20 + 2*pageBytes // bytes of a slot: the largest read of a load, extended to whole pages at both ends
	// placeTime is the time for which a slot is lent. It covers the longest READ: the borrower abandons one after stall and
	// discards its bytes.
	placeTime = 2*stall + time.Second
	slotWait  = 100 * time.Millisecond // longest wait for a slot; reads from other slots end within a few milliseconds
)

// shelf is registered memory into which this host copies pieces of files, so that peers can read them by NIXL.
type shelf struct {
	slots    *staging.Slots
	patience time.Duration

	mu  sync.Mutex
	out map[uint64]lentSlot
}

type lentSlot struct {
	takenSlot
	ends time.Time
}

// takenSlot is a slot that is charged to a caller's share.
type takenSlot struct {
	*staging.Slot
	of  *port
	who caller
}

func (s *takenSlot) Release() {
	s.Slot.Release()
	s.of.back(s.who, places)
}

func newShelf(p staging.Pinner) (*shelf, error) {
	slots, err := staging.NewSlots(mostPlaced, placeBytes)
	if err != nil {
		return nil, err
	}
	return &shelf{slots: slots, patience: slotWait, out: map[uint64]lentSlot{}}, slots.Register(p)
}

// lend stores a slot under a random number, so that no other peer can guess it.
func (s *shelf) lend(slot takenSlot) (n uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for taken := true; n == 0 || taken; _, taken = s.out[n] {
		n = rand.Uint64()
	}
	s.out[n] = lentSlot{slot, time.Now().Add(placeTime)}
	return n
}

// done releases slots that the borrower no longer needs.
func (s *shelf) done(list []uint64) {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range list {
		if slot, ok := s.out[n]; ok {
			delete(s.out, n)
			slot.Release()
		}
	}
}

// end releases slots that have been lent for longer than placeTime.
func (s *shelf) end(now time.Time) {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for n, slot := range s.out {
		if now.After(slot.ends) {
			delete(s.out, n)
			slot.Release()
		}
	}
}

// close unmaps the slots. The agent must be closed. A slot that a hung file read still uses is unmapped when that read ends.
func (s *shelf) close() error {
	if s == nil {
		return nil
	}
	s.end(time.Now().Add(2 * placeTime))
	if err := s.slots.Close(); !errors.Is(err, staging.ErrSlotsOut) {
		return err
	}
	return nil
}

package entries

import (
	"fmt"
	"math/bits"

	"github.com/kvhost/kvhost/host/internal/store/index"
)

// Check compares the index with itself and with the account, given the bytes in quarantine. It looks at every entry.
func (s *Set) Check(quarantine int64) error {
	if err := s.Index.Check(); err != nil {
		return err
	}
	var complete int64
	var tenants []int64
	for slot := range s.Index.High() {
		e := s.Index.At(slot)
		if !e.Is(index.Live) {
			continue
		}
		tenant := int(s.Index.Owner(slot).Tenant)
		for tenant >= len(tenants) {
			tenants = append(tenants, 0)
		}
		tenants[tenant] += s.Index.Bytes(slot)
		if e.Is(index.Detached) {
			continue
		}
		if e.Is(index.Complete) && !e.Is(index.Evicting) {
			complete++
		}
		f, busy := s.flights[slot]
		if !e.Is(index.Evicting) && s.Index.Pieces(slot) == 0 && f.ranks == 0 {
			return fmt.Errorf("slot %d has no piece, and none is written", slot)
		}
		if busy && int(e.Pins()) < bits.OnesCount64(f.ranks) {
			return fmt.Errorf("slot %d has %d pins and %d writers", slot, e.Pins(), bits.OnesCount64(f.ranks))
		}
	}
	if err := s.Moves.check(); err != nil {
		return err
	}
	if complete != s.complete {
		return fmt.Errorf("%d complete entries, the count says %d", complete, s.complete)
	}
	return s.Account.Check(tenants, quarantine)
}

// Census counts the bytes reserved for pieces that are not there, entry by entry, and the entries that are pinned,
// being written or being removed.
func (s *Set) Census() (missing int64, inUse int) {
	inUse = len(s.flights)
	s.Index.Each(func(slot uint32, e *index.Entry) {
		missing += int64(bits.OnesCount64(s.Index.Missing(slot))) * s.ClassOf(slot).FileBytes()
		if e.Pins() != 0 || e.Any(index.Evicting|index.Detached) {
			inUse++
		}
	})
	return missing, inUse
}

package index

import (
	"fmt"
	"maps"
	"math/bits"
)

// Check compares all parts of the index with each other. It takes time proportional to the size of the index and is meant for
// tests.
func (x *Index) Check() error {
	var live, detached, children int
	missing := map[uint16]int64{}
	for slot := range x.high {
		e := x.At(slot)
		if !e.Is(Live) {
			continue
		}
		live++
		key := x.Key(slot)
		if n := len(x.Names.List(slot, &key)); e.Is(Named) != (n > 0) {
			return fmt.Errorf("slot %d has %d names, its state is %#x", slot, n, e.State())
		}
		missing[x.Owner(slot).Class] += int64(bits.OnesCount64(x.missing[slot]))
		if e.Is(Detached) {
			if detached++; e.pins == 0 {
				return fmt.Errorf("slot %d is detached and has no pin", slot)
			}
			continue
		}
		if got := x.Find(x.Fingerprint(slot), x.base(x.Owner(slot).Class), &key); got != slot {
			return fmt.Errorf("the key of slot %d is found in slot %d", slot, got)
		}
		if parent := e.Parent(); parent != 0 {
			children++
			seen := 0
			x.Children(parent, func(s uint32) {
				if s == slot {
					seen++
				}
			})
			if seen != 1 {
				return fmt.Errorf("slot %d is %d times among its parent's children", slot, seen)
			}
		}
	}
	maps.DeleteFunc(missing, func(_ uint16, n int64) bool { return n == 0 })
	inTable, inFamilies := 0, 0
	for i := range x.byKey.shards {
		inTable += x.byKey.shards[i].n
		inFamilies += x.families.small.shards[i].n
	}
	for _, c := range x.families.large {
		inFamilies += c.n
	}
	switch {
	case live != int(x.used):
		return fmt.Errorf("%d entries, the slab counts %d", live, x.used)
	case live-detached != inTable:
		return fmt.Errorf("%d entries, %d of them detached, and %d in the table", live, detached, inTable)
	case children != inFamilies:
		return fmt.Errorf("%d entries with a parent, and %d among children", children, inFamilies)
	case !maps.Equal(missing, x.missingByClass):
		return fmt.Errorf("missing pieces by class %v, counted %v", missing, x.missingByClass)
	}
	return nil
}

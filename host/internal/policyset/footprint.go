package policyset

import (
	"context"
	"errors"
	"math"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
)

// footprint is the memory that an instance of an evict policy takes for n entries: about Start + n·Entry bytes. Limit is
// the most that it may have.
type footprint struct{ Start, Entry, Limit uint64 }

// For is the memory for so many entries.
func (f footprint) For(entries uint32) uint64 { return f.Start + uint64(entries)*f.Entry }

// Fits is how many of a root's entries an instance has room for.
func (f footprint) Fits(entries uint32) uint32 {
	if f.Entry == 0 || f.For(entries) <= f.Limit {
		return entries
	}
	return uint32((f.Limit - min(f.Start, f.Limit)) / f.Entry)
}

// The sizes of the full roots between which the memory for an entry is measured. A Go guest's memory grows by half a MiB,
// which counts as if the entries had needed it: four bytes for each.
const (
	fewEntries, manyEntries = 1 << 12, 1 << 17
	growth                  = 512 << 10
	nativeEntry             = 16
)

// footprintOf measures instances of an evict policy in full roots from which each entry has been evicted once, so that it
// holds what it remembers of those. A module that takes memory for the slots in Info counts the same, because
// these roots have no more slots than entries. Limit is that of a root of o.MaxSlots. The built-in policy
// has 16 bytes for an entry, of the host's memory.
func footprintOf(ctx context.Context, m *policy.Module, o policy.EvictOptions) (footprint, error) {
	limit, ok := m.MemoryLimit(o.MaxSlots)
	if !ok {
		return footprint{Entry: nativeEntry, Limit: math.MaxUint64}, nil
	}
	few, err := fullSize(ctx, m, o, fewEntries)
	if err != nil {
		return footprint{}, err
	}
	many, err := fullSize(ctx, m, o, manyEntries)
	if err != nil {
		return footprint{}, err
	}
	entry := (max(many, few) - few + growth) / (manyEntries - fewEntries)
	return footprint{Start: few - min(few, entry*fewEntries), Entry: entry, Limit: limit}, nil
}

func fullSize(ctx context.Context, m *policy.Module, o policy.EvictOptions, slots uint32) (_ uint64, err error) {
	o.MaxSlots, o.Capacity = slots, uint64(slots)*abi.SizeUnit
	e, err := m.NewEvict(ctx, o)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	key := uint64(0)
	// Each entry is a request's only one: nothing takes more memory.
	insert := func(slot uint32) error {
		key++
		ev := abi.Event{Slot: slot, Parent: abi.None, Request: uint32(key), Time: key << 20, Key: key, Size: 1, Op: abi.OpInsert}
		end := abi.Event{Slot: abi.None, Parent: abi.None, Request: ev.Request, Time: ev.Time, Op: abi.OpRequestEnd}
		return errors.Join(e.Event(ev), e.Event(end))
	}
	for slot := range slots {
		if err := insert(slot); err != nil {
			return 0, err
		}
		if err := ctx.Err(); err != nil && slot%64 == 0 {
			return 0, err
		}
	}
	victims := make([]uint32, 64)
	for gone := 0; gone < int(slots); {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		n, err := e.Victims(abi.Ask{Bytes: uint64(len(victims)) * abi.SizeUnit, MaxVictims: uint32(len(victims)), Tenant: abi.None}, victims)
		if err != nil {
			return 0, err
		}
		if n == 0 {
			break // it leaves evictions to the host, and so remembers none
		}
		for _, slot := range victims[:n] {
			if err := e.Event(abi.Event{Slot: slot, Parent: abi.None, Time: key << 20, Op: abi.OpRemove}); err != nil {
				return 0, err
			}
		}
		for _, slot := range victims[:n] {
			if err := insert(slot); err != nil {
				return 0, err
			}
		}
		gone += n
	}
	return e.Stats().Memory, e.Flush()
}

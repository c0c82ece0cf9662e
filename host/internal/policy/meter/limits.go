package meter

import (
	"fmt"
	"slices"
)

// Limits bound what a module may consist of. The zero value of a field means no limit.
type Limits struct {
	ModuleBytes   int
	Functions     int // imported and defined
	BodyBytes     int // of one function
	Locals        int // of one function, parameters not counted
	Globals       int
	Tables        int
	TableElements int // minimum and maximum of one table
	MemoryPages   int // minimum of the memory
	DataBytes     int // of the data section
	Types         int
	Exports       int
	Imports       int
}

// DefaultLimits fit a Go guest with room to spare and keep compilation in the order of seconds.
func DefaultLimits() Limits {
	return Limits{
		ModuleBytes: 16 << 20, Functions: 50_000, BodyBytes: 1 << 20, Locals: 10_000, Globals: 10_000, Tables: 8,
		TableElements: 1 << 20, MemoryPages: 4096, DataBytes: 8 << 20, Types: 10_000, Exports: 1000, Imports: 100,
	}
}

// Count is how much a module has of something that is limited: the most in one place, where the limit is of one.
type Count struct {
	What string
	Got  uint64
	Most uint64 // 0 for no limit
}

// ModuleBytes is the [Count] of the module's size.
const ModuleBytes = "module bytes"

func (m *module) check(limit int, got uint64, what string) error {
	i := slices.IndexFunc(m.counts, func(c Count) bool { return c.What == what })
	if i < 0 {
		i = len(m.counts)
		m.counts = append(m.counts, Count{What: what, Most: uint64(limit)})
	}
	m.counts[i].Got = max(m.counts[i].Got, got)
	if limit > 0 && got > uint64(limit) {
		return fmt.Errorf("%w: %s: %d, at most %d", ErrLimit, what, got, limit)
	}
	return nil
}

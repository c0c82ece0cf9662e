package sandbox

import (
	"fmt"
	"sync/atomic"

	"github.com/kvhost/kvhost/abi"
	"github.com/tetratelabs/wazero/experimental"
)

// MemoryBudget bounds the memory of all instances that share it. An instance is charged as it grows, and its charge
// ends when it is closed. A nil budget has no limit.
type MemoryBudget struct {
	limit atomic.Uint64
	used  atomic.Uint64
}

// NewMemoryBudget returns a budget with a limit in bytes.
func NewMemoryBudget(limit uint64) *MemoryBudget {
	b := &MemoryBudget{}
	b.limit.Store(limit)
	return b
}

// SetLimit changes the limit. Instances keep memory beyond it, but do not grow.
func (b *MemoryBudget) SetLimit(limit uint64) { b.limit.Store(limit) }

// Limit returns the limit of all instances in bytes.
func (b *MemoryBudget) Limit() uint64 { return b.limit.Load() }

// Used returns the bytes of all instances.
func (b *MemoryBudget) Used() uint64 { return b.used.Load() }

func (b *MemoryBudget) take(n uint64) bool {
	if b == nil {
		return true
	}
	for {
		used, limit := b.used.Load(), b.limit.Load()
		if n > limit-min(used, limit) {
			return false
		}
		if b.used.CompareAndSwap(used, used+n) {
			return true
		}
	}
}

func (b *MemoryBudget) give(n uint64) {
	if b != nil {
		b.used.Add(-n)
	}
}

// boundedMemory is the memory of one instance within its limits.
type boundedMemory struct {
	experimental.LinearMemory
	limit   uint64 // most bytes of this instance
	budget  *MemoryBudget
	usage   *Usage
	size    uint64
	refused error // the reason for which it last did not grow; nil if it grew
}

func (m *boundedMemory) Reallocate(size uint64) []byte {
	m.refused = nil
	switch more := size - min(size, m.size); {
	case size > m.limit:
		m.refused = fmt.Errorf("%w: %d MiB wanted, an instance of this policy gets %d: raise its memory_pages", ErrMemory,
			mebibytes(size), m.limit>>20)
		return nil
	case !m.budget.take(more):
		m.refused = fmt.Errorf("%w: %d MiB wanted, policy_memory allows %d for all policies and %d are taken: raise it",
			ErrMemory, mebibytes(size), m.budget.limit.Load()>>20, m.budget.Used()>>20)
		return nil
	default:
		b := m.LinearMemory.Reallocate(size)
		if b == nil {
			m.budget.give(more)
			m.refused = fmt.Errorf("%w: the system gives no %d MiB", ErrMemory, mebibytes(size))
			return nil
		}
		m.size += more
		m.usage.Memory.Add(more)
		return b
	}
}

func (m *boundedMemory) Free() {
	m.LinearMemory.Free()
	m.budget.give(m.size)
	m.usage.Memory.Add(-m.size)
	m.size = 0
}

func mebibytes(n uint64) uint64 { return (n + 1<<20 - 1) >> 20 }

// slotMemory is the default limit for each slot of an instance, in bytes, in addition to DefaultPages. The most
// demanding first-party policy takes 100 bytes.
const slotMemory = 128

// maxMemory is the largest memory with a 32-bit size.
const maxMemory = 1<<32 - pageSize

// memoryLimit returns the most bytes of an instance. The operator's limit takes precedence, if there is one.
func (c *Code) memoryLimit(s *Settings) uint64 {
	limit := min(uint64(c.pages)*pageSize, maxMemory)
	if s.MemoryPages != 0 {
		return min(limit, uint64(s.MemoryPages)*pageSize)
	}
	return min(limit, DefaultPages*pageSize+slotMemory*uint64(s.MaxSlots))
}

// memory makes the memory of an instance at its initial size, before wazero needs it, since wazero does not expect a
// failure.
func (c *Code) memory(s *Settings, u *Usage) (*boundedMemory, error) {
	least := uint64(c.compiled.ExportedMemories()[abi.ExportMemory].Min()) * pageSize
	m := &boundedMemory{
		LinearMemory: reserve(uint64(c.pages) * pageSize), limit: c.memoryLimit(s), budget: s.Memory, usage: u,
	}
	if m.Reallocate(least) == nil {
		m.Free()
		return nil, m.refused
	}
	return m, nil
}

// pageSize is the unit in which memories grow.
const pageSize = 64 << 10

package config

import "slices"

// leastMemory is the least that a host takes for a root in memory of its own accord.
const leastMemory = 128 << 20

// MemoryBefore is the size of the root in memory before those of the configuration, on a machine with so much memory
// available; 0 for none. A host takes part of it of its own accord only where the operator has arranged no levels, and where
// a publication does not promise that the chunk is on a disk.
func (c *Config) MemoryBefore(available int64) int64 {
	if c.Store.Memory != Auto {
		return c.Store.Memory
	}
	arranged := func(r Root) bool { return r.Level > 0 || r.takesMemory() }
	if c.Store.Durability == DurabilityStrict || slices.ContainsFunc(c.Roots, arranged) {
		return 0
	}
	n := min(available/4, c.Capacity()/2) >> 20 << 20
	if n < leastMemory {
		return 0
	}
	return n
}

// WithMemory is the configuration with a root in memory of so many bytes, nearer than all others. What is stored there is
// copied to the next level at once. With 0 bytes it is the configuration itself.
func (c *Config) WithMemory(bytes int64) *Config {
	if bytes == 0 {
		return c
	}
	out := c.Clone()
	for i := range out.Roots {
		out.Roots[i].Level++
	}
	out.Roots = append(out.Roots, Root{Path: MemoryPrefix, Capacity: bytes, Write: WriteThrough, Route: RouteAuto, AsNeeded: true})
	return out
}

package config

import "slices"

// leastMemory is the smallest root in memory that a host creates without being told to.
const leastMemory = 128 << 20

// MemoryBefore returns the size of the root in memory in front of the configured ones, given the available memory of the
// machine. 0 means none. Without being told to, a host creates such a root only if the operator has not configured levels, and
// if a publication need not mean that the chunk is on a disk.
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

// WithMemory returns the configuration with a root in memory of the given size, nearer than all others. Chunks stored there are
// copied to the next level at once. With 0 bytes it returns the configuration itself.
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

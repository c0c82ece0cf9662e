package doctor

import (
	"slices"

	"github.com/kvhost/kvhost/host/internal/config"
)

// judgeLevels compares each level with the next one, which takes its evicted entries.
func (r *Report) judgeLevels(roots []config.Root) {
	type level struct {
		number   int
		capacity int64
		memory   bool // at least one of its roots is in memory
	}
	var levels []level
	for _, root := range roots {
		i, known := slices.BinarySearchFunc(levels, root.Level, func(l level, n int) int { return l.number - n })
		if !known {
			levels = slices.Insert(levels, i, level{number: root.Level})
		}
		levels[i].capacity += root.Capacity
		levels[i].memory = levels[i].memory || root.Kind().TakesMemory()
	}
	for i := range max(0, len(levels)-1) {
		near, far := levels[i], levels[i+1]
		if far.capacity < near.capacity {
			r.find(Warning, "levels", "give the farther level several times the capacity of the nearer one",
				"level %d has %s and level %d, which is to take what it evicts, only %s", near.number, config.SizeText(near.capacity), far.number,
				config.SizeText(far.capacity))
		}
		if far.memory && !near.memory {
			r.find(Warning, "levels", "give the root in memory the lowest level",
				"level %d is in memory and level %d is not: chunks are stored in the slower one first", far.number, near.number)
		}
	}
}

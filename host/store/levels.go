package store

import (
	"iter"
	"slices"

	"github.com/kvhost/kvhost/host/store/entries"
)

// MaxLevels is one more than the highest level of a root.
const MaxLevels = 8

// level is the roots that are equally near. An entry may have a copy in each level.
type level struct {
	number int      // as configured
	roots  []uint32 // by their places in the configuration
}

// levels are those of the roots, nearest first.
func (c *Config) levels() (list []level) {
	for number := range MaxLevels {
		l := level{number: number}
		for i, r := range c.Roots {
			if r.Level == number {
				l.roots = append(l.roots, uint32(i))
			}
		}
		if len(l.roots) > 0 {
			list = append(list, l)
		}
	}
	return list
}

// nearestFirst yields the roots, level by level.
func (s *Store) nearestFirst() iter.Seq[*root] {
	return func(yield func(*root) bool) {
		for _, l := range s.levels {
			for _, i := range l.roots {
				if !yield(s.roots[i]) {
					return
				}
			}
		}
	}
}

// countCopies finds entries with copies in several roots, so that readers of changes hear of the last one's end.
func (s *Store) countCopies() {
	if s.copies == nil {
		return
	}
	sets := make([]*entries.Set, len(s.roots))
	for i, r := range s.roots {
		sets[i] = &r.Set
	}
	entries.CountCopies(sets)
}

// has says whether a root is of the level.
func (l *level) has(root uint32) bool { return slices.Contains(l.roots, root) }

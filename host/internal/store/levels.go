package store

import (
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/moves"
)

// level is the roots that are equally near. An entry may have a copy in each level. It implements [moves.Level].
type level struct {
	store  *Store
	number int      // as configured
	places []uint32 // of the roots, in the configuration
	roots  []*root
	count  moves.Counters // of moves to it
	around atomic.Uint64  // entries that went to the next level because demotions from this one were behind
	hits   atomic.Uint64  // keys granted
	loaded atomic.Uint64  // bytes of pieces that were opened for loads
}

// levelsOf are the levels of a store, nearest first. Their roots are not open yet.
func levelsOf(s *Store) (list []*level) {
	for number := range MaxLevels {
		l := &level{store: s, number: number}
		for i, r := range s.cfg.Roots {
			if r.Level == number {
				l.places = append(l.places, uint32(i))
			}
		}
		if len(l.places) > 0 {
			list = append(list, l)
		}
	}
	return list
}

// below is the next level, or nil.
func (l *level) below() *level {
	if n := slices.Index(l.store.levels, l) + 1; n < len(l.store.levels) {
		return l.store.levels[n]
	}
	return nil
}

// levelOf is the level of a root that is configured.
func levelOf(s *Store, cfg *RootConfig) *level {
	return s.levels[slices.IndexFunc(s.levels, func(l *level) bool { return l.number == cfg.Level })]
}

// choose is the root of a new entry in the level: the place policy's choice, if it is of the level, or the one with
// most room, among those that take stores. One that is full is chosen when there is no other.
func (l *level) choose(chosen uint32) (*root, error) {
	at := slices.Index(l.places, chosen)
	only := len(l.roots) == 1
	if only {
		at = 0
	}
	if at >= 0 && (l.roots[at].invites() || only && l.roots[at].Health.Takes()) {
		return l.roots[at], nil
	}
	var best *root
	var most float64
	for _, r := range l.roots {
		state := r.Health.State()
		if state > health.Full {
			continue
		}
		share := r.Account.Free()
		if !r.invites() {
			share -= 2 + float64(state)
		}
		if best == nil || share > most {
			best, most = r, share
		}
	}
	if best == nil {
		return nil, fmt.Errorf("%w: %d of %d; the last is %w", ErrRootOut, len(l.roots), len(l.roots),
			l.roots[len(l.roots)-1].Health.OutError())
	}
	return best, nil
}

// Number implements [moves.Level].
func (l *level) Number() int { return l.number }

// Count implements [moves.Level].
func (l *level) Count() *moves.Counters { return &l.count }

// Family implements [moves.Level].
func (l *level) Family(fp, parent uint64) (flags uint32) {
	const all = abi.CandidateContinued | abi.CandidateParentResident
	for _, r := range l.store.roots {
		serves := r.Health.Serves()
		r.Lock()
		if r.Continued(fp) {
			flags |= abi.CandidateContinued
		}
		if parent != 0 && serves && r.Has(parent, index.Live) {
			flags |= abi.CandidateParentResident
		}
		r.Unlock()
		if flags == all {
			break
		}
	}
	return flags
}

// Holds implements [moves.Level].
func (l *level) Holds(fp uint64) bool { return holds(l.roots, fp, index.Complete) }

// Admits implements [moves.Level].
func (l *level) Admits(c *abi.Candidate, ns *catalog.Namespace) (admitted, asked bool) {
	if ns.Admit.Now().Levels&(1<<l.number) == 0 {
		return false, false
	}
	answer := []bool{false}
	if err := ns.Admits([]abi.Candidate{*c}, answer); err != nil {
		l.store.admissionFault(err)
		return false, false
	}
	return answer[0], true
}

// Log implements [moves.Level].
func (l *level) Log(e *moves.Entry, cause error) {
	l.store.log.Debug("an entry is not copied to another level", "kind", e.Kind, "level", l.number, "error", cause)
}

// countCopies finds entries with copies in several roots, so that readers of changes hear of the last one's end.
func countCopies(s *Store) {
	if s.copies == nil {
		return
	}
	sets := make([]*entries.Set, len(s.roots))
	for i, r := range s.roots {
		sets[i] = &r.Set
	}
	entries.CountCopies(sets)
}

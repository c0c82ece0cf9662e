package slots_test

import "slices"

// lirs keeps S and Q as plain slices, newest first, and the state of each key beside them.
type lirsTextbook struct {
	s, q     []uint64
	resident map[uint64]bool
	isLIR    map[uint64]bool
	gone     []uint64 // remembered, first evicted first
	lirs     int
	limit    int
	all      int
}

// LIRS is the paper's, with 1 % for HIR entries and a memory of as many evicted entries as there are resident ones.
func LIRS(capacity int) Textbook {
	return &lirsTextbook{
		resident: map[uint64]bool{}, isLIR: map[uint64]bool{},
		limit: capacity - max(1, capacity/100), all: capacity,
	}
}

func without(s []uint64, key uint64) []uint64 {
	return slices.DeleteFunc(s, func(k uint64) bool { return k == key })
}

func (l *lirsTextbook) prune() {
	for len(l.s) > 0 && !l.isLIR[l.s[len(l.s)-1]] {
		bottom := l.s[len(l.s)-1]
		l.s = l.s[:len(l.s)-1]
		l.gone = without(l.gone, bottom)
	}
}

func (l *lirsTextbook) promote(key uint64) {
	l.isLIR[key] = true
	l.lirs++
	for l.lirs > l.limit {
		l.prune()
		bottom := l.s[len(l.s)-1]
		l.s = l.s[:len(l.s)-1]
		delete(l.isLIR, bottom)
		l.lirs--
		l.q = append([]uint64{bottom}, l.q...)
	}
	l.prune()
}

func (l *lirsTextbook) Access(key uint64) (bool, []uint64) {
	if l.resident[key] {
		stacked := slices.Contains(l.s, key)
		l.s = append([]uint64{key}, without(l.s, key)...)
		switch {
		case l.isLIR[key]:
			l.prune()
		case stacked:
			l.q = without(l.q, key)
			l.promote(key)
		default:
			l.q = append([]uint64{key}, without(l.q, key)...)
		}
		return true, nil
	}
	var gone []uint64
	if len(l.resident) == l.all {
		if len(l.q) > 0 {
			gone = []uint64{l.q[len(l.q)-1]}
			l.q = l.q[:len(l.q)-1]
			if slices.Contains(l.s, gone[0]) {
				l.gone = append(l.gone, gone[0])
				if len(l.gone) > l.all {
					l.s = without(l.s, l.gone[0])
					l.gone = l.gone[1:]
				}
			}
		} else {
			l.prune()
			gone = []uint64{l.s[len(l.s)-1]}
			l.s = l.s[:len(l.s)-1]
			delete(l.isLIR, gone[0])
			l.lirs--
			l.prune()
		}
		delete(l.resident, gone[0])
	}
	stacked := slices.Contains(l.s, key)
	l.gone = without(l.gone, key)
	l.s = append([]uint64{key}, without(l.s, key)...)
	l.resident[key] = true
	if stacked || l.lirs < l.limit {
		l.promote(key)
	} else {
		l.q = append([]uint64{key}, l.q...)
		l.prune()
	}
	return false, gone
}

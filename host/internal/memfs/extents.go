package memfs

import (
	"cmp"
	"slices"
)

// extent is a run of pages of one step.
type extent struct{ step, at, n uint32 }

// run is a run of free pages of a step.
type run struct{ at, n uint32 }

// allocator hands out the pages of steps. It is not safe for concurrent use.
type allocator struct {
	steps []freeRuns
	free  int64 // pages
}

// freeRuns are the free pages of a step.
type freeRuns struct {
	runs    []run  // by place; no two touch
	largest uint32 // length of the longest
}

// add adds a step of free pages.
func (a *allocator) add(pages uint32) {
	a.steps = append(a.steps, freeRuns{[]run{{0, pages}}, pages})
	a.free += int64(pages)
}

// alloc appends extents of n pages together to list, or reports that fewer are free. It takes the smallest run that is
// large enough; if there is none, the largest ones.
func (a *allocator) alloc(n int64, list []extent) ([]extent, bool) {
	if n > a.free {
		return list, false
	}
	for n > 0 {
		step, i := a.choose(n)
		e := a.take(step, i, n)
		list = append(list, e)
		n -= int64(e.n)
	}
	return list, true
}

// choose returns the step and the number of the smallest run of at least n pages, or of the largest run.
func (a *allocator) choose(n int64) (step, i int) {
	step, i = -1, -1
	var best uint32
	for s := range a.steps {
		f := &a.steps[s]
		if fits := int64(f.largest) >= n; !fits && (int64(best) >= n || f.largest <= best) {
			continue
		}
		for k, r := range f.runs {
			switch fits := int64(r.n) >= n; {
			case int64(r.n) == n:
				return s, k
			case fits && (int64(best) < n || r.n < best), !fits && int64(best) < n && r.n > best:
				step, i, best = s, k, r.n
			}
		}
	}
	return step, i
}

// take takes at most n pages from the start of a run.
func (a *allocator) take(step, i int, n int64) extent {
	f := &a.steps[step]
	r := &f.runs[i]
	was := r.n
	e := extent{uint32(step), r.at, uint32(min(int64(r.n), n))}
	if r.at, r.n = r.at+e.n, r.n-e.n; r.n == 0 {
		f.runs = slices.Delete(f.runs, i, i+1)
	}
	if was == f.largest {
		f.largest = 0
		for _, r := range f.runs {
			f.largest = max(f.largest, r.n)
		}
	}
	a.free -= int64(e.n)
	return e
}

// release frees an extent and merges it with free runs that touch it.
func (a *allocator) release(e extent) {
	f := &a.steps[e.step]
	i, _ := slices.BinarySearchFunc(f.runs, e.at, func(r run, at uint32) int { return cmp.Compare(r.at, at) })
	before := i > 0 && f.runs[i-1].at+f.runs[i-1].n == e.at
	after := i < len(f.runs) && e.at+e.n == f.runs[i].at
	switch {
	case before && after:
		f.runs[i-1].n += e.n + f.runs[i].n
		f.runs = slices.Delete(f.runs, i, i+1)
		i--
	case before:
		i--
		f.runs[i].n += e.n
	case after:
		f.runs[i].at, f.runs[i].n = e.at, f.runs[i].n+e.n
	default:
		f.runs = slices.Insert(f.runs, i, run{e.at, e.n})
	}
	f.largest = max(f.largest, f.runs[i].n)
	a.free += int64(e.n)
}

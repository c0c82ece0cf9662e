package memfs

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

// page is the unit of allocation. It wastes nothing for direct I/O and for files of whole pages.
const page = staging.Align

// Sizes of steps. A step is page-locked in one call, and no extent crosses its end.
const (
	smallestStep = 64 << 20
	largestStep  = 1 << 30
	wantedSteps  = 128
)

// growthWait is the longest time that an allocation waits for the next step. It is also the pause before growth as needed tries
// again, if the machine has no memory left.
const growthWait = 10 * time.Second

// arena is the memory of a file system: steps of page-locked memory and their free pages.
type arena struct {
	log  *slog.Logger
	goal int64 // bytes of all steps
	step int64
	keep int64 // one part in keep of the machine's memory is left to others

	// Only for memory that grows as needed:
	ahead int64         // free bytes to maintain; 0 means that all memory is wanted at once
	retry time.Duration // pause between attempts while the machine has no more memory

	yield func() // waits for work that a step would delay; may be nil

	mu      sync.Mutex
	changed sync.Cond // signalled when pages were freed, a step was added, or growth has ended
	pages   allocator
	steps   []*staging.Mapping // steps in use
	kind    staging.Pages      // kind of pages of the first step
	ready   int64              // bytes of the steps
	growing bool
	started bool
	short   error // why growth has ended before the goal, or is paused
	pinners []staging.Pinner
	nodes   []int
	pinned  int // number of steps that the pinners have registered
	stop    bool
	ended   chan struct{} // closed when growth has ended
}

// newArena maps the first step. start maps the others.
func newArena(goal int64, log *slog.Logger) (*arena, error) {
	a := &arena{log: log, goal: goal, keep: keepFree, growing: true, ended: make(chan struct{})}
	a.changed.L = &a.mu
	a.step = min(max(goal/wantedSteps, smallestStep), largestStep)
	a.step = (a.step + 2<<20 - 1) &^ (2<<20 - 1)
	first, err := staging.Map(int(a.next()))
	if err != nil {
		return nil, err
	}
	a.kind = first.Pages()
	a.add(first)
	return a, nil
}

// next returns the size of the next step.
func (a *arena) next() int64 { return min(a.step, a.goal-a.ready) }

// add puts a step into use. mu must be held, unless nothing else uses the arena yet.
func (a *arena) add(m *staging.Mapping) {
	n := int64(len(m.Bytes()))
	a.steps = append(a.steps, m)
	a.pages.add(uint32(n / page))
	a.ready += n
	a.changed.Broadcast()
}

// start page-locks the first step, and starts a goroutine that grows the memory to the goal.
func (a *arena) start(nodes []int, pinners []staging.Pinner) {
	a.mu.Lock()
	a.nodes, a.pinners, a.started = nodes, pinners, true
	first := a.steps[0]
	a.mu.Unlock()
	err := a.lock(first)
	a.mu.Lock()
	if err == nil {
		a.pinned = 1
	}
	a.mu.Unlock()
	go a.grow(err)
}

// grow adds steps until the goal is reached or the machine has no more memory.
func (a *arena) grow(err error) {
	began := time.Now()
	for {
		a.mu.Lock()
		for err == nil && !a.stop && a.ready < a.goal && a.isAhead() {
			a.changed.Wait()
		}
		if err != nil && a.ahead > 0 && a.pinned > 0 { // others may release memory later
			a.pause(err)
			err = nil
		}
		if err != nil || a.stop || a.ready >= a.goal {
			a.growing, a.short = false, err
			a.changed.Broadcast()
			ready, stopped := a.ready, a.stop
			a.mu.Unlock()
			close(a.ended)
			switch {
			case stopped:
			case err != nil:
				a.log.Error("memory is smaller than configured", "bytes", ready, "wanted", a.goal, "error", err)
			default:
				a.log.Info("all memory is there", "bytes", ready, "took", time.Since(began), "pages", string(a.kind))
			}
			return
		}
		n := a.next()
		a.mu.Unlock()
		if a.yield != nil {
			a.yield()
		}
		var m *staging.Mapping
		if m, err = a.makeStep(n); err != nil {
			continue
		}
		a.mu.Lock()
		a.add(m)
		a.pinned++
		a.growing, a.short = true, nil
		a.mu.Unlock()
	}
}

// pause waits for the next attempt to grow. Until then, allocations get only the existing memory. mu must be held.
func (a *arena) pause(short error) {
	if a.growing {
		a.log.Error("memory is smaller than configured", "bytes", a.ready, "wanted", a.goal, "error", short)
	}
	a.growing, a.short = false, short
	a.changed.Broadcast()
	over := false
	defer time.AfterFunc(a.retry, func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		over = true
		a.changed.Broadcast()
	}).Stop()
	for !over && !a.stop {
		a.changed.Wait()
	}
}

// isAhead reports whether there is enough free memory, so that growth can rest. mu must be held.
func (a *arena) isAhead() bool { return a.ahead > 0 && a.pages.free*page >= a.ahead }

// makeStep maps and page-locks a step.
func (a *arena) makeStep(n int64) (*staging.Mapping, error) {
	m, err := staging.Map(int(n))
	if err != nil {
		return nil, err
	}
	if err := a.lock(m); err != nil {
		return nil, errors.Join(err, m.Unmap())
	}
	return m, nil
}

// lock allocates the pages of a step and registers them with all pinners.
func (a *arena) lock(m *staging.Mapping) error {
	if m.Pages() != staging.HugePages { // huge pages are reserved for this process already
		if err := enough(int64(len(m.Bytes())), a.keep); err != nil {
			return err
		}
	}
	if err := m.Near(a.nodes...); err != nil {
		a.log.Warn("memory not bound to the NUMA nodes of the GPUs", "error", err)
		a.nodes = nil
	}
	if err := m.Populate(); err != nil && err != unix.EINVAL { // an old kernel allocates pages when they are touched
		return fmt.Errorf("memfs: allocate %d bytes: %w", len(m.Bytes()), err)
	}
	for i, p := range a.pinners {
		if err := p.Register(m.Bytes()); err != nil {
			for _, p := range a.pinners[:i] {
				err = errors.Join(err, p.Unregister(m.Bytes()))
			}
			return fmt.Errorf("memfs: page-lock %d bytes: %w", len(m.Bytes()), err)
		}
	}
	return nil
}

// unlock ends the growth and unregisters all steps.
func (a *arena) unlock() error {
	a.mu.Lock()
	started := a.started
	a.stop = true
	a.changed.Broadcast()
	a.mu.Unlock()
	if started {
		<-a.ended
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	var errs []error
	for _, m := range a.steps[:a.pinned] {
		for _, p := range a.pinners {
			errs = append(errs, p.Unregister(m.Bytes()))
		}
	}
	a.pinned = 0
	return errors.Join(errs...)
}

// close unmaps the memory. No file may be open.
func (a *arena) close() error {
	err := a.unlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, m := range a.steps {
		err = errors.Join(err, m.Unmap())
	}
	a.steps, a.pages, a.ready = nil, allocator{}, 0
	return err
}

// alloc appends extents of n pages to list. It waits for memory that is being page-locked. If there is not enough
// memory, it returns ENOSPC.
func (a *arena) alloc(n int64, list []extent) ([]extent, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	var deadline time.Time
	for {
		var ok bool
		if list, ok = a.pages.alloc(n, list); ok {
			if a.growing && !a.isAhead() {
				a.changed.Broadcast()
			}
			return list, nil
		}
		if !a.growing || a.stop || n*page > a.goal-a.ready+a.pages.free*page {
			return list, unix.ENOSPC
		}
		if deadline.IsZero() {
			deadline = time.Now().Add(growthWait)
			defer time.AfterFunc(growthWait, a.changed.Broadcast).Stop()
		} else if !time.Now().Before(deadline) {
			return list, unix.ENOSPC
		}
		a.changed.Wait()
	}
}

func (a *arena) release(e extent) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.steps == nil { // closed
		return
	}
	a.pages.release(e)
	a.changed.Broadcast()
}

// memory returns the memory of an extent.
func (a *arena) memory(e extent) []byte {
	a.mu.Lock()
	defer a.mu.Unlock()
	at := int(e.at) * page
	end := at + int(e.n)*page
	return a.steps[e.step].Bytes()[at:end:end]
}

// space returns the bytes of all steps at the end of growth, those of the present steps, and the free part of these.
func (a *arena) space() (total, ready, free int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	total = a.ready
	if a.growing {
		total = a.goal
	}
	return total, a.ready, a.pages.free * page
}

// extent is a run of pages of one step.
type extent struct{ step, at, n uint32 }

// run is a run of free pages of a step.
type run struct{ at, n uint32 }

// allocator hands out the pages of steps. It is not safe for concurrent use.
type allocator struct {
	steps []freeRuns
	free  int64 // free pages
}

// freeRuns holds the free pages of a step.
type freeRuns struct {
	runs    []run  // in order of their place; no two are adjacent
	largest uint32 // length of the longest run
}

// add adds a step of free pages.
func (a *allocator) add(pages uint32) {
	a.steps = append(a.steps, freeRuns{[]run{{0, pages}}, pages})
	a.free += int64(pages)
}

// alloc appends extents with n pages in total to list. It returns false if fewer pages are free. It takes the smallest
// run that is large enough, or else the largest runs.
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

// errMemory means that the machine has too little memory.
var errMemory = errors.New("memfs: not enough memory")

// Parts of the machine's memory that are left to others: one part in keepFree for memory of a configured size, and one part in
// keepFreeAsNeeded for memory that grows as needed.
const (
	keepFree         = 32
	keepFreeAsNeeded = 8
)

// enough returns an error if n more bytes would leave less than one part in keep of the memory. Without this check, the
// kernel would kill processes.
func enough(n, keep int64) error {
	if total, available, known := staging.MachineMemory(); known && available-n < total/keep {
		return fmt.Errorf("%w: %d of %d bytes are available, %d more are wanted, and one part in %d is left to others",
			errMemory, available, total, n, keep)
	}
	return nil
}

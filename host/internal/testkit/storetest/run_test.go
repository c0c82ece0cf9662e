package storetest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/memfs"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/staging"
)

// Options are what a run needs besides its history.
type Options struct {
	Dir      string         // for the roots; it is empty, and the caller removes it
	Policies policy.Options // with the first-party policies
	Open     Opener         // nil: OpenStore
	// Patience ends waits for what a store does by itself. Of a store that has a fault, it is how soon that is found.
	Patience context.Context
}

// Result is what came of a run.
type Result struct {
	History *History
	Results []string // of the operations, as far as they ran
	Stored  int64    // pieces that were published
	Loads   int64
	Hits    int64 // loads that returned bytes
	Killed  int64 // lives of hosts that a kill or a power loss ended
}

// Text is the history with its results: it can be parsed, and run, again.
func (r *Result) Text() string { return r.History.text(r.Results) }

// Run runs a history. The error is the first thing that must not be.
func Run(h *History, opt Options) (res *Result, err error) {
	if opt.Open == nil {
		opt.Open = OpenStore
	}
	r := &runner{h: h, opt: opt, dir: opt.Dir, model: newModel(h.Kind.levels), res: &Result{History: h}, moved: make(chan struct{}, 1)}
	r.policies.opt, r.policies.problem = opt.Policies, r.report
	if r.rules, err = faultfs.ParseRules(strings.Join(h.Faults, "\n")); err != nil {
		return r.res, err
	}
	before, err := countLeftovers()
	if err != nil {
		return r.res, err
	}
	if r.slots, err = staging.NewSlots(8, 2*pieceBytes); err != nil {
		return r.res, err
	}
	r.files = staging.OS()
	if h.Kind.memory {
		if r.memory, err = memfs.New(16<<20, nil); err != nil {
			return r.res, err
		}
		r.files = r.memory
		if err := r.memory.MkdirAll(r.dir, 0o700); err != nil {
			return r.res, err
		}
	}
	for _, host := range h.Hosts {
		r.nodes = append(r.nodes, r.newNode(host))
	}
	err = r.run()
	r.res.Stored, r.res.Loads, r.res.Hits, r.res.Killed = r.stored.Load(), r.loads.Load(), r.model.hits, r.killed
	if err != nil {
		r.abandon()
		return r.res, err
	}
	return r.res, r.awaitNothingLeft(before)
}

// runner is a history at work.
type runner struct {
	h        *History
	opt      Options
	dir      string
	res      *Result
	model    *model
	files    staging.FS // of the roots
	memory   *memfs.FS  // files, if they are in memory
	nodes    []*node
	rules    []faultfs.Rule
	slots    *staging.Slots
	policies policySet

	now   atomic.Int64 // of hosts that take turns
	turns sync.Mutex
	moved chan struct{} // a client goes on

	stored, loads, ended atomic.Int64
	killed               int64
	panicked             bool

	mu       sync.Mutex
	problems []error
}

func (r *runner) clock() time.Duration { return time.Hour + time.Duration(r.now.Load()) }

// report notes something that must not be. The history ends after the operation.
func (r *runner) report(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.problems = append(r.problems, err)
}

func (r *runner) reported() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return errors.Join(r.problems...)
}

func (r *runner) run() error {
	for i, op := range r.h.Ops {
		result, err := r.do(op)
		r.res.Results = append(r.res.Results, result)
		if err != nil {
			return fmt.Errorf("operation %d, %s: %w", i+1, op, err)
		}
	}
	if err := errors.Join(r.end(), r.reported()); err != nil {
		return fmt.Errorf("at the end of the history: %w", err)
	}
	return nil
}

// do runs one operation and looks at everything.
func (r *runner) do(op Op) (result string, err error) {
	defer func() {
		if p := recover(); p != nil {
			r.panicked = true
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	n := r.nodes[r.h.host(op.Host)]
	v := verbs[op.Verb]
	if n.store == nil && !v.closed {
		return "closed", nil
	}
	if result, err = v.run(operator{n}, op); err == nil {
		err = r.reported()
	}
	for _, n := range r.nodes {
		if err == nil && n.store != nil {
			if err = n.invariants(); err != nil {
				err = fmt.Errorf("host %s: %w", n.ID, err)
			}
		}
	}
	if begun, ended := r.loads.Load(), r.ended.Load(); err == nil && begun != ended {
		err = fmt.Errorf("%d loads were begun, %d have ended", begun, ended)
	}
	return result, err
}

// end kills every host and opens it again, compares what hosts reckon with with what is on disk, and closes everything.
func (r *runner) end() error {
	if err := r.settle(); err != nil {
		return err
	}
	for _, n := range r.nodes {
		if n.store == nil {
			continue
		}
		if err := n.crash(); err != nil {
			return fmt.Errorf("host %s: after a kill: %w", n.ID, err)
		}
	}
	for _, n := range r.nodes {
		n.armed, n.before = false, nil // faults are over, but their traces are not
		if err := n.open(n.final); err != nil {
			return err
		}
		n.faults.Set()
	}
	if err := r.settle(); err != nil {
		return fmt.Errorf("reopened: %w", err)
	}
	for _, n := range r.nodes {
		if err := n.readAll(); err != nil {
			return err
		}
	}
	if err := r.compareAccounts(); err != nil {
		return err
	}
	if !r.h.Copies {
		if err := r.model.judge(); err != nil {
			return err
		}
	}
	for _, n := range r.nodes {
		err := n.store.Close()
		if n.store = nil; err != nil {
			return fmt.Errorf("host %s: closing: %w", n.ID, err)
		}
		if err := n.removeMachine(); err != nil {
			return err
		}
	}
	if err := r.slots.Close(); err != nil {
		return err
	}
	return errors.Join(r.noTemporaries(), r.closeMemory())
}

// settle ends what is under way, lets hosts that share a root agree, and checks that nothing is in use. While one of the
// hosts is closed the others may wait for it.
func (r *runner) settle() error {
	for _, n := range r.nodes {
		if n.store == nil {
			continue
		}
		n.faults.Set()
		n.armed = false
		n.letGo()
		n.asleep = 0
	}
	if all, err := r.converge(); err != nil || !all {
		return err
	}
	for _, n := range r.nodes {
		if n.store == nil {
			continue
		}
		if err := n.idle(); err != nil {
			return err
		}
	}
	return nil
}

// abandon closes what a failed run left open, so that another can follow. After a panic nothing can be closed: a lock
// may be held.
func (r *runner) abandon() {
	for _, n := range r.nodes {
		if n.store != nil && !r.panicked {
			n.faults.Set()
			n.letGo()
			_ = n.store.Close() // the run has failed
		}
	}
	_ = r.slots.Close()
}

// leftovers is what a run can leave in the process.
type leftovers struct{ goroutines, descriptors int }

func countLeftovers() (leftovers, error) {
	list, err := os.ReadDir("/proc/self/fd")
	return leftovers{runtime.NumGoroutine(), len(list)}, err
}

// awaitNothingLeft waits until the run's goroutines and descriptors have ended, and its policies were given back.
func (r *runner) awaitNothingLeft(before leftovers) error {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		now, err := countLeftovers()
		given, back := r.policies.given.Load(), r.policies.back.Load()
		if err != nil || now.goroutines <= before.goroutines && now.descriptors <= before.descriptors && given == back {
			return err
		}
		select {
		case <-tick.C:
		case <-r.opt.Patience.Done():
			return fmt.Errorf("leak: %+v before the history, %+v after it; %d policies were used, %d given back",
				before, now, given, back)
		}
	}
}

// wait lets every host that shares the root make a step; this one's is step.
func (n *node) wait(step func()) {
	r := n.r
	r.turns.Lock()
	defer r.turns.Unlock()
	r.now.Add(int64(pollEvery))
	for _, o := range r.nodes {
		switch {
		case o.asleep > 0:
			o.asleep--
			doubt(o)
		case o != n && o.store != nil:
			r.step(o, func() { _ = o.store.Maintain(context.Background(), 0, store.Step) })
		}
	}
	if n.asleep == 0 {
		r.step(n, step)
	} else {
		step()
	}
}

// step makes a step of a host. What it leases from now on is there.
func (r *runner) step(n *node, step func()) {
	n.inStep.Store(true)
	defer n.inStep.Store(false)
	step()
	n.doubted.Store(false)
}

// doubt notes that the others may have given a host up.
func doubt(n *node) {
	n.doubted.Store(true)
	for _, l := range n.leases {
		l.doubt()
	}
}

// turn lets every host that shares the root make a step.
func (n *node) turn() {
	n.wait(func() { _ = n.store.Maintain(context.Background(), 0, store.Step) })
}

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }

// runRush lets clients work at the same time, beside a change of policy, and looks at the disk meanwhile.
func (n operator) runRush(op Op) (string, error) {
	for _, o := range n.r.nodes {
		if o.store == nil {
			return "a host is closed", nil
		}
	}
	n.letGo()
	stop := make(chan struct{})
	var watch, clients sync.WaitGroup
	watch.Go(func() { n.watchDisk(stop) })
	for text := range strings.SplitSeq(op.get("clients"), "+") {
		id, _, _ := strings.Cut(text, ":")
		_, seed := parsePair(text)
		if i := n.r.h.host(id); i >= 0 {
			clients.Go(func() { n.r.nodes[i].client(rand.New(rand.NewPCG(seed, 2))) })
		}
	}
	clients.Go(func() {
		if _, err := n.swap(abi.RoleEvict, op.get("swap")); err != nil {
			n.r.report(fmt.Errorf("host %s: changing the evict policy: %w", n.ID, err))
		}
	})
	clients.Wait()
	close(stop)
	watch.Wait()
	return "", nil
}

// watchDisk checks that roots keep within their capacity each time that a client goes on, and lets hosts make steps meanwhile, until it
// is stopped.
func (n *node) watchDisk(stop <-chan struct{}) {
	none := make(chan struct{})
	if n.r.h.Kind.hosts > 1 {
		close(none)
	}
	for {
		select {
		case <-stop:
			return
		case <-n.r.moved:
		case <-none:
			n.turn()
			continue
		}
		for i, root := range n.cfg.Roots {
			disk, err := n.r.frozenDisk(i)
			if err == nil && disk > root.Capacity {
				var left int64
				left, err = foreign(n, root.Path)
				disk -= left
			}
			if err == nil && disk > root.Capacity {
				err = fmt.Errorf("root %d: %d bytes on disk, of %d", i, disk, root.Capacity)
			}
			if err != nil {
				n.r.report(err)
				return
			}
		}
	}
}

// client stores, loads and gives up at random.
func (n *node) client(rng *rand.Rand) {
	g := &generator{rng: rng}
	for range 30 {
		select {
		case n.r.moved <- struct{}{}:
		default:
		}
		switch k := rng.IntN(10); {
		case k < 5:
			n.storeEntry(g.entry())
		case k < 6:
			if _, err := n.discard(g.entry(), 2); err != nil {
				n.r.report(err)
			}
		case k < 9:
			l, err := n.lookup(g.entry(), 3, 0)
			if err != nil {
				n.r.report(err)
				return
			}
			n.loadAll(l, g.ranks(3))
			l.Release()
		default:
			if p, err := n.begin(g.piece()); err == nil {
				_ = p.write() // it is given up all the same
				p.Abort(errAborted)
			}
		}
	}
}

// runPause stops a host at one operation on files, for as long as the others take to give it up, and perhaps until it
// has joined again beside the operation that stands still. Whatever goes on then must be harmless. Nothing else runs
// at the same time, so that the history repeats.
func (n operator) runPause(op Op) (string, error) {
	if n.r.h.Kind.hosts == 1 || n.armed || n.asleep > 0 {
		return "not now", nil
	}
	hang := faultfs.Rule{
		Op: staging.OpAny, Path: "**", When: faultfs.When{Nth: op.number("call")},
		Fault: faultfs.Fault{Hang: true},
	}
	n.faults.Set(append(slices.Clone(n.r.rules), hang)...)
	defer n.faults.Set(n.r.rules...)
	of := parsePiece(op.get("entry"))
	result := ""
	ctx, ended := context.WithCancel(context.Background())
	go func() {
		defer ended()
		if op.get("step") == "true" {
			n.r.step(n.node, func() { _ = n.store.Maintain(ctx, 0, store.Step) })
			return
		}
		result = n.storeEntry(of.Entry)
	}()
	if n.faults.AwaitHanging(ctx, 1) != nil {
		return "no such call: " + result, nil
	}
	err := n.r.standStill(n.node, op)
	n.faults.Release()
	<-ctx.Done()
	n.asleep = 0
	return "paused: " + result, err
}

// standStill is the time that a host's operation does not go on.
func (r *runner) standStill(n *node, op Op) error {
	const always = 1 << 30
	n.asleep = always
	doubt(n)
	for range op.number("asleep") {
		if err := r.others(n); err != nil {
			return err
		}
	}
	if r.turns.TryLock() { // else the operation is of a step, of this host or while it waits for credit
		r.turns.Unlock()
		r.fill(n, op.get("fill"))
	}
	for range op.number("awake") {
		if !n.inStep.Load() {
			r.step(n, func() { _ = n.store.Maintain(context.Background(), 0, store.Step) })
			n.doubted.Store(true) // what was begun before stands still
		}
		if err := r.others(n); err != nil {
			return err
		}
	}
	return nil
}

// others lets the other hosts make a step, and looks at everything.
func (r *runner) others(n *node) (err error) {
	r.now.Add(int64(pollEvery))
	for _, o := range r.nodes {
		if o != n && o.store != nil && o.asleep == 0 {
			r.step(o, func() { _ = o.store.Maintain(context.Background(), 0, store.Step) })
		}
	}
	for _, o := range r.nodes {
		if o.store != nil {
			if ierr := o.invariants(); ierr != nil {
				err = errors.Join(err, fmt.Errorf("host %s, while %s stands still: %w", o.ID, n.ID, ierr))
			}
		}
	}
	return errors.Join(err, r.reported())
}

// fill stores entries on the other hosts.
func (r *runner) fill(n *node, list string) {
	i := 0
	for text := range strings.SplitSeq(list, "+") {
		o := r.nodes[i%len(r.nodes)]
		if i++; o == n || o.store == nil || o.asleep > 0 {
			continue
		}
		o.storeEntry(parsePiece(text).Entry)
	}
}

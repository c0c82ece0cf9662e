package evictor

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"golang.org/x/sync/semaphore"
)

// MaxVictims bounds the victims of one question to the policy.
const MaxVictims = 256

// Host is what an evictor needs from above.
type Host interface {
	Tenant(number uint16) uint32 // by its number in the index
	Clock() uint64               // the time of events
	Used() int64                 // bytes in the root's account
}

// Policy is a module in use, and since when.
type Policy struct {
	*policy.Handle
	Since time.Time
}

type Config struct {
	Index  *index.Index
	Lock   *sync.Mutex // the root's
	Host   Host
	Policy *Policy
	Run    context.Context // ends the evictor's own work
	Work   *sync.WaitGroup // has it
	Size   Size
	Seed   uint64
	Log    *slog.Logger
}

// Size is the size of a root as its policy gets it.
type Size struct {
	Slots    uint32
	Capacity int64
}

// Evictor is one root's evict policy at work.
type Evictor struct {
	cfg      Config
	x        *index.Index
	mu       *sync.Mutex
	handover *semaphore.Weighted // held by whoever tells a policy what is here

	size      Size
	policy    *policy.Evict
	active    *Policy      // what policy was made from
	fallback  *recency     // answers while the policy is down, else nil
	instead   recency      // answers where the policy names no evictable entry
	candidate *candidate   // a policy that is about to take over, or nil
	past      policy.Stats // of earlier instances of the active policy
	scanning  bool         // a scan runs: the policy is told nothing
	closed    bool
	queue     victimQueue
	named     [MaxVictims]uint32
	count     Counts
}

// Counts count since the evictor was made.
type Counts struct {
	Asks       uint64 // questions to the policy, or to the fallback
	BadVictims uint64 // named although pinned, in flight or gone
	Unanswered uint64 // questions to the policy in which it named no evictable entry, although there was one
	Faults     uint64 // policies that failed
}

// New starts a policy, of which it takes a reference.
func New(ctx context.Context, cfg Config) (*Evictor, error) {
	v := &Evictor{cfg: cfg, size: cfg.Size, x: cfg.Index, mu: cfg.Lock, active: cfg.Policy, handover: semaphore.NewWeighted(1)}
	v.instead.told = true
	var err error
	if v.policy, err = v.start(ctx, v.active, cfg.Size, policy.State{}); err != nil {
		return nil, err
	}
	v.active.Acquire()
	return v, nil
}

func (v *Evictor) start(ctx context.Context, p *Policy, size Size, state policy.State) (*policy.Evict, error) {
	return p.Module.NewEvict(ctx, policy.EvictOptions{
		MaxSlots: size.Slots, Capacity: uint64(size.Capacity), Seed: v.cfg.Seed, Config: p.Config, State: state,
	})
}

// Close ends the policy. Events that come later, as of a lease that is released late, are dropped.
func (v *Evictor) Close() error {
	v.closed = true
	err := v.policy.Close()
	v.active.Release()
	return err
}

// run starts work that ends with the store, unless that is ending.
func (v *Evictor) run(work func(ctx context.Context)) {
	if v.cfg.Run.Err() == nil {
		v.cfg.Work.Go(func() { work(v.cfg.Run) })
	}
}

// SetIndex replaces the index, before anything was told.
func (v *Evictor) SetIndex(x *index.Index) { v.x = x }

// SizeOf is the size of the root as policies get it. It takes the lock.
func SizeOf(v *Evictor) Size {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.size
}

// Active is what decides, or did until it failed.
func (v *Evictor) Active() *Policy { return v.active }

func (v *Evictor) Counts() Counts { return v.count }

// Stats are the active policy's, with its earlier instances.
func (v *Evictor) Stats() policy.Stats {
	s := addStats(v.past, v.policy.Stats())
	s.Builtin = v.fallback != nil
	return s
}

// addStats is b with a's counts added.
func addStats(a, b policy.Stats) policy.Stats {
	b.Calls += a.Calls
	b.Records += a.Records
	b.Time += a.Time
	b.Fuel += a.Fuel
	b.Faults += a.Faults
	return b
}

// Evictable says whether an entry can be evicted.
func (v *Evictor) Evictable(slot uint32) bool {
	if slot >= v.x.High() {
		return false
	}
	e := v.x.At(slot)
	return e.Is(index.Live) && !e.Any(index.Evicting|index.Detached) && e.Pins() == 0
}

// fits says whether an entry can be evicted for a tenant's sake.
func (v *Evictor) fits(slot, tenant uint32) bool {
	return v.Evictable(slot) && (tenant == abi.None || v.tenant(slot) == tenant)
}

func (v *Evictor) tenant(slot uint32) uint32 { return v.cfg.Host.Tenant(v.x.Owner(slot).Tenant) }

// Victims names entries to evict, best first, for so many bytes; only those of the tenant, if one is named. evict
// begins to evict each: the entry is no longer evictable afterwards. If the policy names no evictable entry although
// there is one, the least recently touched go.
func (v *Evictor) Victims(bytes int64, tenant uint32, evict func(slot uint32)) {
	ask := abi.Ask{Bytes: uint64(bytes), MaxVictims: MaxVictims, Tenant: tenant}
	var left int64
	if tenant == abi.None && v.policy.VictimsAhead() > 0 {
		left = v.queuedVictims(bytes, evict)
	} else {
		left = accept(v, v.named[:v.Ask(ask, v.named[:])], bytes, tenant, evict)
	}
	if left < bytes {
		v.policy.Answered()
		return
	}
	accept(v, v.named[:v.Instead(ask, v.named[:])], bytes, tenant, evict)
}

// accept evicts those named who can go, until so many bytes are freed, and returns how many are left to free.
func accept(v *Evictor, named []uint32, bytes int64, tenant uint32, evict func(slot uint32)) (left int64) {
	for _, slot := range named {
		if bytes <= 0 {
			break
		}
		if !v.fits(slot, tenant) {
			v.count.BadVictims++
			continue
		}
		bytes -= v.x.Bytes(slot)
		evict(slot)
	}
	return bytes
}

// BadVictim counts a victim that its root does not accept.
func (v *Evictor) BadVictim() { v.count.BadVictims++ }

// Ask asks for victims, best first: the policy, or the fallback while that is down.
func (v *Evictor) Ask(a abi.Ask, dst []uint32) int {
	v.count.Asks++
	if v.fallback == nil {
		n, err := v.policy.Victims(a, dst)
		if err == nil {
			return n
		}
		if v.Fail(err); v.fallback == nil {
			return 0
		}
	}
	return v.fallback.victims(v, a, dst)
}

// Instead answers a question in which the policy named no evictable entry: with those touched least recently, of the
// entries that the policy knows. If there are none, its answer was right.
func (v *Evictor) Instead(a abi.Ask, dst []uint32) int {
	if v.fallback != nil || v.scanning || v.policy.Ended() {
		return 0
	}
	n := v.instead.victims(v, a, dst)
	if n == 0 {
		return 0
	}
	v.count.Unanswered++
	if err := v.policy.Unanswered(); err != nil {
		v.Fail(err)
	}
	return n
}

// Fail lets the fallback answer for a policy that failed. The policy is restarted when its module allows it.
func (v *Evictor) Fail(cause error) {
	v.count.Faults++
	failed := v.active
	verdict, pause := failed.Module.Failed(abi.RoleEvict, cause)
	if verdict == policy.Halt {
		return // every call fails until the host has ended
	}
	v.cfg.Log.Error("evict policy failed: least recently used chunks are evicted until it is restarted",
		"policy", failed.Label, "error", cause)
	_ = v.policy.Close()
	v.fallback = &recency{}
	if verdict == policy.Restart && v.cfg.Run.Err() == nil {
		failed.Acquire() // a swap may replace it before
		v.cfg.Work.Go(func() {
			defer failed.Release()
			ctx := v.cfg.Run
			policy.Supervise(ctx, pause, func(ctx context.Context) error { return v.restart(ctx, failed) },
				func(err error) (policy.Verdict, time.Duration) { return failed.Module.Failed(abi.RoleEvict, err) })
		})
	}
}

// restart starts a policy again that failed. It takes the lock.
func (v *Evictor) restart(ctx context.Context, failed *Policy) error {
	v.mu.Lock()
	superseded := v.active != failed
	v.mu.Unlock()
	if superseded {
		return nil
	}
	h, err := v.Prepare(ctx, failed, failed)
	if errors.Is(err, ErrSuperseded) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := h.Ready(); err != nil {
		h.Abandon()
		return err
	}
	h.Finish()
	return nil
}

// Flush hands the policy the events that it was not called with yet.
func (v *Evictor) Flush() error { return v.policy.Flush() }

// Save gives the policy's state; ok is false when it keeps none, or is down.
func (v *Evictor) Save(limit uint32) (state policy.State, ok bool, err error) {
	if v.fallback != nil {
		return policy.State{}, false, nil
	}
	return v.policy.Save(limit)
}

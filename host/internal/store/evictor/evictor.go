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

// MaxVictims is the maximum number of victims in one answer of the policy.
const MaxVictims = 256

// Host is the interface of an evictor to its root.
type Host interface {
	Tenant(number uint16) uint32 // returns the tenant with a number
	Clock() uint64               // time for events
	Used() int64                 // bytes in the root's account
}

// Policy is a module in use, with the time since when.
type Policy struct {
	*policy.Handle
	Since time.Time
}

type Config struct {
	Index  *index.Index
	Lock   *sync.Mutex // lock of the root
	Host   Host
	Policy *Policy
	Run    context.Context // ends the evictor's goroutines
	Work   *sync.WaitGroup // counts the evictor's goroutines
	Size   Size
	Seed   uint64
	Log    *slog.Logger
}

// Size is the size of a root as its policy is told.
type Size struct {
	Slots    uint32
	Capacity int64
}

// Evictor runs the evict policy of one root.
type Evictor struct {
	cfg      Config
	x        *index.Index
	mu       *sync.Mutex
	handover *semaphore.Weighted // held by the goroutine that tells a policy about all entries

	size      Size
	policy    *policy.Evict
	active    *Policy      // module of policy
	fallback  *recency     // answers while the policy is down; nil otherwise
	instead   recency      // chooses a victim if the policy names no evictable entry
	candidate *candidate   // policy that is about to take over, or nil
	past      policy.Stats // statistics of earlier instances of the active policy
	scanning  bool         // a scan is running, so the policy is told nothing
	closed    bool
	queue     victimQueue
	named     [MaxVictims]uint32
	count     Counts
}

// Counts count since the evictor was created.
type Counts struct {
	Asks       uint64 // questions to the policy or to the fallback
	BadVictims uint64 // victims that were pinned, in flight or gone
	Unanswered uint64 // questions in which the policy named no evictable entry although there was one
	Faults     uint64 // failures of policies
}

// New starts a policy. It takes a reference to it.
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

// Close ends the policy. Later events are dropped, such as the one of a lease that is released late.
func (v *Evictor) Close() error {
	v.closed = true
	err := v.policy.Close()
	v.active.Release()
	return err
}

// run starts a goroutine that ends with the store, unless the store is closing.
func (v *Evictor) run(work func(ctx context.Context)) {
	if v.cfg.Run.Err() == nil {
		v.cfg.Work.Go(func() { work(v.cfg.Run) })
	}
}

// SetIndex replaces the index. The policy must not have been told anything yet.
func (v *Evictor) SetIndex(x *index.Index) { v.x = x }

// SizeOf returns the size of the root as policies are told. It takes the lock.
func SizeOf(v *Evictor) Size {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.size
}

// Active returns the policy in use, or the one that has failed and is being restarted.
func (v *Evictor) Active() *Policy { return v.active }

func (v *Evictor) Counts() Counts { return v.count }

// Stats returns the statistics of the active policy, including its earlier instances.
func (v *Evictor) Stats() policy.Stats {
	s := v.policy.Stats()
	s.Add(v.past)
	s.Builtin = v.fallback != nil
	return s
}

// Evictable reports whether an entry can be evicted.
func (v *Evictor) Evictable(slot uint32) bool {
	if slot >= v.x.High() {
		return false
	}
	e := v.x.At(slot)
	return e.Is(index.Live) && !e.Any(index.Evicting|index.Detached) && e.Pins() == 0
}

// fits reports whether an entry can be evicted to make room for a tenant.
func (v *Evictor) fits(slot, tenant uint32) bool {
	return v.Evictable(slot) && (tenant == abi.None || v.tenant(slot) == tenant)
}

func (v *Evictor) tenant(slot uint32) uint32 { return v.cfg.Host.Tenant(v.x.Owner(slot).Tenant) }

// Victims names entries to evict that free the given bytes, best first. If tenant is not None, it names only entries of the tenant.
// evict must begin to evict the entry, so that it is no longer evictable afterwards. If the policy names no evictable entry
// although there is one, the least recently touched entries are evicted.
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

// accept evicts the named entries that can be evicted, until the given bytes are freed. It returns the bytes that are left to
// free.
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

// BadVictim counts a victim that the root does not accept.
func (v *Evictor) BadVictim() { v.count.BadVictims++ }

// Ask returns victims, best first, from the policy, or from the fallback while the policy is down.
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

// Instead returns victims after the policy has named no evictable entry. They are the least recently touched entries that the
// policy knows. If there are none, the answer of the policy was right.
func (v *Evictor) Instead(a abi.Ask, dst []uint32) int {
	if v.fallback != nil || v.scanning || v.policy.Ended() {
		return 0
	}
	n := v.instead.victims(v, a, dst)
	if n == 0 {
		return 0
	}
	v.count.Unanswered++
	v.policy.Unanswered()
	return n
}

// Fail puts the fallback in place of a policy that has failed. The policy is restarted if its module permits it.
func (v *Evictor) Fail(cause error) {
	v.count.Faults++
	failed := v.active
	verdict, pause := failed.Module.Failed(abi.RoleEvict, cause)
	if verdict == policy.Halt {
		return // the host stops, and every call of the policy fails until then
	}
	v.cfg.Log.Error("evict policy failed: least recently used chunks are evicted until it is restarted",
		"policy", failed.Label, "error", cause)
	_ = v.policy.Close()
	v.fallback = &recency{}
	if verdict == policy.Restart && v.cfg.Run.Err() == nil {
		failed.Acquire() // a swap may replace it in between
		v.cfg.Work.Go(func() {
			defer failed.Release()
			ctx := v.cfg.Run
			policy.Supervise(ctx, pause, func(ctx context.Context) error { return v.restart(ctx, failed) },
				func(err error) (policy.Verdict, time.Duration) { return failed.Module.Failed(abi.RoleEvict, err) })
		})
	}
}

// restart restarts a policy after a failure. It takes the lock.
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

// Flush delivers the buffered events to the policy.
func (v *Evictor) Flush() error { return v.policy.Flush() }

// Save returns the state of the policy. ok is false if the policy keeps no state or is down.
func (v *Evictor) Save(limit uint32) (state policy.State, ok bool, err error) {
	if v.fallback != nil {
		return policy.State{}, false, nil
	}
	return v.policy.Save(limit)
}

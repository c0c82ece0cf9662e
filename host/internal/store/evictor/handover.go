package evictor

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store/index"
)

// Method is how an evict policy learned what is in its root.
type Method uint8

const (
	// Replayed: it was told every entry, in order of the last touch.
	Replayed Method = iota
	// Loaded: it took over the state of the policy before it.
	Loaded
)

func (m Method) String() string {
	if m == Loaded {
		return "state"
	}
	return "replay"
}

// MaxHandoverState bounds the state that is taken over: it is copied under the root's lock, and no session may wait for
// long. lru takes 3 ms for so much, as a Go module. A policy that keeps more gets the entries instead, in slices.
const MaxHandoverState = 2 << 20

// Handover is a change of a root's evict policy under way. There is one at a time.
type Handover struct {
	To, From *Policy // From is the one that is replaced
	Method   Method  // by which To learned what is here

	v    *Evictor
	ctx  context.Context
	size Size
	next *candidate
}

// HoldHandovers keeps handovers from the root, as during a scan, until AllowHandovers.
func (v *Evictor) HoldHandovers(ctx context.Context) error { return v.handover.Acquire(ctx, 1) }

// AllowHandovers ends HoldHandovers.
func (v *Evictor) AllowHandovers() { v.handover.Release(1) }

// Prepare starts a policy next to the active one, from, and tells it what is here. Finish or Abandon must follow when
// there is no error. Like all methods of a handover, it takes the lock.
func (v *Evictor) Prepare(ctx context.Context, to, from *Policy) (*Handover, error) {
	return PrepareSize(ctx, v, to, from, nil)
}

// PrepareSize is Prepare for a root that gets another size with the policy, unless size is nil. Both may be the same policy, in
// a new instance.
func PrepareSize(ctx context.Context, v *Evictor, to, from *Policy, size *Size) (*Handover, error) {
	if err := v.HoldHandovers(ctx); err != nil { // a scan may hold it for long
		return nil, err
	}
	h := &Handover{v: v, ctx: ctx, To: to, From: from, size: SizeOf(v)}
	if size != nil {
		h.size = *size
	}
	err := h.inherit()
	if err == nil && h.next == nil {
		err = h.learn()
	}
	if err != nil {
		h.Abandon()
		return nil, err
	}
	return h, nil
}

// inherit takes over the active policy's state, if both keep the same. The events that come until that is done are held
// back for it.
func (h *Handover) inherit() error {
	v, format := h.v, h.To.Module.StateFormat()
	if format == "" || format != h.From.Module.StateFormat() {
		return nil
	}
	next := &candidate{whole: true}
	v.mu.Lock()
	var state policy.State
	ok := false
	if v.active == h.From && v.fallback == nil {
		var err error
		if state, ok, err = v.policy.Save(MaxHandoverState); err != nil {
			v.Fail(err)
		}
	}
	if ok {
		v.candidate = next
	}
	v.mu.Unlock()
	if !ok {
		return nil
	}
	p, err := v.start(h.ctx, h.To, h.size, state)
	if err == nil && p.Loaded() {
		h.next, h.Method = next, Loaded
		return h.catchUp(p)
	}
	v.setCandidate(nil)
	if err == nil {
		err = p.Close()
	}
	return err
}

func (v *Evictor) setCandidate(c *candidate) {
	v.mu.Lock()
	v.candidate = c
	v.mu.Unlock()
}

// catchUp delivers the events that were held back, a slice at a time.
func (h *Handover) catchUp(p *policy.Evict) error {
	v, next := h.v, h.next
	v.mu.Lock()
	next.policy = p
	v.mu.Unlock()
	for {
		v.mu.Lock()
		n := min(len(next.held), slice)
		for _, ev := range next.held[:n] {
			if next.err == nil {
				next.err = p.Event(ev)
			}
		}
		next.held = next.held[n:]
		left, err := len(next.held), next.err
		v.mu.Unlock()
		if left == 0 || err != nil {
			return cmp.Or(err, h.ctx.Err())
		}
	}
}

// learn tells the policy of all entries in order of the last touch.
func (h *Handover) learn() error {
	v := h.v
	p, err := v.start(h.ctx, h.To, h.size, policy.State{})
	if err != nil {
		return err
	}
	h.next = &candidate{policy: p}
	v.mu.Lock()
	superseded := v.active != h.From
	if !superseded {
		v.candidate = h.next
	}
	v.mu.Unlock()
	if superseded {
		return ErrSuperseded
	}
	return v.tell(h.ctx, h.next)
}

// tell goes through all entries in order of the last touch, with the lock for a slice of them at a time. Those that leave are left out: the
// active policy has heard of their end already. A scan finds entries that no policy has heard of yet.
func (v *Evictor) tell(ctx context.Context, c *candidate) error {
	for order := v.Snapshot(); len(order) > 0; {
		if err := cmp.Or(ctx.Err(), v.cfg.Run.Err()); err != nil {
			return err
		}
		n, start := min(len(order), slice), time.Now()
		v.mu.Lock()
		for i := range order[:n] {
			if m := &order[i]; v.current(m) && !c.knows(m.Slot) && (v.scanning || v.x.At(m.Slot).Is(index.Announced)) {
				c.announce(v, m.Slot, m.Fingerprint)
			}
		}
		err := c.err
		v.mu.Unlock()
		if order = order[n:]; err != nil {
			return err
		}
		yield(start)
	}
	return nil
}

// Abandon leaves the active policy where it is.
func (h *Handover) Abandon() {
	h.v.setCandidate(nil)
	if h.next != nil && h.next.policy != nil {
		_ = h.next.policy.Close()
	}
	h.v.AllowHandovers()
}

// Ready says why the policy cannot take over, if so: it has failed since, or the store is being closed.
func (h *Handover) Ready() error {
	v, next := h.v, h.next
	v.mu.Lock()
	defer v.mu.Unlock()
	if next.err == nil {
		next.err = next.policy.Flush()
	}
	return cmp.Or(next.err, v.cfg.Run.Err())
}

// Finish lets the policy take over and returns the number of entries. A fault since Ready is treated as that of any policy
// that is active.
func (h *Handover) Finish() (entries int) {
	v, next := h.v, h.next
	v.mu.Lock()
	before, past := v.policy, v.past
	v.size, v.policy, v.fallback, v.candidate = h.size, next.policy, nil, nil
	if h.To == h.From {
		v.past = addStats(past, before.Stats())
	} else {
		h.To.Acquire()
		v.active, v.past = h.To, policy.Stats{}
	}
	if next.err != nil {
		v.Fail(next.err)
	}
	entries = int(v.x.Len())
	v.mu.Unlock()
	v.AllowHandovers()
	v.cfg.Log.Info("evict policy took over", "policy", h.To.Label, "sha256", h.To.Module.Digest(),
		"from", h.From.Label, "by", h.Method)
	_ = before.Close() // without the lock: to return memory takes time
	if h.To != h.From {
		h.From.Release()
	}
	return entries
}

// SetScanning says that a scan runs, while which the policy is told nothing.
func (v *Evictor) SetScanning(on bool) { v.scanning = on }

// EndScan tells the policy of everything that a scan has found, in order of the last touch, and calls end with the lock
// held when it knows all. It takes the lock. When ctx ends before all is told, the scan has not ended and the error
// says so: else the policy's state would be kept, and what it lacks would never be a victim.
func (v *Evictor) EndScan(ctx context.Context, end func()) error {
	v.mu.Lock()
	c := &candidate{policy: v.policy}
	v.candidate = c
	v.mu.Unlock()
	told := v.tell(ctx, c)
	v.mu.Lock()
	defer v.mu.Unlock()
	v.candidate = nil
	if told != nil && c.err == nil {
		return told
	}
	v.x.Each(func(slot uint32, e *index.Entry) {
		if e.Is(index.Evicting) {
			return
		}
		if !c.knows(slot) && c.err == nil { // another host's, from the last moment
			if e.LastTouch() == 0 {
				v.x.TouchEntry(e)
			}
			c.announce(v, slot, v.x.Fingerprint(slot))
		}
		e.Set(index.Announced)
	})
	v.scanning = false
	if c.err != nil {
		v.Fail(c.err)
	}
	end()
	return nil
}

// Resume lets the policy continue from a state, or else tells it what is here, at the start, when no session waits.
func (v *Evictor) Resume(ctx context.Context, state policy.State) {
	if state.Format != "" {
		next, err := v.start(ctx, v.active, v.size, state)
		if err == nil && next.Loaded() {
			_ = v.policy.Close()
			v.policy = next
			v.x.Each(func(_ uint32, e *index.Entry) { e.Set(index.Announced) })
			return
		}
		if err == nil {
			err = next.Close()
		}
		if err != nil {
			v.cfg.Log.Warn("evict policy's saved state not used: it is told of all entries instead", "error", err)
		}
	}
	for _, slot := range v.x.ByLastTouch() {
		if v.fallback != nil { // it failed; the next one gets all entries
			v.x.At(slot).Set(index.Announced)
			continue
		}
		fp := v.x.Fingerprint(slot)
		v.Announce(abi.OpResident, slot, fp, 0)
		if v.x.At(slot).Pins() > 0 {
			v.Tell(abi.OpPin, slot, fp, 0)
		}
	}
}

// candidate is a policy that is told what is here while another one decides. Events that happen at the same time reach it too,
// so it can take over between any two of them.
type candidate struct {
	policy *policy.Evict
	told   []uint64 // slots it knows, a bit each
	whole  bool     // it knows all: it has the state of the active policy
	held   []abi.Event
	err    error
}

func (c *candidate) knows(slot uint32) bool {
	return int(slot/64) < len(c.told) && c.told[slot/64]&(1<<(slot%64)) != 0
}

func (c *candidate) note(slot uint32, known bool) {
	for int(slot/64) >= len(c.told) {
		c.told = append(c.told, 0)
	}
	if known {
		c.told[slot/64] |= 1 << (slot % 64)
	} else {
		c.told[slot/64] &^= 1 << (slot % 64)
	}
}

func (c *candidate) send(ev abi.Event) {
	switch {
	case c.err != nil:
	case c.policy == nil || len(c.held) > 0:
		c.held = append(c.held, ev)
	default:
		c.err = c.policy.Event(ev)
	}
}

// follow passes on an event that the active policy got. What it changes in an entry that the candidate does not know
// yet is in the index, and told with the entry: at once when it is a touch, because a later place in the order would be
// wrong, or when an entry that was to leave stays.
func (c *candidate) follow(v *Evictor, ev abi.Event) {
	switch {
	case c.whole || ev.Op == abi.OpRequestEnd:
		c.send(ev)
		return
	case ev.Op == abi.OpInsert:
		c.note(ev.Slot, true)
	case !c.knows(ev.Slot):
		if ev.Op == abi.OpTouch || ev.Op == abi.OpResident {
			c.announce(v, ev.Slot, ev.Key)
		}
		return
	case ev.Op == abi.OpRemove:
		c.note(ev.Slot, false)
	case ev.Op == abi.OpResident:
		return // the active policy is new itself
	}
	if ev.Parent != index.None && !c.knows(ev.Parent) {
		if ev.Op == abi.OpLink {
			return
		}
		ev.Parent = index.None
	}
	c.send(ev)
}

// announce tells of an entry for the first time, and links the children that came before it.
func (c *candidate) announce(v *Evictor, slot uint32, fp uint64) {
	e := v.x.At(slot)
	cause := Cause{Tenant: v.tenant(slot), Time: v.cfg.Host.Clock()}
	var ev abi.Event
	v.write(&ev, abi.OpResident, slot, e, fp, &cause)
	if parent := v.x.FindFingerprint(ev.ParentKey); parent != index.None && c.knows(parent) {
		ev.Parent = parent
	}
	c.note(slot, true)
	c.send(ev)
	if e.Pins() > 0 {
		ev.Op, ev.Parent = abi.OpPin, index.None
		c.send(ev)
	}
	v.x.Children(fp, func(child uint32) {
		if e := v.x.At(child); c.knows(child) && child != slot {
			cause.Tenant = v.tenant(child)
			v.write(&ev, abi.OpLink, child, e, v.x.Fingerprint(child), &cause)
			ev.Parent = slot
			c.send(ev)
		}
	})
}

// ErrSuperseded says that another policy has taken over since.
var ErrSuperseded = errors.New("store: another policy has taken over")

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

// Method is the way in which an evict policy learned of the entries of its root.
type Method uint8

const (
	// Replayed means that the policy got every entry as an event, in the order of the last touch.
	Replayed Method = iota
	// Loaded means that the policy took over the state of its predecessor.
	Loaded
)

func (m Method) String() string {
	if m == Loaded {
		return "state"
	}
	return "replay"
}

// MaxHandoverState is the maximum number of bytes of state that are taken over. The state is copied under the root's lock, and
// sessions must not wait for long: lru, as a Go module, takes 3 ms for this size. A policy with more state is told the entries
// in slices instead.
const MaxHandoverState = 2 << 20

// Handover is a running change of a root's evict policy. There is at most one at a time.
type Handover struct {
	To, From *Policy // From is the policy that is replaced
	Method   Method  // how To learned of the entries

	v    *Evictor
	ctx  context.Context
	size Size
	next *candidate
}

// HoldHandovers prevents handovers until AllowHandovers, for example during a scan.
func (v *Evictor) HoldHandovers(ctx context.Context) error { return v.handover.Acquire(ctx, 1) }

// AllowHandovers ends HoldHandovers.
func (v *Evictor) AllowHandovers() { v.handover.Release(1) }

// Prepare starts a new policy, to, and tells it about all entries. The active policy, from, stays active. If there is no error,
// the caller must call Finish or Abandon. Like all methods of a handover, Prepare takes the lock.
func (v *Evictor) Prepare(ctx context.Context, to, from *Policy) (*Handover, error) {
	return PrepareSize(ctx, v, to, from, nil)
}

// PrepareSize is Prepare for a root that gets another size together with the policy, unless size is nil. to and from may be the
// same policy, which then gets a new instance.
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

// inherit takes over the state of the active policy if both policies have the same format. Events are held back for the new
// policy until it has the state.
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

// catchUp delivers the held-back events, a slice at a time.
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

// learn tells the policy about all entries in the order of the last touch.
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

// tell tells the candidate about all entries in the order of the last touch, holding the lock for a slice at a time. It leaves
// out entries that are about to leave, because the active policy was already told of their removal. In a scan it includes entries
// that no policy knows yet.
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

// Abandon ends the handover. The active policy stays.
func (h *Handover) Abandon() {
	h.v.setCandidate(nil)
	if h.next != nil && h.next.policy != nil {
		_ = h.next.policy.Close()
	}
	h.v.AllowHandovers()
}

// Ready returns an error if the policy cannot take over, because it has failed in between or the store is closing.
func (h *Handover) Ready() error {
	v, next := h.v, h.next
	v.mu.Lock()
	defer v.mu.Unlock()
	if next.err == nil {
		next.err = next.policy.Flush()
	}
	return cmp.Or(next.err, v.cfg.Run.Err())
}

// Finish puts the policy into use and returns the number of entries. A failure after Ready is handled like a failure of any active
// policy.
func (h *Handover) Finish() (entries int) {
	v, next := h.v, h.next
	v.mu.Lock()
	before := v.policy
	v.size, v.policy, v.fallback, v.candidate = h.size, next.policy, nil, nil
	if h.To == h.From {
		v.past.Add(before.Stats())
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
	_ = before.Close() // without the lock, because returning its memory takes time
	if h.To != h.From {
		h.From.Release()
	}
	return entries
}

// SetScanning records whether a scan is running, during which the policy is told nothing.
func (v *Evictor) SetScanning(on bool) { v.scanning = on }

// EndScan tells the policy about all entries that a scan has found, in the order of the last touch. When the policy knows all of
// them, EndScan calls end with the lock held. If ctx ends before that, the scan has not ended, and EndScan returns an error.
// Otherwise the state of the policy would be saved, and the missing entries would never be victims. It takes the lock.
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
		if !c.knows(slot) && c.err == nil { // an entry of another host that was added at the last moment
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

// Resume makes the policy continue from a state. If it cannot, it is told about all entries. Resume is called at the start, when
// no session waits.
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
		if v.fallback != nil { // it failed; its next instance will be told all entries
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

// candidate is a policy that is told about the entries while another one is active. It also gets the events that happen at the
// same time, so it can take over between any two of them.
type candidate struct {
	policy *policy.Evict
	told   []uint64 // a bit for each slot that it knows
	whole  bool     // it knows all entries, because it has the state of the active policy
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

// follow passes on an event of the active policy. For an entry that the candidate does not know yet, the change is in the index
// and will be told together with the entry. The entry is told at once after a touch, because a later place in the order would be
// wrong, and if it was about to leave and stays.
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
		return // the active policy is itself new
	}
	if ev.Parent != index.None && !c.knows(ev.Parent) {
		if ev.Op == abi.OpLink {
			return
		}
		ev.Parent = index.None
	}
	c.send(ev)
}

// announce tells the policy about an entry for the first time, and links the children that it already knows.
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

// ErrSuperseded means that another policy has taken over in the meantime.
var ErrSuperseded = errors.New("store: another policy has taken over")

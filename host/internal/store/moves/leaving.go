package moves

import (
	"context"
	"slices"
	"sync"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/index"
)

// Leaving makes entries of a root leave for the next level. The root evicts ahead of need: the entries that its policy names
// are copied, served as before, and removed when a put needs their bytes. A put never waits for a copy: if no leaving entry has
// its copy yet, the one with the fewest hits goes without.
type Leaving struct {
	From  *Origin
	To    Level // nil if evicted entries are dropped
	Mover *Mover
	Takes func() bool // reports whether the root and the next level are in service
	Peers bool        // To is the level of other hosts
	Kept  Kind        // kind of the copies by Drain: Demotion, or Through if all entries are copied anyway
	Ahead int64       // divisor of the root that gives the part kept free or for entries that leave

	wake   chan struct{}
	turn   sync.Mutex       // held while entries are offered
	wanted map[uint32]int64 // bytes that should leave soon, by tenant or None for any; guarded by the set's lock
}

// Values of Ahead. If entries are copied when they leave, a burst of new entries needs room. If they were copied when they were
// stored, little room is enough.
const (
	AheadBack    = 4
	AheadThrough = 16
)

// Init prepares for Run.
func (l *Leaving) Init() { l.wake, l.wanted = make(chan struct{}, 1), map[uint32]int64{} }

// due returns the bytes of entries that should leave now. The set's lock must be held.
func (l *Leaving) due() int64 {
	if !l.can() {
		return 0
	}
	return max(0, max(l.wanted[abi.None], l.From.Account.Excess(1-1/float64(l.Ahead)))-l.From.Moves.Leaving())
}

// can reports whether entries can leave at present. The set's lock must be held.
func (l *Leaving) can() bool { return l.To != nil && !l.From.Scanning() && l.Takes() }

// Wake makes entries leave if that is due. The set's lock must be held.
func (l *Leaving) Wake() {
	if len(l.wanted) > 0 || l.due() > 0 {
		select {
		case l.wake <- struct{}{}:
		default:
		}
	}
}

// Run makes entries leave until the context is done.
func (l *Leaving) Run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-l.wake:
			l.Step()
		}
	}
}

// Step makes entries leave as far as due, and offers them to the next level.
func (l *Leaving) Step() {
	if l.To == nil {
		return
	}
	l.turn.Lock()
	defer l.turn.Unlock()
	var list []*entries.Move
	s := l.From.Set
	s.Lock()
	leave := func(bytes int64, tenant uint32) {
		if bytes <= 0 {
			return
		}
		s.Evictor.Victims(bytes, tenant, func(slot uint32) {
			if m := s.Moves.Leave(slot); m != nil {
				list = append(list, m)
			}
		})
	}
	for tenant, bytes := range l.wanted {
		if tenant != abi.None && l.can() {
			leave(bytes-s.Moves.LeavingOf(tenant), tenant)
		}
	}
	leave(l.due(), abi.None)
	clear(l.wanted)
	s.Unlock()
	for _, m := range list {
		(&Entry{Move: m, Kind: Demotion, From: l.From, To: l.To, Ended: l.Wake}).Offer(l.Mover)
	}
}

// Through offers an entry that was just stored to the next level. It does nothing if the entry is not complete yet.
func (l *Leaving) Through(m entries.Mark) {
	var v *entries.Move
	s := l.From.Set
	s.Lock()
	if s.Stands(m) {
		v = s.Moves.Through(m.Slot)
	}
	s.Unlock()
	if v != nil {
		(&Entry{Move: v, Kind: Through, From: l.From, To: l.To, Ended: l.Wake}).Offer(l.Mover)
	}
}

// Evict begins to evict the entries of list until the given bytes are freed. If tenant is not None, it evicts only entries of the tenant.
// Entries that leave go first, and among them those with their copy. If spares is not 0, entries without a copy and with at
// least spares hits stay. behind is then true if the bytes do not suffice, and some entry will have its copy soon. The set's
// lock must be held.
func (l *Leaving) Evict(list []entries.Eviction, bytes int64, tenant, spares uint32) (begun []entries.Eviction, behind bool) {
	s := l.From.Set
	if l.To == nil {
		return l.dropVictims(list, bytes, tenant), false
	}
	if l.Peers {
		spares = 0
	}
	if l.can() {
		l.want(bytes, tenant)
	}
	for bytes > 0 {
		slot, settled := s.Moves.NextLeaving(tenant, spares)
		if slot == index.None {
			break
		}
		if !settled {
			l.To.Count()[Demotion].Shed.Add(1)
		}
		bytes -= s.Index.Bytes(slot)
		list = append(list, s.BeginEvict(slot))
	}
	if bytes > 0 && spares > 0 {
		l.Wake()
		return list, true
	}
	return l.dropVictims(list, bytes, tenant), false
}

// want requests that as much leaves as is evicted now, even if the root is not full, as for a tenant at its quota.
func (l *Leaving) want(bytes int64, tenant uint32) {
	if tenant != abi.None || bytes > l.From.Moves.Leaving() {
		l.wanted[tenant] = max(l.wanted[tenant], bytes)
	}
}

// dropVictims begins to evict the entries that the policy names.
func (l *Leaving) dropVictims(list []entries.Eviction, bytes int64, tenant uint32) []entries.Eviction {
	if bytes <= 0 {
		return list
	}
	s := l.From.Set
	sheds := l.can()
	s.Evictor.Victims(bytes, tenant, func(slot uint32) {
		if sheds && !l.From.Copies.Several(s.Index.Fingerprint(slot)) {
			l.To.Count()[Demotion].Shed.Add(1)
		}
		list = append(list, s.BeginEvict(slot))
	})
	return list
}

// Drain offers the entries of the root to the next level until the context is done. Entries with hits come first, and in both
// groups the most recently used prefixes. It returns the number of entries with a copy there, and of those without one although
// the level wants them. Nothing else may use the root.
func (l *Leaving) Drain(ctx context.Context) (kept, left int) {
	count, lane := &l.To.Count()[l.Kept], l.Mover.lanes[l.To.Number()]
	before := count.Done.Load() + count.Cancelled.Load()
	offered := 0
	for _, slot := range l.order() {
		if l.Mover.await(ctx, func() bool { return len(lane.of) < l.Mover.cfg.Workers }) != nil {
			left++
			continue
		}
		l.From.Lock()
		m := l.From.Moves.Copy(slot)
		l.From.Unlock()
		if m == nil {
			continue
		}
		if (&Entry{Move: m, Kind: l.Kept, From: l.From, To: l.To}).Offer(l.Mover) {
			offered++
		}
	}
	_ = l.Mover.await(ctx, func() bool { return lane.moves == 0 })
	waiting, _ := l.Mover.InFlight()
	after := count.Done.Load() + count.Cancelled.Load()
	return int(after - before), left + min(waiting, offered)
}

// order lists the slots of entries. Entries with hits come first, and in both groups the most recently used ones, but each
// entry comes after its ancestors.
func (l *Leaving) order() (list []uint32) {
	s := l.From.Set
	s.Lock()
	defer s.Unlock()
	recent := s.Index.ByLastTouch()
	slices.Reverse(recent)
	slices.SortStableFunc(recent, func(a, b uint32) int { return int(min(1, s.Hits.Of(b))) - int(min(1, s.Hits.Of(a))) })
	listed := make(map[uint32]bool, len(recent))
	var chain []uint32
	for _, slot := range recent {
		for chain = chain[:0]; slot != index.None && !listed[slot]; {
			listed[slot] = true
			chain = append(chain, slot)
			slot = s.Index.FindFingerprint(s.Index.At(slot).Parent())
		}
		slices.Reverse(chain)
		list = append(list, chain...)
	}
	return list
}

package moves

import (
	"context"
	"slices"
	"sync"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/index"
)

// Leaving lets entries of a root leave for the next level. The root evicts ahead of need: what its policy names is
// copied there, is served as before, and goes when a put needs its bytes. A put never waits for a copy: where what leaves has
// none yet, what was hit least goes without.
type Leaving struct {
	From  *Origin
	To    Level // nil: what is evicted is dropped
	Mover *Mover
	Takes func() bool // the root is in service, and so is the next level
	Peers bool        // To is other hosts
	Kept  Kind        // as what entries are copied at the end: Demotion, or Through where all is copied anyway
	Ahead int64       // the part of the root, 1/n, that is kept free or for entries that leave

	wake   chan struct{}
	turn   sync.Mutex       // held while entries are offered
	wanted map[uint32]int64 // bytes that should leave soon, by tenant or for any; the set's lock guards it
}

// How much leaves ahead. What is copied when it leaves needs room for a burst of what is new; what was copied as it came needs little.
const (
	AheadBack    = 4
	AheadThrough = 16
)

// Init prepares for Run.
func (l *Leaving) Init() { l.wake, l.wanted = make(chan struct{}, 1), map[uint32]int64{} }

// due is how many bytes of entries should leave now. The set's lock is held.
func (l *Leaving) due() int64 {
	if !l.can() {
		return 0
	}
	return max(0, max(l.wanted[abi.None], l.From.Account.Excess(1-1/float64(l.Ahead)))-l.From.Moves.Leaving())
}

// can says whether entries can leave at present. The set's lock is held.
func (l *Leaving) can() bool { return l.To != nil && !l.From.Scanning() && l.Takes() }

// Wake lets entries leave if that is due. The set's lock is held.
func (l *Leaving) Wake() {
	if len(l.wanted) > 0 || l.due() > 0 {
		select {
		case l.wake <- struct{}{}:
		default:
		}
	}
}

// Run lets entries leave until the context is done.
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

// Step lets entries leave as far as is due, and offers them to the next level.
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

// Through offers an entry that was just stored to the next level. Nothing is done where it is not whole yet.
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

// Evict begins to evict entries, up to the bytes wanted; only those of the tenant, if one is named. Those that leave go first, and of
// these what has its copy. What has none, and so many hits as spares says, stays, unless that is 0: then the root is behind, and
// something will have its copy soon. The set's lock is held.
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

// want lets as much leave as goes now, also where the root is not full, as for a tenant at its quota.
func (l *Leaving) want(bytes int64, tenant uint32) {
	if tenant != abi.None || bytes > l.From.Moves.Leaving() {
		l.wanted[tenant] = max(l.wanted[tenant], bytes)
	}
}

// dropVictims begins to evict what the policy names.
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

// Drain offers what the root holds to the next level, what was hit before the rest and of each the most recently used prefixes first, until
// the context is done.
// It returns how many entries have a copy there, and how many have none although the level wants them. Nothing else
// uses the root.
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

// order lists the slots of entries: what was hit first, and of that the most recently used, but each after the entries that it continues.
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

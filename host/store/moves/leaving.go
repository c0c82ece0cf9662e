package moves

import (
	"context"
	"sync"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/store/entries"
	"github.com/kvhost/kvhost/host/store/index"
)

// Leaving lets entries of a root leave for the next level. The root evicts ahead of need: what its policy names is
// copied there meanwhile, is served as before, and goes when a put needs its bytes. A put never waits for a copy: an
// entry that has none yet goes without.
type Leaving struct {
	From  *Origin
	To    Level // nil: what is evicted is dropped
	Mover *Mover
	Takes func() bool // the root is in service

	wake chan struct{}
	turn sync.Mutex // held while entries are offered
}

// leavingAhead is the part of a root, 1/n, that is kept free or for entries that leave.
const leavingAhead = 16

// Init prepares for Run.
func (l *Leaving) Init() { l.wake = make(chan struct{}, 1) }

// due is how many bytes of entries should leave now. The set's lock is held.
func (l *Leaving) due() int64 {
	if l.To == nil || l.From.Scanning() || !l.Takes() {
		return 0
	}
	return max(0, l.From.Account.Excess(1-1.0/leavingAhead)-l.From.Moves.Leaving())
}

// Wake lets entries leave if that is due. The set's lock is held.
func (l *Leaving) Wake() {
	if l.due() > 0 {
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
	l.turn.Lock()
	defer l.turn.Unlock()
	var list []*entries.Move
	s := l.From.Set
	s.Lock()
	if bytes := l.due(); bytes > 0 {
		s.Evictor.Victims(bytes, abi.None, func(slot uint32) {
			if m := s.Moves.Leave(slot); m != nil {
				list = append(list, m)
			}
		})
	}
	s.Unlock()
	for _, m := range list {
		(&Entry{Move: m, Kind: Demotion, From: l.From, To: l.To}).Offer(l.Mover)
	}
}

// Evict begins to evict entries, up to the bytes wanted: those that leave, and then what the policy names. Only those
// of the tenant go, if one is named. The set's lock is held.
func (l *Leaving) Evict(list []entries.Eviction, bytes int64, tenant uint32) []entries.Eviction {
	s := l.From.Set
	shed := func() {
		if l.To != nil {
			l.To.Count()[Demotion].Shed.Add(1)
		}
	}
	for l.To != nil && bytes > 0 {
		slot, settled := s.Moves.NextLeaving(tenant)
		if slot == index.None {
			break
		}
		if !settled {
			shed()
		}
		bytes -= s.Index.Bytes(slot)
		list = append(list, s.BeginEvict(slot))
	}
	if bytes > 0 {
		s.Evictor.Victims(bytes, tenant, func(slot uint32) {
			shed() // there was no time for a copy
			list = append(list, s.BeginEvict(slot))
		})
	}
	return list
}

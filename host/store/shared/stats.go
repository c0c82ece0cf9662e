package shared

import "time"

// Stats is what a member looks like from outside.
type Stats struct {
	State    State
	Member   string
	Evictor  bool
	Epoch    uint64
	Peers    int // other members
	Lag      time.Duration
	Granted  int64
	Free     int64 // credit
	Want     int64
	Refused  uint64 // credits that were not there
	Journal  int    // batches undecided
	Outside  int64  // evictor: credit that is out, over all members
	Reigns   uint64 // times that this host became the evictor
	Unlogged int    // publications that the others have not been told of
	Removed  uint64 // evictor: entries
	Spared   uint64 // evictor: entries, by veto
	Deaths   uint64 // evictor: members given up
}

func (m *Member) tell() {
	old := m.facts.Load()
	s := Stats{
		Member: m.name, Evictor: m.reign != nil, Epoch: m.epoch, Lag: m.lag, Journal: len(m.batches), Unlogged: m.pending.len(),
		Reigns: old.Reigns, Removed: old.Removed, Spared: old.Spared, Deaths: old.Deaths, Outside: 0,
	}
	switch {
	case m.active():
		s.State = Active
	case m.admitted:
		s.State = Admitted
	}
	s.Peers = len(m.tails)
	if r := m.reign; r != nil {
		if !r.counted {
			r.counted = true
			s.Reigns++
		}
		s.Outside = r.outside
		s.Removed, s.Spared, s.Deaths = s.Removed+r.removed, s.Spared+r.spared, s.Deaths+r.deaths
		r.removed, r.spared, r.deaths = 0, 0, 0
	}
	m.facts.Store(&s)
}

// Stats may be called at any time.
func (m *Member) Stats() Stats {
	s := *m.facts.Load()
	c := &m.credits
	c.mu.Lock()
	defer c.mu.Unlock()
	s.Granted, s.Free, s.Want, s.Refused = c.granted, c.free(), c.want, c.refused
	return s
}

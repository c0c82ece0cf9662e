package shared

import "time"

// Stats describes a member.
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
	Held     int64  // bytes of puts of earlier incarnations, which may have files open
	Refused  uint64 // requests for credit that were refused
	Journal  int    // batches undecided
	Outside  int64  // evictor: outstanding credit of all members
	Terms    uint64 // times this host became the evictor
	Unlogged int    // publications not logged yet
	Removed  uint64 // evictor: entries
	Spared   uint64 // evictor: entries, by veto
	GivenUp  uint64 // evictor: members given up
}

func (m *Member) publishStats() {
	old := m.facts.Load()
	s := Stats{
		Member: m.name, Evictor: m.term != nil, Epoch: m.seen.epoch, Lag: m.lag, Journal: len(m.batches),
		Unlogged: m.pending.len(),
		Terms:    old.Terms, Removed: old.Removed, Spared: old.Spared, GivenUp: old.GivenUp, Outside: 0,
	}
	switch {
	case m.active():
		s.State = Active
	case m.admitted:
		s.State = Admitted
	}
	s.Peers = len(m.tails)
	if r := m.term; r != nil {
		if !r.counted {
			r.counted = true
			s.Terms++
		}
		s.Outside = r.outside
		s.Removed, s.Spared, s.GivenUp = s.Removed+r.removed, s.Spared+r.spared, s.GivenUp+r.givenUp
		r.removed, r.spared, r.givenUp = 0, 0, 0
	}
	m.facts.Store(&s)
}

// Stats returns the figures of the latest step.
func (m *Member) Stats() Stats {
	s := *m.facts.Load()
	c := &m.credits
	c.mu.Lock()
	defer c.mu.Unlock()
	s.Granted, s.Free, s.Want, s.Held, s.Refused = c.granted, c.free(), c.want, c.held, c.refused
	return s
}

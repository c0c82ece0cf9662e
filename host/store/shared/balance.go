package shared

import (
	"cmp"
	"slices"
	"time"
)

// maxBatch bounds the victims of one batch.
const maxBatch = 4096

// balance hands out credit, and proposes victims where there is too little.
func (m *Member) balance(now time.Duration) error {
	r := m.reign
	r.outside = 0
	live := make([]string, 0, len(r.peers))
	for name, p := range r.peers {
		if !p.swept {
			if p.unknown {
				return nil // what it may have written is not known before it has been cleared away
			}
			r.outside += p.outstanding(m.published(name))
		}
		if !p.gone {
			live = append(live, name)
		}
	}
	if !m.active() {
		return nil // it does not know yet what is there
	}
	// Who wants most is first: what is left for the last ones is a share of what is left.
	slices.SortFunc(live, func(a, b string) int {
		return cmp.Or(cmp.Compare(r.peers[a].short(), r.peers[b].short()), cmp.Compare(a, b))
	})
	used := m.back.Used()
	room := m.cfg.Capacity - used - r.outside
	var unmet int64
	for i, name := range live {
		p := r.peers[name]
		short := p.short()
		give := min(short, max(0, room)/int64(len(live)-i))
		unmet += short - give
		if give <= 0 {
			continue
		}
		p.granted += give
		room -= give
		r.outside += give
		if err := m.tellGrant(name, p); err != nil {
			return err // what was reckoned with stays so, and the file is written at the next step
		}
	}
	return m.evict(used + r.outside + unmet)
}

// published is how much a member's log tells that it has published.
func (m *Member) published(name string) int64 {
	if name == m.name {
		return m.out.published
	}
	if t := m.tails[name]; t != nil {
		return t.published
	}
	return 0
}

func (p *peer) outstanding(published int64) int64 {
	return max(0, p.granted-p.status.Returned-published)
}

// short is how much more credit a peer wants than it has. Until it has seen what it was given last, it is nothing.
func (p *peer) short() int64 {
	if p.status.Beat < p.beatOf+2 {
		return 0
	}
	return max(0, p.status.Want-p.status.Free)
}

// evict proposes victims when the level is too high, and damaged entries in any case.
func (m *Member) evict(level int64) error {
	r := m.reign
	for n, b := range r.batches {
		if _, mine := m.batches[n]; mine || !b.decided {
			level -= b.bytes() // on their way out
		}
	}
	var victims []Victim
	for _, v := range m.forced {
		if len(victims) == maxBatch {
			break
		}
		victims = append(victims, v)
	}
	if level > int64(m.cfg.High*float64(m.cfg.Capacity)) {
		victims = append(victims, m.back.Victims(level-int64(m.cfg.Low*float64(m.cfg.Capacity)))...)
	}
	for part := range slices.Chunk(victims, maxBatch) {
		m.propose(batch{victims: part})
		for i := range part {
			if id := part[i].ID(); m.forced[id] != (Victim{}) {
				delete(m.forced, id)
				m.reported[id] = true
			}
		}
	}
	if len(victims) > 0 {
		m.wake()
	}
	return nil
}

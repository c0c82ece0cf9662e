package shared

import (
	"cmp"
	"slices"
)

// maxBatch is the maximum number of victims in a batch.
const maxBatch = 4096

// Eviction begins when more than high of the capacity is in use or granted, and frees space down to low.
const high, low = 0.95, 0.90

// balance grants credit, and proposes victims if there is too little room.
func (t *term) balance() error {
	t.outside = 0
	live := make([]string, 0, len(t.peers))
	for name, p := range t.peers {
		if !p.swept {
			if p.unknown {
				return nil // Its bytes are unknown until its temporaries are cleared.
			}
			t.outside += p.outstanding(t.published(name))
		}
		if !p.gone {
			live = append(live, name)
			t.outside += p.status.Held
		}
	}
	if !t.m.active() {
		return nil // not all entries are known yet
	}
	// The smallest wishes are served first; the rest is shared among the larger ones.
	slices.SortFunc(live, func(a, b string) int {
		return cmp.Or(cmp.Compare(t.peers[a].short(), t.peers[b].short()), cmp.Compare(a, b))
	})
	used := t.m.back.Used()
	room := t.m.cfg.Capacity - used - t.outside
	shorts := make([]int64, len(live))
	for i, name := range live {
		shorts[i] = t.peers[name].short()
	}
	gives, unmet := Portions(room, shorts)
	for i, name := range live {
		p := t.peers[name]
		if gives[i] == 0 {
			continue
		}
		p.granted += gives[i]
		t.outside += gives[i]
		if err := t.writeGrant(name, p); err != nil {
			return err // The grant stays counted, and the file is written at the next step.
		}
	}
	return t.evict(used + t.outside + unmet)
}

// Portions divides room among hosts. shorts holds the number of bytes that each host lacks, in ascending order. Bytes that the
// first hosts do not need are divided among the rest. unmet is the number of bytes that could not be given.
func Portions(room int64, shorts []int64) (gives []int64, unmet int64) {
	gives = make([]int64, len(shorts))
	for i, short := range shorts {
		gives[i] = min(short, max(0, room)/int64(len(shorts)-i))
		room -= gives[i]
		unmet += short - gives[i]
	}
	return gives, unmet
}

// Excess returns the number of bytes to evict if level bytes are in use, granted or wanted.
func Excess(level, capacity int64) int64 {
	if level <= int64(high*float64(capacity)) {
		return 0
	}
	return level - int64(low*float64(capacity))
}

// published returns the bytes that a member's log says it published.
func (t *term) published(name string) int64 {
	if name == t.m.name {
		return t.m.out.published
	}
	if t := t.m.tails[name]; t != nil {
		return t.published
	}
	return 0
}

func (p *peer) outstanding(published int64) int64 {
	return max(0, p.granted-p.status.Returned-published)
}

// short returns the credit that a peer lacks. It is 0 until the peer has seen its latest grant.
func (p *peer) short() int64 {
	if p.status.Beat < p.grantedAt+2 {
		return 0
	}
	return p.status.Short()
}

// evict proposes damaged entries, and victims when level is above the high watermark.
func (t *term) evict(level int64) error {
	for n, b := range t.batches {
		if _, mine := t.m.Batches[n]; mine || !b.decided {
			level -= b.bytes() // these bytes are being removed
		}
	}
	victims := t.m.Choose(t.proposed(), Excess(level, t.m.cfg.Capacity), maxBatch)
	for part := range slices.Chunk(victims, maxBatch) {
		t.propose(batch{victims: part})
		t.m.Proposed(part)
	}
	if len(victims) > 0 {
		t.m.Wake()
	}
	return nil
}

// proposed returns the entries in undecided batches. This store does not withhold the entries of an earlier evictor's batch
// until it has acknowledged the batch. A victim must not be in two batches: if the first spared it, it could be leased again
// and then be removed by the second.
func (t *term) proposed() map[ID]bool {
	list := map[ID]bool{}
	for _, b := range t.batches {
		for i := range b.victims {
			if !b.decided {
				list[b.victims[i].ID()] = true
			}
		}
	}
	return list
}

// Package reuse is an admit policy for levels. It decides about copies between levels by how often similar chunks were used again.
//
// If a level is small compared with the time between two turns of a conversation, it evicts most chunks before their first hit, so hits say
// little about them. But chunks of the same kind behave alike. A kind consists of three facts: whether the request continued a conversation
// or began one after a shared prompt; whether it added many chunks; and whether the chunk is its last one, which is hardly ever the
// beginning of something longer. More kinds would give worse results: each would be based on fewer chunks, and a kind that is judged too
// low loses the prefixes of others.
//
// The policy records the request of each chunk. When its level evicts the chunk, the eviction is counted for the kind. When the chunk is
// used again, that is counted as well. A use is a hit there, a load from a farther level, or another store after no level had kept the
// chunk. Refused chunks are observed like all others, so that a wrong judgement is noticed.
//
// A chunk that returned after its removal is demoted from then on, regardless of its kind, just as 2Q, LARC and S3-FIFO admit the entries
// in their ghost queues. A chunk that a request only stores again does not count as added by it.
//
// The policy demotes chunks with a hit, and chunks of a kind that returns nearly as often as the average, unless their prefix was refused.
// It promotes a chunk at the second hit, or at the first if there is room. It admits all new chunks. A new chunk that finds no room in the
// nearest level is stored in the next one, unless it is the end of a request and of a kind that hardly ever returns. Candidates that
// concern other hosts are decided by the host's own rule.
package reuse

import (
	"math/bits"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
)

const (
	lastOne   uint8 = 1 << iota // bits of a kind: the chunk is the request's last one
	goesOn                      // the request continued chunks that few others continue
	addedMuch                   // the request added many chunks
	kinds     = 1 << iota

	few  = 4 // if more requests continue the same chunk, it belongs to a shared prompt
	much = 8 // number of added chunks that counts as many

	ring       = 1 << 12 // number of recorded requests
	fewest     = 64      // evicted chunks of a kind before the kind is judged
	most       = 1 << 16 // evicted chunks after which all counts are halved
	promotedAt = 2       // number of hits

	ways        = 4 // chunks of a set
	defaultKeys = 1 << 18
	mostKeys    = 1 << 22
)

// chunk is the record of a chunk.
type chunk struct {
	key     uint64
	request uint32
	kind    uint8
	state   uint8
	next    uint8 // number of requests that stored a chunk after it, up to few
}

const (
	counted  uint8 = 1 << iota // the eviction was counted for its kind
	reused                     // the reuse was counted for its kind
	refused                    // refused at its last demotion
	returned                   // stored again after its removal
)

// request is the record of a request: the depths of its first and last new chunk, and whether it continued a
// conversation.
type request struct {
	id, first, last uint32
	on              bool
}

type count struct{ evicted, reused uint32 }

// Policy is a guest.Admitter.
type Policy struct {
	chunks   []chunk // sets of chunks by the hash of the key
	shift    uint    // shift from a hash to the number of its set; the number of sets is a power of two
	requests [ring]request
	kinds    [kinds]count
	all      count
	nearest  uint8  // level in which new chunks are stored
	least    uint64 // how often a kind must return, in percent of the average
}

// New returns an empty policy.
func New(info guest.Info) (*Policy, error) {
	keys, err := info.Config.Int("keys", defaultKeys, 1, mostKeys)
	if err != nil {
		return nil, err
	}
	least, err := info.Config.Int("least", 90, 0, 1000)
	if err != nil {
		return nil, err
	}
	width := uint(bits.Len64(uint64(max(keys, ways)-1) / ways))
	return &Policy{chunks: make([]chunk, ways<<width), shift: 64 - width, nearest: abi.NoLevel, least: uint64(least)}, nil
}

// Admit answers for each candidate.
func (p *Policy) Admit(batch []abi.Candidate, dst []bool) {
	for i := range batch {
		dst[i] = p.admit(&batch[i])
	}
}

func (p *Policy) admit(c *abi.Candidate) bool {
	at := p.at(c.Key)
	switch c.Kind {
	case abi.KindNew:
		if c.From != abi.NoLevel {
			return true // the chunk is written through and was recorded before
		}
		if c.To > p.nearest {
			return at.key != c.Key || p.goesAround(at, c)
		}
		p.nearest = c.To
		if at.key == c.Key {
			p.again(at)
			*at = chunk{key: c.Key, request: c.Request, next: at.next, state: returned}
			return true
		}
		*at = chunk{key: c.Key, request: c.Request}
		p.grow(c)
		return true
	case abi.KindDemotion:
		if admits, decided := guest.Elsewhere(c); decided {
			return admits
		}
		return at.key != c.Key || p.demotes(at, c)
	case abi.KindPromotion:
		if at.key == c.Key {
			p.again(at)
		}
		_, decided := guest.Elsewhere(c)
		room := c.Hits > 0 && c.Flags&abi.CandidateRoom != 0 && c.From != abi.PeerLevel
		return (c.Hits >= promotedAt || room) && !decided
	}
	return false
}

// at returns the record of a key. If there is none, it returns the place for it, which has the oldest record of the
// set.
func (p *Policy) at(key uint64) *chunk {
	set := p.chunks[key*0x9e3779b97f4a7c15>>p.shift*ways:][:ways]
	oldest := &set[0]
	for i := range set {
		if set[i].key == key {
			return &set[i]
		}
		if set[i].request < oldest.request {
			oldest = &set[i]
		}
	}
	return oldest
}

// grow records a chunk that a request stores.
func (p *Policy) grow(c *abi.Candidate) {
	parent := p.at(c.ParentKey)
	known := c.ParentKey != 0 && parent.key == c.ParentKey
	r := &p.requests[c.Request%ring]
	if r.id != c.Request {
		*r = request{id: c.Request, first: c.Depth + 1}
	}
	if c.Depth < r.first {
		r.first, r.on = c.Depth, known && parent.next < few
	}
	r.last = max(r.last, c.Depth)
	if known && parent.next < few {
		parent.next++
	}
}

// demotes decides about a chunk that its level evicts.
func (p *Policy) demotes(at *chunk, c *abi.Candidate) bool {
	at.state &^= refused
	if at.state&counted == 0 {
		r := &p.requests[at.request%ring]
		if at.request == 0 || r.id != at.request {
			return true // the chunk is too old to be judged
		}
		at.kind, at.state = kindOf(r, c), at.state|counted
		p.evicted(at.kind)
	}
	if c.Hits > 0 {
		p.again(at)
		return true
	}
	if at.state&returned != 0 {
		return true
	}
	if p.worth(at.kind) && !p.cutOff(c) {
		return true
	}
	at.state |= refused
	return false
}

// goesAround decides about a new chunk for which the nearest level has no room. It refuses only ends of requests: the chunks
// after any other chunk may find room again, and would then lack their prefix.
func (p *Policy) goesAround(at *chunk, c *abi.Candidate) bool {
	r := &p.requests[at.request%ring]
	return r.id != at.request || at.state&returned != 0 || kindOf(r, c)&lastOne == 0 || p.demotes(at, c)
}

// cutOff reports whether a chunk's prefix was refused, so that no request can use the chunk.
func (p *Policy) cutOff(c *abi.Candidate) bool {
	parent := p.at(c.ParentKey)
	return c.Flags&abi.CandidateParentResident == 0 && c.ParentKey != 0 && parent.key == c.ParentKey &&
		parent.state&refused != 0
}

// again counts the reuse of a chunk once.
func (p *Policy) again(at *chunk) {
	if at.state&(counted|reused) == counted {
		at.state |= reused
		p.kinds[at.kind].reused++
		p.all.reused++
	}
}

// evicted counts an eviction. All counts are halved at times, so that older events count less.
func (p *Policy) evicted(kind uint8) {
	p.kinds[kind].evicted++
	if p.all.evicted++; p.all.evicted < most {
		return
	}
	p.all = count{}
	for i := range p.kinds {
		k := &p.kinds[i]
		k.evicted /= 2
		k.reused /= 2
		p.all.evicted += k.evicted
		p.all.reused += k.reused
	}
}

// worth reports whether a kind returns often enough, compared with the average. A kind with few evictions counts as
// worth it.
func (p *Policy) worth(kind uint8) bool {
	k := &p.kinds[kind]
	return k.evicted < fewest ||
		uint64(k.reused)*uint64(p.all.evicted)*100 >= uint64(p.all.reused)*uint64(k.evicted)*p.least
}

func kindOf(r *request, c *abi.Candidate) (kind uint8) {
	if c.Depth >= r.last && c.Flags&abi.CandidateContinued == 0 {
		kind = lastOne
	}
	if r.on {
		kind |= goesOn
	}
	if r.last-r.first+1 >= much {
		kind |= addedMuch
	}
	return kind
}

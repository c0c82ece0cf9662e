// Package reuse decides what moves between levels by how often chunks like it came back.
//
// A level that is small compared with the time between two turns of a conversation evicts most chunks before their first hit, so
// that hits say little about them. But chunks of a kind fare alike. A kind is three answers: whether the request went on
// with a conversation, or began one after what many prompts share; whether it added much; and whether the chunk is its last
// one, which is hardly ever the start of something longer. More and finer kinds do worse: each is known from fewer chunks,
// and a kind that is thought too little of loses the prefixes of others.
//
// The policy remembers from which request a chunk came. When its level evicts the chunk, the kind counts it. When the chunk
// is used again (it was hit there, is loaded from farther away, or is stored anew after no level kept it), the kind counts
// that, too. Refused chunks are watched as the others are, so that a kind that was misjudged is found out.
//
// What comes back after it went is demoted from then on, whatever its kind, as 2Q, LARC and S3-FIFO admit what their ghost
// queues still know; and a request has not added what it only stores again.
//
// It demotes what was hit, and what is of a kind that comes back nearly as often as the average, unless its prefix was
// refused. It promotes at the second hit, or at the first where there is room, and admits everything new. What is new and finds no
// room in the nearest level is stored in the next one, except for ends that hardly ever come back. What concerns other hosts is
// decided as by the host itself.
package reuse

import (
	"math/bits"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
)

const (
	lastOne   uint8 = 1 << iota // bits of a kind: the request's last chunk
	goesOn                      // the request continued what few others do
	addedMuch                   // and added many chunks
	kinds     = 1 << iota

	few  = 4 // requests that continue the same chunk: more of them have a prefix in common
	much = 8 // chunks

	ring       = 1 << 12 // requests that are remembered
	fewest     = 64      // chunks of a kind before it is judged
	most       = 1 << 16 // chunks counted before all counts are halved
	promotedAt = 2       // hits

	ways        = 4 // chunks of a set
	defaultKeys = 1 << 18
	mostKeys    = 1 << 22
)

// chunk is what is known about a chunk.
type chunk struct {
	key     uint64
	request uint32
	kind    uint8
	state   uint8
	next    uint8 // requests that stored a chunk after it, up to few
}

const (
	counted  uint8 = 1 << iota // by its kind, as evicted
	reused                     // and as used again
	refused                    // at its last demotion
	returned                   // it was stored anew after it had gone
)

// request is what a request stored: the depths of its first and last new chunk, and whether it went on.
type request struct {
	id, first, last uint32
	on              bool
}

type count struct{ evicted, reused uint32 }

// Policy is a guest.Admitter.
type Policy struct {
	chunks   []chunk // in sets by hash of the key
	shift    uint    // from a hash to a set; there is a power of two
	requests [ring]request
	kinds    [kinds]count
	all      count
	nearest  uint8  // level that new chunks are stored in
	least    uint64 // how often a kind must come back, in percent of the average
}

// New makes an empty policy.
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
			return true // it is written through, and known
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

// at is where a key is, if it is known, and else where it would be: in place of the one of its set that is there longest.
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

// grow notes a chunk that a request stores.
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

// demotes judges a chunk that its level evicts.
func (p *Policy) demotes(at *chunk, c *abi.Candidate) bool {
	at.state &^= refused
	if at.state&counted == 0 {
		r := &p.requests[at.request%ring]
		if at.request == 0 || r.id != at.request {
			return true // it is too old to be judged
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

// goesAround judges a chunk that its level has no room for. Only ends are refused: what is stored next may find room again,
// and would be cut off.
func (p *Policy) goesAround(at *chunk, c *abi.Candidate) bool {
	r := &p.requests[at.request%ring]
	return r.id != at.request || at.state&returned != 0 || kindOf(r, c)&lastOne == 0 || p.demotes(at, c)
}

// cutOff says that a chunk's prefix was refused, so that no request can use it.
func (p *Policy) cutOff(c *abi.Candidate) bool {
	parent := p.at(c.ParentKey)
	return c.Flags&abi.CandidateParentResident == 0 && c.ParentKey != 0 && parent.key == c.ParentKey &&
		parent.state&refused != 0
}

// again counts a chunk that is used again, once.
func (p *Policy) again(at *chunk) {
	if at.state&(counted|reused) == counted {
		at.state |= reused
		p.kinds[at.kind].reused++
		p.all.reused++
	}
}

// evicted counts a chunk. Now and then all counts are halved: what happened long ago counts less.
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

// worth says whether a kind comes back often enough, compared with the average. A kind that is hardly known does.
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

package store

import (
	"context"
	"fmt"
	"math/bits"
	"sync"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy/shadow"
	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/moves"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// PutRequest names a piece that is to be stored.
type PutRequest struct {
	Namespace *catalog.Namespace
	Group     uint32
	Parent    kv.Key // kv.Root for a prefix's first chunk
	Key       kv.Key
	Depth     uint32
	Rank      uint32
	Ranks     uint64 // pieces that make the entry complete, one bit per rank; 0: all ranks of the namespace
	Request   uint32
	Tenant    uint32
	Continued bool    // the caller puts a child of the entry, too
	copy      *copyOf // it is a copy of an entry of another level
}

// Put is a reservation: space for a piece that is being written. It ends with Publish or Abort.
type Put struct {
	q      PutRequest
	class  *catalog.Class // of the entry in the end
	answer answer         // of the place policy

	root       *root // that has the entry
	farther    *root // that has the piece already, of a put to the nearest level
	mark       entries.Mark
	stamp      int64
	charge     capacity.Charge // against the root's daily budget
	credit     shared.Credit   // of a joint owner
	compresses bool            // it writes version 2

	mu     sync.Mutex
	state  putState
	name   string // that its file gets, below the root; empty: the built-in one
	target string // the same as a path
	temp   string // the path of the file until it has its name; there before the put is filling when it was left a victim's
	file   staging.File
	size   int64 // of the file by its head; 0: it has none yet
}

// putState is how far a put is. What fails ends it.
type putState uint8

const (
	begun     putState = iota
	named              // the place policy was asked, once: it may not give the same answer again
	reserved           // the bytes are in the account, and the entry is in the index
	filling            // the file is open, or was written
	published          // the file has its name
	over               // the put has no claims any more
)

// answer is what the place policy says of a piece.
type answer struct {
	root    uint32 // that it chose, or none
	refused error  // why its name is not used
}

// Put reserves space for a piece: the whole entry's at its first one, and its own where the entry was reserved for
// other ranks, as by another engine with another local run of them. The error is [ErrResident], [ErrRefused] or
// [ErrNoSpace] when nothing is to be written.
func (s *Store) Put(ctx context.Context, q PutRequest) (*Put, error) {
	p, err := s.newPut(&q)
	if err != nil {
		return nil, err
	}
	class := p.class // p's is its entry's in the end
	defer class.Release()
	if q.copy == nil { // what a copy would store twice the index refuses
		p.offer(s)
		stripe := s.stripes[p.mark.Fingerprint%uint64(len(s.stripes))]
		if err := stripe.Acquire(ctx, 1); err != nil {
			return nil, err
		}
		defer stripe.Release(1)
		s.renew(p)
	}
	for _, r := range s.roots {
		if r.recovery.seeks() && (q.copy == nil || r.level == q.copy.level) { // what was stored before may have the name that the policy gives now
			p.ask()
			r.recovery.seek(p.class, &p.q.Key, p.q.Rank, p.class.Builtin(&p.q.Key, p.q.Rank), p.name)
		}
	}
	return s.reserve(ctx, p)
}

func (s *Store) newPut(q *PutRequest) (*Put, error) {
	if s.closed.Load() && q.copy == nil { // the last copies are made while the store ends
		return nil, ErrClosed
	}
	c, err := q.Namespace.OpenClass(q.Group)
	if err != nil {
		return nil, err
	}
	if q.Ranks == 0 {
		q.Ranks = c.Ranks
	}
	if q.Rank >= kv.MaxRanks || q.Ranks&(1<<q.Rank) == 0 || q.Ranks&^c.Ranks != 0 {
		return nil, fmt.Errorf("%w: rank %d of ranks %#x, the namespace has %#x", ErrUnknownNamespace, q.Rank,
			q.Ranks, c.Ranks)
	}
	for _, k := range [...]*kv.Key{&q.Key, &q.Parent} {
		for _, b := range k[c.Namespace.KeyLen:] {
			if b != 0 {
				return nil, fmt.Errorf("%w: %s is longer than the namespace's %d bytes", kv.ErrKey, k, c.Namespace.KeyLen)
			}
		}
	}
	if q.Key == kv.Root || q.Key == q.Parent {
		return nil, fmt.Errorf("%w: %s with parent %s", kv.ErrKey, q.Key, q.Parent)
	}
	if c, err = q.Namespace.AcquireClass(q.Group); err != nil {
		return nil, err
	}
	if q.copy != nil && c.Plan.Digest() != q.copy.header.Plan {
		c.Release()
		return nil, moves.ErrLayout
	}
	return &Put{q: *q, class: c, mark: entries.Mark{Fingerprint: kv.Fingerprint(c.Namespace.Digest, c.Group, q.Key)}}, nil
}

// ask has the place policy name the piece, once.
func (p *Put) ask() {
	if p.state == begun {
		p.state = named
		p.name, p.answer.root, p.answer.refused = p.class.Ask(&p.q.Key, p.q.Rank, p.entryBytes())
	}
}

// place gives the put the target in its root that its name says.
func (p *Put) place() {
	if err := p.answer.refused; err != nil {
		p.answer.refused = nil
		p.useBuiltinName(err)
		return
	}
	p.target = p.root.path(p.name, p.class, &p.q.Key, p.q.Rank)
}

// useBuiltinName puts the piece under the built-in name because the place policy's cannot be had.
func (p *Put) useBuiltinName(cause error) {
	r := p.root
	p.name = ""
	p.target = r.path("", p.class, &p.q.Key, p.q.Rank)
	r.Log.Error("the built-in name is used", "key", p.q.Key, "target", p.target, "cause", cause)
	r.Counted(&r.Count.PlaceFaults)
}

// Root is the directory of the root that the piece goes to.
func (p *Put) Root() string { return p.root.Path }

// Plan is the layout of the payload.
func (p *Put) Plan() *kv.Plan { return p.class.Plan }

// Element is the size of the numbers in the pages, as far as it matters to a codec: 2 for floats of 16 bits, else 1.
func (p *Put) Element() int { return p.class.Namespace.Element() }

// offer tells the shadows of a chunk that a client wants to store, whether or not it is stored.
func (p *Put) offer(s *Store) {
	if !s.shadows.On() {
		return
	}
	s.shadows.Tell(shadow.Step{
		Op: shadow.Offer, Key: p.mark.Fingerprint, Time: s.seq.Clock(),
		Parent: kv.Fingerprint(p.class.Namespace.Digest, p.class.Group, p.q.Parent),
		Size:   uint32(p.entryBytes() / abi.SizeUnit), Depth: p.q.Depth, Request: p.q.Request, Tenant: p.q.Tenant,
	})
}

// renew removes an entry that has expired, so that its key can be stored again.
func (s *Store) renew(p *Put) {
	if p.class.Namespace.TTL == 0 {
		return
	}
	for _, r := range s.roots {
		if !r.Health.Serves() {
			continue
		}
		if m, expired := r.Renew(p.mark.Fingerprint, p.class, &p.q.Key); expired {
			r.drop(m, 0)
		}
	}
}

// copyOf marks the put of a piece that is copied.
type copyOf struct {
	entry  *moves.Entry
	header *pieceformat.Header
	level  *level
}

// entryRanks are the ranks that a new entry gets bytes for: all of them where this host writes them, and while the put has no root.
func (p *Put) entryRanks() uint64 {
	if p.root != nil && p.root.cfg.Shared { // other hosts may write the rest
		return 1 << p.q.Rank
	}
	return p.q.Ranks
}

func (p *Put) entryBytes() int64 {
	return int64(bits.OnesCount64(p.entryRanks())) * p.class.FileBytes()
}

// release ends the put's claims on the root besides its entry: its temporary goes, if there is one.
func (p *Put) release() {
	temp, left := p.temp, int64(0)
	if p.temp = ""; temp != "" {
		left = p.root.Discard(temp, p.class.FileBytes())
	}
	p.root.owner.settle(p, temp, left)
}

// strict says whether the piece is durable before it is resident.
func (p *Put) strict() bool { return p.root.store.cfg.Strict }

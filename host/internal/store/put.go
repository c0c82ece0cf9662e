package store

import (
	"cmp"
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

// PutRequest describes a piece to store.
type PutRequest struct {
	Namespace *catalog.Namespace
	Group     uint32
	Parent    kv.Key // kv.Root for the first chunk of a prefix
	Key       kv.Key
	Depth     uint32
	Rank      uint32
	Ranks     uint64 // ranks of the pieces that make the entry complete, as bits; 0 means all ranks of the namespace
	Request   uint32
	Tenant    uint32
	Continued bool    // the caller also puts a child of the entry
	copy      *copyOf // set if the put copies an entry of another level
}

// Put is the reservation of a piece that is being written. It ends with Publish or Abort.
type Put struct {
	q      PutRequest
	class  *catalog.Class // class of its entry once it has one
	answer answer         // answer of the place policy

	root       *root // root of the entry
	farther    *root // for a put to the nearest level: the farther root that has the piece already
	mark       entries.Mark
	stamp      int64
	charge     capacity.Charge // charge to the root's daily budget
	credit     shared.Credit   // credit of a joint owner
	compresses bool            // the put writes version 2

	mu     sync.Mutex
	state  putState
	name   string // name of the file below the root; empty for the built-in name
	target string // path of the file
	temp   string // path of the temporary; set before the put is filling if it reuses the file of a victim
	file   staging.File
	size   int64 // size of the file according to its head; 0 before the head is written
}

// putState is the progress of a put. A failure ends the put.
type putState uint8

const (
	begun     putState = iota
	named              // the place policy was asked; it is asked only once, since it may give another answer
	reserved           // the bytes are in the account, and the entry is in the index
	filling            // the file is open or has been written
	published          // the file has its name
	over               // the put has no more claims
)

// answer is the answer of the place policy about a piece.
type answer struct {
	root    uint32 // root chosen by the policy, or None
	refused error  // reason why the policy's name is not used
}

func (s *Store) newPut(q *PutRequest) (*Put, error) {
	if s.closed.Load() && q.copy == nil { // the last copies are made while the store closes
		return nil, ErrClosed
	}
	c, err := q.Namespace.OpenClass(q.Group)
	if err != nil {
		return nil, err
	}
	q.Ranks = cmp.Or(q.Ranks, c.Ranks)
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

// ask asks the place policy once for a name of the piece.
func (p *Put) ask() {
	if p.state == begun {
		p.state = named
		p.name, p.answer.root, p.answer.refused = p.class.Ask(&p.q.Key, p.q.Rank, p.entryBytes())
	}
}

// place sets the target of the put from its name.
func (p *Put) place() {
	if err := p.answer.refused; err != nil {
		p.answer.refused = nil
		p.useBuiltinName(err)
		return
	}
	p.target = p.root.path(p.name, p.class, &p.q.Key, p.q.Rank)
}

// useBuiltinName switches to the built-in name because the name of the place policy cannot be used.
func (p *Put) useBuiltinName(cause error) {
	r := p.root
	p.name = ""
	p.target = r.path("", p.class, &p.q.Key, p.q.Rank)
	r.Log.Error("the built-in name is used", "key", p.q.Key, "target", p.target, "cause", cause)
	r.Counted(&r.Count.PlaceFaults)
}

// Root returns the path of the root in which the piece is stored.
func (p *Put) Root() string { return p.root.Path }

// Plan returns the layout of the payload.
func (p *Put) Plan() *kv.Plan { return p.class.Plan }

// Element returns the size of the numbers in the pages in bytes, as relevant to a codec: 2 for floats of 16 bits, and 1
// otherwise.
func (p *Put) Element() int { return p.class.Namespace.Element() }

// offer tells the shadows about a chunk that a client wants to store, whether or not it will be stored.
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

// copyOf marks a put as a copy of an entry of another level.
type copyOf struct {
	entry  *moves.Entry
	header *pieceformat.Header
	level  *level
}

// entryRanks returns the ranks for which a new entry reserves bytes: all ranks, but only the put's own rank in a shared root.
func (p *Put) entryRanks() uint64 {
	if p.root != nil && p.root.cfg.Shared { // other hosts may write the rest
		return 1 << p.q.Rank
	}
	return p.q.Ranks
}

func (p *Put) entryBytes() int64 {
	return int64(bits.OnesCount64(p.entryRanks())) * p.class.FileBytes()
}

// strict reports whether the piece must be durable before it is resident.
func (p *Put) strict() bool { return p.root.store.cfg.Strict }

// unwatch ends the effect of watch.
func (p *Put) unwatch() {
	if p.farther != nil {
		p.farther.store.copies.Unwatch(p.mark.Fingerprint)
		p.farther = nil
	}
}

package store

import (
	"slices"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/policy"
)

// called are pieces that were named together: a crossing for one path costs as much as the path. Who knows what it will name
// next (the puts of a request, the loads of a lease, the victims that are foretold) has them named with the first. A name
// stays right, because it follows from what it names and from the class's place policy.
type called struct {
	list []nameable
	at   int // where the next is most likely
}

// callsAtOnce is how many are named together at most: in several crossings, of which the first makes the caches ready for
// the others.
const callsAtOnce = 4 * policy.MaxPaths

// nameable is a piece, and what it is called.
type nameable struct {
	class  *class
	prefix string // of its name
	key    chunk.Key
	rank   uint32
	root   uint32 // that the policy chose, or none
	size   int64
	name   string // empty: none was given
}

// room says whether another one can be added.
func (c *called) room() bool { return len(c.list) < callsAtOnce }

// of finds a piece that has been named, or nil.
func (c *called) of(class *class, key *chunk.Key, rank uint32) *nameable {
	for range c.list {
		if c.at >= len(c.list) {
			c.at = 0
		}
		if p := &c.list[c.at]; p.rank == rank && p.class == class && p.key == *key {
			if p.name == "" {
				return nil
			}
			return p
		}
		c.at++
	}
	return nil
}

// drop takes out the one that was found last.
func (c *called) drop() {
	last := len(c.list) - 1
	c.list[c.at], c.list[last] = c.list[last], nameable{}
	c.list = c.list[:last]
}

// call names all in the list. A piece that got no name is asked for by itself when it is its turn, and the policy's fault
// is the fault of that call.
func (n *namer) call(c *called) {
	w := n.pool.Get().(*nameWork)
	defer n.pool.Put(w)
	c.at = 0
	for rest := c.list; len(rest) > 0; rest = rest[len(w.queries):] {
		place := rest[0].class.names.place
		w.queries = w.queries[:0]
		for i := range rest {
			if rest[i].class.names.place != place {
				break
			}
			w.queries = append(w.queries, rest[i].query())
		}
		_ = place.Paths(w.queries, &w.names)
		w.path = w.path[:0]
		for i := range w.names.Len() {
			w.path = append(append(w.path, rest[i].prefix...), w.names.Path(i)...)
		}
		text := string(w.path)
		for i := range w.names.Len() {
			p := &rest[i]
			size := len(p.prefix) + len(w.names.Path(i))
			p.name, p.root, text = text[:size], w.names.Root(i), text[size:]
		}
	}
}

func (p *nameable) query() abi.PlaceQuery {
	return abi.PlaceQuery{
		Namespace: p.class.ns.id, Group: p.class.group, Rank: p.rank, KeyLen: p.class.ns.keyLen, Size: uint32(p.size / abi.SizeUnit), Key: p.key,
	}
}

// Foreseen are the keys that a caller is going to put, one after the other, with the same group, rank and ranks. Their pieces
// are named together. It is not safe for concurrent use.
type Foreseen struct {
	keys []chunk.Key
	called
}

// Foresee makes one. The keys are the caller's, and stay as they are until the last is put.
func Foresee(keys []chunk.Key) *Foreseen { return &Foreseen{keys: keys} }

// name is the put's piece, named with those that come after it, or nil.
func (f *Foreseen) name(n *namer, p *Put) *nameable {
	if f == nil {
		return nil
	}
	if found := f.of(p.class, &p.key, p.rank); found != nil {
		return found
	}
	at := slices.Index(f.keys, p.key)
	if at < 0 {
		return nil
	}
	f.keys = f.keys[at:]
	f.list = f.list[:0]
	for ; len(f.keys) > 0 && f.room(); f.keys = f.keys[1:] {
		f.list = append(f.list, nameable{class: p.class, key: f.keys[0], rank: p.rank, size: p.entryBytes()})
	}
	if len(f.list) < 2 {
		return nil
	}
	n.call(&f.called)
	return f.of(p.class, &p.key, p.rank)
}

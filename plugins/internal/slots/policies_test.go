package slots_test

import (
	"container/list"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/plugins/arc"
	"github.com/kvhost/kvhost/plugins/fifo"
	"github.com/kvhost/kvhost/plugins/lru"
	"github.com/kvhost/kvhost/plugins/prefix"
	"github.com/kvhost/kvhost/plugins/s3fifo"
	"github.com/kvhost/kvhost/plugins/sieve"
)

type policy struct {
	name   string
	make   Make
	config guest.Config
}

// policies are the textbook ones.
var policies = []policy{
	{"lru", Of(lru.New), nil},
	{"fifo", Of(fifo.New), nil},
	{"sieve", Of(sieve.New), nil},
	{"arc", Of(arc.New), nil},
	{"s3fifo", Of(s3fifo.New), nil},
}

// TestTextbook compares the victims of each policy in the binary with those of its algorithm as the paper gives it.
func TestTextbook(t *testing.T) {
	for name, textbook := range map[string]func(capacity int) Textbook{"lru": LRU, "fifo": FIFO, "s3fifo": S3FIFO} {
		t.Run(name, func(t *testing.T) {
			i := slices.IndexFunc(policies, func(p policy) bool { return p.name == name })
			Compare(t, policies[i].make, policies[i].config, textbook)
		})
	}
}

// TestDecisionsStay compares all victims of the policies that are for comparisons with what they were when each of them was equal
// to its algorithm as the paper gives it, access by access, and arc to ARC with
// REPLACE before the new entry is known. A policy that decides otherwise is another version of it.
func TestDecisionsStay(t *testing.T) {
	want := map[string]uint64{
		"sieve": 0x175bf9dab0c12abc, "arc": 0x9719251886ed9dda,
	}
	for _, p := range policies {
		if sum, ok := want[p.name]; ok {
			if got := Decisions(t, p.make, p.config); got != sum {
				t.Errorf("%s: the digest of its decisions is %#x, want %#x", p.name, got, sum)
			}
			delete(want, p.name)
		}
	}
	if len(want) > 0 {
		t.Errorf("%d digests are of no policy: %v", len(want), want)
	}
}

// TestAllocatesNothing counts what each policy allocates once it has been made. `kvhost policy check` has the contract.
func TestAllocatesNothing(t *testing.T) {
	for _, p := range policies {
		t.Run(p.name, func(t *testing.T) { AllocatesNothing(t, p.make, p.config) })
	}
	t.Run("prefix", func(t *testing.T) { AllocatesNothing(t, Of(prefix.New), nil) })
}

// Stream is a sequence of accesses to keys.
type Stream []uint64

// Streams are generated workloads, the same every time: skewed reuse, a loop larger than most caches, phases that move
// on, and conversations, in which a growing prefix is read again and again.
func Streams(n int) map[string]Stream {
	return map[string]Stream{
		"skewed":        Skewed(n, 4000),
		"loop":          loop(n, 300),
		"phases":        phases(n),
		"conversations": Conversations(n),
	}
}

// Skewed draws keys with a Zipf distribution.
func Skewed(n int, keys uint64) Stream {
	r := rand.New(rand.NewPCG(1, 2))
	z := rand.NewZipf(r, 1.1, 8, keys-1)
	s := make(Stream, n)
	for i := range s {
		s[i] = z.Uint64() + 1
	}
	return s
}

func loop(n int, keys int) Stream {
	r := rand.New(rand.NewPCG(3, 4))
	s := make(Stream, n)
	for i := range s {
		if r.IntN(5) == 0 {
			s[i] = uint64(r.IntN(keys/3)) + 1
		} else {
			s[i] = uint64(i%keys) + 1000
		}
	}
	return s
}

func phases(n int) Stream {
	r := rand.New(rand.NewPCG(5, 6))
	s := make(Stream, n)
	for i := range s {
		base := uint64(i/3000) * 150
		if r.IntN(8) == 0 {
			s[i] = 1<<32 + uint64(i) // never again
		} else {
			s[i] = base + uint64(r.IntN(400)) + 1
		}
	}
	return s
}

// Conversations interleaves growing prefixes: each turn reads all chunks so far and adds some.
func Conversations(n int) Stream {
	r := rand.New(rand.NewPCG(7, 8))
	type talk struct {
		id     uint64
		chunks int
	}
	var live []talk
	var next uint64
	s := make(Stream, 0, n+200)
	for len(s) < n {
		if len(live) == 0 || len(live) < 12 && r.IntN(3) == 0 {
			next++
			live = append(live, talk{id: next})
		}
		at := r.IntN(len(live))
		live[at].chunks += 1 + r.IntN(6)
		for c := range live[at].chunks {
			if c < 2 {
				s = append(s, uint64(c)+1) // the system prompt
			} else {
				s = append(s, live[at].id<<16+uint64(c))
			}
		}
		if live[at].chunks > 60 || r.IntN(12) == 0 {
			live[at] = live[len(live)-1]
			live = live[:len(live)-1]
		}
	}
	return s[:n]
}

// order is a list of keys with an index: the front is the newest.
type order struct {
	l  *list.List
	at map[uint64]*list.Element
}

func newOrder() *order { return &order{l: list.New(), at: map[uint64]*list.Element{}} }

func (o *order) has(key uint64) bool { return o.at[key] != nil }
func (o *order) len() int            { return o.l.Len() }
func (o *order) push(key uint64)     { o.at[key] = o.l.PushFront(key) }
func (o *order) oldest() uint64      { return o.l.Back().Value.(uint64) }

func (o *order) remove(key uint64) {
	o.l.Remove(o.at[key])
	delete(o.at, key)
}

func (o *order) pop() uint64 {
	key := o.oldest()
	o.remove(key)
	return key
}

func (o *order) renew(key uint64) {
	o.remove(key)
	o.push(key)
}

// LRU and FIFO.
type queue struct {
	o        *order
	capacity int
	renew    bool
}

// LRU is least recently used.
func LRU(capacity int) Textbook { return &queue{newOrder(), capacity, true} }

// FIFO is first in first out.
func FIFO(capacity int) Textbook { return &queue{newOrder(), capacity, false} }

func (q *queue) Access(key uint64) (bool, []uint64) {
	if q.o.has(key) {
		if q.renew {
			q.o.renew(key)
		}
		return true, nil
	}
	var gone []uint64
	if q.o.len() == q.capacity {
		gone = append(gone, q.o.pop())
	}
	q.o.push(key)
	return false, gone
}

// s3fifo is algorithm 1.
type s3fifoTextbook struct {
	small, main, ghost *order
	freq               map[uint64]int
	s, all             int
}

// S3FIFO is S3-FIFO with a small queue of 10 %.
func S3FIFO(capacity int) Textbook {
	return &s3fifoTextbook{newOrder(), newOrder(), newOrder(), map[uint64]int{}, capacity / 10, capacity}
}

func (q *s3fifoTextbook) Access(key uint64) (bool, []uint64) {
	if q.small.has(key) || q.main.has(key) {
		q.freq[key] = min(q.freq[key]+1, 3)
		return true, nil
	}
	var gone []uint64
	for q.small.len()+q.main.len() == q.all {
		if q.small.len() > 0 && (q.small.len() >= q.s || q.main.len() == 0) {
			gone = append(gone, q.evictSmall()...)
		} else {
			gone = append(gone, q.evictMain())
		}
	}
	if q.ghost.has(key) {
		q.ghost.remove(key)
		q.main.push(key)
	} else {
		q.small.push(key)
	}
	q.freq[key] = 0
	return false, gone
}

func (q *s3fifoTextbook) evictSmall() []uint64 {
	for q.small.len() > 0 && (q.small.len() >= q.s || q.main.len() == 0) {
		key := q.small.pop()
		if q.freq[key] > 1 {
			q.freq[key] = 0
			q.main.push(key)
			continue
		}
		delete(q.freq, key)
		q.ghost.push(key)
		if q.ghost.len() > q.all-q.s {
			q.ghost.pop()
		}
		return []uint64{key}
	}
	return nil
}

func (q *s3fifoTextbook) evictMain() uint64 {
	for {
		key := q.main.pop()
		if q.freq[key] == 0 {
			delete(q.freq, key)
			return key
		}
		q.freq[key]--
		q.main.push(key)
	}
}

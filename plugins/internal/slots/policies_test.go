package slots_test

import (
	"math/rand/v2"
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

// TestDecisionsStay compares all victims of the policies with what they were when each of them was equal to its algorithm as the paper
// gives it, access by access, and arc to ARC with REPLACE before the new entry is known. A policy that decides otherwise is another
// version of it.
func TestDecisionsStay(t *testing.T) {
	want := map[string]uint64{
		"sieve": 0x175bf9dab0c12abc, "arc": 0x9719251886ed9dda, "lru": 0xa8dd02c5fef28dd9, "fifo": 0x173d70b11a963773, "s3fifo": 0xdbb4d8583bd6c3fa,
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
		"skewed":        skewed(n, 4000),
		"loop":          loop(n, 300),
		"phases":        phases(n),
		"conversations": Conversations(n),
	}
}

// skewed draws keys with a Zipf distribution.
func skewed(n int, keys uint64) Stream {
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

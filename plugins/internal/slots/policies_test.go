package slots_test

import (
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

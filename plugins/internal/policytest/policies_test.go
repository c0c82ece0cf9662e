package policytest_test

import (
	"testing"

	"github.com/kvhost/kvhost/plugins/arc"
	"github.com/kvhost/kvhost/plugins/internal/policytest"
	"github.com/kvhost/kvhost/plugins/prefix"
)

// TestTextbook compares the victims of each policy with those of its algorithm as the paper gives it.
func TestTextbook(t *testing.T) {
	textbooks := map[string]func(capacity int) policytest.Textbook{
		"lru": policytest.LRU, "fifo": policytest.FIFO, "clock": policytest.Clock, "sieve": policytest.Sieve,
		"lfu": policytest.LFU(true), "lfu aging=false": policytest.LFU(false),
		"gdsf": policytest.LFU(true), // with entries of one size and cost it is LFU-DA
		"twoq": policytest.TwoQ, "s3fifo": policytest.S3FIFO, "lirs": policytest.LIRS,
		"arc": policytest.ARC(true), // but with REPLACE before the new entry is known
	}
	compared := 0
	for _, p := range policies {
		if textbook := textbooks[p.name]; textbook != nil {
			compared++
			t.Run(p.name, func(t *testing.T) { policytest.Compare(t, p.make, p.config, textbook) })
		}
	}
	if compared != len(textbooks) {
		t.Errorf("want %d policies compared, got %d", len(textbooks), compared)
	}
	t.Run("arc as in the paper", func(t *testing.T) { // what asking early costs
		policytest.Near(t, policytest.Of(arc.New), nil, 5, policytest.ARC(false))
	})
}

// TestContract mistreats each policy, and then counts what it allocates.
func TestContract(t *testing.T) {
	judge := func(name string, m policytest.Make) {
		t.Run(name, func(t *testing.T) {
			if name != "lru" && name != "fifo" { // a pinned entry is not pinned again, as in the contract; the others count
				policytest.Abuse(t, m, nil)
			}
			policytest.AllocatesNothing(t, m, nil)
		})
	}
	for _, p := range policies {
		if p.config == nil {
			judge(p.name, p.make)
		}
	}
	judge("prefix", policytest.Of(prefix.New))
}

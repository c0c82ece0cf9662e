package evictor

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/store/index"
)

// TestRecencyFindsEveryTenant asks for entries of two tenants in turns, while some are pinned and unpinned. Each time the
// oldest that can go is named: those that were passed over before are not lost.
func TestRecencyFindsEveryTenant(t *testing.T) {
	const entries = 200
	r := newRig(t, 2*entries)
	rng := rand.New(rand.NewPCG(1, 1))
	n := uint64(0)
	insert := func() {
		r.insertOf(t, n, uint16(rng.IntN(10)/9))
		n++
	}
	for range entries {
		insert()
	}
	s := &recency{}
	r.v.fallback = s
	var dst [1]uint32
	var pinned []uint32
	for round := range 3000 {
		if slot := rng.Uint32N(r.x.High()); len(pinned) < entries/2 && r.v.Evictable(slot) {
			r.v.Pin(slot, r.x.Fingerprint(slot), 0)
			pinned = append(pinned, slot)
		} else if len(pinned) > 0 {
			i := rng.IntN(len(pinned))
			r.x.Unpin(pinned[i])
			r.v.Tell(abi.OpUnpin, pinned[i], r.x.Fingerprint(pinned[i]), 0)
			pinned = slices.Delete(pinned, i, i+1)
		}
		tenant := rng.Uint32N(2)
		if rng.IntN(4) == 0 {
			tenant = abi.None
		}
		want, got := index.None, index.None
		for _, slot := range r.x.ByLastTouch() {
			if r.v.fits(slot, tenant) {
				want = slot
				break
			}
		}
		if s.victims(r.v, abi.Ask{Bytes: 1, MaxVictims: 1, Tenant: tenant}, dst[:]) == 1 {
			got = dst[0]
		}
		if got != want {
			t.Fatalf("round %d: slot %d for tenant %d, the oldest that can go is %d", round, got, tenant, want)
		}
		if got != index.None {
			r.remove(got)
			insert()
		}
	}
	for _, slot := range pinned {
		r.x.Unpin(slot)
	}
}

// TestRecencyRemembersThatNobodyCanGo asks again and again for a tenant all of whose entries are in use, while another
// tenant's come and go. No list is made for that, until one of them can go.
func TestRecencyRemembersThatNobodyCanGo(t *testing.T) {
	r := newRig(t, 64)
	for n := range uint64(32) {
		r.insertOf(t, n, uint16(n%2))
		r.v.Pin(r.find(n), r.x.Fingerprint(r.find(n)), 0)
	}
	s := &recency{}
	r.v.fallback = s
	var dst [1]uint32
	ask := func(tenant uint32) int {
		return s.victims(r.v, abi.Ask{Bytes: 1, MaxVictims: 1, Tenant: tenant}, dst[:])
	}
	unpin := func(n uint64) {
		r.x.Unpin(r.find(n))
		r.v.Tell(abi.OpUnpin, r.find(n), r.x.Fingerprint(r.find(n)), 0)
	}
	if ask(1) != 0 {
		t.Fatal("an entry in use is named")
	}
	unpin(0)
	if n := testing.AllocsPerRun(100, func() {
		if ask(1) != 0 {
			t.Fatal("an entry in use is named")
		}
		r.v.Pin(r.find(0), r.x.Fingerprint(r.find(0)), 0)
		unpin(0)
	}); n > 0 {
		t.Errorf("%v allocations for a question that has no answer: a list is made each time", n)
	}
	if ask(0) != 1 || dst[0] != r.find(0) {
		t.Error("the other tenant's entry is not named")
	}
	unpin(1)
	if ask(1) != 1 || dst[0] != r.find(1) {
		t.Error("the entry that can go again is not named")
	}
	for n := uint64(2); n < 32; n++ {
		unpin(n)
	}
}

package evictor

import (
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/plugins/lru"
)

// rig is an index with its evictor, and the keys that are there.
type rig struct {
	mu  sync.Mutex
	x   *index.Index
	v   *Evictor
	all sync.WaitGroup
}

func (*rig) Tenant(n uint16) uint32 { return uint32(n) }
func (*rig) Clock() uint64          { return 1 }
func (r *rig) Used() int64          { return int64(r.x.Len()) * abi.SizeUnit }

func fingerprint(_ uint16, k kv.Key) uint64 { return binary.LittleEndian.Uint64(k[:]) }

func newRig(t testing.TB, slots uint32) *rig {
	t.Helper()
	r := &rig{x: index.New(slots, fingerprint, func(class uint16) uint16 { return class })}
	ctx, stop := context.WithCancel(context.Background())
	var err error
	r.v, err = New(ctx, Config{
		Index: r.x, Lock: &r.mu, Host: r, Policy: lruPolicy(nil), Run: ctx, Work: &r.all, Size: Size{Slots: slots, Capacity: 1 << 30},
		Log: slog.New(slog.DiscardHandler),
	})
	testenv.OK(t, err)
	t.Cleanup(func() {
		stop()
		r.all.Wait()
		r.v.Close()
	})
	return r
}

// lruPolicy is lru as a native module; made gets its instances.
func lruPolicy(made **lru.Policy) *Policy {
	m := policy.NativeModule("lru", []abi.Role{abi.RoleEvict}, func(i guest.Info) (any, error) {
		p, err := lru.New(i)
		if made != nil {
			*made = p
		}
		return p, err
	})
	return &Policy{Handle: policy.NewHandle(m, "", nil, nil)}
}

// key is spread like a hash.
func key(n uint64) (k kv.Key) {
	binary.LittleEndian.PutUint64(k[:], (n+1)*0x9e3779b97f4a7c15)
	return k
}

func (r *rig) find(n uint64) uint32 {
	k := key(n)
	return r.x.Find(fingerprint(0, k), 0, &k)
}

func (r *rig) insert(t testing.TB, n uint64) {
	t.Helper()
	r.insertOf(t, n, 0)
}

func (r *rig) insertOf(t testing.TB, n uint64, tenant uint16) {
	t.Helper()
	k, parent := key(n), key(n-1)
	slot := r.x.Add(fingerprint(0, k), index.Owner{Tenant: tenant}, &k, fingerprint(0, parent), uint32(n))
	if slot == index.None {
		t.Fatal("the index is full")
	}
	r.x.SetUnits(slot, 1)
	r.x.Touch(slot)
	r.v.Announce(abi.OpInsert, slot, fingerprint(0, k), 0)
}

func (r *rig) touch(slot uint32) {
	r.x.Touch(slot)
	r.v.Tell(abi.OpTouch, slot, r.x.Fingerprint(slot), 0)
}

func (r *rig) remove(slot uint32) {
	r.x.At(slot).Set(index.Evicting)
	r.v.Tell(abi.OpRemove, slot, r.x.Fingerprint(slot), 0)
	r.x.Detach(slot)
	r.x.Release(slot)
}

// TestHandover changes the entries at random while a policy is told of them. It must then know exactly what is there:
// every victim that it names, until it has no more, is one that can go, and all go.
func TestHandover(t *testing.T) {
	const entries = 64
	for seed := range uint64(8) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := newRig(t, 2*entries)
			rng := rand.New(rand.NewPCG(seed, 3))
			for n := range uint64(entries) {
				r.insert(t, n)
			}
			var next *lru.Policy
			p, err := r.v.start(t.Context(), lruPolicy(&next), SizeOf(r.v), policy.State{})
			testenv.OK(t, err)
			defer p.Close()
			c := &candidate{policy: p}
			r.v.setCandidate(c)
			for order := r.v.Snapshot(); len(order) > 0; order = order[1:] {
				for range rng.IntN(4) {
					n := rng.Uint64N(2 * entries)
					if slot := r.find(n); slot == index.None {
						if r.x.Len() == entries {
							r.remove(r.x.ByLastTouch()[0])
						}
						r.insert(t, n)
					} else {
						r.touch(slot)
					}
				}
				if m := &order[0]; r.v.current(m) && !c.knows(m.Slot) {
					c.announce(r.v, m.Slot, m.Fingerprint)
				}
			}
			r.v.setCandidate(nil)
			if err := p.Flush(); err != nil || c.err != nil {
				t.Fatal(err, c.err)
			}
			want := r.x.ByLastTouch()
			got := make([]uint32, 2*entries)
			n := next.Victims(abi.Ask{Bytes: 1 << 60, MaxVictims: 2 * entries, Tenant: abi.None}, got)
			if fmt.Sprint(got[:n]) != fmt.Sprint(want) {
				t.Errorf("it would evict\n%v, by last touch it is\n%v", got[:n], want)
			}
		})
	}
}

// TestAbandon: a handover that ends without effect closes its policy, and another can begin.
func TestAbandon(t *testing.T) {
	r := newRig(t, 8)
	r.insert(t, 0)
	active := r.v.Active()
	for range 2 {
		h, err := PrepareSize(t.Context(), r.v, lruPolicy(nil), active, nil)
		testenv.OK(t, err)
		h.Abandon()
		if !h.next.policy.Ended() || r.v.Active() != active || r.v.policy.Ended() {
			t.Errorf("the new policy is closed: %v, the old one is in place: %v, and closed: %v", h.next.policy.Ended(), r.v.Active() == active, r.v.policy.Ended())
		}
	}
}

// BenchmarkPost tells the policy of a touch and a pin.
func BenchmarkPost(b *testing.B) {
	r := newRig(b, 1<<10)
	for n := range uint64(1 << 10) {
		r.insert(b, n)
	}
	cause := Cause{Request: 1, Time: uint64(time.Now().Unix())}
	b.ReportAllocs()
	for i := uint32(0); b.Loop(); i++ {
		slot := i % (1 << 10)
		r.v.Post(abi.OpTouch, slot, r.x.At(slot), r.x.Fingerprint(slot), &cause)
	}
}

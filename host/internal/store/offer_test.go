package store

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/moves"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/plugins/lru"
)

// others stand for other hosts.
type others struct {
	mu     sync.Mutex
	copies map[uint64]int // by fingerprint
	offers map[kv.Key]int
	takes  atomic.Bool
	blamed atomic.Int64
	take   func(ctx context.Context, o *Offer) error
}

func (o *others) Blame(string, error) { o.blamed.Add(1) }
func (o *others) Takes() bool         { return o.takes.Load() }

func (o *others) Copies(fp uint64) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.copies[fp]
}

func (o *others) Offer(ctx context.Context, offer *Offer) error {
	o.mu.Lock()
	o.offers[offer.Key]++
	o.mu.Unlock()
	return o.take(ctx, offer)
}

// has says that other hosts have so many copies of an entry.
func (o *others) has(f *fixture, n uint64, copies int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.copies[kv.Fingerprint(f.space.Digest, 0, testKey(n))] = copies
}

// among is a fixture with others behind its levels; they take what they are offered.
func among(t *testing.T, entries int, change ...func(*Config)) (*fixture, *others) {
	t.Helper()
	o := &others{copies: map[uint64]int{}, offers: map[kv.Key]int{}, take: func(context.Context, *Offer) error { return nil }}
	o.takes.Store(true)
	f := newFixtureIn(t, filepath.Join(t.TempDir(), "own"), entries, 1, append(change, func(c *Config) {
		level := c.Roots[len(c.Roots)-1].Level + 1
		c.Roots = append(c.Roots, RootConfig{Path: filepath.Join(t.TempDir(), "peers"), Capacity: 1 << 30, MaxEntries: 64, Level: level,
			Medium: Medium{Traits: Lent, Lender: o}, ForPieces: true})
	})...)
	return f, o
}

// TestLoanTouches: a loan is a touch for the evict policy of the lender, and no hit of its own: not in its figures, nor for its shadows.
func TestLoanTouches(t *testing.T) {
	f := newFixture(t, 4, 1, func(c *Config) {
		c.Policies.Shadows = []Shadow{{Policy: policy.NewHandle(policy.Builtin(0), "twin", nil, nil)}}
	})
	f.mustPut(0)
	must(t, f.putUnder(1, 1, 0))
	must(t, f.putUnder(2, 2, 0))
	must(t, f.putUnder(3, 3, 0))
	l, err := f.store.Lend(f.space.Digest, anyone{}, LookupRequest{Keys: keys(0), Ranks: 1, Leading: true})
	must(t, err)
	equal(t, "entries lent", l.Hits(), 1)
	l.Release()
	must(t, f.putUnder(4, 4, 0))
	equal(t, "looked up keys", f.store.Stats().Keys, 0)
	equal(t, "hits", f.store.Stats().Hits, 0)
	if !f.has(0) || f.has(1) {
		t.Error("the entry that was lent went, want the one that was used least recently")
	}
	if s := f.shadowStats("twin", 2); s.Keys != 2 {
		t.Errorf("a shadow heard of %d keys, want the host's own 2", s.Keys)
	}
}

// TestKeptOnce: what memory evicts and another host has goes without a copy in the next level. What another host has lent gets one in
// memory at the second hit, and none in the last level, also if a lookup asks for it.
func TestKeptOnce(t *testing.T) {
	f, o := among(t, 8, func(c *Config) {
		c.Roots = append(c.Roots, RootConfig{Path: filepath.Join(t.TempDir(), "far"), Capacity: 64 * pieceBytes, MaxEntries: 64, Level: 1})
	})
	o.has(f, 2, 1)
	for n := range uint64(16) {
		f.mustPut(n)
		f.settle()
	}
	equal(t, "root of an entry that no other host has", f.rootOf(1), 1)
	equal(t, "root of an entry that another host has", f.rootOf(2), -1)

	one, _ := among(t, 8)
	f.borrow(2, 0, 1)
	one.borrow(2, 0, 1)
	for range 2 {
		f.mustRead(2)
		one.mustRead(2)
	}
	l, err := one.store.Lookup(LookupRequest{Namespace: one.space, Keys: keys(2), Prefetch: true})
	must(t, err)
	f.settle()
	one.settle()
	l.Release()
	equal(t, "root of what memory has copied", f.rootOf(2), 0)
	equal(t, "copies to the last level", one.moved(0, moves.Promotion).Done.Load()+one.moved(0, moves.Prefetch).Done.Load(), 0)
}

// loanOf is a loan of an entry of group 0, with a file as its lender has it.
func (f *fixture) loanOf(n uint64, tenant uint32) *Loan {
	f.Helper()
	lender := newFixture(f, 4, 1)
	must(f, lender.putUnder(n, n, 0))
	return &Loan{Namespace: f.space, Tenant: tenant, Ranks: 1, Entries: []LentEntry{{Key: testKey(n), Bytes: []int64{pieceBytes}}},
		Name: func(_ int, _ uint32, _ int64, name string) {
			b, err := os.ReadFile(lender.pieceFile(n, 0))
			must(f, err)
			fs := f.store.roots[len(f.store.roots)-1].FS
			must(f, fs.MkdirAll(filepath.Dir(name), 0o700))
			file, err := fs.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
			must(f, err)
			_, err = file.WriteAt(b, 0)
			must(f, err)
			must(f, file.Close())
		}}
}

func (f *fixture) borrow(n uint64, tenant uint32, want int) {
	f.Helper()
	list, err := f.store.Borrow(f.loanOf(n, tenant))
	must(f, err)
	equal(f, "entries borrowed", len(list), want)
}

// TestOffers: what the last level evicts, and no other host has, is offered once while it is still served; its pieces can be read then.
// What another host has, or will not take, just goes. Nothing is offered where none takes anything.
func TestOffers(t *testing.T) {
	f, o := among(t, 16)
	var mu sync.Mutex
	var wrong []string
	o.take = func(_ context.Context, offer *Offer) error {
		data, err := read(offer.Lease, 0, 0)
		mu.Lock()
		defer mu.Unlock()
		if err != nil || !bytes.Equal(data, payload(f.space.Plan(0), offer.Key, 0)) {
			wrong = append(wrong, fmt.Sprintf("%d bytes, %v", len(data), err))
		}
		if offer.Key == testKey(3) {
			return moves.ErrRefused
		}
		return nil
	}
	o.has(f, 5, 1)
	for n := range uint64(48) {
		f.mustPut(n)
		f.settle()
	}
	d := f.moved(1, moves.Demotion)
	if len(wrong) > 0 {
		t.Errorf("an entry that is offered cannot be read: %v", wrong)
	}
	if d.Done.Load() < 30 || d.Shed.Load() > 0 || d.Failed.Load() > 0 {
		t.Errorf("%d offers taken, %d shed, %d failed, want most of what went and no other", d.Done.Load(), d.Shed.Load(), d.Failed.Load())
	}
	equal(t, "refused", d.Refused.Load(), 2)
	for n := range uint64(30) {
		want := 1
		if n == 5 {
			want = 0
		}
		equal(t, fmt.Sprintf("offers of entry %d", n), o.offers[testKey(n)], want)
	}
	f.checkOwn()
	o.takes.Store(false)
	before, refused := d.Done.Load(), d.Refused.Load()
	for n := uint64(100); n < 140; n++ {
		f.mustPut(n)
	}
	f.settle()
	equal(t, "offers and sheds after none takes anything", d.Done.Load()-before+d.Refused.Load()-refused+d.Shed.Load(), 0)
	f.checkOwn()
}

// checkOwn compares the account of the own root with its disk, and its index with itself.
func (f *fixture) checkOwn() {
	f.Helper()
	r := f.root()
	bytes, _ := usage(f, r.Path)
	equal(f, "bytes in the account", f.store.Stats().Roots[0].Used, bytes+r.missing())
	r.Lock()
	defer r.Unlock()
	must(f, r.Check(0))
}

// strict is lru, which counts events of slots that it was not told of, or is told of again.
type strict struct {
	*lru.Policy
	known map[uint32]bool
	wrong *atomic.Int32
}

func (p strict) Events(batch []abi.Event) {
	for _, e := range batch {
		switch e.Op {
		case abi.OpInsert, abi.OpResident:
			if p.known[e.Slot] {
				p.wrong.Add(1)
			}
			p.known[e.Slot] = true
		case abi.OpRequestEnd:
		default:
			if !p.known[e.Slot] {
				p.wrong.Add(1)
			}
			p.known[e.Slot] = e.Op != abi.OpRemove
		}
	}
	p.Policy.Events(batch)
}

// TestSlowOffers: neither stores nor what another host offers wait for one that does not answer, and what that is still offered goes.
func TestSlowOffers(t *testing.T) {
	var wrong atomic.Int32
	f, o := among(t, 64, func(c *Config) {
		c.Policies.Evict = handle(policy.NativeModule("strict", []abi.Role{abi.RoleEvict}, func(i guest.Info) (any, error) {
			p, err := lru.New(i)
			return strict{p, map[uint32]bool{}, &wrong}, err
		}))
	})
	hang := make(chan struct{})
	var leases []*Lease
	o.take = func(_ context.Context, offer *Offer) error {
		o.mu.Lock()
		leases = append(leases, offer.Lease)
		o.mu.Unlock()
		<-hang
		return moves.ErrRefused
	}
	for n := range uint64(128) {
		f.mustPut(n)
	}
	await(t, "all workers wait for the other host", func() bool {
		o.mu.Lock()
		defer o.mu.Unlock()
		return len(leases) == 2
	})
	p, err := leases[0].Open(0, 0) // by a call that outlasts the offer
	must(t, err)
	equal(t, "taken while this host's offers are not answered", f.store.Take(t.Context(), f.space.Digest, f.loanOf(200, 0)), true)
	close(hang)
	f.settle()
	p.Close()
	for n := uint64(128); n < 256; n++ {
		f.mustPut(n)
	}
	f.settle()
	if _, err := leases[0].Open(0, 0); err == nil {
		t.Error("an entry is lent after its offer is over")
	}
	f.checkOwn()
	_, used := f.root().Census()
	equal(t, "entries in use", used, 0)
	equal(t, "events of slots that the policy does not know", wrong.Load(), 0)
}

// TestSwapWhileOffered: an evict policy that takes over is not told of what leaves, of which it would not hear the end.
func TestSwapWhileOffered(t *testing.T) {
	var wrong atomic.Int32
	f, o := among(t, 64)
	hang := make(chan struct{})
	o.take = func(context.Context, *Offer) error {
		<-hang
		return moves.ErrRefused
	}
	for n := range uint64(64) {
		f.mustPut(n)
	}
	r := f.root()
	await(t, "entries leave", func() bool {
		r.Lock()
		defer r.Unlock()
		return r.Moves.Leaving() >= 2*pieceBytes
	})
	_, err := f.store.Swap(t.Context(), Swap{From: "lru", Policies: [abi.Roles]*policy.Handle{
		abi.RoleEvict: handle(policy.NativeModule("strict", []abi.Role{abi.RoleEvict}, func(i guest.Info) (any, error) {
			p, err := lru.New(i)
			return strict{p, map[uint32]bool{}, &wrong}, err
		})),
	}})
	must(t, err)
	for n := uint64(64); n < 256; n++ {
		f.mustPut(n)
	}
	close(hang)
	f.settle()
	f.checkOwn()
	equal(t, "events of slots that the policy does not know, or knew before", wrong.Load(), 0)
}

// TestNoOffersAtTheEnd: a host that ends offers nothing of what its memory holds: others are not for that.
func TestNoOffersAtTheEnd(t *testing.T) {
	f, o := among(t, 16, func(c *Config) { c.Roots[0].Volatile, c.Moves.Shutdown = true, time.Minute })
	f.mustPut(1, 2, 3)
	must(t, f.store.Close())
	equal(t, "entries offered at the end", len(o.offers), 0)
}

// TestTake: what another host offers is fetched to the last level if its policy likes that, and not offered on before a lookup has granted it.
func TestTake(t *testing.T) {
	f, o := among(t, 16)
	equal(t, "taken", f.store.Take(t.Context(), f.space.Digest, f.loanOf(100, 0)), true)
	equal(t, "taken a second time", f.store.Take(t.Context(), f.space.Digest, f.loanOf(100, 0)), false)
	o.has(f, 101, 2)
	equal(t, "taken although a third host has it", f.store.Take(t.Context(), f.space.Digest, f.loanOf(101, 0)), false)
	o.has(f, 101, 1)
	equal(t, "taken from who has the only copy", f.store.Take(t.Context(), f.space.Digest, f.loanOf(101, 0)), true)
	equal(t, "taken of a namespace that is not known", f.store.Take(t.Context(), kv.Digest{1}, f.loanOf(102, 0)), false)
	over, cancel := context.WithCancel(t.Context())
	cancel()
	f.store.Take(over, f.space.Digest, f.loanOf(103, 0))
	equal(t, "entries that are borrowed", f.store.Stats().Roots[1].Entries, 0)
	equal(t, "root of what was taken", f.rootOf(101), 0) // a lookup grants it
	o.has(f, 101, 0)
	for n := range uint64(32) {
		f.mustPut(n)
		f.settle()
	}
	equal(t, "offers of what was taken", o.offers[testKey(100)], 0)
	equal(t, "offers of what was taken and granted", o.offers[testKey(101)], 1)
	f.checkOwn()
}

// TestTenantsOfOffers: who offers under many tenants takes none of their numbers, which are few: a piece that was fetched says its tenant itself.
func TestTenantsOfOffers(t *testing.T) {
	f, _ := among(t, 16)
	nothing := f.loanOf(100, 7)
	nothing.Name = func(int, uint32, int64, string) {}
	equal(t, "taken", f.store.Take(t.Context(), f.space.Digest, nothing), false)
	equal(t, "taken", f.store.Take(t.Context(), f.space.Digest, f.loanOf(101, 8)), true)
	for _, tenant := range []uint32{7, 8} {
		if f.store.catalog.Tenants.Has(tenant) {
			t.Errorf("tenant %d of an offer has a number, want none", tenant)
		}
	}
}

// TestTakenEnds: a mark of what was taken ends with its entry.
func TestTakenEnds(t *testing.T) {
	f, _ := among(t, 16)
	equal(t, "taken", f.store.Take(t.Context(), f.space.Digest, f.loanOf(7, 0)), true)
	_, err := f.store.Discard(DiscardRequest{Namespace: f.space, Keys: keys(7)})
	must(t, err)
	f.mustPut(8)
	r := f.root()
	r.Lock()
	defer r.Unlock()
	r.Index.Each(func(slot uint32, _ *index.Entry) {
		if r.Hits.Taken(slot) {
			t.Error("an entry that was stored here counts as taken: the mark of its slot's last one is left")
		}
	})
}

// TestTurnover: a host with room takes endlessly long to replace what it holds, and one that is full about as long as it has taken.
func TestTurnover(t *testing.T) {
	f, o := among(t, 16)
	o.takes.Store(false)
	equal(t, "turnover of a host with room", f.store.Turnover(), policy.Endless)
	for n := range uint64(160) {
		f.mustPut(n)
	}
	began := f.store.seq.Clock()
	for n := uint64(160); n < 176; n++ {
		f.mustPut(n)
	}
	took := f.store.seq.Clock() - began
	if got := uint64(f.store.Turnover()); got < took*3/4 || got > took*4/3 {
		t.Errorf("turnover is %d ns, want about the %d that 16 entries have taken", got, took)
	}
	alone := newFixture(t, 4, 1)
	equal(t, "turnover of a host without others", alone.store.Turnover(), 0)
	shared, _ := among(t, 16, func(c *Config) { c.Roots[0].Shared = true })
	equal(t, "turnover of a host with a shared root", shared.store.Turnover(), 0)
}

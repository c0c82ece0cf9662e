package storetest

import (
	"context"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// broken is a store with a fault that histories must find.
type broken struct {
	Store
	put   func(Put) Put
	lease func(Lease) Lease
}

func (b *broken) Begin(ctx context.Context, of Piece) (Put, error) {
	p, err := b.Store.Begin(ctx, of)
	if err == nil && b.put != nil {
		p = b.put(p)
	}
	return p, err
}

func (b *broken) Lookup(space int, keys []uint64, ranks uint64) (Lease, error) {
	l, err := b.Store.Lookup(space, keys, ranks)
	if err == nil && b.lease != nil {
		l = b.lease(l)
	}
	return l, err
}

// hoarder serves what it served of a piece first, though another version was stored since.
type hoarder struct {
	Store
	first *sync.Map // by Piece
}

type hoarded struct {
	Lease
	first func(i int, rank uint32, payload []byte) []byte
}

func (h hoarder) Lookup(space int, keys []uint64, ranks uint64) (Lease, error) {
	l, err := h.Store.Lookup(space, keys, ranks)
	return hoarded{l, func(i int, rank uint32, payload []byte) []byte {
		first, _ := h.first.LoadOrStore(Piece{Entry{space, keys[i]}, rank}, payload)
		return first.([]byte)
	}}, err
}

func (h hoarded) Load(i int, rank uint32) ([]byte, error) {
	b, err := h.Lease.Load(i, rank)
	if err == nil {
		b = h.first(i, rank, b)
	}
	return b, err
}

// leaky never releases.
type leaky struct{ Lease }

func (leaky) Release() {}

// forgetful misses everything.
type forgetful struct{ Lease }

func (forgetful) Hits() int { return 0 }

// gone fails loads of pieces that nothing happened to.
type gone struct{ Lease }

func (gone) Load(int, uint32) ([]byte, error) { return nil, store.ErrGone }

// keeper discards nothing.
type keeper struct{ Store }

func (keeper) Discard(_ int, keys []uint64) ([]store.DiscardResult, error) {
	results := make([]store.DiscardResult, len(keys))
	for i := range results {
		results[i] = store.DiscardRemoved
	}
	return results, nil
}

// short counts a page less than there is.
type short struct{ Store }

func (s short) Stats() store.Stats {
	st := s.Store.Stats()
	st.Roots = slices.Clone(st.Roots)
	st.Roots[0].Used -= pieceformat.Page
	return st
}

// careless never aborts.
type careless struct{ Put }

func (careless) Abort(error) {}

// torn writes half of a payload as zeros.
type torn struct{ Put }

func (p torn) Write(content func(int64) []byte) error {
	return p.Put.Write(func(size int64) []byte { b := content(size); clear(b[size/2:]); return b })
}

// unsynced is a file system whose syncs do nothing.
type unsynced struct{ staging.FS }

func (unsynced) SyncDir(string) error { return nil }
func (unsynced) SyncFS(string) error  { return nil }

// leases breaks a store's leases, and puts its puts.
func leases(change func(Lease) Lease) func(Store) Store {
	return func(s Store) Store {
		return &broken{Store: s, lease: change}
	}
}

func puts(change func(Put) Put) func(Store) Store {
	return func(s Store) Store { return &broken{Store: s, put: change} }
}

// TestFindsFaults: histories fail when a store breaks one of its promises.
func TestFindsFaults(t *testing.T) {
	testenv.Slow(t)
	lives := 0
	for name, c := range map[string]struct {
		kind  string
		want  string // part of the error
		stuck bool   // it is found by a wait that does not end
		store func(Store) Store
		cfg   func(*store.Config)
	}{
		"an earlier version": {
			kind: "many-clients", want: "no order explains",
			store: func(s Store) Store { return hoarder{s, new(sync.Map)} },
		},
		"torn bytes": {
			kind: "clean", want: "are not those of version",
			store: puts(func(p Put) Put { return torn{p} }),
		},
		"failing loads": {
			kind: "clean", want: "entry is gone",
			store: leases(func(l Lease) Lease { return gone{l} }),
		},
		"a discard that removes nothing": {
			kind: "clean", want: "was discarded and is a hit",
			store: func(s Store) Store { return keeper{s} },
		},
		"a leaked lease": {
			kind: "clean", want: "in use", stuck: true,
			store: leases(func(l Lease) Lease { return leaky{l} }),
		},
		"a put that is not aborted": {
			kind: "clean", stuck: true,
			store: puts(func(p Put) Put { return careless{p} }),
		},
		"a hit that is lost in a restart": {
			kind: "clean", want: "was a hit before the restart",
			store: func(s Store) Store {
				if lives++; lives%2 == 1 {
					return s
				}
				return leases(func(l Lease) Lease { return forgetful{l} })(s)
			},
		},
		"a host that misses a page of a shared root": {
			kind: "shared", want: " counts ",
			store: func(s Store) Store { return short{s} },
		},
		"syncs that do nothing": {
			kind: "power-losses", want: "of the durable entries",
			cfg: func(c *store.Config) { c.FS = unsynced{c.FS} },
		},
		"a root over its capacity": {
			kind: "clean", want: "bytes used, of",
			cfg: func(c *store.Config) {
				root := c.Roots[0]
				root.Capacity *= 2
				c.Roots = []store.RootConfig{root}
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			opt, err := policies()
			must(t, err)
			above := testenv.Dir(t)
			open := func(ctx context.Context, cfg store.Config, slots *staging.Slots) (Store, error) {
				if c.cfg != nil {
					c.cfg(&cfg)
				}
				s, err := OpenStore(ctx, cfg, slots)
				if err == nil && c.store != nil {
					s = c.store(s)
				}
				return s, err
			}
			var found error
			for seed := uint64(0); seed < 400 && found == nil; seed++ {
				h := Generate(seed, 120)
				if h.Kind.Name != c.kind {
					continue
				}
				dir, err := os.MkdirTemp(above, "kvhost-history")
				must(t, err)
				ctx, stop := context.WithCancel(testenv.Context(t))
				if c.stuck {
					ctx, stop = context.WithTimeout(ctx, 30*time.Second)
				}
				_, found = Run(h, Options{Dir: dir, Policies: opt, Open: open, Patience: ctx})
				stop()
				must(t, os.RemoveAll(dir))
			}
			if found == nil || !strings.Contains(found.Error(), c.want) {
				t.Errorf("the histories found %v, want %q", found, c.want)
			}
		})
	}
}

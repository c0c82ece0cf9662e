package entries_test

import (
	"errors"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/evictor"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/kv"
)

// nowhere keeps no files.
type nowhere struct{}

func (nowhere) Keep(string, string, []byte) error { return nil }
func (nowhere) Forget(string, string)             {}

// set is a set with a class of two ranks.
type set struct {
	entries.Set
	testing.TB
	class  *catalog.Class
	tenant uint16
	clock  uint64
}

const slots = 16

func newSet(t testing.TB) *set {
	s := &set{TB: t}
	now := func() time.Time { return time.Unix(1_700_000_000, 0) }
	c, err := catalog.New(t.Context(), catalog.Options{
		Log: slog.New(slog.DiscardHandler), Now: now, Roots: nowhere{}, Expiry: func(string) time.Duration { return 0 },
		AdmitFault: func(err error) { t.Error(err) },
		Policies: catalog.Policies{
			Admit: policy.BuiltinHandle(abi.RoleAdmit), Place: policy.BuiltinHandle(abi.RolePlace),
			Layout: policy.BuiltinHandle(abi.RoleLayout),
		},
	})
	testenv.OK(t, err)
	ns, err := c.Open(t.Context(), &kv.Namespace{
		Model: "test", Revision: "1", DType: "fp8", Engine: "test", HashAlgorithm: "sha256", KeyBytes: 32,
		TokensPerBlock: 16, TensorParallel: 2,
		Groups: []kv.Group{{Lookup: kv.ByPrefix, Geometry: kv.Uniform(2, 2, 2, 1000)}},
	})
	testenv.OK(t, err)
	s.class, err = ns.OpenClass(0)
	testenv.OK(t, err)
	s.tenant = c.Tenants.Number(0)
	s.Init(entries.Config{
		MaxEntries: slots, Catalog: c, Changes: entries.NewChangeLog(16), Now: now,
		Clock:   func() uint64 { s.clock++; return s.clock },
		Account: capacity.New(capacity.Config{Dir: "/r", Bounds: capacity.Bounds{Capacity: 1 << 30}, Now: now}),
	})
	var work sync.WaitGroup
	p := &evictor.Policy{Handle: policy.BuiltinHandle(abi.RoleEvict), Since: now()}
	err = s.StartEvictor(t.Context(), evictor.Config{
		Policy: p, Run: t.Context(), Work: &work, Size: evictor.Size{Capacity: 1 << 30}, Log: slog.New(slog.DiscardHandler),
	})
	testenv.OK(t, err)
	t.Cleanup(func() {
		s.Lock()
		err := s.Evictor.Close()
		s.Unlock()
		p.Release()
		testenv.NoError(t, errors.Join(err, c.Close()))
	})
	return s
}

func keyOf(n uint64) (k kv.Key) {
	k[0], k[1] = byte(n), 1
	return k
}

func (s *set) print(n uint64) uint64 {
	return kv.Fingerprint(s.class.Namespace.Digest, s.class.Group, keyOf(n))
}

// begin makes an entry, or joins it, for one rank.
func (s *set) begin(n uint64, rank uint32) (m entries.Mark, err error) {
	k := keyOf(n)
	m.Fingerprint = s.print(n)
	refused := errors.New("it is leaving")
	m.Slot, err = s.Join(s.Context(), m.Fingerprint, s.class, &k, rank, false, func() error { return refused })
	if err == nil && m.Slot == index.None {
		s.Account.Commit(s.tenant, s.class.FileBytes())
		m.Slot, err = s.Insert(&entries.New{
			Fingerprint: m.Fingerprint, Class: s.class, Key: &k, Rank: rank, Reserved: 1 << rank, Tenant: s.tenant,
		})
	} else if err == nil {
		s.Account.Commit(s.tenant, s.class.FileBytes())
		s.Extend(m.Slot, rank, s.class.FileBytes())
	}
	return m, err
}

func (s *set) find(n uint64) uint32 {
	k := keyOf(n)
	return s.Index.Find(s.print(n), s.class.Base, &k)
}

func (s *set) sound() {
	s.Helper()
	testenv.NoError(s, s.Check(0))
}

// TestForget: an entry that is leased and written leaves the table at once, and another can take its key. Its bytes and
// its slot are free when the last of its users has gone.
func TestForget(t *testing.T) {
	s := newSet(t)
	s.Lock()
	defer s.Unlock()
	m, err := s.begin(1, 0)
	testenv.OK(t, err)
	s.Written(m.Slot, 0, "", 3, kv.Root, 0)
	s.EndWrite(m, 0)
	s.Index.Pin(m.Slot) // a lease
	second, err := s.begin(1, 1)
	if err != nil || second.Slot != m.Slot {
		t.Fatalf("joining: slot %d, %v", second.Slot, err)
	}
	entries.Forget(&s.Set, m.Slot)
	s.sound()
	if s.find(1) != index.None || s.Stands(m) {
		t.Error("a forgotten entry is found")
	}
	again, err := s.begin(1, 0)
	if err != nil || again.Slot == m.Slot {
		t.Fatalf("storing it again: slot %d, %v", again.Slot, err)
	}
	s.sound()
	s.EndWrite(second, 1)
	s.sound()
	if used := s.Account.Figures().Used; used != 3*s.class.FileBytes() {
		t.Errorf("%d bytes are in use while a lease is on the entry", used)
	}
	s.Unpin(m)
	s.sound()
	if used := s.Account.Figures().Used; used != s.class.FileBytes() || s.Index.Len() != 1 {
		t.Errorf("%d bytes and %d slots are in use when only the new one is there", used, s.Index.Len())
	}
	s.EndWrite(again, 0)
	s.sound()
	if used := s.Account.Figures().Used; used != 0 || s.Index.Len() != 0 || s.InFlight() != 0 {
		t.Errorf("at the end %d bytes, %d slots and %d flights are in use", used, s.Index.Len(), s.InFlight())
	}
}

// TestForgetDuringARemoval: whoever removes an entry's files ends it, not who forgets it meanwhile.
func TestForgetDuringARemoval(t *testing.T) {
	s := newSet(t)
	s.Lock()
	defer s.Unlock()
	m, err := s.begin(1, 0)
	testenv.OK(t, err)
	s.Written(m.Slot, 0, "", 1, kv.Root, 0)
	s.EndWrite(m, 0)
	v := s.BeginEvict(m.Slot)
	entries.Forget(&s.Set, m.Slot)
	if s.Index.Len() != 1 {
		t.Fatal("the slot of an entry whose files are being removed is free")
	}
	s.FinishEvict(&v)
	s.sound()
	if f := s.Account.Figures(); f.Entries != 0 || s.Index.Len() != 0 {
		t.Errorf("the account says %+v, %d slots are in use", f, s.Index.Len())
	}
}

// TestJoin: one writer for each piece, and none for a piece that is there.
func TestJoin(t *testing.T) {
	s := newSet(t)
	s.Lock()
	defer s.Unlock()
	a, err := s.begin(1, 0)
	testenv.OK(t, err)
	if _, err := s.begin(1, 0); !errors.Is(err, entries.ErrResident) {
		t.Errorf("a second writer of a piece: %v", err)
	}
	s.Written(a.Slot, 0, "", 3, kv.Root, 0)
	s.EndWrite(a, 0)
	if _, err := s.begin(1, 0); !errors.Is(err, entries.ErrResident) {
		t.Errorf("a writer of a piece that is there: %v", err)
	}
	if s.Complete() != 0 {
		t.Error("an entry is complete with one of two pieces")
	}
	b, err := s.begin(1, 1)
	testenv.OK(t, err)
	s.Written(b.Slot, 1, "", 3, kv.Root, 0)
	s.EndWrite(b, 1)
	s.sound()
	if s.Complete() != 1 {
		t.Error("an entry is not complete with both pieces")
	}
	v := s.BeginEvict(a.Slot)
	if _, err := s.begin(1, 0); err == nil {
		t.Error("a writer joins an entry that is being removed")
	}
	s.FinishEvict(&v)
	s.sound()
}

// TestLives plays random steps of entries' lives, and checks index and account after each.
func TestLives(t *testing.T) {
	testenv.Slow(t)
	type write struct {
		m    entries.Mark
		rank uint32
	}
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 3))
		s := newSet(t)
		s.Lock()
		var writes []write
		var pins []entries.Mark
		var removals []entries.Eviction
		live := func() (list []uint32) {
			s.Index.Each(func(slot uint32, e *index.Entry) {
				if !e.Any(index.Evicting | index.Detached) {
					list = append(list, slot)
				}
			})
			return list
		}
		end := func(i int, done bool) {
			w := writes[i]
			writes = slices.Delete(writes, i, i+1)
			if done && !s.Index.At(w.m.Slot).Is(index.Evicting) {
				s.Written(w.m.Slot, w.rank, "", 3, kv.Root, 0)
			} else if !done {
				s.Unreserve(w.m.Slot, w.rank, s.class.FileBytes())
			}
			s.EndWrite(w.m, w.rank)
		}
		for range 2000 {
			list := live()
			switch k := rng.IntN(7); {
			case k < 2 && s.Index.Len() < slots:
				rank := uint32(rng.IntN(2))
				if m, err := s.begin(rng.Uint64N(12), rank); err == nil {
					writes = append(writes, write{m, rank})
				}
			case k == 2 && len(writes) > 0:
				end(rng.IntN(len(writes)), rng.IntN(3) > 0)
			case k == 3 && len(list) > 0:
				slot := list[rng.IntN(len(list))]
				s.Index.Pin(slot)
				pins = append(pins, entries.Mark{Slot: slot, Fingerprint: s.Index.Fingerprint(slot)})
			case k == 4 && len(pins) > 0:
				i := rng.IntN(len(pins))
				s.Unpin(pins[i])
				pins = slices.Delete(pins, i, i+1)
			case k == 5 && len(list) > 0 && rng.IntN(2) == 0:
				removals = append(removals, s.BeginEvict(list[rng.IntN(len(list))]))
			case k == 5 && len(removals) > 0:
				i := rng.IntN(len(removals))
				s.FinishEvict(&removals[i])
				removals = slices.Delete(removals, i, i+1)
			case k == 6 && len(list) > 0 && rng.IntN(4) == 0:
				entries.Forget(&s.Set, list[rng.IntN(len(list))])
			}
			if err := s.Check(0); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
		}
		for len(writes) > 0 {
			end(0, false)
		}
		for i := range removals {
			s.FinishEvict(&removals[i])
		}
		for _, m := range pins {
			s.Unpin(m)
		}
		for _, slot := range live() {
			entries.Forget(&s.Set, slot)
		}
		if used := s.Account.Figures().Used; used != 0 || s.Index.Len() != 0 || s.InFlight() != 0 {
			t.Errorf("seed %d: at the end %d bytes, %d slots and %d flights are in use", seed, used, s.Index.Len(), s.InFlight())
		}
		s.Unlock()
	}
}

package store

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/plugins/lru"
)

// witness is lru, and keeps what it was told.
type witness struct {
	*lru.Policy
	mu     sync.Mutex
	events []abi.Event
	slots  map[uint32]uint64                   // the key's number
	answer func(ask abi.Ask, dst []uint32) int // instead of lru's, when set
}

func (w *witness) module() *policy.Module {
	return policy.NativeModule("witness", []abi.Role{abi.RoleEvict}, func(i guest.Info) (any, error) {
		p, err := lru.New(i)
		w.Policy, w.slots = p, map[uint32]uint64{}
		return w, err
	})
}

func (w *witness) Events(batch []abi.Event) {
	w.mu.Lock()
	w.events = append(w.events, batch...)
	w.mu.Unlock()
	w.Policy.Events(batch)
}

func (w *witness) Victims(ask abi.Ask, dst []uint32) int {
	if w.answer != nil {
		return w.answer(ask, dst)
	}
	return w.Policy.Victims(ask, dst)
}

// told flushes the store's events and gives what came since the last time: a word each, with the key's number and its
// parent's.
func (w *witness) told(f *fixture) string {
	f.Helper()
	r := f.root()
	r.Lock()
	err := r.Evictor.Flush()
	r.Unlock()
	must(f, err)
	number := map[uint64]uint64{}
	for n := range uint64(20) {
		number[kv.Fingerprint(f.space.Digest, 0, testKey(n))] = n
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	var words []string
	for _, ev := range w.events {
		if ev.Op == abi.OpInsert || ev.Op == abi.OpResident {
			w.slots[ev.Slot] = number[ev.Key]
		}
		switch n := number[ev.Key]; {
		case ev.Op == abi.OpRequestEnd:
			words = append(words, fmt.Sprintf("end:%d", ev.Request))
		case w.slots[ev.Slot] != n:
			f.Errorf("%s of key %d in slot %d, which is key %d", ev.Op, n, ev.Slot, w.slots[ev.Slot])
		case ev.Parent != abi.None:
			words = append(words, fmt.Sprintf("%s:%d<%d", ev.Op, n, w.slots[ev.Parent]))
		default:
			words = append(words, fmt.Sprintf("%s:%d", ev.Op, n))
		}
	}
	w.events = nil
	return strings.Join(words, " ")
}

func TestEvents(t *testing.T) {
	w := &witness{}
	f := newFixture(t, 3, 1, func(c *Config) { c.Policies.Evict = handle(w.module()) })
	expect := func(what, want string) {
		t.Helper()
		if got := w.told(f); got != want {
			t.Errorf("%s: the policy got the events\n%s\nwant\n%s", what, got, want)
		}
	}
	f.mustPut(0, 1, 2)
	expect("a chain", "insert:0 pin:0 unpin:0 insert:1<0 pin:1 unpin:1 insert:2<1 pin:2 unpin:2")

	if err := f.put(1, 0); !errors.Is(err, ErrResident) {
		t.Fatal(err)
	}
	expect("a resident put", "")

	ask := func(request uint32) *Lease {
		l, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: keys(0, 1, 2, 3), Request: request})
		if err != nil || l.Hits() != 3 {
			t.Fatal(l.Hits(), err)
		}
		return l
	}
	l := ask(7)
	expect("a lookup", "touch:0 pin:0 touch:1 pin:1 touch:2 pin:2")
	again := ask(7)
	expect("the same request again", "")
	l.Release()
	expect("one of two leases released", "")
	again.Release()
	expect("the last released", "unpin:0 unpin:1 unpin:2")
	f.store.EndRequest(7, abi.Hints{})
	ask(7).Release()
	expect("the next request of this id", "end:7 touch:0 pin:0 touch:1 pin:1 touch:2 pin:2 unpin:0 unpin:1 unpin:2")

	f.mustPut(9)
	expect("a put that evicts the oldest", "remove:0 insert:9 pin:9 unpin:9")
	f.lookup(9).Release()
	w.told(f)
	f.mustPut(0)
	expect("the parent is evicted by itself and its child is linked to nothing", "remove:1 insert:0 pin:0 unpin:0")
	f.mustPut(1)
	expect("a child of it", "remove:2 insert:1<0 pin:1 unpin:1")

	f.restart()
	expect("a restart, oldest first", "resident:9 resident:0 resident:1<0")
}

func TestLinkWhenAParentComesBack(t *testing.T) {
	w := &witness{}
	f := newFixture(t, 4, 1, func(c *Config) { c.Policies.Evict = handle(w.module()) })
	f.mustPut(2, 1)
	if got := w.told(f); got != "insert:2 pin:2 unpin:2 insert:1 link:2<1 pin:1 unpin:1" {
		t.Error(got)
	}
	f.restart()
	if got := w.told(f); got != "resident:2 resident:1 link:2<1" {
		t.Error(got)
	}
}

// TestVictimsAreJudged has a policy that names what it must not; the host passes over that and takes what is right.
func TestVictimsAreJudged(t *testing.T) {
	w := &witness{}
	f := newFixture(t, 3, 1, func(c *Config) { c.Policies.Evict = handle(w.module()) })
	f.mustPut(0, 1, 2)
	l := f.lookup(0)
	defer l.Release()
	w.answer = func(_ abi.Ask, dst []uint32) int { return copy(dst, []uint32{7, 0, 2, 1}) }
	f.mustPut(5)
	st := f.store.Stats().Roots[0]
	if st.BadVictims != 2 || st.Evictions != 1 {
		t.Errorf("%d bad victims, %d evictions", st.BadVictims, st.Evictions)
	}
	if f.has(2) || !f.has(1) || !f.has(0) {
		t.Error("another entry went than the first valid victim")
	}
	w.answer = func(abi.Ask, []uint32) int { return 0 }
	f.mustPut(6)
	if f.has(5) || !f.has(1) || !f.has(0) {
		t.Error("another entry went than the one touched least recently")
	}
	st = f.store.Stats().Roots[0]
	equal(t, "Sheds", st.Sheds, 0)
	equal(t, "Unanswered", st.Unanswered, 1)
	equal(t, "EvictFaults", st.EvictFaults, 0)
	f.checkUsed()
}

// TestPolicyFault replaces a policy that answers nonsense by the built-in one, which knows what is here.
func TestPolicyFault(t *testing.T) {
	w := &witness{}
	f := newFixture(t, 3, 1, func(c *Config) { c.Policies.Evict = handle(w.module()) })
	f.mustPut(0, 1, 2)
	f.lookup(0).Release()
	w.answer = func(_ abi.Ask, dst []uint32) int { return copy(dst, []uint32{1 << 30}) }
	f.mustPut(5)
	st := f.store.Stats().Roots[0]
	if st.EvictFaults != 1 || !st.Evict.Builtin {
		t.Errorf("%d faults, policy %s", st.EvictFaults, st.Evict.Module)
	}
	if f.has(1) || !f.has(0) || !f.has(2) || !f.has(5) {
		t.Error("the built-in policy did not evict the least recently touched")
	}
	noError(t, f.idle())
}

func TestAdmission(t *testing.T) {
	var seen []abi.Candidate
	admit := policy.NativeModule("deep", []abi.Role{abi.RoleAdmit}, func(guest.Info) (any, error) {
		return admitFunc(func(c abi.Candidate) bool { seen = append(seen, c); return c.Depth < 2 }), nil
	})
	f := newFixture(t, 4, 2, func(c *Config) { c.Policies.Admit = handle(admit) })
	f.mustPut(0, 1)
	if err := f.put(2, 0); !errors.Is(err, ErrRefused) {
		t.Errorf("put at depth 2: %v", err)
	}
	if len(seen) != 3 || seen[0].Flags != abi.CandidateLast || seen[1].Flags != abi.CandidateLast|abi.CandidateParentResident || seen[1].Size != 8 {
		t.Errorf("candidates %+v", seen)
	}
	for _, c := range seen {
		if c.Kind != abi.KindNew || c.From != abi.NoLevel || c.To != 0 || c.Hits != 0 {
			t.Errorf("a new entry is said to be %+v", c)
		}
	}
	st := f.store.Stats()
	equal(t, "Refused", st.Refused, 1)
	equal(t, "Entries", st.Roots[0].Entries, 2)
}

type admitFunc func(abi.Candidate) bool

func (f admitFunc) Admit(batch []abi.Candidate, dst []bool) {
	for i, c := range batch {
		dst[i] = f(c)
	}
}

// TestDetour has a place policy that gives one name to all keys: the first has it, the others get the built-in name.
func TestDetour(t *testing.T) {
	place := policy.NativeModule("one", []abi.Role{abi.RolePlace}, func(guest.Info) (any, error) {
		return onePlace{}, nil
	})
	f := newFixture(t, 8, 2, func(c *Config) { c.Policies.Place = handle(place) })
	f.mustPut(0, 1, 2)
	for round := range 2 {
		f.mustRead(upTo(3)...)
		f.checkUsed()
		if round == 0 {
			if got := f.store.Stats().Roots[0].PlaceFaults; got != 4 {
				t.Errorf("%d place faults", got)
			}
			f.restart()
		}
	}
	l := f.lookup(0)
	p, err := l.Open(0, 0)
	must(t, err)
	p.Bad(errors.New("on purpose"))
	p.Close()
	l.Release()
	f.mustRead(1, 2)
	f.mustPut(0)
	f.mustRead(0)
	f.checkUsed()
	if _, err := f.store.Put(context.Background(),
		PutRequest{Namespace: f.space, Group: 9, Key: testKey(1)}); !errors.Is(err, ErrUnknownNamespace) {
		t.Errorf("put in an unknown group: %v", err)
	}
}

type onePlace struct{}

func (onePlace) Place(q *abi.PlaceQuery, _ []abi.RootFacts, dst []byte) ([]byte, uint32) {
	return fmt.Appendf(dst, "one/r%d", q.Rank), abi.None
}

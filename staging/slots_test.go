package staging

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
)

func newSlots(t testing.TB, count, bytes int) *Slots {
	t.Helper()
	s, err := NewSlots(count, bytes)
	must(t, err)
	return s
}

func (s *Slots) waiting() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for w := s.first; w != nil; w = w.next {
		n++
	}
	return n
}

// until yields until a condition holds; what never does is found by the test's own time limit.
func until(cond func() bool) {
	for !cond() {
		runtime.Gosched()
	}
}

func TestSlotsShape(t *testing.T) {
	for _, c := range []struct{ count, bytes, want int }{{1, 1, 4096}, {3, 4096, 4096}, {2, 4097, 8192}, {4, 3 << 20, 3 << 20}} {
		s := newSlots(t, c.count, c.bytes)
		if s.Capacity() != c.count || s.slotBytes() != c.want || s.InUse() != 0 {
			t.Fatalf("%+v: capacity %d, slot %d, in use %d", c, s.Capacity(), s.slotBytes(), s.InUse())
		}
		if total := c.count * c.want; total >= hugePage && address(s.mem)%hugePage != 0 {
			t.Errorf("%+v: starts at %#x, not on a huge page", c, address(s.mem))
		}
		var all []*Slot
		for i := range c.count {
			m, ok := s.TryAcquire()
			if !ok || len(m.Bytes()) != c.want || cap(m.Bytes()) != c.want || address(m.Bytes())%Align != 0 {
				t.Fatalf("%+v: slot %d: %v, %d bytes at %#x", c, i, ok, len(m.Bytes()), address(m.Bytes()))
			}
			m.Bytes()[0], m.Bytes()[c.want-1] = byte(i), byte(i)
			all = append(all, m)
		}
		if _, ok := s.TryAcquire(); ok {
			t.Fatal("one more than there are")
		}
		for i, m := range all {
			if m.Bytes()[0] != byte(i) || m.Bytes()[c.want-1] != byte(i) {
				t.Fatal("slots overlap")
			}
			m.Release()
		}
		must(t, s.Close())
	}
	for _, bad := range [][2]int{{0, 1}, {1, 0}, {-1, 4096}, {1, -4096}, {1 << 50, 1 << 30}, {1, 1 << 62}} {
		if _, err := NewSlots(bad[0], bad[1]); err == nil {
			t.Errorf("%v slots and bytes were accepted", bad)
		}
	}
}

func TestSlotsLastInFirstOut(t *testing.T) {
	s := newSlots(t, 4, 4096)
	a, _ := s.TryAcquire()
	b, _ := s.TryAcquire()
	a.Release()
	b.Release()
	for _, want := range []*Slot{b, a} {
		if got, _ := s.TryAcquire(); got != want {
			t.Fatal("not the slot that came back last")
		}
	}
}

func TestSlotsServeInOrder(t *testing.T) {
	s := newSlots(t, 1, 4096)
	held, _ := s.TryAcquire()
	const n = 8
	order := make(chan int, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			m, err := s.Acquire(t.Context())
			if err != nil {
				t.Error(err)
				return
			}
			order <- i
			m.Release()
		})
		until(func() bool { return s.waiting() == i+1 })
	}
	held.Release()
	wg.Wait()
	close(order)
	var got []int
	for i := range order {
		got = append(got, i)
	}
	if !slices.IsSorted(got) || len(got) != n {
		t.Fatalf("served in order %v", got)
	}
	if s.InUse() != 0 {
		t.Fatalf("%d in use", s.InUse())
	}
}

func TestSlotsCancel(t *testing.T) {
	s := newSlots(t, 1, 4096)
	held, _ := s.TryAcquire()
	ctx, cancel := context.WithCancel(t.Context())
	errs := make(chan error, 3)
	for range 3 {
		go func() {
			_, err := s.Acquire(ctx)
			errs <- err
		}()
	}
	until(func() bool { return s.waiting() == 3 })
	cancel()
	for range 3 {
		if err := <-errs; !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
	}
	if s.waiting() != 0 {
		t.Fatalf("%d still wait", s.waiting())
	}
	held.Release()
	if s.InUse() != 0 {
		t.Fatal("a slot went to who had left")
	}
}

// TestSlotsInABubble: what one pool keeps for those that wait is not another one's. The runtime ends a program that uses
// a bubble's channel outside of it.
func TestSlotsInABubble(t *testing.T) {
	wait := func(t *testing.T) {
		s := newSlots(t, 1, Align)
		slot, _ := s.TryAcquire()
		var wg sync.WaitGroup
		wg.Go(func() {
			if slot, err := s.Acquire(t.Context()); err != nil {
				t.Error(err)
			} else {
				slot.Release()
			}
		})
		until(func() bool { return s.waiting() == 1 })
		slot.Release()
		wg.Wait()
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
	for range 20 {
		synctest.Test(t, wait)
		wait(t)
	}
}

func TestSlotsDoubleRelease(t *testing.T) {
	s := newSlots(t, 2, 4096)
	m, _ := s.TryAcquire()
	m.Release()
	defer func() {
		if recover() == nil {
			t.Fatal("released twice without a word")
		}
		if s.InUse() != 0 {
			t.Fatal("the pool counts wrong")
		}
		if _, ok := s.TryAcquire(); !ok {
			t.Fatal("the pool is locked")
		}
	}()
	m.Release()
}

func TestSlotsClose(t *testing.T) {
	s := newSlots(t, 1, 4096)
	m, _ := s.TryAcquire()
	errs := make(chan error)
	go func() {
		_, err := s.Acquire(context.Background())
		errs <- err
	}()
	until(func() bool { return s.waiting() == 1 })
	if err := s.Close(); !errors.Is(err, ErrSlotsOut) {
		t.Fatalf("with a slot out: %v", err)
	}
	if err := <-errs; !errors.Is(err, ErrClosed) {
		t.Fatalf("who waited got %v", err)
	}
	m.Bytes()[0] = 1 // still mapped
	if _, err := s.Acquire(t.Context()); !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
	m.Release()
	if s.mem != nil {
		t.Fatal("not unmapped with the last slot")
	}
	if err := s.Close(); !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
	if err := s.Register(&pins{}); !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
}

type pins struct {
	held    []byte
	log     *[]string
	name    string
	refuse  error
	ungrace error
}

func (p *pins) Register(mem []byte) error {
	if p.refuse != nil {
		return p.refuse
	}
	p.held = mem
	return nil
}

func (p *pins) Unregister(mem []byte) error {
	if address(mem) != address(p.held) || len(mem) != len(p.held) {
		return errors.New("other memory than was registered")
	}
	*p.log = append(*p.log, p.name)
	return p.ungrace
}

func TestSlotsPinners(t *testing.T) {
	s := newSlots(t, 2, 1<<20)
	var log []string
	errUn := errors.New("unpin")
	a, b := &pins{log: &log, name: "a", ungrace: errUn}, &pins{log: &log, name: "b"}
	for _, p := range []*pins{a, b} {
		must(t, s.Register(p))
	}
	if len(a.held) != 2<<20 {
		t.Fatalf("%d bytes registered", len(a.held))
	}
	refused := errors.New("no")
	if err := s.Register(&pins{refuse: refused}); !errors.Is(err, refused) {
		t.Fatal(err)
	}
	if err := s.Close(); !errors.Is(err, errUn) {
		t.Fatalf("close: error %v, want %v", err, errUn)
	}
	if !slices.Equal(log, []string{"b", "a"}) || s.mem != nil {
		t.Fatalf("given back in order %v, unmapped %v", log, s.mem == nil)
	}
}

func TestSlotsHammer(t *testing.T) {
	s := newSlots(t, 3, 4096)
	var owners [3]atomic.Int32
	index := func(m *Slot) int { return int(address(m.Bytes())-address(s.mem)) / 4096 }
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(1, uint64(g)))
			for range 500 {
				ctx, cancel := context.WithCancel(context.Background())
				if rng.IntN(4) == 0 {
					go cancel()
				}
				m, err := s.Acquire(ctx)
				if err == nil {
					if owners[index(m)].Add(1) != 1 {
						t.Error("one slot, two owners")
					}
					m.Bytes()[rng.IntN(4096)]++
					owners[index(m)].Add(-1)
					m.Release()
				}
				cancel()
			}
		})
	}
	wg.Wait()
	if s.InUse() != 0 || s.waiting() != 0 {
		t.Fatalf("%d in use, %d wait", s.InUse(), s.waiting())
	}
	must(t, s.Close())
}

package staging

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/kvhost/kvhost/abi/testenv"
)

func newSlots(t testing.TB, count, bytes int) *Slots {
	t.Helper()
	s, err := NewSlots(count, bytes)
	must(t, err)
	return s
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
		if s.Capacity() != c.count || s.InUse() != 0 {
			t.Fatalf("%+v: capacity %d, in use %d, want none in use", c, s.Capacity(), s.InUse())
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
	synctest.Test(t, func(t *testing.T) {
		s := newSlots(t, 1, 4096)
		held, _ := s.TryAcquire()
		const n = 8
		var got []int
		for i := range n {
			go func() {
				m, err := s.Acquire(t.Context())
				if err != nil {
					t.Error(err)
					return
				}
				got = append(got, i) // by whoever has the slot
				m.Release()
			}()
			synctest.Wait()
		}
		held.Release()
		synctest.Wait()
		if !slices.IsSorted(got) || len(got) != n {
			t.Errorf("served in order %v, want the order of arrival of %d", got, n)
		}
		if s.InUse() != 0 {
			t.Errorf("%d slots in use, want 0", s.InUse())
		}
		must(t, s.Close())
	})
}

func TestSlotsCancel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
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
		synctest.Wait()
		cancel()
		for range 3 {
			if err := <-errs; !errors.Is(err, context.Canceled) {
				t.Fatalf("waiting for a slot: error %v, want %v", err, context.Canceled)
			}
		}
		held.Release()
		if s.InUse() != 0 {
			t.Fatal("a slot went to who had left")
		}
		must(t, s.Close())
	})
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
	synctest.Test(t, func(t *testing.T) {
		s := newSlots(t, 1, 4096)
		m, _ := s.TryAcquire()
		errs := make(chan error)
		go func() {
			_, err := s.Acquire(context.Background())
			errs <- err
		}()
		synctest.Wait()
		if err := s.Close(); !errors.Is(err, ErrSlotsOut) {
			t.Fatalf("with a slot out: error %v, want %v", err, ErrSlotsOut)
		}
		m.Bytes()[0] = 1 // still mapped
		_, late := s.Acquire(t.Context())
		m.Release()
		if s.mem != nil {
			t.Fatal("not unmapped with the last slot")
		}
		_, last := s.Acquire(t.Context())
		for what, err := range map[string]error{
			"a wait": <-errs, "a later one": late, "the last": last, "Close": s.Close(), "Register": s.Register(&pins{}),
		} {
			if !errors.Is(err, ErrClosed) {
				t.Errorf("%s, of a closed pool: error %v, want %v", what, err, ErrClosed)
			}
		}
	})
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
	if s.InUse() != 0 {
		t.Fatalf("%d slots in use, want 0", s.InUse())
	}
	must(t, s.Close())
}

// What is available is the least of the machine's and of what each control group leaves, and a group's cached files can go.
func TestMachineMemory(t *testing.T) {
	for _, v := range []struct {
		name, mount, line, limit, used, cached, none string
	}{
		{"version 1", "sys/fs/cgroup/memory", "7:pids:/x\n4:cpuset,memory:/a/b\n0::/y\n", "memory.limit_in_bytes", "memory.usage_in_bytes",
			"inactive_file 1\ntotal_inactive_file 131072\n", "9223372036854771712\n"},
		{"version 2", "sys/fs/cgroup", "0::/a/b\n", "memory.max", "memory.current", "anon 524288\ninactive_file 131072\n", "max\n"},
	} {
		t.Run(v.name, func(t *testing.T) {
			top := t.TempDir()
			all, _, known := MemoryBelow(top)
			if all < 64<<20 || known {
				t.Errorf("a machine that does not say what is available has %d bytes, known %v", all, known)
			}
			above, group := filepath.Join(v.mount, "a"), filepath.Join(v.mount, "a/b")
			err := errors.Join(os.MkdirAll(filepath.Join(top, group), 0o700), os.MkdirAll(filepath.Join(top, "proc/self"), 0o700))
			write := func(name, text string) {
				err = errors.Join(err, os.WriteFile(filepath.Join(top, name), []byte(text), 0o600))
				testenv.OK(t, err)
			}
			want := func(what string, total, available int64) {
				t.Helper()
				if gotTotal, got, known := MemoryBelow(top); gotTotal != total || got != available || !known {
					t.Errorf("%s: got %d bytes, %d available, known %v; want %d and %d", what, gotTotal, got, known, total, available)
				}
			}
			all = 16 << 20
			write("proc/meminfo", "MemTotal: 16384 kB\nMemFree: 1 kB\nMemAvailable:    2048 kB\n")
			want("no control group", all, 2<<20)
			write("proc/self/cgroup", v.line)
			write(filepath.Join(group, v.limit), v.none)
			write(filepath.Join(above, v.limit), "1048576\n")
			want("a limit above, without its use", 1<<20, 2<<20)
			write(filepath.Join(above, v.used), "786432\n")
			want("a limit above", 1<<20, 1<<18)
			write(filepath.Join(above, "memory.stat"), v.cached)
			want("a limit above, with cached files", 1<<20, 1<<18+1<<17)
			write(filepath.Join(v.mount, v.limit), "524288\n")
			want("the limit of a container, whose group has the machine's path", 1<<19, 1<<18+1<<17)
		})
	}
}

// A process in a group of 1 GiB has no more, whichever version of control groups the machine has.
func TestMemoryOfAGroup(t *testing.T) {
	const inGroup, limit = "KVHOST_TEST_IN_GROUP", 1 << 30
	if os.Getenv(inGroup) != "" {
		if total, available, known := MachineMemory(); total != limit || available > limit || !known {
			t.Errorf("in a group of %d bytes: got %d bytes, %d available, known %v", limit, total, available, known)
		}
		return
	}
	testenv.Need(t, testenv.MemoryCgroup)
	dir, err := os.MkdirTemp(testenv.MemoryCgroups(), "kvhost-test-")
	testenv.OK(t, err)
	t.Cleanup(func() { testenv.NoError(t, os.Remove(dir)) })
	name := "memory.max"
	if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
		name = "memory.limit_in_bytes"
	}
	testenv.OK(t, os.WriteFile(filepath.Join(dir, name), []byte(strconv.Itoa(limit)), 0))
	cmd := exec.Command("sh", "-c", `echo $$ >"$0/cgroup.procs" && exec "$@"`, dir, os.Args[0], "-test.run=^TestMemoryOfAGroup$")
	cmd.Env = append(os.Environ(), inGroup+"=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("a process in a group: %v\n%s", err, out)
	}
}

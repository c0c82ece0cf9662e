package policy

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/testkit/wasmtest"
)

func TestEvictAllocatesNothing(t *testing.T) {
	for _, m := range []*Module{modules["lru"], natives["lru"]} {
		e := newEvict(t, m, 4096)
		for slot := range uint32(4096) {
			testenv.OK(t, e.Event(abi.Event{Op: abi.OpInsert, Slot: slot, Parent: abi.None, Size: 1}))
		}
		dst := make([]uint32, 4)
		slot := uint32(0)
		n := testing.AllocsPerRun(200, func() {
			for range 300 {
				slot = (slot + 997) % 4096
				testenv.OK(t, e.Event(abi.Event{Op: abi.OpTouch, Slot: slot}))
			}
			if _, err := e.Victims(abi.Ask{Bytes: 4 * abi.SizeUnit, MaxVictims: 4, Tenant: abi.None}, dst); err != nil {
				t.Fatal(err)
			}
		})
		if n != 0 {
			t.Errorf("%s %s: %v allocations per run", m.Name(), m.Digest(), n)
		}
	}
}

// TestTurnover: it is the time that a content takes at the pace of the last two, grows while nothing goes, and never overflows.
func TestTurnover(t *testing.T) {
	var u Turnover
	const content = 1000
	now := 7 * time.Hour
	if got := u.Of(content, now); got != Endless {
		t.Errorf("%s before anything has gone, want endless", got)
	}
	about := func(when string, want time.Duration) {
		t.Helper()
		if got := u.Of(content, now); got < want*3/4 || got > want*4/3 {
			t.Errorf("%s: %s, want about %s", when, got, want)
		}
	}
	replace := func(n int64, in time.Duration) {
		for i := range time.Duration(n) {
			u.Replaced(1, content, now+in*(i+1)/time.Duration(n))
		}
		now += in
	}
	replace(content/10, time.Minute)
	about("a tenth in a minute", 10*time.Minute)
	replace(5*content, 100*time.Minute)
	about("five contents in 100 minutes", 20*time.Minute)
	replace(3*content, 3*time.Minute)
	about("three more in 3 minutes", time.Minute)
	replace(content/4, 30*time.Second)
	if got := u.Of(content, now); got > 2*time.Minute {
		t.Errorf("%s after a quarter at half the pace, want it to count for a part", got)
	}
	now += 10 * time.Hour
	if got := u.Of(content, now); got < 4*time.Hour {
		t.Errorf("%s after ten hours in which nothing has gone, want it to grow", got)
	}
	var large Turnover
	large.Replaced(1, 1<<60, 0)
	if got := large.Of(1<<60, Endless); got <= 0 {
		t.Errorf("%s for a byte of 2^60 in 292 years, want it above 0", got)
	}
}

// TestTaker: the one that takes longest is chosen if that is three times as long, those that take as long in turns, and none that does not say.
func TestTaker(t *testing.T) {
	const s = time.Second
	for _, c := range []struct {
		own    time.Duration
		others []time.Duration
		want   int
	}{
		{s, nil, -1},
		{s, []time.Duration{0, s, 3*s - 1}, -1},
		{s, []time.Duration{0, 3 * s, 2 * s}, 1},
		{s, []time.Duration{3 * s, Endless, 9 * s}, 1},
		{0, []time.Duration{0, 0, 1}, 2},
		{Endless, []time.Duration{Endless, Endless}, -1},
		{Endless / 2, []time.Duration{Endless, 1}, -1},
	} {
		for turn := range 4 {
			if got := Taker(c.own, c.others, turn); got != c.want {
				t.Errorf("of %s %v in turn %d: %d, want %d", c.own, c.others, turn, got, c.want)
			}
		}
	}
	count := [3]int{}
	for turn := range 30 {
		count[Taker(s, []time.Duration{Endless, s, Endless}, turn)]++
	}
	if count[0] < 10 || count[1] != 0 || count[2] < 10 {
		t.Errorf("two that take as long are chosen %v times, want both", count)
	}
	r := rand.New(rand.NewPCG(1, 2))
	for range 1000 {
		own, others := time.Duration(r.Int64()), []time.Duration{time.Duration(r.Int64()), time.Duration(r.Int64())}
		if n := Taker(own, others, r.IntN(9)); n >= 0 && others[n]/3 < own-1 {
			t.Errorf("of %d %v the %d. is chosen, want three times as long", own, others, n)
		}
	}
}

// Guests that are made to take as long as they can for their fuel. A little more memory than caches have, and buffers
// before it.
const (
	vastAt    = 128 << 10
	vastPages = 1000
	vastBytes = vastPages<<16 - vastAt
	vastLines = 1 << 20 // at 56 bytes each
)

const (
	localGet, localSet, localTee = 0x20, 0x21, 0x22
	i32Add, i32Mul, i32And       = 0x6a, 0x6c, 0x71
)

func vast(step ...[]byte) wasmtest.Assembly {
	a := minimal(abi.RoleEvict).With(abi.ExportStep, "ii>I", append(step, wasmtest.I64(0))...)
	a.Pages = vastPages
	return a
}

// nextLine makes a line's number of local 0 the number of another one; all have their turn.
func nextLine() []byte {
	return wasmtest.Join([]byte{localGet, 0}, wasmtest.I32(1664525), []byte{i32Mul}, wasmtest.I32(1013904223), []byte{i32Add}, wasmtest.I32(vastLines-1), []byte{i32And})
}

func lineAt(line []byte) []byte {
	return wasmtest.Join(line, wasmtest.I32(56), []byte{i32Mul}, wasmtest.I32(vastAt), []byte{i32Add})
}

// chaser follows a chain of addresses through all lines: each load waits for the one before. kv_init lays it.
func chaser() wasmtest.Assembly {
	lay := wasmtest.Loop(lineAt([]byte{localGet, 0}), lineAt(nextLine()), []byte{0x36, 2, 0}, nextLine(), []byte{localTee, 0, 0x45, 0x0d, 1}) // until it is 0 again
	a := vast(lineAt([]byte{localGet, 0}), []byte{localSet, 0},
		wasmtest.Loop([]byte{localGet, 0}, slices.Repeat([]byte{0x28, 2, 0}, 100), []byte{localSet, 0}))
	return a.With(abi.ExportInit, "i>i", wasmtest.I32(0), []byte{localSet, 0, 0x02, 0x40}, lay, []byte{0x0b}, wasmtest.I32(0))
}

// marcher does something to a MiB after the other.
func marcher(do ...[]byte) wasmtest.Assembly {
	return vast(wasmtest.Loop([]byte{localGet, 0}, wasmtest.I32(vastAt), []byte{i32Add, localSet, 1}, wasmtest.Join(do...),
		[]byte{localGet, 0}, wasmtest.I32(1<<20), []byte{i32Add}, wasmtest.I32(1<<25-1), []byte{i32And, localSet, 0}))
}

var stallers = map[string]wasmtest.Assembly{
	"loop":   vast(wasmtest.Loop()),
	"chase":  chaser(),
	"store":  vast(wasmtest.Loop(slices.Repeat(wasmtest.Join(nextLine(), []byte{localTee, 0}, wasmtest.I32(56), []byte{i32Mul, localGet, 1, 0x36, 2, 0}), 50))),
	"fill":   marcher([]byte{localGet, 1}, wasmtest.I32(1), wasmtest.I32(1<<20), []byte{0xfc, 11, 0}),
	"copy":   marcher([]byte{localGet, 1}, wasmtest.I32(1<<24), []byte{i32Add, localGet, 1}, wasmtest.I32(1<<20), []byte{0xfc, 10, 0, 0}),
	"touch":  vast(wasmtest.Loop([]byte{localGet, 1}, wasmtest.I32(4096), []byte{i32Add, localTee, 1}, wasmtest.I32(vastBytes), []byte{0x70, localTee, 1}, wasmtest.I32(1), []byte{0x36, 2, 0})), // every page for the first time
	"divide": vast(wasmtest.Loop(slices.Repeat(wasmtest.Join([]byte{localGet, 0}, wasmtest.I32(1), []byte{0x72, localSet, 0}, wasmtest.I32(-1), []byte{localGet, 0, 0x6e, localSet, 0}), 50))),
	"recursion": func() wasmtest.Assembly {
		a := vast()
		again := wasmtest.Join(wasmtest.I32(0), wasmtest.I32(0), wasmtest.Call(uint64(len(a.Funcs)-1)), drop)
		return a.With(abi.ExportStep, "ii>I", again, again, wasmtest.I64(0))
	}(),
}

// decisions runs a seeded stream, with pins, tenants and sizes, and logs each answer: what a policy decides is part of its version.
func decisions(t *testing.T, m *Module) []byte {
	t.Helper()
	const slots = 300
	e := newEvict(t, m, slots)
	s := newStream(42, slots)
	var b bytes.Buffer
	var dst [16]uint32
	for range 150 {
		for range 1 + s.rng.IntN(20) {
			testenv.OK(t, e.Event(s.next()))
		}
		ask := s.ask()
		n, err := e.Victims(ask, dst[:])
		testenv.OK(t, err)
		fmt.Fprintf(&b, "bytes %d most %d tenant %d: %d\n", ask.Bytes, ask.MaxVictims, int32(ask.Tenant), dst[:n])
		for _, v := range dst[:n] {
			if s.at[v] >= 0 {
				_ = e.Event(s.remove(v))
			}
		}
	}
	return b.Bytes()
}

func TestDecisionsStay(t *testing.T) {
	for name, want := range map[string]string{"lru": "ea353a2fe4807811", "fifo": "fc16bb4c20333d97"} {
		for kind, m := range map[string]*Module{"native": natives[name], "module": modules[name]} {
			if got := fmt.Sprintf("%x", sha256.Sum256(decisions(t, m)))[:16]; got != want {
				t.Errorf("%s, %s: its decisions have the digest %s, want %s: another version?", name, kind, got, want)
			}
		}
	}
}

// The scan reads whatever an operator hands over.
func FuzzScan(f *testing.F) {
	for r := range abi.Roles {
		a := minimal(r).Importing(abi.ImportModule, abi.ImportFail, "ii>")
		a.Manifest = `{"name":"x","version":"1","abi":1,"roles":["evict"]}`
		f.Add(a.Bytes())
	}
	f.Add([]byte("\x00asm\x01\x00\x00\x00\x01\xff\xff\xff\xff\x0f"))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := sandbox.ScanModule(b)
		if err != nil {
			return
		}
		if _, err := s.Verify(); err == nil {
			_ = s.CheckGrants(abi.Manifest{}, nil)
		}
		if again, err := sandbox.ScanModule(s.Compilable()); err != nil || len(again.Sections) > 13 {
			t.Errorf("what compilers get cannot be read: %v", err)
		}
	})
}

// side is one of the things that a benchmark compares: work does a fixed number of units of it.
type side struct {
	name string
	work func()
}

// contest runs the sides in turns, a round of each per iteration, so that what else the machine does hits them alike.
// Of each side it reports the fastest round, which is what the code costs when nothing disturbs it, and the median,
// both in nanoseconds per unit. Run it with -benchtime 1000x or so: the time per iteration means nothing.
func contest(b *testing.B, units int, sides ...side) {
	b.Helper()
	rounds := make([][]time.Duration, len(sides))
	for b.Loop() {
		for i, s := range sides {
			start := time.Now()
			s.work()
			rounds[i] = append(rounds[i], time.Since(start))
		}
	}
	for i, s := range sides {
		slices.Sort(rounds[i])
		b.ReportMetric(float64(rounds[i][0])/float64(units), s.name+"-best-ns")
		b.ReportMetric(float64(rounds[i][len(rounds[i])/2])/float64(units), s.name+"-median-ns")
	}
}

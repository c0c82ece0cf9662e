package striped

import (
	"encoding/binary"
	"math"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/abi/testenv"
)

const (
	gib = 1 << 30
	mib = 1 << 20
)

func root(id uint32, capacity, free, speed uint64) abi.RootFacts {
	return abi.RootFacts{ID: id, Flags: abi.RootWritable, Capacity: capacity, Free: free, ReadBps: speed, WriteBps: speed}
}

func key(n uint64, rank uint32) *abi.PlaceQuery {
	q := &abi.PlaceQuery{Namespace: 1, Group: 2, Rank: rank, KeyLen: 32}
	for i := range 4 {
		binary.LittleEndian.PutUint64(q.Key[8*i:], mix(n*4+uint64(i)))
	}
	return q
}

func shares(roots []abi.RootFacts, n int) []float64 {
	got := make([]float64, len(roots))
	for i := range n {
		if at := choose(key(uint64(i), 0), roots); at != abi.None {
			got[at] += 1 / float64(n)
		}
	}
	return got
}

func TestShares(t *testing.T) {
	for _, c := range []struct {
		name  string
		roots []abi.RootFacts
		want  []float64
	}{
		{"one root", []abi.RootFacts{root(0, 100*gib, gib, 1)}, []float64{1}},
		{"alike", []abi.RootFacts{root(0, 100*gib, 50*gib, 500*mib), root(1, 100*gib, 50*gib, 500*mib)}, []float64{.5, .5}},
		{"three times as fast", []abi.RootFacts{root(0, 100*gib, 50*gib, 500*mib), root(1, 100*gib, 50*gib, 1500*mib)}, []float64{.25, .75}},
		{"four times the room", []abi.RootFacts{root(0, 100*gib, 80*gib, 500*mib), root(1, 100*gib, 20*gib, 500*mib)}, []float64{.8, .2}},
		{"full roots, by capacity", []abi.RootFacts{root(0, 300*gib, 0, 500*mib), root(1, 100*gib, 0, 500*mib)}, []float64{.75, .25}},
		{"a speed unknown", []abi.RootFacts{root(0, 100*gib, 50*gib, 0), root(1, 100*gib, 50*gib, 500*mib)}, []float64{.5, .5}},
		{"no speed known", []abi.RootFacts{root(0, 100*gib, 50*gib, 0), root(1, 100*gib, 50*gib, 0)}, []float64{.5, .5}},
		{"one takes no stores", []abi.RootFacts{root(0, 100*gib, 50*gib, 500*mib), {ID: 1, Capacity: 100 * gib, Free: 100 * gib}}, []float64{1, 0}},
		{"none does", []abi.RootFacts{{ID: 0}, {ID: 1}}, []float64{0, 0}},
		{"extremes", []abi.RootFacts{root(0, math.MaxUint64, math.MaxUint64, math.MaxUint64), root(1, 0, 0, 1)}, []float64{1, 0}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := shares(c.roots, 20000)
			for i := range got {
				if math.Abs(got[i]-c.want[i]) > 0.015 {
					t.Errorf("shares are %.3f, want %.3f", got, c.want)
					break
				}
			}
		})
	}
}

// When one root of three gets slower, entries leave it and none of the others move.
func TestOnlyWhatMustMoves(t *testing.T) {
	before := []abi.RootFacts{root(7, 100*gib, 50*gib, gib), root(8, 100*gib, 50*gib, gib), root(9, 100*gib, 50*gib, gib)}
	after := []abi.RootFacts{before[0], root(8, 100*gib, 50*gib, gib/2), before[2]}
	for i := range 5000 {
		was, is := choose(key(uint64(i), 0), before), choose(key(uint64(i), 0), after)
		if was != is && was != 1 {
			t.Fatalf("key %d went from root %d to %d", i, was, is)
		}
	}
}

func TestRanksShareARoot(t *testing.T) {
	roots := []abi.RootFacts{root(0, 100*gib, 50*gib, gib), root(1, 100*gib, 50*gib, gib)}
	for i := range 100 {
		for rank := range uint32(8) {
			if choose(key(uint64(i), rank), roots) != choose(key(uint64(i), 0), roots) {
				t.Fatalf("key %d, rank %d is elsewhere", i, rank)
			}
		}
	}
}

func TestNamesAreFanouts(t *testing.T) {
	p, err := New(guest.Info{MaxNamespaces: 2, Config: guest.Config{"widths": "1/1"}})
	testenv.OK(t, err)
	p.Namespace(1, "model=a\n")
	q := key(5, 3)
	roots := []abi.RootFacts{root(0, gib, gib, gib), root(1, gib, gib, gib)}
	path, at := p.Place(q, roots, nil)
	if want, _ := p.Policy.Place(q, nil, nil); string(path) != string(want) || at > 1 {
		t.Errorf("got %q on root %d, want %q", path, at, want)
	}
	if _, err := New(guest.Info{Config: guest.Config{"widths": "9"}}); err == nil {
		t.Error("bad widths were taken")
	}
}

func TestMinusLog(t *testing.T) {
	for _, u := range []uint64{1, 2, 3, 1 << 32, 1<<63 - 1, 1 << 63, math.MaxUint64, 0x123456789abcdef1} {
		want := 64 - math.Log2(float64(u|1))
		if got := float64(minusLog(u)) / (1 << 24); math.Abs(got-want) > 1e-6 {
			t.Errorf("-log2(%#x / 2^64) is %f, want %f", u, got, want)
		}
	}
}

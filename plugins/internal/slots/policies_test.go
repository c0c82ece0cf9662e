package slots_test

import (
	"testing"

	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/plugins/arc"
	"github.com/kvhost/kvhost/plugins/clock"
	"github.com/kvhost/kvhost/plugins/fifo"
	"github.com/kvhost/kvhost/plugins/gdsf"
	"github.com/kvhost/kvhost/plugins/lfu"
	"github.com/kvhost/kvhost/plugins/lirs"
	"github.com/kvhost/kvhost/plugins/lru"
	"github.com/kvhost/kvhost/plugins/prefix"
	"github.com/kvhost/kvhost/plugins/s3fifo"
	"github.com/kvhost/kvhost/plugins/sieve"
	"github.com/kvhost/kvhost/plugins/twoq"
	"github.com/kvhost/kvhost/plugins/wtinylfu"
)

// policies are the textbook ones.
var policies = []struct {
	name   string
	make   Make
	config guest.Config
}{
	{"lru", Of(lru.New), nil},
	{"fifo", Of(fifo.New), nil},
	{"clock", Of(clock.New), nil},
	{"sieve", Of(sieve.New), nil},
	{"lfu", Of(lfu.New), nil},
	{"lfu aging=false", Of(lfu.New), guest.Config{lfu.ConfigAging: "false"}},
	{"gdsf", Of(gdsf.New), nil},
	{"twoq", Of(twoq.New), nil},
	{"arc", Of(arc.New), nil},
	{"s3fifo", Of(s3fifo.New), nil},
	{"wtinylfu", Of(wtinylfu.New), nil},
	{"lirs", Of(lirs.New), nil},
}

// TestTextbook compares the victims of each policy with those of its algorithm as the paper gives it.
func TestTextbook(t *testing.T) {
	textbooks := map[string]func(capacity int) Textbook{
		"lru": LRU, "fifo": FIFO, "clock": Clock, "sieve": Sieve,
		"lfu": LFU(true), "lfu aging=false": LFU(false),
		"gdsf": LFU(true), // with entries of one size and cost it is LFU-DA
		"twoq": TwoQ, "s3fifo": S3FIFO, "lirs": LIRS,
		"arc": ARC(true), // but with REPLACE before the new entry is known
	}
	compared := 0
	for _, p := range policies {
		if textbook := textbooks[p.name]; textbook != nil {
			compared++
			t.Run(p.name, func(t *testing.T) { Compare(t, p.make, p.config, textbook) })
		}
	}
	if compared != len(textbooks) {
		t.Errorf("want %d policies compared, got %d", len(textbooks), compared)
	}
	t.Run("arc as in the paper", func(t *testing.T) { // what asking early costs
		Near(t, Of(arc.New), nil, 5, ARC(false))
	})
}

// TestAllocatesNothing counts what each policy allocates once it has been made. `kvhost policy check` has the contract.
func TestAllocatesNothing(t *testing.T) {
	for _, p := range policies {
		t.Run(p.name, func(t *testing.T) { AllocatesNothing(t, p.make, p.config) })
	}
	t.Run("prefix", func(t *testing.T) { AllocatesNothing(t, Of(prefix.New), nil) })
}

// wtinylfu has no textbook, as its answers follow from its sketch: a change that moves its misses is a change of policy. Its
// window adapts to the stream, and that pays where only recency counts.
func TestWTinyLFU(t *testing.T) {
	fixed := guest.Config{wtinylfu.ConfigAdapt: "false", wtinylfu.ConfigWindow: "1", wtinylfu.ConfigSample: "10"}
	for stream, want := range map[string]struct{ adapts, fixed int }{
		"skewed": {29100, 26450}, "loop": {41738, 38594}, "phases": {40431, 40703}, "conversations": {35426, 38406},
	} {
		misses := func(config guest.Config) int {
			return Misses(NewCache(t, Of(wtinylfu.New), 100, config), Streams(50000)[stream])
		}
		if a, f := misses(nil), misses(fixed); a != want.adapts || f != want.fixed {
			t.Errorf("%s: %d misses, and %d with a fixed window, want %d and %d", stream, a, f, want.adapts, want.fixed)
		}
	}
}

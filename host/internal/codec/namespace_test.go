package codec

import (
	"bytes"
	"fmt"
	"log/slog"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

const piece = 1 << 20

// store stores pieces of a ratio, and returns how many of them were compressed.
func (n *Namespace) store(pieces int, ratio, least float64) (compressed int) {
	for range pieces {
		if n.gains(least, piece) {
			n.Encoded(piece, int64(piece/ratio), time.Millisecond)
			compressed++
		}
	}
	return compressed
}

// A namespace is compressed while it gains, and from time to time when it does not.
func TestGainDecides(t *testing.T) {
	var s Set
	for _, c := range []struct {
		ratio, least float64
		want         int // of ten times as many pieces as are between trials in the end
	}{
		{1.45, Always, 10 * Trial},
		{1.03, Always, 10 * Trial},
		{1.02, Always, 1 + 12},
		{1, Always, 1 + 12},
		{1.45, 1.5, 12},         // a ratio that was never seen is not expected
		{1.2, 1.35, 1 + 12},     // 1.4 is expected, and 1.2 found
		{1.45, math.Inf(1), 12}, // however much it gains
	} {
		n := s.Namespace("model=m\n")
		if got := n.store(10*Trial, c.ratio, c.least); got != c.want {
			t.Errorf("ratio %g, worth it from %g on: %d of %d pieces are compressed, want %d", c.ratio, c.least, got, 10*Trial,
				c.want)
		}
	}
}

// A namespace's first pieces are stored as they are where nothing is known of the root. Trials follow, ever fewer of them.
func TestFirstTrials(t *testing.T) {
	var s Set
	n := s.Namespace("model=m\n")
	trials, next, step := 0, First, First
	for i := 1; i <= 5*Trial; i++ {
		got := n.gains(math.Inf(1), piece)
		if got != (i == next) {
			t.Fatalf("piece %d is compressed: %t, the next trial is %d", i, got, next)
		}
		if got {
			step = min(2*step, Trial)
			trials, next = trials+1, next+step
		}
	}
	if trials != 7 {
		t.Errorf("%d trials in %d pieces", trials, 5*Trial)
	}
	if n = s.Namespace("model=m\n"); !n.gains(Always, piece) {
		t.Error("where all that gains is compressed, the first piece is not")
	}
}

// Each namespace has the mode of the first rule that matches it, and of its root only what that mode asks for.
func TestModes(t *testing.T) {
	rule := func(m Mode, patterns ...string) Rule {
		list, err := kv.ParsePatterns(patterns)
		testenv.OK(t, err)
		return Rule{list, m}
	}
	s := Set{Modes: Modes{Rest: Never, Rules: []Rule{
		rule(Never, "vendor/small*"), rule(Faster, "vendor/*"), rule(Gaining, "none", "dtype=bf16"),
	}}}
	slow, fast := &Root{Speeds: func() Speeds { return speeds(0.1, 0.1, 1, 1) }, Log: slog.New(slog.DiscardHandler)},
		&Root{Speeds: func() Speeds { return speeds(9, 9, 1, 1) }, Log: slog.New(slog.DiscardHandler)}
	for _, c := range []struct {
		text       string
		slow, fast bool
	}{
		{"dtype=bf16\nmodel=vendor/small-1\n", false, false},
		{"dtype=bf16\nmodel=vendor/large\n", true, false},
		{"dtype=bf16\nmodel=other\n", true, true},
		{"dtype=fp8\nmodel=none\n", true, true},
		{"dtype=fp8\nmodel=other\n", false, false},
	} {
		for r, want := range map[*Root]bool{slow: c.slow, fast: c.fast} {
			n := s.Namespace(c.text)
			n.plain = 0 // no trial
			if got := n.Compresses(r, piece); got != want {
				t.Errorf("%q: compressed %t on the slow root %t, want %t", c.text, got, r == slow, want)
			}
		}
	}
	for m, want := range map[Mode]bool{Gaining: true, Faster: true, Never: true} {
		if s.Modes.Any(m) != want || (&Modes{Rest: Never}).Any(m) != (m == Never) {
			t.Errorf("mode %d is not found where it is, or found where it is not", m)
		}
	}
}

// One trial shows that the data has changed, and a gain that ends is noticed within a few windows.
func TestDataChanges(t *testing.T) {
	var s Set
	n := s.Namespace("model=m\n")
	n.store(3*Trial, 1, Always)
	for range Trial {
		if n.store(1, 1.45, Always) == 1 {
			break
		}
	}
	if got := n.store(100, 1.45, Always); got != 100 {
		t.Errorf("%d of 100 pieces are compressed after a trial that gained", got)
	}
	n.store(1000, 5000, Always) // pages of zeros, that a warm-up stores
	if got := n.store(10000, 1, Always) * piece / window; got > 10 {
		t.Errorf("%d windows of what gains nothing were compressed before that was noticed", got)
	}
}

// Figures are by model, and there are at most so many of them.
func TestFiguresByModel(t *testing.T) {
	var s Set
	for i := range MaxModels + 10 {
		n := s.Namespace(fmt.Sprintf("dtype=bf16\nmodel=m%02d\n", i))
		n.store(2, 1, Always)
		n.Decoded(piece, piece/2, time.Second)
	}
	s.Namespace("model=m00\n").store(1, 2, Always) // another namespace of the same model
	list := s.Figures()
	if len(list) != MaxModels+1 {
		t.Fatalf("%d models have figures, want %d", len(list), MaxModels+1)
	}
	first, last := Figures{
		"m00", Flow{2 * piece, piece + piece/2, 2 * time.Millisecond}, Flow{piece, piece / 2, time.Second}, piece,
	}, Figures{
		Other, Flow{10 * piece, 10 * piece, 10 * time.Millisecond}, Flow{10 * piece, 5 * piece, 10 * time.Second}, 10 * piece,
	}
	if list[0] != first {
		t.Errorf("the figures of the first model are %+v, want %+v", list[0], first)
	}
	if list[MaxModels] != last {
		t.Errorf("the figures of other models are %+v, want %+v", list[MaxModels], last)
	}
}

// speeds are GB/s.
func speeds(write, read, encode, decode float64) Speeds {
	return Speeds{Write: uint64(write * 1e9), Read: uint64(read * 1e9), Encode: uint64(encode * 1e9), Decode: uint64(decode * 1e9)}
}

// inMemory are speeds of copies between pages and a root in memory.
func inMemory(write, read, encode, decode float64) Speeds {
	s := speeds(write, read, encode, decode)
	s.Memory = true
	return s
}

// What a ratio must be for compression to save time follows from the speeds.
func TestLeastRatio(t *testing.T) {
	for _, c := range []struct {
		name  string
		s     Speeds
		begun bool
		want  float64
		known bool
	}{
		{"nothing is measured", Speeds{}, false, math.Inf(1), false},
		{"nothing was compressed", speeds(1, 1, 0, 0), false, math.Inf(1), false},
		{"stores only", speeds(0.1, 0, 1, 0), false, 10 / (9.5 - 1), true},
		{"nothing compressed was loaded", speeds(0.1, 0.1, 1, 0), false, 10 / (9.5 - 1), true},
		{"a network disk", speeds(0.1, 0.2, 1, 1), false, 20 / (19 - 3.), true},
		{"it goes on", speeds(0.1, 0.2, 1, 1), true, 20 / (20 - 3.), true},
		{"a disk of 1 GB/s and eight cores", speeds(1, 1, 8, 8), false, 3 / (2.85 - 3./8), true},
		{"slow stores, fast loads", speeds(0.5, 20, 1, 1), false, math.Inf(1), true},
		{"tmpfs", speeds(4, 5, 0.8, 1.1), false, math.Inf(1), true},
		{"tmpfs where it was begun", speeds(4, 5, 0.8, 1.1), true, math.Inf(1), true},
		{"as fast as the codec", speeds(1, 1, 1, 1), true, math.Inf(1), true},
		{"memory, nothing compressed", inMemory(2, 2, 0, 0), false, math.Inf(1), false},
		{"memory, a codec within the bus", inMemory(2, 2, 1e9, 1e9), false, Always, true},
		{"memory, an H200's codec", inMemory(2.66, 2.5, 11.85, 8.83), false, Always, true},
		{"memory, a processor's codec", inMemory(10, 10, 1, 1), true, math.Inf(1), true},
		{"a floppy disk", speeds(1e-5, 1e-5, 1, 1), true, Always, true},
	} {
		if got, known := c.s.Least(c.begun); math.Abs(got-c.want) > 1e-3 && got != c.want || known != c.known {
			t.Errorf("%s: from %.4f on (known %t), want %.4f (%t)", c.name, got, known, c.want, c.known)
		}
	}
}

// The choice follows the speeds, goes on while it saves anything, and is logged once with its figures when it changes.
func TestChoiceIsLogged(t *testing.T) {
	var log bytes.Buffer
	now := Speeds{}
	r := Root{Speeds: func() Speeds { return now }, Log: slog.New(slog.NewTextHandler(&log, nil))}
	for _, c := range []struct {
		s     Speeds
		keeps bool     // what comes compressed
		says  []string // of one line; nil: none
	}{
		{Speeds{}, false, nil},
		{speeds(4, 0, 1, 0), false, []string{"compressed=false", "writes 4.00 and reads 0.00 GB/s", "1.00 and 0.00", "takes longer"}},
		{speeds(4, 5, 1, 1), false, nil},
		{speeds(0.2, 0.2, 1, 1), true, []string{"compressed=true", "from a ratio of 1."}},
		{speeds(0.27, 0.27, 1, 1), true, nil}, // it would not be begun at these
		{speeds(0.4, 0.4, 1, 1), false, []string{"compressed=false", "from a ratio of 1.82 on"}},
		{speeds(0.27, 0.27, 1, 1), false, nil},
	} {
		log.Reset()
		now = c.s
		for range 3 {
			r.Least()
		}
		for mode, want := range map[Mode]bool{Gaining: true, Faster: c.keeps, Never: false} {
			if n := (&Namespace{mode: mode}); n.Keeps(&r) != want {
				t.Errorf("%+v, mode %v: keeps what is compressed: %t, want %t", c.s, mode, !want, want)
			}
		}
		text := log.String()
		if strings.Count(text, "\n") != min(1, len(c.says)) {
			t.Errorf("%+v: %q, want %d lines", c.s, text, min(1, len(c.says)))
		}
		for _, want := range c.says {
			if !strings.Contains(text, want) {
				t.Errorf("%+v: %q does not say %q", c.s, text, want)
			}
		}
	}
	if now = (Speeds{}); r.Why() != "not measured yet" {
		t.Error(r.Why())
	}
}

// The codec's speeds are those of all namespaces, by the time of a byte.
func TestSpeedsAreMeasured(t *testing.T) {
	var s Set
	var files staging.Meter
	files.Writes.Observe(piece, time.Second)
	files.Reads.Observe(2*piece, time.Second)
	r := s.Root(&files, false, nil, slog.New(slog.DiscardHandler))
	a, b := s.Namespace("model=a\n"), s.Namespace("model=b\n")
	a.Encoded(100, 50, time.Second) // too little
	if got, want := r.Speeds(), (Speeds{Write: piece, Read: 2 * piece}); got != want {
		t.Errorf("the speeds before the codec was measured are %+v, want %+v", got, want)
	}
	a.Encoded(piece, piece/2, time.Second/4)
	b.Decoded(piece, piece/2, time.Second)
	if got, want := r.Speeds(), (Speeds{Write: piece, Read: 2 * piece, Encode: 4 * piece, Decode: piece}); got != want {
		t.Errorf("the measured speeds are %+v, want %+v", got, want)
	}
}

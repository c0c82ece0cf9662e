package codec

import (
	"bytes"
	"log/slog"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/staging"
)

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

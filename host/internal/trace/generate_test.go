package trace

import (
	"bytes"
	"errors"
	"flag"
	"math"
	"os"
	"slices"
	"testing"
)

var update = flag.Bool("update", false, "write examples/traces/mixed.jsonl.zst")

const mixedPath = "../../../examples/traces/mixed.jsonl.zst"

func generate(t *testing.T, m Mix) []Request {
	t.Helper()
	var all []Request
	if err := Generate(m, func(r *Request) error {
		c := *r
		c.HashIDs = slices.Clone(r.HashIDs)
		all = append(all, c)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return all
}

// The committed trace is what `kvhost trace gen --out examples/traces/mixed.jsonl.zst` writes. It is compared as text,
// because a newer compressor may give other bytes.
func TestExampleTrace(t *testing.T) {
	want := generate(t, DefaultMix())
	if *update {
		if err := os.WriteFile(mixedPath, pack(t, mixedPath, want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	r, err := Open(mixedPath)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	got, err := rest(r)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(pack(t, "x", got), pack(t, "x", want)) {
		t.Errorf("%s is not what the generator makes: go test ./host/internal/trace -update", mixedPath)
	}
}

func TestGeneratedTraceIsChained(t *testing.T) {
	c := NewCollector()
	var last int64
	for _, r := range generate(t, DefaultMix()) {
		if r.Timestamp < last {
			t.Fatalf("timestamp %d after %d", r.Timestamp, last)
		}
		last = r.Timestamp
		if want := r.InputLength / int64(DefaultMix().BlockTokens); int64(len(r.HashIDs)) != want {
			t.Fatalf("%d tokens have %d blocks, want %d", r.InputLength, len(r.HashIDs), want)
		}
		c.Add(&r)
	}
	s := c.Stats()
	if s.OtherParents != 0 {
		t.Errorf("%d accesses with another parent than before", s.OtherParents)
	}
	if s.PrefixHits != s.Accesses-s.Unique {
		t.Errorf("%d prefix hits of %d: an infinite cache must hit contiguous prefixes only", s.PrefixHits,
			s.Accesses-s.Unique)
	}
	if s.OneTimeShare() < 0.2 || s.HitRatio() < 0.3 || s.HitRatio() > 0.95 {
		t.Errorf("not a mixture: one-time share %.3f, hit ratio %.3f", s.OneTimeShare(), s.HitRatio())
	}
}

func TestSeedDecides(t *testing.T) {
	m := DefaultMix()
	m.Requests = 200
	a, b := pack(t, "x", generate(t, m)), pack(t, "x", generate(t, m))
	if !bytes.Equal(a, b) {
		t.Error("the same seed gave two traces")
	}
	m.Seed++
	if bytes.Equal(a, pack(t, "x", generate(t, m))) {
		t.Error("two seeds gave the same trace")
	}
}

func TestEachKindAlone(t *testing.T) {
	for _, m := range []Mix{{Chat: 1}, {Agent: 1}, {OneShot: 1}} {
		m.Seed, m.Requests, m.BlockTokens, m.Prompts, m.GapMillis = 9, 300, 256, 3, 1000
		if got := len(generate(t, m)); got != 300 {
			t.Errorf("%+v: %d requests", m, got)
		}
	}
	ok := DefaultMix()
	for name, change := range map[string]func(*Mix){
		"requests": func(m *Mix) { m.Requests = 0 }, "block": func(m *Mix) { m.BlockTokens = 0 },
		"prompts": func(m *Mix) { m.Prompts = 0 },
		"weights": func(m *Mix) { m.Chat, m.Agent, m.OneShot = 0, 0, 0 }, "negative": func(m *Mix) { m.Chat = -1 },
		"gap": func(m *Mix) { m.GapMillis = 0 },
	} {
		m := ok
		change(&m)
		if err := Generate(m, func(*Request) error { return nil }); !errors.Is(err, ErrOptions) {
			t.Errorf("generating with a bad %s: got %v, want %v", name, err, ErrOptions)
		}
	}
	stop := errors.New("stop")
	if err := Generate(ok, func(*Request) error { return stop }); err != stop {
		t.Errorf("emit's error came back as %v", err)
	}
}

func TestDraws(t *testing.T) {
	d := draw{state: 42}
	const n = 200_000
	var sum, most int64
	below := 0
	for range n {
		v := d.around(1000)
		sum += v
		most = max(most, v)
		if v < 693 {
			below++
		}
	}
	if mean := float64(sum) / n; math.Abs(mean-1000) > 20 {
		t.Errorf("mean %v, want 1000", mean)
	}
	if share := float64(below) / n; math.Abs(share-0.5) > 0.02 {
		t.Errorf("%v of the draws below the median, want 0.5", share)
	}
	if most < 8000 {
		t.Errorf("the largest of %d is %d: no tail", n, most)
	}
	for range 1000 {
		if v := d.between(3, 5); v < 3 || v > 5 {
			t.Fatalf("between(3, 5) = %d", v)
		}
	}
}

package kv

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/zeebo/xxh3"
)

func TestParseKey(t *testing.T) {
	for _, c := range []struct {
		name string
		in   []byte
		ok   bool
	}{
		{"sha256", bytes.Repeat([]byte{7}, 32), true},
		{"xxh3-128", bytes.Repeat([]byte{7}, 16), true},
		{"shortest", bytes.Repeat([]byte{7}, 8), true},
		{"empty", nil, false},
		{"too short", bytes.Repeat([]byte{7}, 7), false},
		{"too long", bytes.Repeat([]byte{7}, 33), false},
		{"all zero means no parent", make([]byte, 32), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			k, err := ParseKey(c.in)
			if c.ok != (err == nil) {
				t.Fatalf("ParseKey(%x): %v", c.in, err)
			}
			if err != nil && !errors.Is(err, ErrKey) {
				t.Errorf("%v is not ErrKey", err)
			}
			if c.ok && !bytes.Equal(k[:len(c.in)], c.in) {
				t.Errorf("key %s does not start with %x", k, c.in)
			}
		})
	}
}

// TestFingerprintIsXXH3 compares with a whole implementation: policies, checkpoints and lists of touches outlive this one.
func TestFingerprintIsXXH3(t *testing.T) {
	random := rand.NewChaCha8([32]byte{1})
	for range 1000 {
		var ns Digest
		var k Key
		_, _ = random.Read(ns[:])
		_, _ = random.Read(k[:8+random.Uint64()%25])
		group := uint32(random.Uint64())
		b := binary.LittleEndian.AppendUint32(ns[:], group)
		if got, want := Fingerprint(ns, group, k), xxh3.Hash(append(b, k[:]...)); got != want {
			t.Fatalf("%x, group %d, %s: %016x, want %016x", ns, group, k, got, want)
		}
	}
}

func TestRootHasNoFingerprint(t *testing.T) {
	if got := Fingerprint(Digest{3}, 0, Root); got != 0 {
		t.Errorf("the fingerprint of Root is %016x, want 0", got)
	}
}

// FuzzPattern compares patterns with regular expressions.
func FuzzPattern(f *testing.F) {
	f.Add("meta-llama/*", "model=meta-llama/a\n")
	f.Add("dtype=fp?*", "model=m\ndtype=fp8\n")
	f.Add("**a*b", "model=aabab")
	f.Fuzz(func(t *testing.T, pattern, text string) {
		p, err := ParsePattern(pattern)
		if err != nil {
			return
		}
		got := p.Matches(text)
		if strings.ContainsFunc(pattern+text, func(r rune) bool { return r >= 0x80 }) {
			return // ? is a byte of a pattern, and a character of an expression
		}
		same := regexp.MustCompile("^(?:" + strings.NewReplacer(`\*`, `(?s:.*)`, `\?`, `(?s:.)`).Replace(regexp.QuoteMeta(p.glob)) + ")$")
		want := false
		for line := range strings.Lines(text) {
			k, v, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
			want = want || k == p.field && same.MatchString(v)
		}
		if got != want {
			t.Fatalf("%q on %q: %v", pattern, text, got)
		}
	})
}

func TestPattern(t *testing.T) {
	n := Namespace{
		Model: "meta-llama/Llama-3.1-70B", DType: "fp8", KeyBytes: 32, TokensPerBlock: 16, TensorParallel: 8,
		Groups: []Group{{Geometry: Uniform(1, 1, 1, 4096)}}, Extra: map[string]string{"tier": "gold"},
	}
	for pattern, want := range map[string]bool{
		"*": true, "meta-llama/*": true, "*70B": true, "*Llama*-70?": true, "meta-llama": false, "llama*": false, "*7": false,
		"meta-llama/Llama-3.1-70B": true, "dtype=fp8": true, "dtype=fp*": true, "dtype=bf16": false, "extra.tier=g*d": true,
		"tensor_parallel=8": true, "nothing=*": false, "*-*-*-*-*": false, "model=*a*a*a*a*b": false,
	} {
		p, err := ParsePattern(pattern)
		testenv.OK(t, err)
		if got := p.Matches(n.Text()); got != want {
			t.Errorf("%s matches: %t, want %t", pattern, got, want)
		}
	}
	for _, bad := range []string{"", "=x", "dtype=", "a\nb"} {
		if _, err := ParsePattern(bad); !errors.Is(err, ErrNamespace) {
			t.Errorf("parsing the pattern %q: got %v, want %v", bad, err, ErrNamespace)
		}
	}
}

func example() Namespace {
	return Namespace{
		Model: "meta-llama/Llama-3.1-8B", Revision: "0e9e39f", DType: "bf16", Engine: "vllm",
		HashAlgorithm: "sha256_cbor", HashSeed: "4e1195df", KeyBytes: 32, TokensPerBlock: 16, TensorParallel: 2,
		Groups: []Group{{ID: 0, Geometry: Uniform(16, 32, 2, 32768)}},
		Extra:  map[string]string{"layout": "NHD"},
	}
}

// Each of these changes makes other bytes, so each must make another namespace, and Diff must name the field.
func TestEveryFieldSeparates(t *testing.T) {
	base := example()
	for field, change := range map[string]func(*Namespace){
		"model":            func(n *Namespace) { n.Model += "x" },
		"revision":         func(n *Namespace) { n.Revision = "" },
		"dtype":            func(n *Namespace) { n.DType = "fp8" },
		"engine":           func(n *Namespace) { n.Engine = "sglang" },
		"hash_algorithm":   func(n *Namespace) { n.HashAlgorithm = "sha256" },
		"hash_seed":        func(n *Namespace) { n.HashSeed = "1" },
		"key_bytes":        func(n *Namespace) { n.KeyBytes = 16 },
		"tokens_per_block": func(n *Namespace) { n.TokensPerBlock = 32 },
		"tensor_parallel":  func(n *Namespace) { n.TensorParallel = 4 },
		"pipeline_stages":  func(n *Namespace) { n.PipelineStages = 2 },
		"context_parallel": func(n *Namespace) { n.ContextParallel = 2 },
		"replicated":       func(n *Namespace) { n.Replicated = true },
		"group.0":          func(n *Namespace) { n.Groups = []Group{{Geometry: Uniform(16, 32, 2, 16384)}} },
		"group.1":          func(n *Namespace) { n.Groups = append(n.Groups[:1:1], Group{ID: 1, Geometry: Uniform(1, 1, 1, 64)}) },
		"extra.layout":     func(n *Namespace) { n.Extra = map[string]string{"layout": "HND"} },
		"extra.lora":       func(n *Namespace) { n.Extra = map[string]string{"layout": "NHD", "lora": "a"} },
	} {
		t.Run(field, func(t *testing.T) {
			other := example()
			change(&other)
			if other.Digest() == base.Digest() {
				t.Fatal("same digest")
			}
			if diff := base.Diff(&other); !strings.HasPrefix(diff, field+":") {
				t.Errorf("Diff says %q, want the field %s", diff, field)
			}
		})
	}
	same := example()
	if same.Digest() != base.Digest() || base.Diff(&same) != "" {
		t.Error("equal namespaces differ")
	}
}

// A text of one field, whatever is in it, is no text of another.
func TestTextsHaveBorders(t *testing.T) {
	dice := rand.New(rand.NewPCG(1, 2))
	words := []string{"", "=", "a", "model=", "revision=a", "extra.", "extra.a=", "group.0=", "\t", " ", ",", "\u2028", "kvhost.tenant"}
	text := func() string { return words[dice.IntN(len(words))] + words[dice.IntN(len(words))] }
	seen := map[string]Namespace{}
	for range 20_000 {
		n := Namespace{
			Model: text(), Revision: text(), DType: text(), Engine: text(), HashAlgorithm: text(), HashSeed: text(),
			KeyBytes: 32, TokensPerBlock: 16, TensorParallel: 1, PipelineStages: 1, ContextParallel: 1,
			Groups: []Group{{Geometry: Uniform(1, 1, 1, 64)}}, Extra: map[string]string{},
		}
		for range dice.IntN(3) {
			n.Extra[text()] = text()
		}
		if n.Validate() != nil {
			continue
		}
		if other, ok := seen[n.Text()]; ok && !reflect.DeepEqual(n, other) {
			t.Fatalf("%+v\nand %+v\nhave one text: %q", n, other, n.Text())
		}
		seen[n.Text()] = n
	}
	if len(seen) < 1000 {
		t.Errorf("%d namespaces were valid, want 1000 or more", len(seen))
	}
}

func TestNamespaceRefusals(t *testing.T) {
	for name, change := range map[string]func(*Namespace){
		"no model":          func(n *Namespace) { n.Model = "" },
		"no dtype":          func(n *Namespace) { n.DType = "" },
		"line break":        func(n *Namespace) { n.Revision = "a\nmodel=b" },
		"NUL":               func(n *Namespace) { n.Extra["x"] = "\x00" },
		"extra key with =":  func(n *Namespace) { n.Extra["a=b"] = "c" },
		"endless text":      func(n *Namespace) { n.Model = strings.Repeat("m", 2000) },
		"key bytes":         func(n *Namespace) { n.KeyBytes = 33 },
		"tokens per block":  func(n *Namespace) { n.TokensPerBlock = 0 },
		"too many ranks":    func(n *Namespace) { n.TensorParallel = 65 },
		"negative parallel": func(n *Namespace) { n.TensorParallel = -1 },
		"no groups":         func(n *Namespace) { n.Groups = nil },
		"group twice":       func(n *Namespace) { n.Groups = append(n.Groups, n.Groups[0]) },
		"no blocks":         func(n *Namespace) { n.Groups = []Group{{Geometry: Uniform(0, 1, 1, 64)}} },
		"no planes":         func(n *Namespace) { n.Groups = []Group{{Geometry: Geometry{Blocks: 1}}} },
		"empty pages":       func(n *Namespace) { n.Groups = []Group{{Geometry: Uniform(1, 1, 1, 0)}} },
		"layer twice":       func(n *Namespace) { n.Groups = []Group{{Geometry: Geometry{1, []Plane{{0, 0, 8}, {0, 0, 8}}}}} },
		"huge chunk":        func(n *Namespace) { n.Groups = []Group{{Geometry: Uniform(4096, 64, 2, 1<<20)}} },
	} {
		t.Run(name, func(t *testing.T) {
			n := example()
			change(&n)
			err := n.Validate()
			if !errors.Is(err, ErrNamespace) && !errors.Is(err, ErrGeometry) {
				t.Errorf("validating: got %v, want %v or %v", err, ErrNamespace, ErrGeometry)
			}
		})
	}
	n := example()
	if err := n.Validate(); err != nil {
		t.Errorf("the example is refused: %v", err)
	}
}

func TestRanks(t *testing.T) {
	for _, c := range []struct {
		n    Namespace
		want int
	}{
		{Namespace{}, 1},
		{Namespace{TensorParallel: 8}, 8},
		{Namespace{TensorParallel: 8, PipelineStages: 2}, 16},
		{Namespace{TensorParallel: 8, Replicated: true}, 1},
		{Namespace{TensorParallel: 8, PipelineStages: 2, Replicated: true}, 2},
		{Namespace{TensorParallel: 2, Units: 8}, 8},
		{Namespace{TensorParallel: 16, PipelineStages: 2, Units: 8}, 16},
	} {
		if got := c.n.Ranks(); got != c.want {
			t.Errorf("%+v: %d ranks, want %d", c.n, got, c.want)
		}
	}
}

// Whatever the tensor-parallel size, the ranks of each stage have all of its units, in order, and as many ranks each of them. Engines
// of all sizes have one namespace.
func TestUnitsOfRanks(t *testing.T) {
	for _, units := range []int{1, 2, 8, 16, 64} {
		digests := map[Digest]bool{}
		for _, tensor := range []int{1, 2, 4, 8, 16, 32, 64} {
			n := example()
			n.TensorParallel, n.Units = tensor, units
			testenv.OK(t, n.Validate())
			digests[n.Digest()] = true
			again, err := ParseNamespace(n.Text())
			if err != nil || again.Units != units || again.Ranks() != units {
				t.Fatalf("%q is read as %+v, %v", n.Text(), again, err)
			}
			if units > 32 {
				continue
			}
			n.PipelineStages = 2
			var have []int
			for rank := range 2 * tensor {
				first, count := n.Pieces(uint32(rank))
				for unit := range count {
					have = append(have, int(first+unit))
				}
			}
			var want []int
			for unit := range 2 * units {
				for range max(1, tensor/units) {
					want = append(want, unit)
				}
			}
			if !slices.Equal(have, want) {
				t.Errorf("%d units in %d ranks and 2 stages: %v, want %v", units, tensor, have, want)
			}
		}
		ranked := example()
		if digests[ranked.Digest()] {
			t.Error("units have the namespace of ranks")
		}
		if len(digests) != 1 {
			t.Errorf("%d units: engines of 7 sizes have %d namespaces, want 1", units, len(digests))
		}
	}
	for what, change := range map[string]func(*Namespace){
		"8 of 3 ranks":        func(n *Namespace) { n.Units, n.TensorParallel = 8, 3 },
		"3 of 8 ranks":        func(n *Namespace) { n.Units, n.TensorParallel = 3, 8 },
		"too many":            func(n *Namespace) { n.Units = MaxRanks + 1 },
		"too many for stages": func(n *Namespace) { n.Units, n.PipelineStages = 64, 2 },
		"fewer than none":     func(n *Namespace) { n.Units = -1 },
		"of replicated ranks": func(n *Namespace) { n.Units, n.Replicated = 2, true },
		"of spread tokens":    func(n *Namespace) { n.Units, n.ContextParallel = 2, 2 },
	} {
		n := example()
		if change(&n); !errors.Is(n.Validate(), ErrNamespace) {
			t.Errorf("units %s: got %v, want %v", what, n.Validate(), ErrNamespace)
		}
	}
}

func TestDigestText(t *testing.T) {
	n := example()
	d, err := ParseDigest(n.Digest().String())
	if err != nil || d != n.Digest() {
		t.Errorf("round trip: %v %v", d, err)
	}
	for _, bad := range []string{"", "00", strings.Repeat("g", 32), strings.Repeat("0", 34)} {
		if _, err := ParseDigest(bad); !errors.Is(err, ErrNamespace) {
			t.Errorf("parsing the digest %q: got %v, want %v", bad, err, ErrNamespace)
		}
	}
}

func TestElement(t *testing.T) {
	for dtype, want := range map[string]int{
		"bf16": 2, "bfloat16": 2, "torch.float16": 2, "auto/bfloat16": 2, "Half": 2, "float16": 2,
		"fp8": 1, "fp8_e4m3/bfloat16": 1, "auto/float32": 1, "auto": 1, "opaque": 1, "u8": 1, "float32": 1,
	} {
		if got := (&Namespace{DType: dtype}).Element(); got != want {
			t.Errorf("%q: %d bytes, want %d", dtype, got, want)
		}
		hinted := Namespace{DType: "opaque", PageDType: dtype}
		if got := hinted.Element(); got != want {
			t.Errorf("%q behind opaque: %d bytes, want %d", dtype, got, want)
		}
		if plain := (&Namespace{DType: "opaque"}); hinted.Text() != plain.Text() || hinted.Diff(plain) != "" {
			t.Errorf("%q: the hint changes the namespace to %q", dtype, hinted.Text())
		}
	}
}

package kv

import (
	"errors"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

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

package policy

import (
	"bytes"
	"math/rand/v2"
	"strings"
	"testing"
)

// legalPath has the rules of a path, one after the other.
func legalPath(path []byte) bool {
	parts := strings.Split(string(path), "/")
	if len(path) > MaxPath || len(parts) > maxPathComponents {
		return false
	}
	for _, part := range parts {
		if part == "" || len(part) > maxPathComponentSize || part[0] == '.' {
			return false
		}
		for _, c := range []byte(part) {
			if !pathChars[c] {
				return false
			}
		}
	}
	return true
}

// TestPathsAreCheckedWhole compares the check, which looks at eight bytes together, with the rules: a byte that is not
// plain, at each place of a path.
func TestPathsAreCheckedWhole(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	legal := 0
	for range 200_000 {
		path := bytes.Repeat([]byte("a"), 1+rng.IntN(40))
		if rng.IntN(20) == 0 {
			path = bytes.Repeat([]byte("a"), 240+rng.IntN(30))
		}
		for range rng.IntN(4) {
			path[rng.IntN(len(path))] = "/./.z\x00~/"[rng.IntN(8)]
		}
		want := legalPath(path)
		if got := pathError(path) == ""; got != want {
			t.Fatalf("%q: %v, by the rules %v: %s", path, got, want, pathError(path))
		}
		if want {
			legal++
		}
	}
	if legal < 20_000 || legal > 180_000 {
		t.Errorf("%d legal paths", legal)
	}
}

package metamorphic

import (
	"testing"
)

// FuzzParse reads histories, and writes them again.
func FuzzParse(f *testing.F) {
	for seed := range uint64(6) {
		f.Add(Generate(seed, 6).String())
	}
	f.Fuzz(func(t *testing.T, text string) {
		h, err := Parse(text)
		if err != nil {
			return
		}
		again, err := Parse(h.String())
		if err != nil || again.String() != h.String() {
			t.Fatalf("read back: %v\n%s\n%s", err, h, again)
		}
	})
}

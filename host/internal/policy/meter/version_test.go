package meter

import (
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"testing"
)

// Forms that were kept on disk must not outlive a change of the rewriter.
func TestVersionNamesTheForm(t *testing.T) {
	h := sha256.New()
	h.Write(inject(t, single(body(0, opLocalGet, 0, 0x10, 0))))
	for seed := range uint64(50) {
		code := emitAll(nil, generate(rand.New(rand.NewPCG(seed, 7)), 5, 0, 0))
		h.Write(inject(t, single(body(locals-1+3, append(code, opLocalGet, 0)...))))
	}
	for seed := range uint64(20) {
		_, code := enteredProgram(seed)
		h.Write(inject(t, named(body(locals-1+3, code...), "f")))
	}
	h.Write(inject(t, tabled([]byte{0, 10}, body(0, opLocalGet, 0))))
	const want = "6 8e4d143f4ce520d8"
	if got := fmt.Sprintf("%d %x", Version, h.Sum(nil)[:8]); got != want {
		t.Errorf("metered forms are %s, were %s: raise Version and note the new digest here", got, want)
	}
}

package index

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"testing"

	"github.com/kvhost/kvhost/host/kv"
)

// BenchmarkBytesPerEntry measures the memory that KVHOST_ENTRIES entries take.
func BenchmarkBytesPerEntry(b *testing.B) {
	entries := 1_000_000
	if n, err := strconv.Atoi(os.Getenv("KVHOST_ENTRIES")); err == nil {
		entries = n
	}
	for _, keyBytes := range []int{16, 32} {
		b.Run(fmt.Sprintf("key=%d/entries=%d", keyBytes, entries), func(b *testing.B) {
			for range b.N {
				before := heap()
				x := plainIndex(1<<27, func(k kv.Key) uint64 { return kv.Fingerprint(kv.Digest{}, 0, k) })
				var parent uint64
				for n := range uint64(entries) {
					k := hashKey(n, keyBytes)
					fp := x.fingerprint(0, k)
					x.SetPieces(x.Add(fp, Owner{}, &k, parent, 0), 1)
					parent = fp
				}
				b.ReportMetric(float64(heap()-before)/float64(entries), "heap-B/entry")
				b.ReportMetric(float64(x.Memory())/float64(entries), "counted-B/entry")
			}
		})
	}
}

func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

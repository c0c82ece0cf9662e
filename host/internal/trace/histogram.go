package trace

import (
	"math"
	"math/bits"
)

// Histogram counts integers in buckets with a width that grows with the value, so that a quantile has a fixed number of
// significant bits at any scale. It is not safe for concurrent use; merge one per goroutine.
type Histogram struct {
	bits   int
	counts []uint64
	count  uint64
	sum    float64
	least  uint64
	most   uint64
}

// NewHistogram counts values below 2^bits exactly, and larger ones with a relative error of 2^-bits; 1 to 16 bits.
func NewHistogram(bits int) *Histogram {
	return &Histogram{bits: min(max(bits, 1), 16), least: math.MaxUint64}
}

func (h *Histogram) bucket(v uint64) int {
	shift := max(0, bits.Len64(v)-h.bits)
	if shift == 0 {
		return int(v)
	}
	// The top h.bits bits of v, of which the highest is set: half a row of 2^bits per shift.
	return shift<<(h.bits-1) + int(v>>shift)
}

// middle is the value that represents a bucket.
func (h *Histogram) middle(bucket int) uint64 {
	half := 1 << (h.bits - 1)
	if bucket < 2*half {
		return uint64(bucket)
	}
	shift := bucket/half - 1
	return uint64(bucket-shift*half)<<shift + uint64(1)<<(shift-1)
}

// Record counts v once.
func (h *Histogram) Record(v uint64) {
	b := h.bucket(v)
	if b >= len(h.counts) {
		h.counts = append(h.counts, make([]uint64, b+1-len(h.counts))...)
	}
	h.counts[b]++
	h.count++
	h.sum += float64(v)
	h.least, h.most = min(h.least, v), max(h.most, v)
}

// Merge adds the counts of another histogram with the same bits.
func (h *Histogram) Merge(o *Histogram) {
	if len(o.counts) > len(h.counts) {
		h.counts = append(h.counts, make([]uint64, len(o.counts)-len(h.counts))...)
	}
	for i, n := range o.counts {
		h.counts[i] += n
	}
	h.count += o.count
	h.sum += o.sum
	h.least, h.most = min(h.least, o.least), max(h.most, o.most)
}

// Count is the number of recorded values.
func (h *Histogram) Count() uint64 { return h.count }

// Mean is their mean, 0 for none.
func (h *Histogram) Mean() float64 {
	if h.count == 0 {
		return 0
	}
	return h.sum / float64(h.count)
}

// Max is the largest, 0 for none.
func (h *Histogram) Max() uint64 { return h.most }

// Quantile is the least value that at least the fraction q of the values do not exceed; 0 for none.
func (h *Histogram) Quantile(q float64) uint64 {
	rank := uint64(math.Ceil(q * float64(h.count)))
	rank = min(max(rank, 1), h.count)
	var seen uint64
	for b, n := range h.counts {
		if seen += n; n > 0 && seen >= rank {
			return min(max(h.middle(b), h.least), h.most)
		}
	}
	return 0
}

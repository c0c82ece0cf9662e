// Package striped is the place policy "striped". It spreads entries over several roots in proportion to the weights of the
// roots. Names are those of fanout.
//
// The weight of a root is its measured speed times its room. The room is its free bytes, but at least a sixteenth of its
// capacity, since a full root makes room by evicting. So a fast root gets more entries, an emptier root catches up, and in full
// roots of the same speed entries reach the same age before they are evicted. A root that takes no stores has no weight. An
// unknown speed counts as the mean of the known ones.
//
// The root of an entry follows from its key by weighted rendezvous hashing (D. G. Thaler, C. V. Ravishankar, Using Name-Based
// Mappings to Increase Hit Rates, IEEE/ACM Transactions on Networking 6(1), 1998). Each root draws a number from the key,
// scaled by its weight, and the best draw wins. This needs no state, so any number of instances agree, and the pieces of all
// ranks of an entry are in the same root. When a weight changes, only the entries that must change roots do.
package striped

import (
	"math/bits"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/plugins/fanout"
)

// roomShare is the divisor of a root's capacity that gives its least room.
const roomShare = 16

// Policy is a [guest.Placer] and a [guest.Namespacer].
type Policy struct {
	*fanout.Policy
}

// New accepts the settings of fanout.
func New(info guest.Info) (*Policy, error) {
	names, err := fanout.New(info)
	if err != nil {
		return nil, err
	}
	return &Policy{names}, nil
}

// Place appends fanout's path and chooses the root.
func (p *Policy) Place(q *abi.PlaceQuery, roots []abi.RootFacts, dst []byte) ([]byte, uint32) {
	dst, _ = p.Policy.Place(q, nil, dst)
	return dst, choose(q, roots)
}

// choose returns the index of the root with the best draw, or None if no root takes stores.
func choose(q *abi.PlaceQuery, roots []abi.RootFacts) uint32 {
	best := abi.None
	var bestCost, bestWeight uint64
	usual := meanSpeed(roots)
	for i := range roots {
		r := &roots[i]
		weight := weigh(r, usual)
		if weight == 0 {
			continue
		}
		cost := minusLog(draw(q, r.ID))
		// The least cost/weight wins. The fractions are compared without a division.
		hi, lo := bits.Mul64(cost, bestWeight)
		bestHi, bestLo := bits.Mul64(bestCost, weight)
		if best == abi.None || hi < bestHi || hi == bestHi && lo < bestLo {
			best, bestCost, bestWeight = uint32(i), cost, weight
		}
	}
	return best
}

// weigh returns a root's speed in MiB/s times its room in MiB.
func weigh(r *abi.RootFacts, usual uint64) uint64 {
	if r.Flags&abi.RootWritable == 0 {
		return 0
	}
	s := speed(r)
	if s == 0 {
		s = usual
	}
	room := min(max(r.Free, r.Capacity/roomShare)>>20+1, 1<<40)
	return s * room
}

// speed returns the harmonic mean of read and write speed in MiB/s, at most 2^23. It is 0 while unknown.
func speed(r *abi.RootFacts) uint64 {
	read, write := min(r.ReadBps>>20, 1<<23), min(r.WriteBps>>20, 1<<23)
	if read == 0 || write == 0 {
		return max(read, write)
	}
	return 2 * read * write / (read + write)
}

// meanSpeed returns the mean of the known speeds, or 1 if none is known.
func meanSpeed(roots []abi.RootFacts) uint64 {
	var sum, n uint64
	for i := range roots {
		if s := speed(&roots[i]); s > 0 {
			sum += s
			n++
		}
	}
	if n == 0 {
		return 1
	}
	return max(1, sum/n)
}

// draw returns a root's number for an entry. It is uniformly distributed and the same for every rank.
func draw(q *abi.PlaceQuery, root uint32) uint64 {
	h := mix(uint64(q.Namespace)<<32 | uint64(q.Group))
	for i := 0; i < abi.KeyBytes; i += 8 {
		var word uint64
		for j := range 8 {
			word |= uint64(q.Key[i+j]) << (8 * j)
		}
		h = mix(h ^ word)
	}
	return mix(h ^ uint64(root)*0x9e3779b97f4a7c15)
}

// mix is the finaliser of SplitMix64.
func mix(z uint64) uint64 {
	z += 0x9e3779b97f4a7c15
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// minusLog returns -log2(u / 2^64) in units of 2^-24. It computes the fraction bit by bit, by squaring.
func minusLog(u uint64) uint64 {
	u |= 1
	n := uint64(bits.LeadingZeros64(u))
	x := u << n // 1 <= x/2^63 < 2
	var fraction uint64
	for range 24 {
		hi, lo := bits.Mul64(x, x)
		fraction <<= 1
		if hi>>63 != 0 {
			fraction |= 1
			x = hi
		} else {
			x = hi<<1 | lo>>63
		}
	}
	return (n+1)<<24 - fraction
}

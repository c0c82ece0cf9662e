package wtinylfu

// sketch counts uses of fingerprints approximately, from above: a count-min sketch of four rows of four-bit counters,
// sixteen to a word (G. Cormode, S. Muthukrishnan, An Improved Data Stream Summary, 2005).
//
// Old counts fade: in the time of one period all counters are halved. The paper halves all at once; here every use
// halves its share of words, so that no event takes longer than another.
type sketch struct {
	words  []uint64
	mask   uint64
	credit uint64
	at     uint64 // next word to halve
}

const (
	rows      = 4
	maxCount  = 15
	maxHalved = 16 // words per use
)

func newSketch(counters uint32) sketch {
	words := uint64(8)
	for words < uint64(counters) {
		words *= 2
	}
	return sketch{words: make([]uint64, words), mask: words - 1}
}

var seeds = [rows]uint64{0xc3a5c85c97cb3127, 0xb492b66fbe98f273, 0x9ae16a3b2f90404f, 0xcbf29ce484222325}

// spot is row i's word and the shift of its counter.
func (s *sketch) spot(key uint64, i int) (word uint64, shift uint64) {
	h := (key + seeds[i]) * seeds[i]
	h ^= h >> 32
	return h & s.mask, h >> 58 & 0x3c
}

// add counts a use; period is how many uses halve everything.
func (s *sketch) add(key, period uint64) {
	for i := range rows {
		w, shift := s.spot(key, i)
		if s.words[w]>>shift&maxCount < maxCount {
			s.words[w] += 1 << shift
		}
	}
	s.credit = min(s.credit+uint64(len(s.words)), maxHalved*period)
	for ; s.credit >= period; s.credit -= period {
		s.words[s.at] = s.words[s.at] >> 1 & 0x7777777777777777
		s.at = (s.at + 1) & s.mask
	}
}

// count is the estimate for a fingerprint.
func (s *sketch) count(key uint64) uint64 {
	least := uint64(maxCount)
	for i := range rows {
		w, shift := s.spot(key, i)
		least = min(least, s.words[w]>>shift&maxCount)
	}
	return least
}

package wtinylfu

import "testing"

// fingerprint spreads a key.
func fingerprint(key uint64) uint64 { return (key + 1) * 0x9e3779b97f4a7c15 }

// A count is never below the true one while nothing faded, up to its limit.
func TestSketchCountsFromAbove(t *testing.T) {
	s := newSketch(64)
	for key := range uint64(20) {
		for range key {
			s.add(fingerprint(key), 1<<40)
		}
	}
	for key := range uint64(20) {
		if got := s.count(fingerprint(key)); got < min(key, maxCount) {
			t.Errorf("key %d was used %d times, counted %d", key, key, got)
		}
	}
}

func TestSketchForgets(t *testing.T) {
	s := newSketch(64)
	key := fingerprint(1)
	for range 15 {
		s.add(key, 1<<40)
	}
	before := s.count(key)
	for i := range uint64(640) {
		s.add(fingerprint(1000+i%3), 640)
	}
	if got := s.count(key); got > before/2+1 {
		t.Errorf("counted %d before a period went by and %d after", before, got)
	}
}

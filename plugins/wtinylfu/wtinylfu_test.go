package wtinylfu

import (
	"testing"

	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/plugins/internal/policytest"
)

type testSketch struct{ s sketch }

func (s *testSketch) Add(key uint64, resident int) {
	s.s.add(policytest.Fingerprint(key), 10*uint64(1+resident))
}
func (s *testSketch) Count(key uint64) uint64 { return s.s.count(policytest.Fingerprint(key)) }

func TestTextbook(t *testing.T) {
	policytest.Compare(t, policytest.Of(New), guest.Config{ConfigAdapt: "false", ConfigWindow: "1", ConfigSample: "10"},
		policytest.WTinyLFU(func(capacity int) policytest.Sketch { return &testSketch{newSketch(uint32(capacity))} }))
}

// A count is never below the true one while nothing faded, up to its limit.
func TestSketchCountsFromAbove(t *testing.T) {
	s := newSketch(64)
	for key := range uint64(20) {
		for range key {
			s.add(policytest.Fingerprint(key), 1<<40)
		}
	}
	for key := range uint64(20) {
		if got := s.count(policytest.Fingerprint(key)); got < min(key, maxCount) {
			t.Errorf("key %d was used %d times, counted %d", key, key, got)
		}
	}
}

func TestSketchForgets(t *testing.T) {
	s := newSketch(64)
	key := policytest.Fingerprint(1)
	for range 15 {
		s.add(key, 1<<40)
	}
	before := s.count(key)
	for i := range uint64(640) {
		s.add(policytest.Fingerprint(1000+i%3), 640)
	}
	if got := s.count(key); got > before/2+1 {
		t.Errorf("counted %d before a period went by and %d after", before, got)
	}
}

// On a workload in which only recency counts the climber widens the window, and that pays.
func TestClimberFollowsTheWorkload(t *testing.T) {
	stream := policytest.Conversations(60000)
	misses := map[string]int{}
	for _, adapt := range []string{"true", "false"} {
		c := policytest.NewCache(t, policytest.Of(New), 200, guest.Config{ConfigAdapt: adapt, ConfigWindow: "1"})
		misses[adapt] = policytest.Misses(c, stream)
	}
	if misses["true"] >= misses["false"] {
		t.Errorf("%d misses with a window that adapts, %d with a fixed one", misses["true"], misses["false"])
	}
}

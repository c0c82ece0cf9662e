package server

import (
	"fmt"
	"testing"
	"time"
)

func TestLatencies(t *testing.T) {
	var l Latencies
	now := time.Now()
	l.Observe(AnswerLoad, now.Add(-time.Minute))   // above the last bound
	l.Observe(AnswerLoad, now.Add(30*time.Second)) // a clock that went back
	l.Observe(AnswerLoad, now.Add(-15*time.Second))
	for _, h := range l.Read() {
		if h.Answer != AnswerLoad {
			if h.Count != 0 {
				t.Errorf("%s has %d answers, want none", h.Answer, h.Count)
			}
			continue
		}
		last := len(h.Buckets) - 1
		if h.Count != 3 || h.Buckets[0] != 1 || h.Buckets[last] != 1 || h.Buckets[last-1] != 1 {
			t.Errorf("load: %d answers in %v, want one below 10us, one in 10 to 30s and one above", h.Count, h.Buckets)
		}
		if h.Sum < 75*time.Second {
			t.Errorf("load: sum %s, want at least 75s", h.Sum)
		}
	}
}

// TestTableIsBounded names more models than there are counters: clients choose the names.
func TestTableIsBounded(t *testing.T) {
	var table UsageTable
	for i := range 10 * maxPairs {
		table.Of(fmt.Sprintf("model-%04d", i), uint32(i)).Keys.Add(1)
	}
	if table.Of("model-0000", 0).Keys.Load() != 1 {
		t.Error("the first model lost its counter")
	}
	list := table.List()
	if len(list) != maxPairs+1 {
		t.Fatalf("%d counters, want %d and one for the others", len(list), maxPairs)
	}
	last := list[len(list)-1]
	if last.Model != otherModel || last.Keys.Load() != 9*maxPairs {
		t.Errorf("%q has %d keys, want %q with %d", last.Model, last.Keys.Load(), otherModel, 9*maxPairs)
	}
}

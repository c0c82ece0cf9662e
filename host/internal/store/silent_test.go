package store

import (
	"slices"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/internal/policy"
)

// answering is an evict policy that answers every question with the same slots.
type answering []uint32

func (answering) Events([]abi.Event) {}

func (a answering) Victims(_ abi.Ask, dst []uint32) int { return copy(dst, a) }

func answers(slots ...uint32) *policy.Module {
	return policy.NativeModule("answers", []abi.Role{abi.RoleEvict}, func(guest.Info) (any, error) { return answering(slots), nil })
}

// TestSilentPolicies has evict policies that name nobody who can go. What was touched least recently goes in place of the
// store, and silence that lasts is a fault.
func TestSilentPolicies(t *testing.T) {
	for _, tt := range []struct {
		name  string
		names []uint32
	}{
		{"nobody", nil},
		{"a pinned entry", []uint32{0}},
		{"a slot that is free", []uint32{7}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t, t.TempDir(), 4, 1, func(c *Config) { c.Policies.Evict = handle(answers(tt.names...)) })
			f.mustPut(0, 1, 2, 3)
			held := f.lookup(0)
			defer held.Release()
			for n := uint64(4); n < 10; n++ {
				if err := f.put(n, 0); err != nil {
					t.Fatalf("store %d: %v", n, err)
				}
				if f.has(n-3) || !f.has(n-1) {
					t.Fatalf("store %d: the one touched least recently should have gone", n)
				}
			}
			if st := f.store.Stats().Roots[0]; st.Unanswered != 6 || st.EvictFaults != 0 {
				t.Errorf("%d questions unanswered, %d faults", st.Unanswered, st.EvictFaults)
			}
			for n := uint64(10); n < 10+policy.MaxSilences; n++ {
				f.mustPut(n)
			}
			if st := f.store.Stats().Roots[0]; st.EvictFaults != 1 || !st.Evict.Builtin {
				t.Errorf("%d faults after %d silent answers", st.EvictFaults, policy.MaxSilences+6)
			}
			f.checkUsed()
		})
	}
}

// TestSilenceWithoutEntriesThatCanGo is no fault: all are in use.
func TestSilenceWithoutEntriesThatCanGo(t *testing.T) {
	f := newFixture(t, t.TempDir(), 4, 1, func(c *Config) { c.Policies.Evict = handle(answers()) })
	f.mustPut(0, 1, 2, 3)
	held := f.lookup(0, 1, 2, 3)
	for n := range uint64(2 * policy.MaxSilences) {
		if err := f.put(10+n, 0); err == nil {
			t.Fatal("a store found room among entries in use")
		}
	}
	if st := f.store.Stats().Roots[0]; st.Unanswered != 0 || st.EvictFaults != 0 {
		t.Errorf("%d questions unanswered, %d faults", st.Unanswered, st.EvictFaults)
	}
	held.Release()
	f.mustPut(9)
	if slices.ContainsFunc([]uint64{0}, f.has) {
		t.Error("the one touched least recently should have gone")
	}
}

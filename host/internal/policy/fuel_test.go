package policy

import (
	"errors"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
)

// An instance that runs out dies with a fault that says so and names the guest's functions; what it used is counted.
func TestOutOfFuel(t *testing.T) {
	m, err := Open(t.Context(), "lru", Options{
		Dir: distDir, Cache: policytest.Cache(t), Fuel: sandbox.Fuel{Call: 2000, Record: 1}, SkipSelfTest: true,
	})
	testenv.OK(t, err)
	defer m.Close(t.Context())
	e := newEvict(t, m, 1000)
	before := e.Stats().Fuel
	for slot := range uint32(eventQueue) {
		err = e.Event(abi.Event{Op: abi.OpInsert, Slot: slot, Parent: abi.None, Size: 1})
	}
	var f *Fault
	if !errors.As(err, &f) || !errors.Is(err, ErrFuel) || f.Reason != "used up its fuel of 2256" || f.Export != abi.ExportEvents || !strings.Contains(f.Stack, "lru.") {
		t.Errorf("a call without enough fuel: got %v", err)
	}
	if s := e.Stats(); s.Fuel-before != 2256 || s.Faults != 1 || before == 0 {
		t.Errorf("the stats after it are %+v, want 2256 fuel more than %d and one fault", s, before)
	}
}

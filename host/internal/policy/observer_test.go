package policy

import (
	"errors"
	"slices"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
)

// A policy decides and uses what it does without being looked at, and what is seen of it adds up to all that it used.
func TestObservedPolicyIsTheSame(t *testing.T) {
	testenv.Slow(t)
	profile := &sandbox.Profile{}
	m, err := Open(t.Context(), "lru", Options{Dir: distDir, Cache: policytest.Cache(t), Profile: profile})
	testenv.OK(t, err)
	defer m.Close(t.Context())
	var seen Call // sums
	o := EvictOptions{MaxSlots: 300, Capacity: 1 << 30, Seed: 7, Observe: func(c *Call) error {
		seen.Events = append(seen.Events, c.Events...)
		seen.Victims = append(seen.Victims, c.Victims...)
		if seen.Fuel += c.Fuel; c.Fuel == 0 || c.Fuel > c.Allowed || c.Time <= 0 || c.Err != nil {
			t.Errorf("a call: want fuel within its limit, time and no error, got %+v", c)
		}
		return nil
	}}
	e, err := m.NewEvict(t.Context(), o)
	testenv.OK(t, err)
	defer e.Close()
	plain, s := newEvict(t, modules["lru"], 300), newStream(1, 300)
	start, events := e.Stats().Fuel, 0
	for range 3000 {
		ev := s.next()
		events++
		testenv.OK(t, errors.Join(e.Event(ev), plain.Event(ev)))
		if events%7 != 0 {
			continue
		}
		ask := s.ask()
		got, want := make([]uint32, 16), make([]uint32, 16)
		n, err := e.Victims(ask, got)
		testenv.OK(t, err)
		k, err := plain.Victims(ask, want)
		testenv.OK(t, err)
		if !slices.Equal(got[:n], want[:k]) || !slices.Equal(seen.Victims, got[:n]) {
			t.Fatalf("victims: want %v, got %v and seen were %v", want[:k], got[:n], seen.Victims)
		}
		seen.Victims = nil
	}
	testenv.OK(t, errors.Join(e.Flush(), plain.Flush()))
	if used := e.Stats().Fuel; used != plain.Stats().Fuel || seen.Fuel != used-start || len(seen.Events) != events {
		t.Errorf("fuel: want %d in all, %d after the start, for %d events; got %d, %d, %d", plain.Stats().Fuel, used-start, events,
			used, seen.Fuel, len(seen.Events))
	}
	var own uint64
	for _, f := range profile.Functions() {
		own += f.Fuel
		if f.Function == abi.ExportStep && f.Export == abi.ExportStep && (f.Calls != uint64(events/7) || f.Whole < f.Fuel) {
			t.Errorf("kv_step: want %d calls, got %+v", events/7, f)
		}
	}
	if own != e.Stats().Fuel {
		t.Errorf("the functions' fuel: want %d in all, got %d", e.Stats().Fuel, own)
	}
	o.Observe = func(*Call) error { return ErrClosed }
	e, err = m.NewEvict(t.Context(), o)
	testenv.OK(t, err)
	if _, err := e.Victims(s.ask(), make([]uint32, 1)); !errors.Is(err, ErrClosed) || !e.Ended() {
		t.Errorf("an observer's error: want it to end the policy, got %v", err)
	}
}

package policy_test

import (
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
)

// tape records events, and names the slots in answer as victims.
type tape struct {
	events []abi.Event
	answer []uint32
	err    error
}

func (t *tape) Event(ev abi.Event) error {
	t.events = append(t.events, ev)
	return t.err
}

func (t *tape) Victims(_ abi.Ask, dst []uint32) (int, error) { return copy(dst, t.answer), t.err }

// Whatever is done to a set, its events keep the contract.
func TestSetKeepsTheContract(t *testing.T) {
	for seed := range uint64(50) {
		rng := rand.New(rand.NewPCG(seed, 1))
		p := &tape{}
		s := policy.NewResidents(p)
		for i := range 400 {
			key := 1 + rng.Uint64N(30)
			e := policy.Resident{Key: key, Parent: key / 2, Size: uint32(key), Depth: uint32(key / 2)}
			c := policy.Cause{Request: uint32(i), Time: uint64(i)}
			slot, ok := s.Find(key)
			if !ok {
				if _, err := s.Insert(abi.OpInsert, e, c); err != nil {
					t.Fatal(err)
				}
				continue
			}
			if got, there := s.At(slot); !there || got != e {
				t.Fatalf("seed %d: slot %d holds %+v, want %+v", seed, slot, got, e)
			}
			var err error
			switch op := rng.IntN(5); {
			case op == 0:
				err = s.Touch(slot, c)
			case op == 1:
				err = s.Pin(slot, c)
			case op == 2 && s.Pinned(slot):
				err = s.Unpin(slot, c)
			case op == 3:
				err = s.Remove(slot, c)
			default:
				p.answer = []uint32{slot, slot, 99}
				_, err = s.Evict(p, abi.Ask{}, make([]uint32, 4), c, func() bool { return false })
			}
			testenv.OK(t, err)
		}
		testenv.OK(t, s.EndRequest(0, abi.Hints{}, policy.Cause{}))
		if err := policytest.CheckEvents(p.events); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		var used int64
		for key := range uint64(31) {
			if slot, ok := s.Find(key); ok {
				e, _ := s.At(slot)
				used += int64(e.Size) * abi.SizeUnit
			}
		}
		if used != s.Used() {
			t.Fatalf("seed %d: %d bytes, want %d", seed, s.Used(), used)
		}
	}
}

func TestEvictStopsWhenItIsEnough(t *testing.T) {
	p := &tape{}
	s := policy.NewResidents(p)
	for key := range uint64(4) {
		slot, err := s.Insert(abi.OpResident, policy.Resident{Key: key + 1, Size: 1}, policy.Cause{})
		testenv.OK(t, err)
		p.answer = append(p.answer, slot)
	}
	testenv.OK(t, s.Pin(p.answer[0], policy.Cause{}))
	n, err := s.Evict(p, abi.Ask{}, make([]uint32, 4), policy.Cause{}, func() bool { return s.Len() <= 2 })
	if n != 2 || err != nil || s.Len() != 2 || !s.Pinned(p.answer[0]) {
		t.Errorf("removed %d, %d left, %v", n, s.Len(), err)
	}
	p.err = errors.New("fault")
	if n, err := s.Evict(p, abi.Ask{}, make([]uint32, 4), policy.Cause{}, func() bool { return false }); n != 0 || err == nil {
		t.Errorf("removed %d after a fault: %v", n, err)
	}
}

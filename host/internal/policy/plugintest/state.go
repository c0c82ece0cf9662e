package plugintest

import (
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
)

// mostState is above the size of any state at the sizes used here.
const mostState = 4 << 20

// save asks for the state. ok is false if the module saves none.
func (c *checker) save(p *policy.Probe) (state []byte, ok bool, err error) {
	if c.m.StateFormat() == "" {
		return nil, false, c.silent(p)
	}
	if ok, err := p.Buffer(abi.BufferState, mostState); err != nil || !ok {
		return nil, false, c.finding(abi.ExportBuffer, fmt.Sprintf("it gives no room of %d bytes for STATE", mostState),
			"give room for the limit of kv_save")
	}
	n, ok, err := c.good(p, abi.ExportSave, mostState, 0, mostState)
	if err != nil || !ok {
		return nil, false, err
	}
	if n > mostState {
		return nil, false, c.finding(abi.ExportSave, fmt.Sprintf("it says it wrote %d bytes when given %d", n, mostState),
			"write at most limit")
	}
	b, err := p.Bytes(abi.BufferState, n)
	if err != nil {
		return nil, false, c.fault(abi.ExportSave, "", err)
	}
	return slices.Clone(b), true, nil
}

// silent reports a state without a format, which would be lost.
func (c *checker) silent(p *policy.Probe) error {
	if _, err := p.Call(abi.ExportSave, 0, 0, 0); noExport(err) {
		return nil
	}
	return c.finding(abi.ExportSave, "it is exported, and the manifest names no state_format",
		"name the form of the state, such as \"mine/1\"")
}

// load passes a state to the guest. taken is false if the guest starts empty.
func (c *checker) load(p *policy.Probe, state []byte) (taken bool, err error) {
	if ok, err := p.Buffer(abi.BufferState, uint32(len(state))); err != nil || !ok {
		return false, c.finding(abi.ExportBuffer, fmt.Sprintf("it gives no room of %d bytes for STATE", len(state)),
			"give room for what kv_save wrote")
	}
	b, err := p.Bytes(abi.BufferState, uint32(len(state)))
	if err != nil {
		return false, c.fault(abi.ExportLoad, "", err)
	}
	copy(b, state)
	_, ok, err := c.good(p, abi.ExportLoad, uint64(len(state)), 0, len(state))
	return ok, err
}

// garbage loads states that were never saved. An instance that accepts one must still keep the contract.
func (c evictChecks) garbage(state []byte, slots uint32) error {
	rng := rand.New(rand.NewPCG(c.o.Seed, 23))
	for i := range 24 {
		bad := slices.Clone(state)
		switch {
		case i == 0:
			bad = nil
		case i < 8:
			bad = bad[:rng.IntN(len(bad)+1)]
		case i < 16 && len(bad) > 0:
			for range 1 + rng.IntN(8) {
				bad[rng.IntN(len(bad))] ^= byte(1 + rng.IntN(255))
			}
		default:
			for j := range bad {
				bad[j] = byte(rng.Uint32())
			}
		}
		e, err := c.evictor(slots, 0)
		if err != nil {
			return err
		}
		err = c.after(e, bad)
		e.p.Close()
		if err != nil {
			return c.tolerate(err, "given a state that is damaged,")
		}
	}
	return nil
}

// after loads a state and then makes the instance work.
func (c evictChecks) after(e *evictor, state []byte) error {
	if _, err := c.load(e.p, state); err != nil {
		return err
	}
	for i := range uint64(600) {
		slot := uint32(i) % e.slots
		for _, op := range []abi.Op{abi.OpTouch, abi.OpRemove, abi.OpInsert} {
			if _, err := e.event(abi.Event{Op: op, Slot: slot, Parent: abi.None, Key: i | 1, Size: 1, Time: i}); err != nil {
				return err
			}
		}
		if i%50 == 0 {
			if _, err := e.step(abi.Ask{Bytes: 8 * abi.SizeUnit, MaxVictims: 8, Tenant: abi.None}); err != nil {
				return err
			}
		}
	}
	return nil
}

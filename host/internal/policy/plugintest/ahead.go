package plugintest

import (
	"fmt"

	"github.com/kvhost/kvhost/abi"
)

const (
	aheadSlots  = 600
	aheadRounds = 40
)

// ahead checks a policy that may be asked for victims before they are needed: it must name the same first victims, in
// the same order, after other entries have been touched, inserted and removed.
func (c evictChecks) ahead() error {
	ahead := c.m.Manifest().VictimsAhead
	if ahead == 0 {
		return nil
	}
	e, err := c.evictor(aheadSlots, 0)
	if err != nil {
		return err
	}
	defer e.p.Close()
	var now uint64
	resident := map[uint32]bool{}
	event := func(op abi.Op, slot uint32) {
		now++
		if resident[slot] = op != abi.OpRemove; err == nil {
			_, err = e.event(abi.Event{Op: op, Slot: slot, Parent: abi.None, Key: (uint64(slot)+now<<20)*0x9e3779b97f4a7c15 | 1, Size: 1, Time: now, Request: uint32(now)})
		}
	}
	for slot := range uint32(aheadSlots - 100) {
		event(abi.OpInsert, slot)
	}
	for slot := uint32(0); slot < aheadSlots-100; slot += 3 {
		event(abi.OpTouch, slot)
	}
	ask := abi.Ask{Bytes: aheadSlots * abi.SizeUnit, MaxVictims: ahead, Tenant: abi.None}
	free := uint32(aheadSlots - 100)
	for round := range uint32(aheadRounds) {
		if err != nil {
			return err
		}
		var before, after []uint32
		if before, err = e.step(ask); err != nil {
			return err
		}
		left := map[uint32]bool{}
		for _, slot := range before {
			left[slot] = true
		}
		change := func(op abi.Op, slot uint32) {
			event(op, slot)
			delete(left, slot)
		}
		for i, slot := range before {
			switch (uint32(i) + round) % 5 {
			case 1:
				change(abi.OpTouch, slot)
			case 3:
				change(abi.OpRemove, slot)
				if free < aheadSlots {
					change(abi.OpInsert, free)
					free++
				} else {
					change(abi.OpInsert, slot)
				}
			}
		}
		change(abi.OpTouch, (round*37)%(aheadSlots-100))
		if err != nil {
			return err
		}
		if after, err = e.step(ask); err != nil {
			return err
		}
		at := 0
		for _, slot := range before {
			if !left[slot] || !resident[slot] {
				continue
			}
			if at >= len(after) || after[at] != slot {
				return c.finding(abi.ExportStep, fmt.Sprintf("with victims_ahead it named %v, and after others were touched, inserted and "+
					"removed %v: slot %d is not in its place", short(before), short(after), slot),
					"say victims_ahead only if entries that were inserted or touched since stand behind all that were named (section 8)")
			}
			at++
		}
	}
	return err
}

package policytest

import (
	"errors"
	"testing"

	"github.com/kvhost/kvhost/abi"
)

func TestCheckEventsFinds(t *testing.T) {
	insert := func(slot uint32, key, parent uint64, at uint32) abi.Event {
		return abi.Event{Op: abi.OpInsert, Slot: slot, Key: key, ParentKey: parent, Parent: at}
	}
	for what, events := range map[string][]abi.Event{
		"slot in use":      {insert(1, 1, 0, abi.None), insert(1, 2, 0, abi.None)},
		"key twice":        {insert(1, 1, 0, abi.None), insert(2, 1, 0, abi.None)},
		"parent left out":  {insert(1, 1, 0, abi.None), insert(2, 2, 1, abi.None)},
		"wrong parent":     {insert(1, 1, 0, abi.None), insert(2, 2, 1, 7)},
		"child not linked": {insert(2, 2, 1, abi.None), insert(1, 1, 0, abi.None)},
		"empty slot":       {{Op: abi.OpTouch, Slot: 3, Parent: abi.None}},
		"changed entry":    {insert(1, 1, 0, abi.None), {Op: abi.OpTouch, Slot: 1, Key: 2, Parent: abi.None}},
		"link of no child": {insert(1, 1, 0, abi.None), {Op: abi.OpLink, Slot: 1, Key: 1, Parent: 1}},
		"unpin":            {insert(1, 1, 0, abi.None), {Op: abi.OpUnpin, Slot: 1, Key: 1, Parent: abi.None}},
		"unknown op":       {{Op: 200}},
	} {
		if err := CheckEvents(events); !errors.Is(err, errEvents) {
			t.Errorf("%s: want an error of the contract, got %v", what, err)
		}
	}
}

package policytest

import (
	"errors"
	"fmt"

	"github.com/kvhost/kvhost/abi"
)

// errEvents means that a sequence of events breaks the contract between a host and an evict policy.
var errEvents = errors.New("policytest: events break the contract")

// CheckEvents checks the events that a host sent to one evict policy, from its start on: slots are used by one entry at a
// time, an entry's key, parent, size and depth do not change, parents are the slots that hold them, and children that
// are resident are linked when their parent arrives.
func CheckEvents(events []abi.Event) error {
	c := checker{at: map[uint32]*abi.Event{}, slotOf: map[uint64]uint32{}, pinned: map[uint32]bool{},
		due: map[uint32]uint32{}}
	for i := range events {
		if what := c.event(&events[i]); what != "" {
			return fmt.Errorf("%w: event %d, %s of slot %d: %s", errEvents, i, events[i].Op, events[i].Slot, what)
		}
	}
	if len(c.due) > 0 {
		return fmt.Errorf("%w: %d children of the last entry were not linked", errEvents, len(c.due))
	}
	return nil
}

type checker struct {
	at     map[uint32]*abi.Event // by slot: what brought the entry
	slotOf map[uint64]uint32
	pinned map[uint32]bool
	due    map[uint32]uint32 // children to be linked next, and the slot of their parent
}

func (c *checker) event(ev *abi.Event) string {
	if ev.Op == abi.OpRequestEnd {
		return ""
	}
	if len(c.due) > 0 && ev.Op != abi.OpLink {
		return "the children of the entry before are not linked"
	}
	switch ev.Op {
	case abi.OpInsert, abi.OpResident:
		return c.insert(ev)
	case abi.OpTouch, abi.OpLink, abi.OpPin, abi.OpUnpin, abi.OpRemove:
	default:
		return "an unknown op"
	}
	e := c.at[ev.Slot]
	if e == nil {
		return "nothing is in it"
	}
	if ev.Key != e.Key || ev.ParentKey != e.ParentKey || ev.Size != e.Size || ev.Depth != e.Depth {
		return fmt.Sprintf("another entry than its %s brought", e.Op)
	}
	if ev.Op != abi.OpLink && ev.Parent != abi.None && ev.Parent != c.slot(ev.ParentKey) {
		return fmt.Sprintf("slot %d does not hold its parent", ev.Parent)
	}
	switch ev.Op {
	case abi.OpLink:
		if parent, ok := c.due[ev.Slot]; !ok || parent != ev.Parent {
			return "its parent did not arrive just now"
		}
		delete(c.due, ev.Slot)
	case abi.OpPin, abi.OpUnpin:
		if c.pinned[ev.Slot] == (ev.Op == abi.OpPin) {
			return "it is so already"
		}
		c.pinned[ev.Slot] = ev.Op == abi.OpPin
	case abi.OpRemove:
		delete(c.at, ev.Slot)
		delete(c.slotOf, e.Key)
		delete(c.pinned, ev.Slot)
	}
	return ""
}

func (c *checker) insert(ev *abi.Event) string {
	if c.at[ev.Slot] != nil {
		return "the slot is in use"
	}
	if c.slot(ev.Key) != abi.None {
		return "its key is resident in another slot"
	}
	if parent := c.slot(ev.ParentKey); ev.Parent != parent {
		return fmt.Sprintf("its parent is in slot %d, not %d", parent, ev.Parent)
	}
	for slot, e := range c.at {
		if e.ParentKey == ev.Key {
			c.due[slot] = ev.Slot
		}
	}
	c.at[ev.Slot], c.slotOf[ev.Key] = ev, ev.Slot
	return ""
}

// slot is where a key is resident, or None.
func (c *checker) slot(key uint64) uint32 {
	if s, ok := c.slotOf[key]; ok && key != 0 {
		return s
	}
	return abi.None
}

// Package fifo is the first-party eviction policy "fifo". It evicts the entry that was stored first, regardless of its
// uses. After a restart the order is that of the last touch, in which the host replays the entries.
package fifo

import (
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/plugins/slotlist"
)

// Policy is a [guest.Evictor].
type Policy struct{ order slotlist.List }

// New returns an empty policy for info.MaxSlots slots.
func New(info guest.Info) (*Policy, error) {
	return &Policy{order: slotlist.New(info.MaxSlots)}, nil
}

// Events applies a batch.
func (p *Policy) Events(batch []abi.Event) { p.order.Apply(batch, false) }

// Victims names the entries stored longest ago.
func (p *Policy) Victims(ask abi.Ask, dst []uint32) int { return p.order.Victims(ask, dst) }

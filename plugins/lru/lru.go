// Package lru is the first-party eviction policy "lru": the entry whose last touch lies furthest back goes first.
//
// It is also the host's native fallback, so it stays plain: one order, O(1) per event, 16 bytes per slot, no allocation
// after New.
package lru

import (
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/plugins/slotlist"
)

// Policy is a [guest.Evictor].
type Policy struct{ order slotlist.List }

// New makes an empty policy for info.MaxSlots slots.
func New(info guest.Info) (*Policy, error) {
	return &Policy{order: slotlist.New(info.MaxSlots)}, nil
}

// Events applies a batch.
func (p *Policy) Events(batch []abi.Event) { p.order.Apply(batch, true) }

// Victims names the least recently touched entries.
func (p *Policy) Victims(ask abi.Ask, dst []uint32) int { return p.order.Victims(ask, dst) }

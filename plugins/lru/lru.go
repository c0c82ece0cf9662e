// Package lru is the first-party eviction policy "lru". It evicts the entry with the oldest last touch.
//
// The host also uses it natively in place of a module that failed, so it is simple: one order, O(1) per event, and 16
// bytes for each slot up to the highest that was used.
package lru

import (
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/plugins/slotlist"
)

// StateFormat is the format of the saved state, as in the manifest.
const StateFormat = "lru/1"

// Policy is a [guest.Evictor] and a [guest.Saver].
type Policy struct{ order slotlist.List }

// New returns an empty policy for info.MaxSlots slots.
func New(info guest.Info) (*Policy, error) {
	return &Policy{order: slotlist.New(info.MaxSlots)}, nil
}

// Events applies a batch.
func (p *Policy) Events(batch []abi.Event) { p.order.Apply(batch, true) }

// Victims names the least recently touched entries.
func (p *Policy) Victims(ask abi.Ask, dst []uint32) int { return p.order.Victims(ask, dst) }

// Save appends the order of all entries to dst. It takes 8 bytes for each slot, and a few for each run of slots with the same tenant. An
// instance that loads the state makes the same decisions as this one. Saving takes little longer than a copy, because a host waits for it.
func (p *Policy) Save(dst []byte, limit int) ([]byte, error) {
	state, ok := p.order.Save(dst, limit)
	if !ok {
		return dst, guest.ErrStateSize
	}
	return state, nil
}

// Load restores a saved order.
func (p *Policy) Load(state []byte) error { return p.order.Load(state) }

// Package lru is the first-party eviction policy "lru": the entry with the last touch furthest back goes first.
//
// It is also the host's native fallback, so it stays plain: one order, O(1) per event, 16 bytes for each slot up to the
// highest that was used.
package lru

import (
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/plugins/slotlist"
)

// StateFormat names the form of what Save keeps, as the manifest does.
const StateFormat = "lru/1"

// Policy is a [guest.Evictor] and a [guest.Saver].
type Policy struct{ order slotlist.List }

// New makes an empty policy for info.MaxSlots slots.
func New(info guest.Info) (*Policy, error) {
	return &Policy{order: slotlist.New(info.MaxSlots)}, nil
}

// Events applies a batch.
func (p *Policy) Events(batch []abi.Event) { p.order.Apply(batch, true) }

// Victims names the least recently touched entries.
func (p *Policy) Victims(ask abi.Ask, dst []uint32) int { return p.order.Victims(ask, dst) }

// Save appends the order of all entries to dst: 8 bytes for each slot, and a few for each run of slots of one tenant. An instance
// that loads it decides as this one would have. It takes about as long as copying does, because a host waits for it.
func (p *Policy) Save(dst []byte, limit int) ([]byte, error) {
	state, ok := p.order.Save(dst, limit)
	if !ok {
		return dst, guest.ErrStateSize
	}
	return state, nil
}

// Load takes an order over.
func (p *Policy) Load(state []byte) error { return p.order.Load(state) }

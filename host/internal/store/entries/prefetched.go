package entries

import "sync/atomic"

// Prefetched are the entries that were copied here because a lookup asked for that, and were not loaded since. The set's
// lock guards them, but not the counts.
type Prefetched struct {
	of map[uint32]struct{} // by slot

	Used   atomic.Uint64 // copies that were loaded afterwards
	Wasted atomic.Uint64 // copies that went without
}

// Add counts an entry in.
func (p *Prefetched) Add(slot uint32) {
	if p.of == nil {
		p.of = map[uint32]struct{}{}
	}
	p.of[slot] = struct{}{}
}

// loaded says that an entry is loaded.
func (p *Prefetched) loaded(slot uint32) { p.end(slot, &p.Used) }

// goes says that an entry is removed.
func (p *Prefetched) goes(slot uint32) { p.end(slot, &p.Wasted) }

func (p *Prefetched) end(slot uint32, n *atomic.Uint64) {
	if len(p.of) == 0 {
		return
	}
	if _, ok := p.of[slot]; ok {
		delete(p.of, slot)
		n.Add(1)
	}
}

package peers

import (
	"maps"
	"slices"
	"time"
)

// Stats is one peer. What counts up does so since the start.
type Stats struct {
	Name, Address string
	State         State
	Reason        string        // of the last failure
	Heard         time.Duration // since it last told a change of its entries; 0: it never did
	Entries       int64         // that it has, as it says

	Asks     uint64        // for leases
	Failures uint64        // of asks and reads
	Keys     uint64        // asked for
	Struck   uint64        // promises that were not kept
	Bytes    uint64        // read
	Blamed   uint64        // pieces with wrong bytes
	Turnover time.Duration // how long it takes to replace what it holds, as it says; 0: it takes no offers
	Offers   uint64        // of what was evicted here
	Taken    uint64        // of them

	NIXL          bool   // it is read by NIXL
	NIXLBytes     uint64 // of Bytes
	NIXLFallbacks uint64 // reads that went by gRPC though both hosts have NIXL
}

// Lent is what this host has lent, since the start.
type Lent struct {
	Refused   uint64 // leases
	Bytes     uint64
	NIXLBytes uint64 // of Bytes
	Took      uint64 // offers of peers
}

// Stats are all peers, by address, and then the names without one.
func (p *Peers) Stats() (list []Stats) {
	if p == nil {
		return nil
	}
	for _, x := range p.all() {
		c := &x.count
		s := Stats{Name: x.name, Address: x.addr, Asks: c.asks.Load(), Failures: c.failures.Load(),
			Keys: c.keys.Load(), Struck: c.struck.Load(), Bytes: c.bytes.Load(), Blamed: c.blamed.Load(), Turnover: time.Duration(x.turnover.Load()),
			Offers: c.offers.Load(), Taken: c.taken.Load(),
			NIXL: p.nixl.isProven(x.agent()), NIXLBytes: c.nixl.Load(), NIXLFallbacks: c.fallbacks.Load()}
		x.mu.Lock()
		s.State, s.Reason = x.state, x.reason
		if x.list < lists {
			s.Entries, s.Heard = p.table.count[x.list].Load(), time.Since(x.heard)
		}
		x.mu.Unlock()
		list = append(list, s)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(p.lost)) {
		list = append(list, Stats{Name: name, State: Away, Reason: p.lost[name].Error()})
	}
	return list
}

// Table is the memory of what peers have told, and how many fingerprints there was no room for.
func (p *Peers) Table() (bytes int64, full uint64) {
	return p.table.cells.Load() * cellBytes, p.table.full.Load()
}

// Lent is what this host has lent.
func (p *Peers) Lent() (l Lent) {
	if p == nil || p.lending == nil {
		return l
	}
	c := &p.lending.count
	return Lent{Refused: c.refused.Load(), Bytes: c.bytes.Load(), NIXLBytes: c.nixl.Load(), Took: c.took.Load()}
}

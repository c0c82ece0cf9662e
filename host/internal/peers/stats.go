package peers

import (
	"maps"
	"slices"
	"time"
)

// Stats describes one peer. Counters start at 0 with the process.
type Stats struct {
	Name, Address string
	State         State
	Reason        string        // message of the last failure
	Heard         time.Duration // time since the last message about its entries; 0 if there was none
	Entries       int64         // number of entries that it has announced

	Asks     uint64        // requests for leases
	Failures uint64        // failed lease requests and reads
	Keys     uint64        // keys in the requests for leases
	Struck   uint64        // announced entries that it did not lend
	Bytes    uint64        // bytes read from it
	Blamed   uint64        // pieces with wrong bytes, and answers that cannot be true
	Turnover time.Duration // time in which it replaces its content, as announced; 0 if it takes no offers
	Offers   uint64        // evicted entries that this host offered to it
	Taken    uint64        // offers that it took

	NIXL          bool   // true if its memory is read by NIXL
	NIXLBytes     uint64 // the part of Bytes that NIXL read
	NIXLFallbacks uint64 // reads by gRPC although both hosts have NIXL
}

// Lent counts the loans of this host to others since the start.
type Lent struct {
	Refused uint64 // requests that were refused
	// Bytes is the number of bytes sent to peers.
	Bytes     uint64
	NIXLBytes uint64 // the part of Bytes that peers read by NIXL
}

// Stats returns the peers in the order of their addresses, followed by the configured names that have no address.
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

// Table returns the size of the table of fingerprints in bytes, and the number of fingerprints that found no room in it.
func (p *Peers) Table() (bytes int64, full uint64) {
	return p.table.cells.Load() * cellBytes, p.table.full.Load()
}

// Lent returns the counters of loans to others.
func (p *Peers) Lent() (l Lent) {
	if p == nil || p.lending == nil {
		return l
	}
	c := &p.lending.count
	return Lent{Refused: p.lending.refused.Load(), Bytes: c.bytes.Load(), NIXLBytes: c.nixl.Load()}
}

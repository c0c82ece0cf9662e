package policy

import (
	"cmp"
	"time"

	"github.com/kvhost/kvhost/abi"
)

// Fuel is what a guest call may spend, in units of the meter: about one per instruction. Zero fields have a default.
type Fuel struct {
	Call   uint64 // for any call of a role
	Record uint64 // on top, for each record: an event, a victim asked for, a candidate, a query, a page of a layout
	// Time of the processor that a call may take which a session waits for, on top of a slice of its fuel or two.
	Time time.Duration `json:",omitempty"`
}

// The defaults leave lru, as a Go guest, what its worst batch on real traces needs, twice and more; busier policies say so
// in their manifests. An endless loop spends maxFuel in 1 to 2 ms. A guest that only waits for memory would take up to 80 ms
// for it, and is ended after 7, by its time (BenchmarkLongestStall).
const (
	defaultCallFuel   = 500_000
	defaultRecordFuel = 2_000
	maxFuel           = 6_000_000 // for one call, unless the operator says more
	mostFuel          = 1 << 40   // that an operator can allow

	// Calls that set an instance up are rare, and made off the path of requests. What they may spend follows from what
	// they are for.
	setupFuel     = 200_000_000 // _initialize (a Go runtime starts in it), kv_buffer, kv_init, kv_save, kv_load
	slotSetupFuel = 1_000       // on top, for each slot that the instance was told of
	textFuel      = 500         // on top of maxFuel, for each byte of a namespace's text
	pageFuel      = 4_000       // on top of maxFuel, for each page of a layout
	stateByteFuel = 64          // on top of those two, for each byte that kv_save may write or kv_load reads
)

// stateFuel is what keeping or taking over a state may spend.
func stateFuel(bytes, slots uint32) uint64 {
	return setupFuel + slotSetupFuel*uint64(slots) + stateByteFuel*uint64(bytes)
}

// budgets are a module's resolved limits.
type budgets struct {
	call, record, most uint64
	patience           time.Duration
}

// budgets gives the operator's word first, whatever it is. A manifest may ask for more than the defaults, up to maxFuel; it
// gets half as much again, because it says what its author saw.
func (f Fuel) budgets(hint *abi.FuelHints) budgets {
	b := budgets{defaultCallFuel, defaultRecordFuel, maxFuel, cmp.Or(f.Time, defaultPatience)}
	if hint != nil {
		b.call, b.record = max(b.call, min(hint.Call, maxFuel)*3/2), max(b.record, min(hint.Record, maxFuel)*3/2)
	}
	if f.Call != 0 {
		b.call = min(f.Call, mostFuel)
	}
	if f.Record != 0 {
		b.record = min(f.Record, mostFuel)
	}
	if f.Call != 0 || f.Record != 0 {
		b.most = max(b.most, b.call+b.record*(batchSize+maxVictims))
	}
	return b
}

// of is the fuel of a call with n records.
func (b *budgets) of(n int) uint64 { return min(b.call+b.record*uint64(n), b.most) }

// records is how many events one call can carry.
func (b *budgets) records() uint32 {
	if b.call >= b.most {
		return 1
	}
	return uint32(max(1, min((b.most-b.call)/max(1, b.record), batchSize)))
}

package sandbox

import (
	"cmp"
	"time"

	"github.com/kvhost/kvhost/abi"
)

// Fuel limits the instructions of a guest call, in units of about one instruction. Zero fields have a default.
type Fuel struct {
	Call   uint64 `json:"call"`   // fuel of any call of a role
	Record uint64 `json:"record"` // additional fuel for each record: an event, a victim asked for, a candidate, a query, a page of a layout
	// Time limits the CPU time of a call that a session waits for. One or two slices of its fuel are not counted.
	Time time.Duration `json:"time,omitempty"`
}

// The defaults are more than twice the need of lru, as a Go guest, for its worst batch on real traces. More expensive
// policies state their needs in the manifest. An endless loop uses maxFuel in 1 to 2 ms. A guest that only waits for
// memory would need up to 80 ms, and is aborted after 7 ms by its CPU time (BenchmarkLongestStall).
const (
	defaultCallFuel   = 500_000
	defaultRecordFuel = 2_000
	maxFuel           = 6_000_000 // limit of one call, unless the operator allows more
	maxOperatorFuel   = 1 << 40

	// Calls that set up an instance are rare and off the path of requests. Their limits follow from their work.
	setupFuel     = 200_000_000 // _initialize (which starts a Go runtime), kv_buffer, kv_init, kv_save, kv_load
	slotSetupFuel = 1_000       // additional for each slot of the instance
	textFuel      = 500         // in addition to maxFuel, for each byte of a namespace's text
	pageFuel      = 4_000       // in addition to maxFuel, for each page of a layout
	// in addition to setupFuel and slotSetupFuel, for each byte that kv_save may write or kv_load reads
	stateByteFuel = 64
)

// stateFuel returns the fuel for saving or loading a state.
func stateFuel(bytes, slots uint32) uint64 {
	return setupFuel + slotSetupFuel*uint64(slots) + stateByteFuel*uint64(bytes)
}

// fuelLimits are a module's limits after defaults, manifest and configuration.
type fuelLimits struct {
	Call, Record uint64
	Max          uint64 // limit of one call, whatever its records
	CPUTime      time.Duration
}

// Limits resolves f with the hints of a manifest. The operator's values take precedence. A manifest may ask for more
// than the defaults, up to maxFuel, and gets one and a half times its value, because its author states observed needs.
func (f Fuel) Limits(hint *abi.FuelHints) fuelLimits {
	l := fuelLimits{defaultCallFuel, defaultRecordFuel, maxFuel, cmp.Or(f.Time, defaultCPULimit)}
	if hint != nil {
		l.Call = max(l.Call, min(hint.Call, maxFuel)*3/2)
		l.Record = max(l.Record, min(hint.Record, maxFuel)*3/2)
	}
	if f.Call != 0 {
		l.Call = min(f.Call, maxOperatorFuel)
	}
	if f.Record != 0 {
		l.Record = min(f.Record, maxOperatorFuel)
	}
	if f.Call != 0 || f.Record != 0 {
		l.Max = max(l.Max, l.Call+l.Record*(MaxBatch+MaxVictims))
	}
	return l
}

// For returns the fuel of a call with n records.
func (l *fuelLimits) For(n int) uint64 { return min(l.Call+l.Record*uint64(n), l.Max) }

// ForPages returns the fuel of a layout of n pages.
func (l *fuelLimits) ForPages(n uint64) uint64 { return l.Max + pageFuel*n }

// ForExport returns the fuel of a call of an export by name. records is the number of records of a batch, pages of a
// layout, or bytes of a text or a state.
func (l *fuelLimits) ForExport(name string, records int, slots uint32) uint64 {
	switch name {
	case abi.ExportStep:
		return l.For(records + MaxVictims)
	case abi.ExportEvents, abi.ExportAdmit, abi.ExportPlace:
		return l.For(records)
	case abi.ExportLayout:
		return l.ForPages(uint64(records))
	case abi.ExportNamespace:
		return maxFuel + textFuel*uint64(records)
	case abi.ExportSave, abi.ExportLoad:
		return stateFuel(uint32(records), slots)
	}
	return setupFuel + slotSetupFuel*uint64(slots)
}

// Batch returns the most events of one call.
func (l *fuelLimits) Batch() int {
	if l.Call >= l.Max {
		return 1
	}
	return int(max(1, min((l.Max-l.Call)/max(1, l.Record), MaxBatch)))
}

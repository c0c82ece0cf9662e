package meter

import (
	"fmt"
	"slices"
)

// Limits of a module's parts. A Go guest is far below them, and compiling stays in the order of seconds. The counted
// items take many times their bytes in a decoder.
const (
	// MaxModuleBytes is the most bytes of a module's file.
	MaxModuleBytes = 16 << 20

	maxSections        = 1000
	maxName            = 1024 // bytes of the name of an import, an export or a custom section
	maxTypes           = 10_000
	maxTypeSize        = 1000 // parameters, and likewise results
	maxImports         = 100
	maxFunctions       = 50_000 // imported and defined
	maxTables          = 8
	maxTableElements   = 1 << 20 // minimum and maximum of one table
	maxMemoryPages     = 4096    // minimum of the memory
	maxGlobals         = 10_000
	maxExports         = 1000
	maxElementSegments = 10_000
	maxElements        = 1 << 20 // elements of all segments together
	maxBodyBytes       = 1 << 20 // bytes of one function
	maxLocals          = 10_000  // locals of one function, without parameters
	maxDataSegments    = 100_000 // a Go guest has 30,000
	maxDataBytes       = 8 << 20 // bytes of the data section
)

// Limits of all functions of a module together. The compiler's time grows with the square of a function's blocks, in
// sequence or nested: 7,000 loops took 8 s. A million values carried by branches or blocks took 1 s and 100 MB, and a
// million locals 70 MB. First-party policies have at most 5 million pairs, 400,000 values and 8,000 locals.
const (
	maxPairs     = 30_000_000
	maxValues    = 6_000_000
	maxAllLocals = 2_000_000
)

// work measures the compiler's work for functions: locals, pairs of blocks of the same function, and values that
// instructions make or branches carry.
type work struct{ locals, pairs, values uint64 }

// weigh adds the work of a function, and refuses a legal module that takes a compiler too long.
func (m *rewriter) weigh(w work) error {
	all := &m.work
	all.locals, all.pairs, all.values = all.locals+w.locals, all.pairs+w.pairs, all.values+w.values
	for _, c := range []struct {
		most     int
		got      uint64
		what, do string
	}{
		{maxPairs, all.pairs, "pairs of blocks of the same function", "split functions with many blocks"},
		{maxValues, all.values, "values of all functions", "leave out functions, or blocks and calls with many values"},
		{maxAllLocals, all.locals, "locals of all functions", "keep large state in memory"},
	} {
		if err := m.check(c.most, c.got, c.what); err != nil {
			return fmt.Errorf("%w: %s", err, c.do)
		}
	}
	return nil
}

// Count is a module's count of a limited item. If the limit is per place, it is the largest count of one place.
type Count struct {
	What string
	Got  uint64
	Most uint64
}

// check records a count of a module, and refuses one above its limit.
func (m *Module) check(most int, got uint64, what string) error {
	i := slices.IndexFunc(m.counts, func(c Count) bool { return c.What == what })
	if i < 0 {
		i = len(m.counts)
		m.counts = append(m.counts, Count{What: what, Most: uint64(most)})
	}
	m.counts[i].Got = max(m.counts[i].Got, got)
	if got > uint64(most) {
		return fmt.Errorf("%w: %s: %d, at most %d", ErrLimit, what, got, most)
	}
	return nil
}

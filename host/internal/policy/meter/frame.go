package meter

// A function's frame on the stack has a place for each value that must be kept while something is called. The compiler
// shares no places, so that a function of a megabyte can have a frame as large, though a call of it does nothing. A few
// thousand nested calls would make the stack grow to 100 MB, which takes 20 ms. So a function that calls others pays at
// its entry for what may be beyond a usual frame. The largest of the first-party policies has 4,016 bytes.
const (
	usualFrame = 4 << 10 // bytes
	frameUnit  = 16      // bytes that cost a unit
)

// frameEstimate is an upper bound of a frame's size: all values that the function makes, and at each place where control
// flow joins one for each local that is set anywhere.
type frameEstimate struct {
	locals uint64
	types  *Module
	values uint64
	joins  uint64
	sets   map[uint32]struct{}
	wide   bool // some values have 16 bytes
}

func (f *frameEstimate) add(in *instruction, code []byte) {
	switch op := in.op; {
	case op == opLocalSet, op == opLocalTee:
		if f.sets == nil {
			f.sets = map[uint32]struct{}{}
		}
		f.sets[operand(code, *in)] = struct{}{}
	case op == opBlock, op == opLoop, op == opIf:
		f.joins++
		if code[in.hi-1] >= blockEmpty {
			break // no type, or that of one result
		}
		r := reader{b: code, at: in.lo + 1}
		if kind := r.u32(); uint64(kind) < uint64(len(f.types.Types)) {
			f.values += uint64(len(f.types.Types[kind]) - 1) // parameters and results
		}
	case op == opCall, op == opCallIndirect:
		f.values += uint64(f.types.mostResults)
	case op == opLocalGet, op == opEnd, op == opElse, op >= opBranch && op <= opReturn, op >= 0x36 && op <= 0x3e:
		// they make no values
	default:
		f.values++
		f.wide = f.wide || op == opPrefixSIMD
	}
}

// cost is what an entry pays for the frame.
func (f *frameEstimate) cost() uint64 {
	width := uint64(8)
	if f.wide {
		width = 16
	}
	size := 16*f.locals + width*(f.values+f.joins*uint64(len(f.sets)))
	return (size - min(size, usualFrame)) / frameUnit
}

package meter

// A function's frame on the stack has a place for each value that is kept across calls. The compiler shares no places,
// so a function of a megabyte can have a frame as large, even if a call does nothing. A few thousand nested calls would
// grow the stack to 100 MB, which takes 20 ms. So a function that calls others pays at its entry for a frame beyond the
// usual size. The largest frame of the first-party policies has 4,016 bytes.
const (
	usualFrame = 4 << 10 // bytes
	frameUnit  = 16      // bytes per unit
)

// frameEstimate is an upper bound of a frame's size: all values that the function makes, and, for each join of control
// flow, one value per local that is set anywhere.
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
			break // the block has no type, or one result
		}
		r := reader{b: code, at: in.lo + 1}
		if kind := r.u32(); uint64(kind) < uint64(len(f.types.Types)) {
			f.values += uint64(len(f.types.Types[kind]) - 1) // parameters and results
		}
	case op == opCall, op == opCallIndirect:
		f.values += uint64(f.types.mostResults)
	case op == opLocalGet, op == opEnd, op == opElse, op >= opBranch && op <= opReturn, op >= 0x36 && op <= 0x3e:
		// the others make no values
	default:
		f.values++
		f.wide = f.wide || op == opPrefixSIMD
	}
}

// cost returns the charge of an entry for the frame.
func (f *frameEstimate) cost() uint64 {
	width := uint64(8)
	if f.wide {
		width = 16
	}
	size := 16*f.locals + width*(f.values+f.joins*uint64(len(f.sets)))
	return (size - min(size, usualFrame)) / frameUnit
}

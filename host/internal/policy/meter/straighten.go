package meter

import "slices"

// Compilers without structured control flow, above all Go's, write every jump within a function as
//
//	i32.const K; local.set V; br L
//
// where L is the head of a loop that only looks V up in a table and branches. V is also a parameter, so that a function
// can be entered again in its middle. For the next compiler, each piece of the function can therefore be reached from
// everywhere, and it must move all variables to the same places before each piece. That costs more than the code
// between: a third of the time of a batch of events in lru, measured.
//
// Such a function gets a second form for calls that enter it at its start, which are nearly all. In this form the
// target of the table for K is known. A jump ahead leads to the end of a block that is still open, and becomes a
// branch. Jumps back stay, and the table keeps their entries. The first form is moved to the module's end, for any
// other V.

// target is a block that a branch can name.
type target struct {
	jumps *jumps // if it is a dispatch loop: its table
	of    *jumps // if it is a block of a dispatch loop: that loop's table
	label int    // index of the block, from the innermost
}

// jumps is a dispatch loop's table.
type jumps struct {
	variable uint32
	blocks   int
	labels   []uint32 // by the variable's value; the last is for all others
	lo, hi   int      // place of the head in the code
}

func (j *jumps) of(value uint32) uint32 { return j.labels[min(uint64(value), uint64(len(j.labels)-1))] }

// dispatchLoop reads the table of a loop that only jumps, and returns a reader of the code after its head. It returns
// nil for any other loop.
func dispatchLoop(r reader) (*jumps, reader) {
	j := &jumps{}
	in := r.next()
	for ; in.op == opBlock && r.err == nil && r.b[in.hi-1] == blockEmpty; in = r.next() {
		j.blocks++
	}
	if j.blocks == 0 || in.op != opLocalGet {
		return nil, r
	}
	j.variable = operand(r.b, in)
	if in = r.next(); in.op != opBranchTable || r.err != nil {
		return nil, r
	}
	j.lo, j.hi = in.lo, in.hi
	table := reader{b: r.b, at: in.lo + 1}
	for range table.count(1) + 1 {
		label := table.u32()
		if uint64(label) >= uint64(j.blocks) {
			return nil, r // the jump leads to the loop itself or out of it
		}
		j.labels = append(j.labels, label)
	}
	return j, r
}

// operand returns the first immediate of an instruction, which must be an index.
func operand(code []byte, in instruction) uint32 { return (&reader{b: code, at: in.lo + 1}).u32() }

// straightener rewrites the code of a function for calls with local 0 equal to zero.
type straightener struct {
	r     reader
	open  []target
	jumps *jumps
	keep  []bool // labels that a jump still leads to
	out   []byte
	done  int // end of the code that is already in out
}

// straighten returns the form of a function's code for calls with local 0 equal to zero. ok is false if it would not
// differ, or if the code has another shape.
func straighten(code []byte) (out []byte, ok bool) {
	s := &straightener{r: reader{b: code}, open: []target{{}}}
	var first, second instruction
	for !s.r.done() {
		in := s.r.next()
		if s.r.err != nil || len(s.open) == 0 || !s.step(first, second, in) {
			return nil, false
		}
		first, second = second, in
	}
	if s.jumps == nil || !slices.Contains(s.keep, false) {
		return nil, false
	}
	s.out = append(s.out, code[s.done:]...)
	return s.prune(), true
}

// step returns false for code of another shape.
func (s *straightener) step(first, second, in instruction) bool {
	switch in.op {
	case opBlock, opIf:
		s.open = append(s.open, target{})
	case opLoop:
		j, after := dispatchLoop(s.r)
		s.open = append(s.open, target{jumps: j})
		if j == nil {
			return s.jumps != nil // only inside a dispatch loop: an outer loop would reach that head with any value
		}
		if s.jumps != nil || j.variable != 0 {
			return false
		}
		s.jumps, s.keep = j, make([]bool, j.blocks)
		s.keep[j.of(0)] = true
		for label := j.blocks - 1; label >= 0; label-- {
			s.open = append(s.open, target{of: j, label: label})
		}
		s.r = after
	case opEnd:
		s.open = s.open[:len(s.open)-1]
	case opLocalSet, opLocalTee:
		return s.jumps != nil || operand(s.r.b, in) != 0
	case opBranch:
		if t := s.at(operand(s.r.b, in)); t != nil && t.jumps != nil {
			return s.jump(first, second, in)
		}
	case opBranchIf:
		t := s.at(operand(s.r.b, in))
		return t == nil || t.jumps == nil
	case opBranchTable:
		labels := reader{b: s.r.b, at: in.lo + 1}
		for range labels.count(1) + 1 {
			if t := s.at(labels.u32()); t != nil && t.jumps != nil {
				return false
			}
		}
	}
	return true
}

func (s *straightener) at(depth uint32) *target {
	if uint64(depth) >= uint64(len(s.open)) {
		return nil
	}
	return &s.open[len(s.open)-1-int(depth)]
}

// jump turns a jump ahead into a branch. Any other jump must at least lead to a known place.
func (s *straightener) jump(first, second, in instruction) bool {
	code := s.r.b
	if first.op != opI32Const || second.op != opLocalSet || first.hi != second.lo || second.hi != in.lo ||
		operand(code, second) != 0 {
		return false
	}
	value, ok := smallConstant(code[first.lo+1 : first.hi])
	if !ok {
		return false
	}
	label := s.jumps.of(value)
	for depth := range operand(code, in) {
		if t := s.at(depth); t.of != nil && uint32(t.label) == label {
			s.out = append(s.out, code[s.done:in.lo]...)
			s.out = appendU32(append(s.out, opBranch), depth)
			s.done = in.hi
			return true
		}
	}
	s.keep[label] = true
	return true
}

// prune removes the table's entries that no jump leads to any more. Those places are then reached only from the code
// before them. The table is before all rewritten code.
func (s *straightener) prune() []byte {
	j := s.jumps
	table := appendU32([]byte{opBranchTable}, uint32(len(j.labels)-1))
	for _, label := range j.labels {
		if !s.keep[label] {
			label = j.of(0)
		}
		table = appendU32(table, label)
	}
	return slices.Concat(s.out[:j.lo], table, s.out[j.hi:])
}

// smallConstant reads an i32 constant that is not negative, from its signed LEB128.
func smallConstant(b []byte) (uint32, bool) {
	var v uint64
	for i, c := range b {
		v |= uint64(c&0x7f) << (7 * i)
	}
	return uint32(v), b[len(b)-1]&0x40 == 0 && v < 1<<31
}

// mostStraightened is the most bytes of code that get a second form, which only saves time.
const mostStraightened = 512 << 10

// entered returns the beginning of a function with two forms: unless local 0 is zero, it calls the other form.
func entered(params, other uint32) []byte {
	out := []byte{opLocalGet, 0, opIf, blockEmpty}
	for p := range params {
		out = appendU32(append(out, opLocalGet), p)
	}
	out = appendU32(append(out, opCall), other)
	return append(out, opReturn, opEnd)
}

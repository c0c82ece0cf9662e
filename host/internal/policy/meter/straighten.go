package meter

import "slices"

// Compilers that have no structured control flow to give, Go's above all, spell every jump within a function as
//
//	i32.const K; local.set V; br L
//
// where L is the head of a loop that does nothing but look V up in a table and branch. V is also a parameter, so that a
// function can be entered again in its middle. So each piece of the function can be reached from everywhere, as far as
// the next compiler knows, and it must bring all variables to the same places before each: that costs more than the
// code in between. (A third of the time that a batch of events takes in lru, measured.)
//
// Such a function gets a second form for when it is entered at its start, which is all but always. There, where the
// table leads for K is known. A jump ahead leads to the end of a block that is still open, so that it becomes a branch;
// jumps back stay, and the table keeps what they need. The first form stands at the module's end, for any other V.

// target is a block that a branch can name.
type target struct {
	jumps *jumps // of a dispatch loop: what its head does
	of    *jumps // of one of its blocks
	label int    // which of them, counted from the innermost
}

// jumps is a dispatch loop's table.
type jumps struct {
	variable uint32
	blocks   int
	labels   []uint32 // by the variable's value; the last is for all others
	lo, hi   int      // its place in the code
}

func (j *jumps) of(value uint32) uint32 { return j.labels[min(uint64(value), uint64(len(j.labels)-1))] }

// dispatchLoop reads what follows the head of a loop if that only jumps, and where its code goes on.
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
			return nil, r // around the loop or out of it
		}
		j.labels = append(j.labels, label)
	}
	return j, r
}

// operand is the first immediate of an instruction that has an index there.
func operand(code []byte, in instruction) uint32 { return (&reader{b: code, at: in.lo + 1}).u32() }

// straightener rewrites the code of a function for when local 0 is zero at its start.
type straightener struct {
	r     reader
	open  []target
	jumps *jumps
	keep  []bool // labels that something jumps to still
	out   []byte
	done  int // of the code, in out
}

// straighten gives the form of a function's code that is right when local 0 is zero. ok is false when it would not
// differ, or when the code is not of the kind that is understood here.
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

// step is false for what must not be.
func (s *straightener) step(first, second, in instruction) bool {
	switch in.op {
	case opBlock, opIf:
		s.open = append(s.open, target{})
	case opLoop:
		j, after := dispatchLoop(s.r)
		s.open = append(s.open, target{jumps: j})
		if j == nil {
			return s.jumps != nil // a loop around it would come to its head with any value
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

// jump makes a branch of a jump ahead. Any other must at least lead to a known place.
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

// prune lets the table forget where nothing jumps to any more. Those places are then reached from before them only. The
// table stands before all that was rewritten.
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

// smallConstant is an i32 constant that is not negative, from its signed LEB128.
func smallConstant(b []byte) (uint32, bool) {
	var v uint64
	for i, c := range b {
		v |= uint64(c&0x7f) << (7 * i)
	}
	return uint32(v), b[len(b)-1]&0x40 == 0 && v < 1<<31
}

// mostStraightened bounds what is done for speed alone: bytes of code that get a second form.
const mostStraightened = 512 << 10

// entered is how a function begins that has two forms: unless local 0 is zero, the other one does all.
func entered(params, other uint32) []byte {
	out := []byte{opLocalGet, 0, opIf, blockEmpty}
	for p := range params {
		out = appendU32(append(out, opLocalGet), p)
	}
	out = appendU32(append(out, opCall), other)
	return append(out, opReturn, opEnd)
}

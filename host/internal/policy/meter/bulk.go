package meter

// A copy of a gigabyte is one instruction, during which a garbage collection stops all goroutines of the host. So
// memory.copy and memory.fill of more than a slice become calls of functions that work in slices and pay before each. A
// slice that is out of bounds traps at its turn, and not before the first slice as in the specification. The difference
// is not visible, because a trap ends the instance.

const (
	bulkSlice = 512 << 10 // bytes
	bulkShift = 3         // 8 bytes a unit
)

// bulk pays for a copy or fill and makes it. For more than one slice it calls a function that does both. The operands
// are on the stack, the length on top.
func (w *bodyRewriter) bulk(op []byte, function uint32) {
	w.uses = true
	w.local(opLocalTee, w.scratch)
	w.local(opLocalGet, w.scratch)
	w.more()
	w.out = append(w.out, opIf)
	w.out = appendS64(w.out, int64(w.bulkKind)) // the type of the block, which takes the operands
	w.local(opCall, function)
	w.out = append(w.out, opElse)
	w.chargeLength(w.scratch)
	w.out = append(append(w.out, op...), opEnd)
}

// more appends the test whether the length on the stack is more than one slice.
func (w *bodyRewriter) more() {
	w.out = append(appendS64(append(w.out, opI32Const), bulkSlice), opI32GtU)
}

// chargeLength pays for the number of bytes in a local.
func (w *bodyRewriter) chargeLength(local uint32) {
	w.local(opGlobalGet, w.global)
	w.local(opLocalGet, local)
	w.out = append(w.out, opI64ExtendU, opI64Const, bulkShift, opI64ShrU)
	w.subtract()
	w.checkFuel(false)
}

// local appends an instruction with an index.
func (w *bodyRewriter) local(op byte, index uint32) { w.out = appendU32(append(w.out, op), index) }

// The functions' parameters.
const (
	paramTo     = 0
	paramFrom   = 1 // source address, or the value of a fill
	paramLength = 2
)

// slicedCopy copies from the start if the destination is before the source, and otherwise from the end, so that
// overlapping ranges are right.
func (w *bodyRewriter) slicedCopy() []byte {
	op := []byte{opPrefixMisc, miscMemoryCopy, 0, 0}
	w.out = []byte{0} // no locals
	w.local(opLocalGet, paramTo)
	w.local(opLocalGet, paramFrom)
	w.out = append(w.out, opI32LeU, opIf, blockEmpty)
	w.forward(op, true)
	w.out = append(w.out, opElse, opLoop, blockEmpty)
	w.charge(&charge{units: bulkSlice >> bulkShift, check: after})
	w.move(paramLength, opI32Sub)
	for _, local := range []uint32{paramTo, paramFrom} {
		w.local(opLocalGet, local)
		w.local(opLocalGet, paramLength)
		w.out = append(w.out, opI32Add)
	}
	w.out = append(appendS64(append(w.out, opI32Const), bulkSlice), op...)
	w.again()
	w.out = append(w.out, opEnd)
	return w.rest(op)
}

func (w *bodyRewriter) slicedFill() []byte {
	op := []byte{opPrefixMisc, miscMemoryFill, 0}
	w.out = []byte{0} // no locals
	w.forward(op, false)
	return w.rest(op)
}

// forward moves all slices but the last, from the start.
func (w *bodyRewriter) forward(op []byte, copies bool) {
	w.out = append(w.out, opLoop, blockEmpty)
	w.charge(&charge{units: bulkSlice >> bulkShift, check: after})
	w.local(opLocalGet, paramTo)
	w.local(opLocalGet, paramFrom)
	w.out = append(appendS64(append(w.out, opI32Const), bulkSlice), op...)
	w.move(paramTo, opI32Add)
	if copies {
		w.move(paramFrom, opI32Add)
	}
	w.move(paramLength, opI32Sub)
	w.again()
}

// move adds a slice to a parameter, or subtracts it.
func (w *bodyRewriter) move(param uint32, op byte) {
	w.local(opLocalGet, param)
	w.out = append(appendS64(append(w.out, opI32Const), bulkSlice), op)
	w.local(opLocalSet, param)
}

// again closes a loop that repeats while more than a slice is left.
func (w *bodyRewriter) again() {
	w.local(opLocalGet, paramLength)
	w.more()
	w.out = append(w.out, opBranchIf, 0, opEnd)
}

// rest moves the last slice, from the positions in the parameters, and ends the function.
func (w *bodyRewriter) rest(op []byte) []byte {
	w.chargeLength(paramLength)
	for _, local := range []uint32{paramTo, paramFrom, paramLength} {
		w.local(opLocalGet, local)
	}
	return append(append(w.out, op...), opEnd)
}

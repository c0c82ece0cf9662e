package meter

// bodyRewriter charges one function.
type bodyRewriter struct {
	global   uint32 // index of the fuel global
	refuel   uint32 // index of the function that is called while the global is below zero
	copier   uint32 // index of the function for large copies
	filler   uint32 // index of the function for large fills
	bulkKind uint32 // index of the type of copier and filler
	scratch  uint32 // index of the i32 local that holds an operand's copy
	types    *Module
	uses     bool // scratch is used
	out      []byte
}

// charge subtracts the cost of a place from the fuel.
func (w *bodyRewriter) charge(c *charge) {
	if c.check == before {
		w.checkFuel(true)
	}
	if c.units > 0 {
		w.out = append(w.out, opGlobalGet)
		w.out = appendU32(w.out, w.global)
		w.out = append(w.out, opI64Const)
		w.out = appendS64(w.out, int64(c.units))
		w.subtract()
	}
	if c.check == after {
		w.checkFuel(false)
	}
}

// chargeOperand subtracts the i32 on top of the stack, times 2^up or divided by 2^down, and leaves it on the stack.
func (w *bodyRewriter) chargeOperand(up, down uint) {
	w.uses = true
	w.out = append(w.out, opLocalTee)
	w.out = appendU32(w.out, w.scratch)
	w.out = append(w.out, opGlobalGet)
	w.out = appendU32(w.out, w.global)
	w.out = append(w.out, opLocalGet)
	w.out = appendU32(w.out, w.scratch)
	w.out = append(w.out, opI64ExtendU)
	if up > 0 {
		w.out = append(w.out, opI64Const)
		w.out = appendS64(w.out, 1<<up)
		w.out = append(w.out, opI64Mul)
	}
	if down > 0 {
		w.out = append(w.out, opI64Const)
		w.out = appendS64(w.out, int64(down))
		w.out = append(w.out, opI64ShrU)
	}
	w.subtract()
	w.checkFuel(false)
}

// subtract subtracts the two i64 on the stack and stores the fuel.
func (w *bodyRewriter) subtract() {
	w.out = append(w.out, opI64Sub, opGlobalSet)
	w.out = appendU32(w.out, w.global)
}

// checkFuel emits code that calls the refuel function if the counter is below zero. If again is set, the code stands at
// the head of a loop, and branches back to that head after the call. The code that follows then has only one
// predecessor, so the compiler keeps its values in registers.
func (w *bodyRewriter) checkFuel(again bool) {
	w.out = append(w.out, opGlobalGet)
	w.out = appendU32(w.out, w.global)
	w.out = append(w.out, opI64Const, 0, opI64LtS, opIf, blockEmpty, opCall)
	w.out = appendU32(w.out, w.refuel)
	if again {
		w.out = append(w.out, opBranch, 1)
	}
	w.out = append(w.out, opEnd)
}

// refuelBody is the body of the function that checkFuel calls. It traps unless the host has raised the fuel.
func refuelBody(global uint32) []byte {
	w := bodyRewriter{global: global, out: []byte{0}} // no locals
	w.out = appendU32(append(w.out, opGlobalGet), global)
	return append(w.out, opI64Const, 0, opI64LtS, opIf, blockEmpty, opUnreachable, opEnd, opEnd)
}

// rewriteBody injects the charges into one body. code is its expression, without the locals.
func (w *bodyRewriter) rewriteBody(code []byte, locals uint64) (work, error) {
	p, err := plan(code, locals, w.types)
	if err != nil {
		return work{}, err
	}
	if p.entry.units > 0 {
		if p.entry.check == before { // in a loop of its own
			w.out = append(w.out, opLoop, blockEmpty)
			w.checkFuel(true)
			w.out = append(w.out, opEnd)
			p.entry.check = never
		}
		w.charge(&p.entry)
	}
	r := reader{b: code}
	for next := 0; !r.done(); {
		in := r.next()
		replaced := false
		switch in.op {
		case opMemoryGrow:
			w.chargeOperand(10, 0) // pages of 64 KiB, at 64 bytes a unit
		case opPrefixMisc:
			switch in.sub {
			case miscMemoryCopy:
				w.bulk(code[in.lo:in.hi], w.copier)
				replaced = true
			case miscMemoryFill:
				w.bulk(code[in.lo:in.hi], w.filler)
				replaced = true
			case miscMemoryInit:
				w.chargeOperand(0, 3)
			case miscTableFill, miscTableCopy, miscTableInit, miscTableGrow:
				w.chargeOperand(0, 0)
			}
		}
		if !replaced {
			w.out = append(w.out, code[in.lo:in.hi]...)
		}
		for next < len(p.rest) && p.rest[next].at == in.hi {
			w.charge(&p.rest[next])
			next++
		}
	}
	return p.work, r.err
}

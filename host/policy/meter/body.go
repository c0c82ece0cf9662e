package meter

// bodyRewriter charges one function.
type bodyRewriter struct {
	global  uint32 // index of the fuel global
	refuel  uint32 // index of the function to call when it is below zero
	scratch uint32 // index of the i32 local that holds an operand's copy
	uses    bool   // of scratch
	out     []byte
}

// charge takes what is due from the fuel.
func (w *bodyRewriter) charge(c *charge) {
	if c.looks == before {
		w.look(true)
	}
	if c.units > 0 {
		w.out = append(w.out, opGlobalGet)
		w.out = appendU32(w.out, w.global)
		w.out = append(w.out, opI64Const)
		w.out = appendS64(w.out, int64(c.units))
		w.settle()
	}
	if c.looks == after {
		w.look(false)
	}
}

// chargeOperand takes the i32 on top of the stack, left where it is: times 2^up, or divided by 2^down.
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
	w.settle()
	w.look(false)
}

// settle subtracts the two i64 on the stack and stores the fuel.
func (w *bodyRewriter) settle() {
	w.out = append(w.out, opI64Sub, opGlobalSet)
	w.out = appendU32(w.out, w.global)
}

// look asks for more when the fuel is below zero. Coming again, from the head of a loop around it, means that the code
// behind is reached in one way only: a compiler then keeps what it has at hand.
func (w *bodyRewriter) look(again bool) {
	w.out = append(w.out, opGlobalGet)
	w.out = appendU32(w.out, w.global)
	w.out = append(w.out, opI64Const, 0, opI64LtS, opIf, blockEmpty, opCall)
	w.out = appendU32(w.out, w.refuel)
	if again {
		w.out = append(w.out, opBranch, 1)
	}
	w.out = append(w.out, opEnd)
}

// refuelBody is the function that is called then. It traps unless somebody has raised the fuel meanwhile.
func refuelBody(global uint32) []byte {
	w := bodyRewriter{global: global, out: []byte{0}} // no locals
	w.out = appendU32(append(w.out, opGlobalGet), global)
	return append(w.out, opI64Const, 0, opI64LtS, opIf, blockEmpty, opUnreachable, opEnd, opEnd)
}

// rewriteBody charges one body: code is its expression, without the locals.
func (w *bodyRewriter) rewriteBody(code []byte, locals uint64) error {
	p, err := plan(code, locals/8)
	if err != nil {
		return err
	}
	if p.entry.units > 0 {
		if p.entry.looks == before { // in a loop of its own
			w.out = append(w.out, opLoop, blockEmpty)
			w.look(true)
			w.out = append(w.out, opEnd)
			p.entry.looks = never
		}
		w.charge(&p.entry)
	}
	r := reader{b: code}
	for next := 0; !r.done(); {
		in := r.next()
		switch in.op {
		case opMemoryGrow:
			w.chargeOperand(10, 0) // pages of 64 KiB, at 64 bytes a unit
		case opPrefixMisc:
			switch in.sub {
			case miscMemoryFill, miscMemoryCopy, miscMemoryInit:
				w.chargeOperand(0, 3)
			case miscTableFill, miscTableCopy, miscTableInit, miscTableGrow:
				w.chargeOperand(0, 0)
			}
		}
		w.out = append(w.out, code[in.lo:in.hi]...)
		for next < len(p.rest) && p.rest[next].at == in.hi {
			w.charge(&p.rest[next])
			next++
		}
	}
	return r.err
}

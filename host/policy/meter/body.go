package meter

// bodyRewriter charges one function.
type bodyRewriter struct {
	global  uint32 // index of the fuel global
	scratch uint32 // index of the i32 local that holds an operand's copy
	uses    bool   // of scratch
	out     []byte
}

// charge takes n from the fuel and traps when that leaves less than nothing.
func (w *bodyRewriter) charge(n uint64) {
	w.out = append(w.out, opGlobalGet)
	w.out = appendU32(w.out, w.global)
	w.out = append(w.out, opI64Const)
	w.out = appendS64(w.out, int64(n))
	w.settle()
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
}

// settle subtracts the two i64 on the stack, stores the fuel and traps when it is negative. The value never goes far
// below zero: the first charge that makes it negative is the last instruction that runs.
func (w *bodyRewriter) settle() {
	w.out = append(w.out, opI64Sub, opGlobalSet)
	w.out = appendU32(w.out, w.global)
	w.out = append(w.out, opGlobalGet)
	w.out = appendU32(w.out, w.global)
	w.out = append(w.out, opI64Const, 0, opI64LtS, opIf, blockEmpty, opUnreachable, opEnd)
}

// rewriteBody charges one body: code is its expression, without the locals.
func (w *bodyRewriter) rewriteBody(code []byte, locals uint64) error {
	p, err := plan(code, locals/8)
	if err != nil {
		return err
	}
	if p.entry > 0 {
		w.charge(p.entry)
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
				w.chargeOperand(0, 6)
			case miscTableFill, miscTableCopy, miscTableInit, miscTableGrow:
				w.chargeOperand(0, 3)
			}
		}
		w.out = append(w.out, code[in.lo:in.hi]...)
		for next < len(p.rest) && p.rest[next].at == in.hi {
			w.charge(p.rest[next].units)
			next++
		}
	}
	return r.err
}

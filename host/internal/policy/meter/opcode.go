package meter

import "fmt"

// Opcodes that the rewriter treats by name; the rest differ only in their immediates.
const (
	opUnreachable  = 0x00
	opBlock        = 0x02
	opLoop         = 0x03
	opIf           = 0x04
	opEnd          = 0x0b
	opBranch       = 0x0c
	opBranchIf     = 0x0d
	opBranchTable  = 0x0e
	opReturn       = 0x0f
	opCall         = 0x10
	opCallIndirect = 0x11
	opLocalGet     = 0x20
	opLocalSet     = 0x21
	opLocalTee     = 0x22
	opGlobalGet    = 0x23
	opGlobalSet    = 0x24
	opTableGet     = 0x25
	opTableSet     = 0x26
	opElse         = 0x05
	opMemoryGrow   = 0x40
	opI32Const     = 0x41
	opI32GtU       = 0x4b
	opI32LeU       = 0x4d
	opI32Add       = 0x6a
	opI32Sub       = 0x6b
	opRefFunc      = 0xd2
	opI64Const     = 0x42
	opI64LtS       = 0x53
	opI64Sub       = 0x7d
	opI64Mul       = 0x7e
	opI64ShrU      = 0x88
	opI64ExtendU   = 0xad
	opPrefixMisc   = 0xfc
	opPrefixSIMD   = 0xfd
	blockEmpty     = 0x40
	valI32         = 0x7f
	valI64         = 0x7e
	valFuncref     = 0x70
	valExternref   = 0x6f
)

// immediates of a one-byte opcode.
type immediates uint8

const (
	unknown   immediates = iota
	none                 // no immediate
	blockType            // s33
	index                // u32
	index2               // u32 u32
	memarg               // align u32, offset u32
	const32              // s32
	const64              // s64
	float32              // 4 bytes
	float64              // 8 bytes
	oneByte
	labels // vector of u32, then u32
	types  // vector of value types
)

// oneByteOps is the accepted set of WebAssembly 2.0's one-byte opcodes. Tail calls, threads, exceptions, garbage
// collection and typed function references are not in it.
var oneByteOps = func() (t [256]immediates) {
	set := func(lo, hi int, im immediates) {
		for op := lo; op <= hi; op++ {
			t[op] = im
		}
	}
	set(0x00, 0x01, none)      // unreachable, nop
	set(0x02, 0x04, blockType) // block, loop, if
	t[0x05], t[0x0b] = none, none
	set(0x0c, 0x0d, index) // br, br_if
	t[0x0e] = labels       // br_table
	t[0x0f] = none         // return
	t[0x10] = index        // call
	t[0x11] = index2       // call_indirect
	set(0x1a, 0x1b, none)  // drop, select
	t[0x1c] = types        // select t
	set(0x20, 0x26, index) // local.*, global.*, table.get, table.set
	set(0x28, 0x3e, memarg)
	set(0x3f, 0x40, oneByte) // memory.size, memory.grow
	t[0x41], t[0x42], t[0x43], t[0x44] = const32, const64, float32, float64
	set(0x45, 0xc4, none) // comparisons, arithmetic, conversions, sign extension
	t[0xd0] = oneByte     // ref.null
	t[0xd1] = none        // ref.is_null
	t[0xd2] = index       // ref.func
	return t
}()

// instruction is one decoded opcode: its bytes in the body and, for 0xfc and 0xfd, the number after the prefix.
type instruction struct {
	op     byte
	sub    uint32
	lo, hi int
}

func (r *reader) next() instruction {
	in := instruction{lo: r.at}
	in.op = r.byte()
	switch in.op {
	case opPrefixMisc:
		in.sub = r.u32()
		r.miscImmediates(in.sub)
	case opPrefixSIMD:
		in.sub = r.u32()
		r.simdImmediates(in.sub)
	default:
		r.immediates(in.op)
	}
	in.hi = r.at
	return in
}

func (r *reader) unknown(format string, args ...any) {
	r.stop(fmt.Errorf("%w: %s at byte %d of the body", ErrOpcode, fmt.Sprintf(format, args...), r.at))
}

func (r *reader) immediates(op byte) {
	switch oneByteOps[op] {
	case unknown:
		r.unknown("opcode 0x%02x", op)
	case none:
	case blockType:
		r.skipLEB(33)
	case index:
		r.u32()
	case index2, memarg:
		r.u32()
		r.u32()
	case const32:
		r.skipLEB(32)
	case const64:
		r.skipLEB(64)
	case float32:
		r.take(4)
	case float64:
		r.take(8)
	case oneByte:
		r.byte()
	case labels:
		for range r.count(1) {
			r.u32()
		}
		r.u32()
	case types:
		r.take(r.count(1))
	}
}

// Numbers after the 0xfc prefix.
const (
	miscMemoryInit = 8
	miscDataDrop   = 9
	miscMemoryCopy = 10
	miscMemoryFill = 11
	miscTableInit  = 12
	miscElemDrop   = 13
	miscTableCopy  = 14
	miscTableGrow  = 15
	miscTableSize  = 16
	miscTableFill  = 17
)

func (r *reader) miscImmediates(sub uint32) {
	switch {
	case sub <= 7: // saturating truncation
	case sub == miscMemoryInit:
		r.u32()
		r.byte()
	case sub == miscMemoryCopy:
		r.byte()
		r.byte()
	case sub == miscMemoryFill:
		r.byte()
	case sub == miscTableInit, sub == miscTableCopy:
		r.u32()
		r.u32()
	case sub == miscDataDrop, sub == miscElemDrop, sub == miscTableGrow, sub == miscTableSize, sub == miscTableFill:
		r.u32()
	default:
		r.unknown("opcode 0xfc %d", sub)
	}
}

func (r *reader) simdImmediates(sub uint32) {
	switch {
	case sub <= 11, sub == 92, sub == 93: // loads, stores, load_zero
		r.u32()
		r.u32()
	case sub == 12, sub == 13: // v128.const, i8x16.shuffle
		r.take(16)
	case sub >= 21 && sub <= 34: // extract and replace lane
		r.byte()
	case sub >= 84 && sub <= 91: // load and store lane
		r.u32()
		r.u32()
		r.byte()
	case sub <= 255:
	default:
		r.unknown("opcode 0xfd %d (relaxed SIMD or later)", sub)
	}
}

// cost returns the charge of an instruction: about its worst time in units of a simple one. Loads count as cache
// misses, others by their compiled code.
func (in *instruction) cost() uint64 {
	switch op := in.op; {
	case op >= 0x28 && op <= 0x35: // loads
		return 8
	case op >= 0x36 && op <= 0x3e: // stores
		return 4
	case op == opCall, op == opCallIndirect:
		return 24
	case op >= 0x6d && op <= 0x70, op >= 0x7f && op <= 0x82: // integer division
		return 8
	case op == 0x91, op == 0x9f, op == 0x95, op == 0xa3: // square roots and divisions
		return 8
	case op == opTableGet:
		return 8
	case op == opTableSet, op >= 0x8b && op <= 0xa6, op >= 0xb2 && op <= 0xbb: // floats may be subnormal
		return 4
	case op == opRefFunc: // a call into the host
		return 150
	case op == opMemoryGrow:
		return 500
	case op == opPrefixMisc && in.sub == miscTableGrow:
		return 500
	case op == opPrefixMisc && in.sub >= miscMemoryInit:
		return 20
	case op == opPrefixSIMD:
		return 8
	}
	return 1
}

// plain reports whether an instruction neither branches nor calls, opens no block, and does not pay by itself.
func (in *instruction) plain() bool {
	return in.op <= 0x01 || in.op >= 0x1a && in.op <= 0x3f || in.op >= opI32Const && in.op < opPrefixMisc
}

package meter

import "math/rand/v2"

// A program is a random structured function over four i32 locals (local 0 is the argument) and 64 bytes of memory. It
// can be emitted as wasm and evaluated in Go, which also counts the instructions that run.

const locals = 4

type machine struct {
	local [locals]uint32
	mem   [64]byte
	steps uint64
}

type branch int // -1: go on; n >= 0: leave n blocks more after this one

type node interface {
	emit(out []byte) []byte
	run(m *machine) branch
}

// set is local a = (b op constant), four instructions.
type set struct {
	a, b byte
	op   byte
	k    int32
}

var setOps = map[byte]func(x, y uint32) uint32{
	0x6a: func(x, y uint32) uint32 { return x + y },
	0x6b: func(x, y uint32) uint32 { return x - y },
	0x6c: func(x, y uint32) uint32 { return x * y },
	0x71: func(x, y uint32) uint32 { return x & y },
	0x73: func(x, y uint32) uint32 { return x ^ y },
}

func (s set) emit(out []byte) []byte {
	out = append(out, opLocalGet, s.b, opI32Const)
	out = appendS64(out, int64(s.k))
	return append(out, s.op, 0x21, s.a)
}

func (s set) run(m *machine) branch {
	m.steps += 4
	m.local[s.a] = setOps[s.op](m.local[s.b], uint32(s.k))
	return -1
}

// fill is memory.fill(at, local a, n); the address and length are constants within bounds.
type fill struct{ a, at, n byte }

func (f fill) emit(out []byte) []byte {
	out = append(out, opI32Const, f.at, opLocalGet, f.a, opI32Const, f.n)
	return append(out, opPrefixMisc, miscMemoryFill, 0)
}

func (f fill) run(m *machine) branch {
	m.steps += 4 + uint64(f.n)/64
	for i := range f.n {
		m.mem[f.at+i] = byte(m.local[f.a])
	}
	return -1
}

// load is local a = memory[at].
type load struct{ a, at byte }

func (l load) emit(out []byte) []byte {
	return append(out, opI32Const, l.at, 0x2d, 0, 0, 0x21, l.a)
}

func (l load) run(m *machine) branch {
	m.steps += 3
	m.local[l.a] = uint32(m.mem[l.at])
	return -1
}

// breakIf leaves depth blocks when local a is odd.
type breakIf struct {
	a     byte
	depth byte
}

func (b breakIf) emit(out []byte) []byte {
	return append(out, opLocalGet, b.a, opI32Const, 1, 0x71, 0x0d, b.depth)
}

func (b breakIf) run(m *machine) branch {
	m.steps += 4
	if m.local[b.a]&1 != 0 {
		return branch(b.depth)
	}
	return -1
}

type block struct{ body []node }

func (b block) emit(out []byte) []byte {
	return append(emitAll(append(out, opBlock, blockEmpty), b.body), opEnd)
}

func (b block) run(m *machine) branch {
	m.steps += 2
	return leave(runAll(m, b.body))
}

// choice is if (local a & 1) then else.
type choice struct {
	a         byte
	yes, no   []node
	elseGiven bool
}

func (c choice) emit(out []byte) []byte {
	out = append(out, opLocalGet, c.a, opI32Const, 1, 0x71, opIf, blockEmpty)
	out = emitAll(out, c.yes)
	if c.elseGiven {
		out = emitAll(append(out, 0x05), c.no)
	}
	return append(out, opEnd)
}

func (c choice) run(m *machine) branch {
	m.steps += 5
	if m.local[c.a]&1 != 0 {
		return leave(runAll(m, c.yes))
	}
	if c.elseGiven {
		return leave(runAll(m, c.no))
	}
	return -1
}

// repeat runs its body times+1 times at most, counting in a local of its own (index is 4 + nesting).
type repeat struct {
	counter byte
	times   byte
	body    []node
}

func (r repeat) emit(out []byte) []byte {
	out = append(out, opI32Const, r.times, 0x21, r.counter, opLoop, blockEmpty)
	out = emitAll(out, r.body)
	// counter -= 1; br_if 0 while it has not gone below zero
	out = append(out, opLocalGet, r.counter, opI32Const, 1, 0x6b, opLocalTee, r.counter, opI32Const, 0, 0x4e, 0x0d, 0)
	return append(out, opEnd)
}

func (r repeat) run(m *machine) branch {
	m.steps += 3
	for range int(r.times) + 1 {
		runAll(m, r.body) // a break never leaves a loop: see generate
		m.steps += 8
	}
	return -1
}

// leave is what a block's end makes of a branch out of its body.
func leave(b branch) branch {
	if b <= 0 {
		return -1
	}
	return b - 1
}

func emitAll(out []byte, nodes []node) []byte {
	for _, n := range nodes {
		out = n.emit(out)
	}
	return out
}

func runAll(m *machine, nodes []node) branch {
	for _, n := range nodes {
		if b := n.run(m); b != -1 {
			return b
		}
	}
	return -1
}

// generate makes a list of nodes. A break may leave depth blocks, which are never loops, so every program ends.
func generate(r *rand.Rand, size, depth, loops int) []node {
	var out []node
	for range 1 + r.IntN(4) {
		reg := func() byte { return byte(r.IntN(locals)) }
		switch k := r.IntN(9); {
		case k < 3 || size == 0:
			ops := []byte{0x6a, 0x6b, 0x6c, 0x71, 0x73}
			out = append(out, set{reg(), reg(), ops[r.IntN(len(ops))], int32(r.Uint32())})
		case k == 3:
			n := byte(r.IntN(32))
			out = append(out, fill{reg(), byte(r.IntN(32)), n})
		case k == 4:
			out = append(out, load{reg(), byte(r.IntN(64))})
		case k == 5 && depth > 0:
			out = append(out, breakIf{reg(), byte(r.IntN(depth))})
		case k == 6:
			out = append(out, block{generate(r, size-1, depth+1, loops)})
		case k == 7:
			c := choice{a: reg(), yes: generate(r, size-1, depth+1, loops), elseGiven: r.IntN(2) == 0}
			c.no = generate(r, size-1, depth+1, loops)
			out = append(out, c)
		case loops < 3:
			out = append(out, repeat{counter: byte(locals + loops), times: byte(r.IntN(6)), body: generate(r, size-1, 0, loops+1)})
		}
	}
	return out
}

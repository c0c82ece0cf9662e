package meter

import "math/rand/v2"

// A program is a random structured function over four i32 locals (local 0 is the argument) and 64 bytes of memory. It
// can be emitted as wasm and evaluated in Go, which also counts the instructions that run.

const locals = 4

type machine struct {
	local [locals]uint32
	mem   [64]byte
	steps uint64 // what the instructions that ran cost
	turns uint64 // of dispatch loops
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
	m.steps += 23 + uint64(f.n)/8
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
	m.steps += 10
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

// states is a dispatch loop: a local says which state runs, and each turn takes one from the counter.
type states struct {
	counter, state byte
	times          byte
	list           []state
}

// state is a segment of such a loop: what it does, and where it goes: on to the next one by itself, by a jump (through
// the dispatch, to next), by a branch straight to a later segment, or out.
type state struct {
	body []node
	next byte
	skip byte // segments that the branch passes over, when local a is odd
	a    byte
	how  byte // 0 falls through, 1 jumps, 2 branches when odd and else falls through, 3 branches
}

// emit writes: counter = times; state = 0; block { loop { block^n { br_table } segments } }.
func (s states) emit(out []byte) []byte {
	n := len(s.list)
	out = append(out, opI32Const, s.times, 0x21, s.counter)
	if s.state != 0 { // local 0 says where the function is entered
		out = append(out, opI32Const, 0, 0x21, s.state)
	}
	out = append(out, opBlock, blockEmpty, opLoop, blockEmpty)
	for range n {
		out = append(out, opBlock, blockEmpty)
	}
	out = append(out, opLocalGet, s.state, opBranchTable, byte(n-1))
	for i := range n {
		out = append(out, byte(i))
	}
	for i, st := range s.list {
		out = emitAll(append(out, opEnd), st.body)
		left := byte(n - 1 - i) // blocks still open within the loop
		switch st.how {
		case 1: // counter -= 1; leave when it is below zero; else to the loop
			out = append(out, opLocalGet, s.counter, opI32Const, 1, 0x6b, opLocalTee, s.counter, opI32Const, 0, 0x48, opBranchIf, left+1)
			out = append(out, opI32Const, st.next, 0x21, s.state, opBranch, left)
		case 2:
			out = append(out, opLocalGet, st.a, opI32Const, 1, 0x71, opBranchIf, st.skip)
		case 3:
			out = append(out, opBranch, st.skip)
		}
	}
	return append(out, opEnd, opEnd)
}

func (s states) run(m *machine) branch {
	m.steps += 4 + 1 + 1
	at, left := 0, int(s.times)
	if s.state == 0 {
		at = int(min(m.local[0], uint32(len(s.list)-1)))
	}
	for jumped := true; at < len(s.list); {
		if jumped {
			m.steps += 1 + 2 // the loop's body, local.get and br_table
			m.turns++
		}
		jumped = false
		st := s.list[at]
		runAll(m, st.body)
		at++
		m.steps++ // the end
		switch st.how {
		case 1:
			m.steps += 7
			if left--; left < 0 {
				return -1
			}
			m.steps += 3
			at, jumped = int(st.next), true
			if s.state == 0 {
				m.local[0] = uint32(st.next)
			}
		case 2:
			m.steps += 4
			if m.local[st.a]&1 != 0 {
				at += int(st.skip)
			}
		case 3:
			m.steps++
			at += int(st.skip)
		}
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

// generate makes a list of nodes. Loops count in locals of their own, one for each level, two for states. A break may
// leave depth blocks, which are never loops, so every program ends.
func generate(r *rand.Rand, size, depth, loops int) []node {
	var out []node
	for range 1 + r.IntN(4) {
		reg := func() byte { return byte(r.IntN(locals)) }
		switch k := r.IntN(10); {
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
		case k == 9 && loops < 2:
			s := states{counter: byte(locals + loops), state: byte(locals + loops + 1), times: byte(r.IntN(8))}
			n := 1 + r.IntN(6)
			for i := range n {
				body := generate(r, min(size-1, 1), 0, loops+2)
				for range r.IntN(40) { // some segments are larger than an allowance
					body = append(body, load{reg(), byte(r.IntN(64))})
				}
				s.list = append(s.list, state{
					body: body, next: byte(r.IntN(n)), a: reg(), how: byte(r.IntN(4)), skip: byte(r.IntN(max(1, n-1-i))),
				})
			}
			s.list[n-1].how &= 1 // nothing later to branch to
			out = append(out, s)
		case loops < 3:
			out = append(out, repeat{counter: byte(locals + loops), times: byte(r.IntN(6)), body: generate(r, size-1, 0, loops+1)})
		}
	}
	return out
}

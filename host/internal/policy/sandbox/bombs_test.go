package sandbox

import (
	"bytes"
	"slices"
)

// Modules that are made to exhaust a compiler. All are valid and within the limits of sizes and counts.

func vector(items ...[]byte) []byte { return append(leb(len(items)), slices.Concat(items...)...) }

func section(id byte, content []byte) []byte {
	return append(append([]byte{id}, leb(len(content))...), content...)
}

// body is a function's: so many i64 locals, and code without the last end.
func body(locals int, code ...[]byte) []byte {
	b := []byte{0}
	if locals > 0 {
		b = append(append([]byte{1}, leb(locals)...), 0x7e)
	}
	b = append(slices.Concat(append([][]byte{b}, code...)...), 0x0b)
	return append(leb(len(b)), b...)
}

// module has functions of type 0, which is (i32) -> (), and more types.
func module(bodies [][]byte, types ...[]byte) []byte {
	types = append([][]byte{{0x60, 1, 0x7f, 0}}, types...)
	kinds := make([]byte, len(bodies))
	return slices.Concat([]byte("\x00asm\x01\x00\x00\x00"), section(1, vector(types...)),
		section(3, append(leb(len(bodies)), kinds...)), section(10, vector(bodies...)))
}

func times(n int, b ...byte) []byte { return bytes.Repeat(b, n) }

const (
	opBlock, opIf     = 0x02, 0x04
	opBrIf, opBrTable = 0x0d, 0x0e
	empty             = 0x40
)

// locals: many functions with many locals, each with a branch, so that they are merged.
func manyLocals(functions, locals int) []byte {
	f := body(locals, []byte{0x20, 0, opIf, empty}, []byte{0x42, 1, 0x21}, leb(locals), []byte{opEnd})
	return module(slices.Repeat([][]byte{f}, functions))
}

// blockParams: blocks that take and give many values.
func blockParams(blocks, values int) []byte {
	kind := slices.Concat([]byte{0x60}, leb(values), times(values, 0x7e), leb(values), times(values, 0x7e))
	one := slices.Concat([]byte{0x20, 0, opIf}, sleb(1), []byte{0x05, opEnd})
	return module([][]byte{body(0, times(values, 0x42, 0), bytes.Repeat(one, blocks), times(values, 0x1a))}, kind)
}

// nested: so many of one construct inside each other.
func nested(depth int, open ...byte) []byte {
	return module([][]byte{body(0, times(depth, open...), times(depth, opEnd))})
}

// phis: locals that are set in loops, so that each loop merges all of them.
func phis(loops, locals int) []byte {
	var code []byte
	for i := range loops {
		code = slices.Concat(code, []byte{opLoop, empty, 0x42, 1, 0x21}, leb(1+i%locals), []byte{0x20, 0, opBrIf, 0, opEnd})
	}
	return module([][]byte{body(locals, code)})
}

// labels: jump tables whose labels all carry many values.
func labels(n, values int) []byte {
	kind := slices.Concat([]byte{0x60, 0}, leb(values), times(values, 0x7e))
	table := slices.Concat([]byte{0x20, 0, opBrTable}, leb(n), times(n+1, 0))
	block := slices.Concat([]byte{opBlock}, sleb(1), times(values, 0x42, 0), table, []byte{opEnd})
	return module([][]byte{body(0, block, times(values, 0x1a))}, kind)
}

package meter

import "slices"

// A few lines of assembler: enough to write modules in tests as bytes with names.

func vec(items ...[]byte) []byte {
	out := appendU32(nil, uint32(len(items)))
	for _, i := range items {
		out = append(out, i...)
	}
	return out
}

func sized(b []byte) []byte { return append(appendU32(nil, uint32(len(b))), b...) }

func sec(id byte, data []byte) []byte { return append([]byte{id}, sized(data)...) }

func name(s string) []byte { return sized([]byte(s)) }

func cat(parts ...[]byte) []byte {
	var out []byte
	for _, p := range parts {
		out = append(out, p...)
	}
	return out
}

// body is a function with the given number of i32 locals.
func body(locals uint32, code ...byte) []byte {
	decl := []byte{0}
	if locals > 0 {
		decl = append(appendU32([]byte{1}, locals), valI32)
	}
	return sized(append(decl, append(code, opEnd)...))
}

// single is a module with one memory page and one exported function f: (i32) -> i32.
func single(f []byte, extra ...[]byte) []byte {
	return cat(magic,
		sec(secType, vec([]byte{0x60, 1, valI32, 1, valI32})),
		sec(secFunction, vec([]byte{0})),
		sec(secMemory, vec([]byte{1, 1, 16})),
		sec(secExport, vec(cat(name("f"), []byte{0, 0}), cat(name("memory"), []byte{2, 0}))),
		cat(extra...),
		sec(secCode, vec(f)))
}

// tabled is single with one table of functions, whose limits are given, 16 elements and 128 bytes to fill it and memory
// from.
func tabled(limits []byte, f []byte) []byte {
	elements := []byte{1, 0} // passive, of functions
	elements = append(elements, vec(slices.Repeat([][]byte{{0}}, 16)...)...)
	return cat(magic,
		sec(secType, vec([]byte{0x60, 1, valI32, 1, valI32})),
		sec(secFunction, vec([]byte{0})),
		sec(secTable, vec(append([]byte{valFuncref}, limits...))),
		sec(secMemory, vec([]byte{1, 1, 16})),
		sec(secExport, vec(cat(name("f"), []byte{0, 0}), cat(name("memory"), []byte{2, 0}))),
		sec(secElement, vec(elements)),
		sec(secDataCount, []byte{1}),
		sec(secCode, vec(f)),
		sec(secData, vec(cat([]byte{1}, sized(make([]byte, 128))))))
}

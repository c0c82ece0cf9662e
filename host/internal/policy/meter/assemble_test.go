package meter

import (
	"slices"

	"github.com/kvhost/kvhost/host/internal/testkit/wasmtest"
)

func sized(b []byte) []byte { return append(appendU32(nil, uint32(len(b))), b...) }

// body is a function with the given number of i32 locals.
func body(locals uint32, code ...byte) []byte {
	decl := []byte{0}
	if locals > 0 {
		decl = append(appendU32([]byte{1}, locals), valI32)
	}
	return sized(append(decl, append(code, opEnd)...))
}

// parts are those of a module with one memory page and one exported function f: (i32) -> i32.
func parts(f []byte) wasmtest.Assembly {
	return wasmtest.Assembly{Funcs: []wasmtest.Function{{Name: "f", Sig: "i>i"}}}.
		Replacing(secMemory, wasmtest.Vector([]byte{1, 1, 16})).Replacing(secCode, wasmtest.Vector(f))
}

func single(f []byte) []byte { return parts(f).Bytes() }

// tabled is single with one table of functions, whose limits are given, 16 elements and 128 bytes to fill it and memory
// from.
func tabled(limits []byte, f []byte) []byte {
	elements := []byte{1, 0} // passive, of functions
	elements = append(elements, wasmtest.Vector(slices.Repeat([][]byte{{0}}, 16)...)...)
	return parts(f).Replacing(secTable, wasmtest.Vector(append([]byte{valFuncref}, limits...))).
		Replacing(secElement, wasmtest.Vector(elements)).Replacing(secDataCount, []byte{1}).
		Replacing(secData, wasmtest.Vector(append([]byte{1}, sized(make([]byte, 128))...))).Bytes()
}

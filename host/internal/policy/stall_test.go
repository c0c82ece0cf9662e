package policy

import (
	"slices"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/testkit/wasmtest"
)

// Guests that are made to take as long as they can for their fuel. A little more memory than caches have, and buffers
// before it.
const (
	vastAt    = 128 << 10
	vastPages = 1000
	vastBytes = vastPages<<16 - vastAt
	vastLines = 1 << 20 // at 56 bytes each
)

const (
	localGet, localSet, localTee = 0x20, 0x21, 0x22
	i32Add, i32Mul, i32And       = 0x6a, 0x6c, 0x71
)

func vast(step ...[]byte) wasmtest.Assembly {
	a := minimal(abi.RoleEvict).With(abi.ExportStep, "ii>I", append(step, wasmtest.I64(0))...)
	a.Pages = vastPages
	return a
}

// nextLine makes a line's number of local 0 the number of another one; all have their turn.
func nextLine() []byte {
	return wasmtest.Join([]byte{localGet, 0}, wasmtest.I32(1664525), []byte{i32Mul}, wasmtest.I32(1013904223), []byte{i32Add}, wasmtest.I32(vastLines-1), []byte{i32And})
}

func lineAt(line []byte) []byte {
	return wasmtest.Join(line, wasmtest.I32(56), []byte{i32Mul}, wasmtest.I32(vastAt), []byte{i32Add})
}

// chaser follows a chain of addresses through all lines: each load waits for the one before. kv_init lays it.
func chaser() wasmtest.Assembly {
	lay := wasmtest.Loop(lineAt([]byte{localGet, 0}), lineAt(nextLine()), []byte{0x36, 2, 0}, nextLine(), []byte{localTee, 0, 0x45, 0x0d, 1}) // until it is 0 again
	a := vast(lineAt([]byte{localGet, 0}), []byte{localSet, 0},
		wasmtest.Loop([]byte{localGet, 0}, slices.Repeat([]byte{0x28, 2, 0}, 100), []byte{localSet, 0}))
	return a.With(abi.ExportInit, "i>i", wasmtest.I32(0), []byte{localSet, 0, 0x02, 0x40}, lay, []byte{0x0b}, wasmtest.I32(0))
}

// marcher does something to a MiB after the other.
func marcher(do ...[]byte) wasmtest.Assembly {
	return vast(wasmtest.Loop([]byte{localGet, 0}, wasmtest.I32(vastAt), []byte{i32Add, localSet, 1}, wasmtest.Join(do...),
		[]byte{localGet, 0}, wasmtest.I32(1<<20), []byte{i32Add}, wasmtest.I32(1<<25-1), []byte{i32And, localSet, 0}))
}

var stallers = map[string]wasmtest.Assembly{
	"loop":   vast(wasmtest.Loop()),
	"chase":  chaser(),
	"store":  vast(wasmtest.Loop(slices.Repeat(wasmtest.Join(nextLine(), []byte{localTee, 0}, wasmtest.I32(56), []byte{i32Mul, localGet, 1, 0x36, 2, 0}), 50))),
	"fill":   marcher([]byte{localGet, 1}, wasmtest.I32(1), wasmtest.I32(1<<20), []byte{0xfc, 11, 0}),
	"copy":   marcher([]byte{localGet, 1}, wasmtest.I32(1<<24), []byte{i32Add, localGet, 1}, wasmtest.I32(1<<20), []byte{0xfc, 10, 0, 0}),
	"touch":  vast(wasmtest.Loop([]byte{localGet, 1}, wasmtest.I32(4096), []byte{i32Add, localTee, 1}, wasmtest.I32(vastBytes), []byte{0x70, localTee, 1}, wasmtest.I32(1), []byte{0x36, 2, 0})), // every page for the first time
	"divide": vast(wasmtest.Loop(slices.Repeat(wasmtest.Join([]byte{localGet, 0}, wasmtest.I32(1), []byte{0x72, localSet, 0}, wasmtest.I32(-1), []byte{localGet, 0, 0x6e, localSet, 0}), 50))),
	"recursion": func() wasmtest.Assembly {
		a := vast()
		again := wasmtest.Join(wasmtest.I32(0), wasmtest.I32(0), wasmtest.Call(uint64(len(a.Funcs)-1)), drop)
		return a.With(abi.ExportStep, "ii>I", again, again, wasmtest.I64(0))
	}(),
}

package policy

import (
	"encoding/binary"
	"slices"
	"strings"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
)

// assembly is a module put together by hand, so that a bad guest is a line in a table and needs no toolchain.
type assembly struct {
	imports  []imported
	funcs    []function
	noMemory bool
	pages    uint64 // 0 for 2
	start    bool
	manifest string
}

type imported struct{ module, name, sig string }

// Kinds of exports.
const (
	kindFunc   = 0
	kindMemory = 2
)

type function struct {
	name, sig string
	body      []byte
}

// Instructions, as far as bad guests go.
func i32(v int32) []byte                   { return append([]byte{0x41}, sleb(int64(v))...) }
func i64(v uint64) []byte                  { return append([]byte{0x42}, sleb(int64(v))...) }
func call(f uint64) []byte                 { return binary.AppendUvarint([]byte{0x10}, f) }
func bodyOf(parts ...[]byte) []byte        { return slices.Concat(parts...) }
func store32(addr, v int32) []byte         { return bodyOf(i32(addr), i32(v), []byte{0x36, 2, 0}) }
func packed(s abi.Status, n uint32) []byte { return i64(abi.Pack(s, n)) }

var (
	unreachable = []byte{0x00}
)

func sleb(v int64) (out []byte) {
	for {
		c := byte(v & 0x7f)
		v >>= 7
		if (v == 0 && c&0x40 == 0) || (v == -1 && c&0x40 != 0) {
			return append(out, c)
		}
		out = append(out, c|0x80)
	}
}

func wasmString(s string) []byte { return append(binary.AppendUvarint(nil, uint64(len(s))), s...) }

func wasmSection(id byte, body []byte) []byte {
	return append(binary.AppendUvarint([]byte{id}, uint64(len(body))), body...)
}

func wasmVector(items [][]byte) []byte {
	return append(binary.AppendUvarint(nil, uint64(len(items))), slices.Concat(items...)...)
}

func (a assembly) bytes() []byte {
	var types, imports, funcs, exports, codes [][]byte
	typeOf := func(sig string) []byte {
		params, results, _ := strings.Cut(sig, ">")
		t := []byte{0x60}
		for _, list := range []string{params, results} {
			t = binary.AppendUvarint(t, uint64(len(list)))
			for _, c := range list {
				t = append(t, map[rune]byte{'i': 0x7f, 'I': 0x7e, 'f': 0x7d, 'F': 0x7c}[c])
			}
		}
		types = append(types, t)
		return binary.AppendUvarint(nil, uint64(len(types)-1))
	}
	for _, i := range a.imports {
		imports = append(imports, slices.Concat(wasmString(i.module), wasmString(i.name), []byte{kindFunc}, typeOf(i.sig)))
	}
	for i, f := range a.funcs {
		funcs = append(funcs, typeOf(f.sig))
		if f.name != "" {
			exports = append(exports, binary.AppendUvarint(append(wasmString(f.name), kindFunc), uint64(i+len(a.imports))))
		}
		body := slices.Concat([]byte{0}, f.body, []byte{0x0b})
		codes = append(codes, append(binary.AppendUvarint(nil, uint64(len(body))), body...))
	}
	if !a.noMemory {
		exports = append(exports, append(wasmString(abi.ExportMemory), kindMemory, 0))
	}
	out := []byte("\x00asm\x01\x00\x00\x00")
	out = append(out, wasmSection(1, wasmVector(types))...)
	if len(imports) > 0 {
		out = append(out, wasmSection(2, wasmVector(imports))...)
	}
	out = append(out, wasmSection(3, wasmVector(funcs))...)
	if !a.noMemory {
		pages := a.pages
		if pages == 0 {
			pages = 2
		}
		out = append(out, wasmSection(5, append([]byte{1, 0}, binary.AppendUvarint(nil, pages)...))...)
	}
	out = append(out, wasmSection(7, wasmVector(exports))...)
	if a.start {
		out = append(out, wasmSection(8, []byte{0})...)
	}
	out = append(out, wasmSection(10, wasmVector(codes))...)
	if a.manifest != "" {
		out = append(out, wasmSection(0, append(wasmString(abi.ManifestSection), a.manifest...))...)
	}
	return out
}

// minimal is a module that is legal and does nothing: kv_buffer gives 16 KiB to each kind.
func minimal(role abi.Role) assembly {
	a := assembly{funcs: []function{
		{abi.ExportMarker, ">", nil},
		{abi.ExportBuffer, "ii>i", bodyOf([]byte{0x20, 0}, i32(14), []byte{0x74}, i32(4096), []byte{0x6a})}, // (kind << 14) + 4096
		{abi.ExportInit, "i>i", i32(0)},
	}}
	for _, name := range role.Exports() {
		body := i64(0)
		if sandbox.ExportType(name) == "ii>i" {
			body = i32(0)
		}
		a.funcs = append(a.funcs, function{name, sandbox.ExportType(name), body})
	}
	return a
}

// with replaces or adds a function.
func (a assembly) with(name, sig string, body ...[]byte) assembly {
	f := function{name, sig, bodyOf(body...)}
	a.funcs = slices.Clone(a.funcs)
	if i := slices.IndexFunc(a.funcs, func(f function) bool { return f.name == name }); i >= 0 {
		a.funcs[i] = f
	} else {
		a.funcs = append(a.funcs, f)
	}
	return a
}

func (a assembly) without(name string) assembly {
	a.funcs = slices.DeleteFunc(slices.Clone(a.funcs), func(f function) bool { return f.name == name })
	return a
}

func (a assembly) importing(module, name, sig string) assembly {
	a.imports = append(slices.Clone(a.imports), imported{module, name, sig})
	return a
}

package wasmtest

import (
	"encoding/binary"
	"maps"
	"slices"
	"strings"

	"github.com/kvhost/kvhost/abi"
)

// Assembly is a module in parts. The zero value has a memory of no pages and nothing else.
type Assembly struct {
	Imports  []Import
	Funcs    []Function
	Pages    uint64
	NoMemory bool
	Manifest string
	Sections map[byte][]byte // contents in place of those that follow from the parts
	Custom   [][]byte        // whole sections, at the end
}

// Import is an imported function. A type has a letter for each parameter, '>', and one for each result: i and I are
// integers of 32 and 64 bits, f and F such floats, v is a vector.
type Import struct{ Module, Name, Sig string }

// Function is a function, exported if it has a name.
type Function struct {
	Name, Sig string
	Body      []byte // without the last end
	Locals    []byte // declarations, or nil for none
}

// Bytes is the binary form.
func (a Assembly) Bytes() []byte {
	var types, imports, funcs, exports, codes [][]byte
	typeOf := func(sig string) []byte {
		types = append(types, signature(sig))
		return Uleb(uint64(len(types) - 1))
	}
	for _, i := range a.Imports {
		imports = append(imports, Join(Text(i.Module), Text(i.Name), []byte{0}, typeOf(i.Sig)))
	}
	for i, f := range a.Funcs {
		funcs = append(funcs, typeOf(f.Sig))
		if f.Name != "" {
			exports = append(exports, Join(Text(f.Name), []byte{0}, Uleb(uint64(i+len(a.Imports)))))
		}
		locals := f.Locals
		if locals == nil {
			locals = []byte{0}
		}
		body := Join(locals, f.Body, []byte{0x0b})
		codes = append(codes, Join(Uleb(uint64(len(body))), body))
	}
	parts := map[byte][]byte{1: Vector(types...), 3: Vector(funcs...), 10: Vector(codes...)}
	if !a.NoMemory {
		exports = append(exports, append(Text(abi.ExportMemory), 2, 0))
		parts[5] = append([]byte{1, 0}, Uleb(a.Pages)...)
	}
	parts[7] = Vector(exports...)
	if len(imports) > 0 {
		parts[2] = Vector(imports...)
	}
	maps.Copy(parts, a.Sections)
	out := []byte("\x00asm\x01\x00\x00\x00")
	for _, id := range []byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 10, 11} {
		if body, ok := parts[id]; ok {
			out = append(out, Section(id, body)...)
		}
	}
	if a.Manifest != "" {
		out = append(out, Custom(abi.ManifestSection, []byte(a.Manifest))...)
	}
	return append(out, Join(a.Custom...)...)
}

var wasmTypes = map[rune]byte{'i': 0x7f, 'I': 0x7e, 'f': 0x7d, 'F': 0x7c, 'v': 0x7b}

func signature(sig string) []byte {
	params, results, _ := strings.Cut(sig, ">")
	t := []byte{0x60}
	for _, list := range []string{params, results} {
		t = append(t, Uleb(uint64(len(list)))...)
		for _, c := range list {
			t = append(t, wasmTypes[c])
		}
	}
	return t
}

// With replaces or adds an export.
func (a Assembly) With(name, sig string, code ...[]byte) Assembly {
	f := Function{Name: name, Sig: sig, Body: Join(code...)}
	a.Funcs = slices.Clone(a.Funcs)
	if i := slices.IndexFunc(a.Funcs, func(o Function) bool { return o.Name == name }); i >= 0 {
		a.Funcs[i] = f
	} else {
		a.Funcs = append(a.Funcs, f)
	}
	return a
}

func (a Assembly) Without(name string) Assembly {
	a.Funcs = slices.DeleteFunc(slices.Clone(a.Funcs), func(f Function) bool { return f.Name == name })
	return a
}

// Importing adds an import, which moves the indexes of functions.
func (a Assembly) Importing(module, name, sig string) Assembly {
	a.Imports = append(slices.Clone(a.Imports), Import{module, name, sig})
	return a
}

// Replacing replaces the content of a section.
func (a Assembly) Replacing(id byte, body ...[]byte) Assembly {
	sections := map[byte][]byte{}
	maps.Copy(sections, a.Sections)
	sections[id] = Join(body...)
	a.Sections = sections
	return a
}

// Ending adds whole sections at the end.
func (a Assembly) Ending(sections ...[]byte) Assembly {
	a.Custom = append(slices.Clone(a.Custom), sections...)
	return a
}

func I32(v int32) []byte { return append([]byte{0x41}, Sleb(int64(v))...) }

func I64(v uint64) []byte { return append([]byte{0x42}, Sleb(int64(v))...) }

// Call calls a function by its index, imported ones first.
func Call(f uint64) []byte { return append([]byte{0x10}, Uleb(f)...) }

// Packed is the answer of a call: a status and a count.
func Packed(s abi.Status, n uint32) []byte { return I64(abi.Pack(s, n)) }

// Loop repeats code for ever.
func Loop(parts ...[]byte) []byte {
	return Join([]byte{0x03, 0x40}, Join(parts...), []byte{0x0c, 0, 0x0b})
}

// Join is slices.Concat of code.
func Join(parts ...[]byte) []byte { return slices.Concat(parts...) }

func local(n byte) []byte                 { return []byte{0x20, n} }
func load32(addr int32) []byte            { return Join(I32(addr), []byte{0x28, 2, 0}) }
func store32(addr int32, v []byte) []byte { return Join(I32(addr), v, []byte{0x36, 2, 0}) }
func when(cond []byte, then ...[]byte) []byte {
	return Join(cond, []byte{0x04, 0x40}, Join(then...), []byte{0x0b})
}

var (
	unreachable = []byte{0x00}
	drop        = []byte{0x1a}
	growOne     = []byte{0x41, 1, 0x40, 0}
)

const (
	opAdd = 0x6a
	opAnd = 0x71
	opGeU = 0x4f
	opEq  = 0x46
)

func Uleb(v uint64) []byte { return binary.AppendUvarint(nil, v) }

func Sleb(v int64) (out []byte) {
	for {
		c := byte(v & 0x7f)
		v >>= 7
		if (v == 0 && c&0x40 == 0) || (v == -1 && c&0x40 != 0) {
			return append(out, c)
		}
		out = append(out, c|0x80)
	}
}

// Text is a name.
func Text(s string) []byte { return append(Uleb(uint64(len(s))), s...) }

// Section is a section with its length.
func Section(id byte, body []byte) []byte { return Join([]byte{id}, Uleb(uint64(len(body))), body) }

func Custom(name string, body ...[]byte) []byte {
	return Section(0, append(Text(name), Join(body...)...))
}

// Vector is a list with its length.
func Vector(items ...[]byte) []byte { return Join(Uleb(uint64(len(items))), Join(items...)) }

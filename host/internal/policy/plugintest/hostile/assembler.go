package hostile

import (
	"encoding/binary"
	"slices"
	"strings"

	"github.com/kvhost/kvhost/abi"
)

// assembly is a module in parts, each of which a class can replace.
type assembly struct {
	imports  []imported
	funcs    []function
	pages    uint64
	manifest string
	sections map[byte][]byte // contents in place of those that follow from the parts
	custom   [][]byte        // whole sections, at the end
}

type imported struct{ module, name, sig string }

type function struct {
	name, sig string
	body      []byte
	locals    []byte // declarations, or nil for none
}

// Where the buffers of a minimal module stand: 128 KiB for each kind, and more for the last that a role asks for.
const (
	bufferBase  = 1 << 16
	bufferShift = 17
	argsAt      = bufferBase + abi.BufferArgs<<bufferShift
	resultAt    = bufferBase + abi.BufferResult<<bufferShift
	stateAt     = bufferBase + abi.BufferState<<bufferShift
	basePages   = 64
)

// The few instructions that attacks need.
func i32(v int32) []byte                  { return append([]byte{0x41}, sleb(int64(v))...) }
func i64(v uint64) []byte                 { return append([]byte{0x42}, sleb(int64(v))...) }
func local(n byte) []byte                 { return []byte{0x20, n} }
func call(f uint64) []byte                { return append([]byte{0x10}, uleb(f)...) }
func join(parts ...[]byte) []byte         { return slices.Concat(parts...) }
func load32(addr int32) []byte            { return join(i32(addr), []byte{0x28, 2, 0}) }
func store32(addr int32, v []byte) []byte { return join(i32(addr), v, []byte{0x36, 2, 0}) }
func loop(parts ...[]byte) []byte {
	return join([]byte{0x03, 0x40}, join(parts...), []byte{0x0c, 0, 0x0b})
}
func when(cond []byte, then ...[]byte) []byte {
	return join(cond, []byte{0x04, 0x40}, join(then...), []byte{0x0b})
}
func packed(s abi.Status, n uint32) []byte { return i64(abi.Pack(s, n)) }

// counting adds one to a word of memory and leaves it on the stack: how often the code came by.
func counting(addr int32) []byte {
	return join(store32(addr, join(load32(addr), i32(1), []byte{opAdd})), load32(addr))
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

func uleb(v uint64) []byte { return binary.AppendUvarint(nil, v) }

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

func text(s string) []byte { return append(uleb(uint64(len(s))), s...) }

func section(id byte, body []byte) []byte { return join([]byte{id}, uleb(uint64(len(body))), body) }

func custom(name string, body ...[]byte) []byte {
	return section(0, append(text(name), join(body...)...))
}

func vector(items [][]byte) []byte { return join(uleb(uint64(len(items))), join(items...)) }

var wasmTypes = map[rune]byte{'i': 0x7f, 'I': 0x7e, 'f': 0x7d, 'F': 0x7c, 'v': 0x7b}

func signature(sig string) []byte {
	params, results, _ := strings.Cut(sig, ">")
	t := []byte{0x60}
	for _, list := range []string{params, results} {
		t = append(t, uleb(uint64(len(list)))...)
		for _, c := range list {
			t = append(t, wasmTypes[c])
		}
	}
	return t
}

// bytes is the binary form.
func (a assembly) bytes() []byte {
	var types, imports, funcs, exports, codes [][]byte
	typeOf := func(sig string) []byte {
		types = append(types, signature(sig))
		return uleb(uint64(len(types) - 1))
	}
	for _, i := range a.imports {
		imports = append(imports, join(text(i.module), text(i.name), []byte{0}, typeOf(i.sig)))
	}
	for i, f := range a.funcs {
		funcs = append(funcs, typeOf(f.sig))
		if f.name != "" {
			exports = append(exports, join(text(f.name), []byte{0}, uleb(uint64(i+len(a.imports)))))
		}
		locals := f.locals
		if locals == nil {
			locals = []byte{0}
		}
		body := join(locals, f.body, []byte{0x0b})
		codes = append(codes, join(uleb(uint64(len(body))), body))
	}
	exports = append(exports, append(text(abi.ExportMemory), 2, 0))
	parts := map[byte][]byte{
		1: vector(types), 3: vector(funcs), 5: append([]byte{1, 0}, uleb(a.pages)...), 7: vector(exports), 10: vector(codes),
	}
	if len(imports) > 0 {
		parts[2] = vector(imports)
	}
	for id, body := range a.sections {
		parts[id] = body
	}
	out := []byte("\x00asm\x01\x00\x00\x00")
	for _, id := range []byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 10, 11} {
		if body, ok := parts[id]; ok {
			out = append(out, section(id, body)...)
		}
	}
	if a.manifest != "" {
		out = append(out, custom(abi.ManifestSection, []byte(a.manifest))...)
	}
	return append(out, join(a.custom...)...)
}

// minimal is a legal module that does nothing in its role.
func minimal(role abi.Role) assembly {
	a := assembly{pages: basePages, funcs: []function{
		{name: abi.ExportMarker, sig: ">"},
		{name: abi.ExportBuffer, sig: "ii>i", body: bufferBody()},
		{name: abi.ExportInit, sig: "i>i", body: i32(0)},
	}}
	for _, name := range role.Exports() {
		a.funcs = append(a.funcs, function{name: name, sig: signatures[name], body: ok(name)})
	}
	return a
}

// bufferBody is the code of kv_buffer: a place for each kind, whatever the length.
func bufferBody() []byte {
	return join(local(0), i32(bufferShift), []byte{0x74}, i32(bufferBase), []byte{opAdd})
}

var signatures = map[string]string{
	abi.ExportMarker: ">", abi.ExportInitialize: ">", abi.ExportBuffer: "ii>i", abi.ExportInit: "i>i", abi.ExportNamespace: "ii>i",
	abi.ExportEvents: "ii>i", abi.ExportStep: "ii>I", abi.ExportAdmit: "ii>I", abi.ExportPlace: "ii>I",
	abi.ExportLayout: "ii>I", abi.ExportSave: "i>I", abi.ExportLoad: "i>i",
}

// ok is the code of an export that leaves its answer to the host.
func ok(name string) []byte {
	switch sig := signatures[name]; {
	case name == abi.ExportBuffer:
		return bufferBody()
	case strings.HasSuffix(sig, "I"):
		return packed(abi.StatusDefault, 0)
	case strings.HasSuffix(sig, "i"):
		return i32(0)
	}
	return nil
}

// with replaces or adds an export.
func (a assembly) with(name string, code ...[]byte) assembly {
	f := function{name: name, sig: signatures[name], body: join(code...)}
	a.funcs = slices.Clone(a.funcs)
	if i := slices.IndexFunc(a.funcs, func(o function) bool { return o.name == name }); i >= 0 {
		a.funcs[i] = f
	} else {
		a.funcs = append(a.funcs, f)
	}
	return a
}

// asleepFor is how often an export is called before its attack begins: more often than a self-test calls it.
func asleepFor(export string) int32 {
	if export == abi.ExportPlace {
		return 250
	}
	return 40
}

// sleeping replaces an export by code that does nothing until it was called often. The code may leave the answer on the
// stack or not at all.
func (a assembly) sleeping(export string, answers bool, code ...[]byte) assembly {
	attack := join(code...)
	if answers {
		attack = append(attack, 0x0f) // return
	}
	return a.with(export, when(join(counting(2048), i32(asleepFor(export)), []byte{opGeU}), attack), ok(export))
}

func (a assembly) importing(module, name, sig string) assembly {
	a.imports = append(slices.Clone(a.imports), imported{module, name, sig})
	return a
}

// replacing replaces the content of a section.
func (a assembly) replacing(id byte, body ...[]byte) assembly {
	sections := map[byte][]byte{id: join(body...)}
	for other, b := range a.sections {
		if other != id {
			sections[other] = b
		}
	}
	a.sections = sections
	return a
}

func (a assembly) ending(sections ...[]byte) assembly {
	a.custom = append(slices.Clone(a.custom), sections...)
	return a
}

func (a assembly) described(fields string, role abi.Role) assembly {
	a.manifest = `{"name":"hostile","version":"1","abi":1,"roles":["` + role.String() + `"]` + fields + `}`
	return a
}

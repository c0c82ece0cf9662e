package meter

import (
	"bytes"
	"fmt"
	"strings"
	"unicode"
)

// Module is the content of a module's sections, read before compilation. It is enough to refuse a module with a reason
// that helps its author.
//
// Reading also protects the decoders that follow, which reserve memory for any claim of a module. It walks every
// section to its end: no claim exceeds the bytes of the module, and items that take few bytes in the module and many in
// a decoder are limited in number.
type Module struct {
	Types    []string // signatures, as in "ii>I": i and I are integers of 32 and 64 bits
	Imports  []Import
	Funcs    []uint32 // type of each function, imported ones first
	Exports  map[string]Export
	Sections []Section
	Memories int
	Pages    uint64 // pages of 64 KiB of the memory at its start

	last        int // [rank] of the last section that was not custom
	mostResults int // most results of a type
	globals     uint32
	elements    uint64   // elements of all segments
	tables      []byte   // the table section, after each table got a maximum
	bodies      [][]byte // bodies of the functions that are not imported
	counts      []Count
}

// Import is an imported function: nothing else can be imported.
type Import struct{ Module, Name, Sig string }

// Export is an exported item.
type Export struct {
	Kind  byte // KindFunc, KindMemory or another
	Index uint32
}

// Kinds of imports and exports.
const (
	KindFunc   = 0
	KindMemory = 2
	kindGlobal = 3
)

// Section is a section. The bytes of a custom section are without its name.
type Section struct {
	ID   byte
	Name string // name of a custom section
	Body []byte
}

// Section ids, and the required order of sections.
const (
	secCustom    = 0
	secType      = 1
	secImport    = 2
	secFunction  = 3
	secTable     = 4
	secMemory    = 5
	secGlobal    = 6
	secExport    = 7
	secStart     = 8
	secElement   = 9
	secCode      = 10
	secData      = 11
	secDataCount = 12
)

var rank = [13]int{secType: 1, secImport: 2, secFunction: 3, secTable: 4, secMemory: 5, secGlobal: 6, secExport: 7,
	secStart: 8, secElement: 9, secDataCount: 10, secCode: 11, secData: 12}

var sectionNames = [len(rank)]string{
	"custom", "type", "import", "function", "table", "memory", "global", "export", "start", "element", "code", "data",
	"data count",
}

// Custom reports whether the section is a custom section, which has no required place.
func (s *Section) Custom() bool { return s.ID == secCustom }

// String returns the section's printable name.
func (s *Section) String() string {
	switch {
	case s.Custom():
		return "custom " + Printable(s.Name, MaxShown) + " section"
	case int(s.ID) < len(sectionNames):
		return sectionNames[s.ID] + " section"
	}
	return fmt.Sprintf("section %d", s.ID)
}

// Header is the beginning of every module.
const Header = "\x00asm\x01\x00\x00\x00"

// Read reads the sections. It trusts nothing: lengths are checked, and no count allocates memory ahead of its bytes. A
// refused module is returned as far as it was read.
func Read(wasm []byte) (*Module, error) {
	m := &Module{Exports: map[string]Export{}}
	return m, m.read(wasm)
}

func (m *Module) read(wasm []byte) error {
	if err := m.check(MaxModuleBytes, uint64(len(wasm)), "module bytes"); err != nil {
		return err
	}
	switch {
	case !bytes.HasPrefix(wasm, []byte(Header[:4])):
		return fmt.Errorf("%w: not a WebAssembly module", ErrMalformed)
	case !bytes.HasPrefix(wasm, []byte(Header)):
		return fmt.Errorf("%w: not a core module of version 1 (the component model is not supported: build a core module)", ErrMalformed)
	}
	r := reader{b: wasm, at: len(Header)}
	for !r.done() {
		s := Section{ID: r.byte()}
		s.Body = r.take(r.u32())
		if r.err != nil {
			return r.err
		}
		if len(m.Sections) == maxSections {
			return fmt.Errorf("%w: more than %d sections", ErrLimit, maxSections)
		}
		if err := m.section(&s); err != nil {
			return fmt.Errorf("%s: %w", &s, err)
		}
		m.Sections = append(m.Sections, s)
	}
	if defined := len(m.Funcs) - len(m.Imports); len(m.bodies) != defined {
		return fmt.Errorf("%w: %d bodies for %d functions", ErrMalformed, len(m.bodies), defined)
	}
	return nil
}

func (m *Module) section(s *Section) error {
	r := &reader{b: s.Body}
	switch {
	case s.Custom():
		s.Name = r.name()
		s.Body = s.Body[r.at:]
		return r.err
	case int(s.ID) >= len(rank):
		return fmt.Errorf("%w: not supported: build for WebAssembly 2.0", ErrOpcode)
	case rank[s.ID] <= m.last:
		return fmt.Errorf("%w: it stands twice or out of order", ErrMalformed)
	}
	m.last = rank[s.ID]
	switch s.ID {
	case secType:
		m.each(r, "types", 3, maxTypes, func() { m.Types = append(m.Types, m.signature(r)) })
	case secImport:
		m.each(r, "imports", 4, maxImports, func() { m.importEntry(r) })
	case secFunction:
		m.each(r, "functions", 1, maxFunctions, func() { m.function(r) })
		m.limit(r, maxFunctions, len(m.Funcs), "functions")
	case secTable:
		m.scanTables(r)
	case secMemory:
		m.memory(r)
	case secGlobal:
		m.each(r, "globals", 4, maxGlobals, func() { m.global(r) })
	case secExport:
		m.each(r, "exports", 3, maxExports, func() { m.export(r) })
	case secStart:
		return fmt.Errorf("%w: the module would run code before it can be charged; do that work in _initialize", ErrStart)
	case secElement:
		m.each(r, "element segments", 3, maxElementSegments, func() { m.elementSegment(r) })
	case secDataCount:
		r.u32()
	case secCode:
		m.each(r, "function bodies", 2, maxFunctions, func() { m.bodies = append(m.bodies, r.take(r.u32())) })
	case secData:
		m.limit(r, maxDataBytes, len(s.Body), "data bytes")
		m.each(r, "data segments", 2, maxDataSegments, r.data)
	}
	if r.err == nil && !r.done() {
		r.fail("%d bytes too many", len(r.b)-r.at)
	}
	return r.err
}

// limit is check for an item that is being read. An error stops the reader.
func (m *Module) limit(r *reader, most, got int, what string) {
	if err := m.check(most, uint64(got), what); err != nil {
		r.stop(err)
	}
}

// each reads a vector of items. bytes is the least length of an item.
func (m *Module) each(r *reader, what string, bytes, most int, item func()) {
	n := r.u32()
	if m.limit(r, most, int(n), what); r.err == nil && uint64(n)*uint64(bytes) > uint64(len(r.b)-r.at) {
		r.fail("the binary ends early: %d %s in %d bytes", n, what, len(r.b)-r.at)
	}
	for range n {
		if r.err != nil {
			return
		}
		item()
	}
}

// signature reads a function type: parameters, '>', results.
func (m *Module) signature(r *reader) string {
	if form := r.byte(); form != 0x60 {
		r.fail("type form 0x%02x is not supported: build for WebAssembly 2.0 without garbage-collected types", form)
		return ""
	}
	var b strings.Builder
	m.each(r, "parameters", 1, maxTypeSize, func() { b.WriteByte(r.valueType()) })
	params := b.Len()
	b.WriteByte('>')
	m.each(r, "results", 1, maxTypeSize, func() { b.WriteByte(r.valueType()) })
	m.mostResults = max(m.mostResults, b.Len()-params-1)
	return b.String()
}

// params returns the number of parameters of a type.
func (m *Module) params(kind uint32) uint32 { return uint32(strings.IndexByte(m.Types[kind], '>')) }

func (m *Module) importEntry(r *reader) {
	i := Import{Module: r.name(), Name: r.name()}
	if kind := r.byte(); kind != KindFunc && r.err == nil {
		r.fail("imports %s.%s, which is not a function: a policy imports functions only",
			Printable(i.Module, MaxShown), Printable(i.Name, MaxShown))
	}
	if m.function(r); r.err == nil {
		i.Sig = m.Types[m.Funcs[len(m.Funcs)-1]]
		m.Imports = append(m.Imports, i)
	}
}

func (m *Module) function(r *reader) {
	kind := r.u32()
	if uint64(kind) >= uint64(len(m.Types)) {
		r.fail("a function of type %d of %d", kind, len(m.Types))
	}
	m.Funcs = append(m.Funcs, kind)
}

// memory reads the memory section. There is one memory at most.
func (m *Module) memory(r *reader) {
	if n := r.u32(); n > 1 {
		r.stop(fmt.Errorf("%w: %d memories, at most 1", ErrLimit, n))
	} else if n == 1 {
		least, _ := r.limits()
		m.Memories, m.Pages = 1, uint64(least)
	}
}

func (m *Module) global(r *reader) {
	r.valueType()
	if r.byte() > 1 {
		r.fail("a global that is neither constant nor mutable")
	}
	r.constant()
	m.globals++
}

func (m *Module) export(r *reader) {
	name := r.name()
	if _, twice := m.Exports[name]; twice {
		r.fail("exports %s twice", Printable(name, MaxShown))
	}
	if name == Global || name == Refuel {
		r.stop(fmt.Errorf("%w: the module exports %q", ErrReserved, name))
	}
	m.Exports[name] = Export{Kind: r.byte(), Index: r.u32()}
}

// Signature returns the type of an exported function; empty if the export is not a function.
func (m *Module) Signature(e Export) string {
	if e.Kind != KindFunc || uint64(e.Index) >= uint64(len(m.Funcs)) {
		return ""
	}
	return m.Types[m.Funcs[e.Index]]
}

// scanTables reads the table section and gives each table a maximum. Without a maximum table.grow could take memory of
// the host, which no other limit bounds.
func (m *Module) scanTables(r *reader) {
	var tables [][]byte
	m.each(r, "tables", 3, maxTables, func() {
		kind := r.referenceType()
		least, most := r.limits()
		m.limit(r, maxTableElements, int(least), "table elements")
		if most != unbounded {
			m.limit(r, maxTableElements, int(most), "table elements")
		}
		tables = append(tables, appendU32(appendU32([]byte{kind, 1}, least), min(most, maxTableElements)))
	})
	m.tables = appendItems([]byte{0}, tables...)
}

// elementSegment passes over an element segment.
func (m *Module) elementSegment(r *reader) {
	const passive, indexed, expressions = 1, 2, 4
	flags := r.u32()
	if flags > passive|indexed|expressions {
		r.fail("an element segment of form %d", flags)
	}
	if flags&passive == 0 {
		if flags&indexed != 0 {
			r.u32() // the table
		}
		r.constant()
	}
	if flags&(passive|indexed) != 0 {
		if flags&expressions != 0 {
			r.referenceType()
		} else if r.byte() != 0 {
			r.fail("an element segment of an unsupported kind")
		}
	}
	n := r.count(1)
	m.elements += uint64(n)
	m.limit(r, maxElements, int(m.elements), "elements")
	for range n {
		if r.err != nil {
			return
		}
		if flags&expressions != 0 {
			r.constant()
		} else {
			r.u32()
		}
	}
}

// FunctionName is a function's name in the name section, unchanged.
type FunctionName struct {
	Index uint32
	Text  []byte
}

// FunctionNames returns the names of the first name section, in order of their functions. It returns none if they
// cannot be read, since no check depends on names.
func (m *Module) FunctionNames() (list []FunctionName) {
	const functions = 1 // id of a subsection
	for _, s := range m.Sections {
		if !s.Custom() || s.Name != "name" {
			continue
		}
		r := reader{b: s.Body}
		for !r.done() {
			id := r.byte()
			sub := reader{b: r.take(r.u32())}
			if r.err != nil || id != functions {
				continue
			}
			n := sub.count(2)
			for range min(n, uint32(len(m.Funcs))) {
				f := FunctionName{Index: sub.u32(), Text: sub.take(sub.u32())}
				if uint64(f.Index) >= uint64(len(m.Funcs)) || len(list) > 0 && f.Index <= list[len(list)-1].Index {
					sub.fail("functions are named out of order")
				}
				list = append(list, f)
			}
			if sub.err != nil || !sub.done() {
				return nil
			}
			return list
		}
		return nil
	}
	return nil
}

// MaxShown is the most bytes of a guest's name in a message.
const MaxShown = 128

// Printable returns a guest's name for a message: at most most bytes, without control characters.
func Printable(name string, most int) string {
	var b strings.Builder
	for _, c := range name {
		if b.Len()+len("\ufffd") > most {
			b.WriteString("...")
			break
		}
		if !unicode.IsPrint(c) {
			c = '?'
		}
		b.WriteRune(c)
	}
	return b.String()
}

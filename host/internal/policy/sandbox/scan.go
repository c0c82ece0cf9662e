package sandbox

import (
	"errors"
	"fmt"
	"strings"
	"unicode"

	"github.com/kvhost/kvhost/abi"
	metering "github.com/kvhost/kvhost/host/internal/policy/meter"
)

// Scan is the content of a module's sections, read before anything is compiled. It is enough to refuse a module with a
// reason that helps its author.
//
// The scan is also what protects the decoders behind it, which reserve memory for whatever a module claims to have. It
// walks every section to its end: no claim exceeds the bytes that are there, and nothing that takes few bytes in the
// module and many in a decoder occurs too often. [Scan.Compilable] leaves custom sections out, so that no decoder sees
// them.
type Scan struct {
	types     []string // signatures, as in "ii>I"
	imports   []imported
	funcs     []uint32 // type of each function, imported ones first
	exports   map[string]exported
	memories  []limits
	manifest  []byte
	start     bool
	sections  []Section
	standard  [][]byte // the header and all sections but custom ones
	nameBytes []byte   // the first name section
	elements  uint64   // of all element segments
	last      int      // rank of the last section that was not custom
}

// Section is one section of a module.
type Section struct {
	Name  string
	Bytes int
}

// Import is a host function that a module imports.
type Import struct {
	Module, Name, Type string
	Grant              string // that it needs; empty for none
	Known              bool   // this host has the function
}

type imported struct{ module, name, sig string }

type exported struct {
	kind  byte
	index uint32
}

type limits struct {
	min, max uint64 // pages
	bounded  bool
}

const (
	kindFunc   = 0
	kindTable  = 1
	kindMemory = 2
	kindGlobal = 3
)

// Limits of a module besides those of package meter. Each bounds what would take many times its bytes in a decoder.
const (
	// MaxModuleBytes is the most that a module's file may have.
	MaxModuleBytes = 16 << 20

	maxSections        = 1000
	maxElementSegments = 10_000
	maxElements        = 1 << 20 // of all element segments
	maxDataSegments    = 100_000 // a Go guest has 30,000
	maxTypeSize        = 1000    // parameters, and results
	maxName            = 1024    // bytes, of an import, an export or a custom section
)

// ScanModule reads the sections. It trusts nothing: lengths are checked, and no count allocates memory ahead of its
// bytes.
func ScanModule(b []byte) (*Scan, error) {
	if len(b) > MaxModuleBytes {
		return nil, fmt.Errorf("it has more than the %d bytes that a module may have", MaxModuleBytes)
	}
	if len(b) < 8 || string(b[:4]) != "\x00asm" {
		return nil, errors.New("not a WebAssembly module")
	}
	if string(b[4:8]) != "\x01\x00\x00\x00" {
		return nil, errors.New("not a core module of version 1 (the component model is not supported: build a core module)")
	}
	s := &Scan{exports: map[string]exported{}, standard: [][]byte{b[:8]}}
	r := reader{b: b[8:]}
	for len(r.b) > 0 {
		whole := r.b
		id := r.byte()
		body := reader{b: r.bytes(r.u32())}
		if r.err != nil {
			return nil, r.err
		}
		if len(s.sections) == maxSections {
			return nil, fmt.Errorf("more than %d sections; it may have at most %d", maxSections, maxSections)
		}
		s.sections = append(s.sections, Section{sectionName(id, body.b), len(body.b)})
		if id != sectionCustom {
			s.standard = append(s.standard, whole[:len(whole)-len(r.b)])
		}
		if err := s.section(id, &body); err != nil {
			return nil, fmt.Errorf("%s section: %w", s.sections[len(s.sections)-1].Name, err)
		}
	}
	return s, nil
}

// Manifest is the content of the manifest section; nil without one.
func (s *Scan) Manifest() []byte { return s.manifest }

// Exports reports whether the module exports a name.
func (s *Scan) Exports(name string) bool {
	_, ok := s.exports[name]
	return ok
}

// MinPages is the size of the module's memory at its start, in pages of 64 KiB; 0 without a memory.
func (s *Scan) MinPages() uint64 {
	if len(s.memories) == 0 {
		return 0
	}
	return s.memories[0].min
}

// Sections are the module's sections, in their order.
func (s *Scan) Sections() []Section { return s.sections }

// Imports are the functions that the module imports.
func (s *Scan) Imports() []Import {
	var list []Import
	for _, i := range s.imports {
		f, known := hostFunctions[i.module][i.name]
		list = append(list, Import{printable(i.module, maxShown), printable(i.name, maxShown), spell(i.sig), f.grant, known})
	}
	return list
}

// Ids of sections.
const (
	sectionCustom = iota
	sectionType
	sectionImport
	sectionFunction
	sectionTable
	sectionMemory
	sectionGlobal
	sectionExport
	sectionStart
	sectionElement
	sectionCode
	sectionData
	sectionDataCount
)

// sectionRank is the order in which sections stand.
var sectionRank = [...]int{
	sectionType: 1, sectionImport: 2, sectionFunction: 3, sectionTable: 4, sectionMemory: 5, sectionGlobal: 6,
	sectionExport: 7, sectionStart: 8, sectionElement: 9, sectionDataCount: 10, sectionCode: 11, sectionData: 12,
}

func (s *Scan) section(id byte, r *reader) error {
	if id == sectionCustom {
		return s.custom(r)
	}
	if int(id) >= len(sectionRank) {
		return errors.New("not supported: build for WebAssembly 2.0")
	}
	if sectionRank[id] <= s.last {
		return errors.New("it stands twice or out of order")
	}
	s.last = sectionRank[id]
	most := metering.DefaultLimits()
	switch id {
	case sectionType:
		r.each("types", 3, most.Types, func() { s.types = append(s.types, r.signature()) })
	case sectionImport:
		r.each("imports", 4, most.Imports, func() { s.importEntry(r) })
	case sectionFunction:
		r.each("functions", 1, most.Functions, func() { s.funcs = append(s.funcs, r.u32()) })
	case sectionTable:
		r.each("tables", 3, most.Tables, r.table)
	case sectionMemory:
		r.each("memories", 2, 1, func() { s.memories = append(s.memories, r.limits()) })
	case sectionGlobal:
		r.each("globals", 4, most.Globals, r.global)
	case sectionExport:
		r.each("exports", 3, most.Exports, func() { s.export(r) })
	case sectionStart:
		r.u32()
		s.start = true
	case sectionElement:
		r.each("element segments", 3, maxElementSegments, func() { s.elements += r.elements(maxElements - s.elements) })
	case sectionDataCount:
		r.u32()
	case sectionCode:
		r.each("function bodies", 2, most.Functions, func() { r.bytes(r.u32()) })
	case sectionData:
		r.each("data segments", 2, maxDataSegments, r.data)
	}
	if r.err == nil && len(r.b) > 0 {
		r.fail(fmt.Errorf("%d bytes too many", len(r.b)))
	}
	return r.err
}

func (s *Scan) custom(r *reader) error {
	switch name := r.name(); {
	case r.err != nil:
	case name == abi.ManifestSection && s.manifest != nil:
		return errors.New("there are two of it")
	case name == abi.ManifestSection:
		s.manifest = append([]byte{}, r.b...)
	case name == "name" && s.nameBytes == nil:
		s.nameBytes = r.b
	}
	return r.err
}

func (s *Scan) importEntry(r *reader) {
	i := imported{module: r.name(), name: r.name()}
	switch kind := r.byte(); kind {
	case kindFunc:
		t := r.u32()
		if uint64(t) < uint64(len(s.types)) {
			i.sig = s.types[t]
		}
		s.funcs = append(s.funcs, t)
		s.imports = append(s.imports, i)
	default:
		r.fail(fmt.Errorf("imports %s.%s, which is not a function: a policy imports functions only",
			printable(i.module, maxShown), printable(i.name, maxShown)))
	}
}

func (s *Scan) export(r *reader) {
	name := r.name()
	if _, twice := s.exports[name]; twice {
		r.fail(fmt.Errorf("exports %s twice", printable(name, maxShown)))
	}
	s.exports[name] = exported{kind: r.byte(), index: r.u32()}
}

// signature is the type of an exported function; empty when there is none.
func (s *Scan) signature(e exported) string {
	if e.kind != kindFunc || uint64(e.index) >= uint64(len(s.funcs)) {
		return ""
	}
	if t := s.funcs[e.index]; uint64(t) < uint64(len(s.types)) {
		return s.types[t]
	}
	return ""
}

var sectionNames = [...]string{
	"custom", "type", "import", "function", "table", "memory", "global", "export", "start", "element", "code", "data",
	"data count",
}

func sectionName(id byte, body []byte) string {
	if int(id) >= len(sectionNames) {
		return fmt.Sprintf("section %d", id)
	}
	if id == sectionCustom {
		r := reader{b: body}
		return "custom " + printable(r.name(), maxShown)
	}
	return sectionNames[id]
}

// maxShown is how much of a guest's name people are shown.
const maxShown = 128

// printable is a guest's name as people may see it: at most so many bytes, nothing that a terminal acts on.
func printable(name string, most int) string {
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

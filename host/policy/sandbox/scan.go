package sandbox

import (
	"errors"
	"fmt"
	"strings"

	"github.com/kvhost/kvhost/abi"
)

// Scan is the content of a module's sections, read before anything is compiled. It is enough to refuse a module with a
// reason that helps its author.
type Scan struct {
	types    []string // signatures, as in "ii>I"
	imports  []imported
	funcs    []uint32 // type of each function, imported ones first
	exports  map[string]exported
	memories []limits
	manifest []byte
	start    bool
	sections []Section
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

const (
	// MaxModuleBytes is the most that a module's file may have.
	MaxModuleBytes = 16 << 20

	maxItems = 1 << 20 // of one section
	maxName  = 1 << 16
)

var errTruncated = errors.New("the binary ends early")

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
	s := &Scan{exports: map[string]exported{}}
	r := reader{b: b[8:]}
	for len(r.b) > 0 && r.err == nil {
		id := r.byte()
		body := reader{b: r.bytes(r.u32())}
		if r.err != nil {
			break
		}
		s.sections = append(s.sections, Section{sectionName(id, body.b), len(body.b)})
		if err := s.section(id, &body); err != nil {
			return nil, err
		}
	}
	return s, r.err
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
		list = append(list, Import{i.module, i.name, spell(i.sig), f.grant, known})
	}
	return list
}

func (s *Scan) section(id byte, r *reader) error {
	switch id {
	case 0:
		if name := r.name(); name == abi.ManifestSection && r.err == nil {
			if s.manifest != nil {
				return fmt.Errorf("two %s sections", abi.ManifestSection)
			}
			s.manifest = append([]byte{}, r.b...)
		}
	case 1:
		r.each(func() { s.types = append(s.types, r.signature()) })
	case 2:
		r.each(func() { s.importEntry(r) })
	case 3:
		r.each(func() { s.funcs = append(s.funcs, r.u32()) })
	case 5:
		r.each(func() { s.memories = append(s.memories, r.limits()) })
	case 7:
		r.each(func() {
			name := r.name()
			s.exports[name] = exported{kind: r.byte(), index: r.u32()}
		})
	case 8:
		s.start = true
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
		r.fail(fmt.Errorf("imports %s.%s, which is not a function: a policy imports functions only", i.module, i.name))
	}
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
	if id == 0 {
		r := reader{b: body}
		return "custom " + r.name()
	}
	return sectionNames[id]
}

// reader reads the binary format. After the first error it returns zeros.
type reader struct {
	b   []byte
	err error
}

func (r *reader) fail(err error) {
	if r.err == nil {
		r.err, r.b = err, nil
	}
}

func (r *reader) bytes(n uint32) []byte {
	if uint64(n) > uint64(len(r.b)) {
		r.fail(errTruncated)
		return nil
	}
	out := r.b[:n]
	r.b = r.b[n:]
	return out
}

func (r *reader) byte() byte {
	if b := r.bytes(1); len(b) == 1 {
		return b[0]
	}
	return 0
}

func (r *reader) u32() uint32 { return uint32(r.leb(5)) }

func (r *reader) leb(most int) uint64 {
	var v uint64
	for i := range most {
		c := r.byte()
		v |= uint64(c&0x7f) << (7 * i)
		if c < 0x80 {
			return v
		}
	}
	r.fail(errors.New("a number is too long"))
	return 0
}

func (r *reader) name() string {
	n := r.u32()
	if n > maxName {
		r.fail(fmt.Errorf("a name of %d bytes", n))
	}
	return string(r.bytes(n))
}

func (r *reader) each(item func()) {
	n := r.u32()
	if n > maxItems {
		r.fail(fmt.Errorf("a section of %d items, at most %d", n, maxItems))
	}
	for i := uint32(0); i < n && r.err == nil; i++ {
		item()
	}
}

var valueTypes = map[byte]byte{0x7f: 'i', 0x7e: 'I', 0x7d: 'f', 0x7c: 'F', 0x7b: 'v', 0x70: 'r', 0x6f: 'x'}

// signature is a function type: parameters, '>', results; i and I are i32 and i64.
func (r *reader) signature() string {
	if form := r.byte(); form != 0x60 {
		r.fail(fmt.Errorf("type form %#02x is not supported: build for WebAssembly 2.0 without garbage-collected types",
			form))
		return ""
	}
	var b strings.Builder
	for _, sep := range []string{">", ""} {
		for range min(r.u32(), maxName) {
			c, ok := valueTypes[r.byte()]
			if !ok || r.err != nil {
				r.fail(errors.New("an unsupported value type"))
				return ""
			}
			b.WriteByte(c)
		}
		b.WriteString(sep)
	}
	return b.String()
}

func (r *reader) limits() limits {
	flags := r.byte()
	if flags > 1 {
		r.fail(errors.New("a shared or 64-bit memory: build without threads, for wasm32"))
		return limits{}
	}
	l := limits{min: uint64(r.u32()), bounded: flags == 1}
	if l.bounded {
		l.max = uint64(r.u32())
	}
	return l
}

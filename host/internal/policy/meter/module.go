package meter

import (
	"bytes"
	"fmt"
	"strings"
)

// Names under which a metered module exports what was added to it.
const (
	Global = "kvhost_fuel" // the counter: a mutable i64
	// the function that is called when it is below zero, and traps if it is still when that returns
	Refuel = "kvhost_refuel"
)

// Version is raised whenever the metered form of some module changes, so that forms that were kept are not used any
// more.
const Version = 6

// Section ids, and the order in which sections must stand.
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

type section struct {
	id   byte
	data []byte
}

// module is what the rewriter must know of one: parameter counts of its functions and how many globals it has.
type module struct {
	limits    Limits
	sections  []section
	params    []uint32 // by type
	types     blockTypes
	functions []uint32 // type of each defined function
	imported  uint64   // functions
	globals   uint32   // imported and defined
	counts    []Count
	memory    bool
	names     []byte // what the name section holds
	tables    []byte // the table section, where each has a maximum
	added     []added
}

// added is a function at the module's end: the one to call for more fuel, and then first forms of functions that have a
// second one in their place.
type added struct {
	kind uint32 // type
	body []byte
}

// Inject gives the metered form of a module. A compiler must have validated the original bytes. Function indexes,
// exports and custom sections stay as they are; debug sections are dropped.
func Inject(wasm []byte, limits Limits) ([]byte, error) {
	return (&module{limits: limits}).inject(wasm)
}

// Measure gives what a module has of all that is limited. When the module is refused, which the error tells, it is what
// was counted until then.
func Measure(wasm []byte, limits Limits) ([]Count, error) {
	m := &module{limits: limits}
	_, err := m.inject(wasm)
	return m.counts, err
}

func (m *module) inject(wasm []byte) ([]byte, error) {
	limits := &m.limits
	if err := m.check(limits.ModuleBytes, uint64(len(wasm)), ModuleBytes); err != nil {
		return nil, err
	}
	if err := m.split(wasm); err != nil {
		return nil, err
	}
	for _, s := range m.sections {
		if err := m.scan(s); err != nil {
			return nil, err
		}
	}
	if err := m.check(limits.Functions, m.imported+uint64(len(m.functions)), "functions"); err != nil {
		return nil, err
	}
	if err := m.check(limits.Globals, uint64(m.globals), "globals"); err != nil {
		return nil, err
	}
	return m.rewrite()
}

var magic = []byte{0, 'a', 's', 'm', 1, 0, 0, 0}

func (m *module) split(wasm []byte) error {
	if !bytes.HasPrefix(wasm, magic) {
		return fmt.Errorf("%w: no WebAssembly 1 header", ErrMalformed)
	}
	r := reader{b: wasm, at: len(magic)}
	last := 0
	for !r.done() {
		id := r.byte()
		data := r.take(r.u32())
		if r.err != nil {
			return r.err
		}
		if int(id) >= len(rank) {
			return fmt.Errorf("%w: section %d", ErrOpcode, id)
		}
		if id == secStart {
			return fmt.Errorf("%w: the module would run code before it can be charged; do that work in _initialize", ErrStart)
		}
		if id != secCustom {
			if rank[id] <= last {
				return fmt.Errorf("%w: section %d is out of order", ErrMalformed, id)
			}
			last = rank[id]
		} else if name := customName(data); strings.HasPrefix(name, ".debug_") {
			continue
		} else if name == "name" {
			m.names = data[1+len(name):]
		}
		m.sections = append(m.sections, section{id, data})
	}
	return nil
}

func customName(data []byte) string {
	r := reader{b: data}
	return string(r.take(r.u32()))
}

func (m *module) scan(s section) error {
	r := &reader{b: s.data}
	switch s.id {
	case secType:
		m.scanTypes(r)
	case secImport:
		m.scanImports(r)
	case secFunction:
		n := r.count()
		for range n {
			t := r.u32()
			if r.err == nil && uint64(t) >= uint64(len(m.params)) {
				return fmt.Errorf("%w: a function of type %d of %d", ErrMalformed, t, len(m.params))
			}
			m.functions = append(m.functions, t)
		}
	case secTable:
		m.scanTables(r)
	case secMemory:
		for range r.count() {
			m.scanMemory(r)
		}
	case secGlobal:
		n := r.count()
		m.globals += n
		for range n {
			r.take(2)
			r.constant()
		}
	case secExport:
		m.scanExports(r)
	case secData:
		if err := m.check(m.limits.DataBytes, uint64(len(s.data)), "data bytes"); err != nil {
			return err
		}
		r.count()
		return r.err
	case secElement:
		for range r.count() {
			scanElements(r)
		}
	default:
		return nil
	}
	if r.err == nil && !r.done() {
		r.fail("%d bytes too many in section %d", len(r.b)-r.at, s.id)
	}
	return r.err
}

func (m *module) limit(r *reader, limit int, got uint32, what string) {
	if err := m.check(limit, uint64(got), what); err != nil && r.err == nil {
		r.err = err
		r.at = len(r.b)
	}
}

func (m *module) scanTypes(r *reader) {
	n := r.count()
	m.limit(r, m.limits.Types, n, "types")
	for range n {
		if form := r.byte(); form != 0x60 && r.err == nil {
			r.fail("type form 0x%02x", form)
			return
		}
		params := r.count()
		r.take(params)
		results := r.count()
		r.take(results)
		m.params = append(m.params, params)
		m.types.values = append(m.types.values, params+results)
		m.types.mostResults = max(m.types.mostResults, results)
	}
}

func (m *module) scanImports(r *reader) {
	n := r.count()
	m.limit(r, m.limits.Imports, n, "imports")
	for range n {
		r.take(r.u32())
		r.take(r.u32())
		switch kind := r.byte(); kind {
		case 0:
			r.u32()
			m.imported++
		case 1:
			r.byte()
			m.scanLimits(r, m.limits.TableElements, "table elements")
		case 2:
			m.scanMemory(r)
		case 3:
			r.byte()
			r.byte()
			m.globals++
		default:
			r.fail("import kind %d", kind)
		}
	}
}

func (m *module) scanMemory(r *reader) {
	m.memory = true
	flags := r.byte()
	if flags > 1 && r.err == nil {
		r.fail("memory flags 0x%02x (shared or 64-bit memory)", flags)
		return
	}
	m.limit(r, m.limits.MemoryPages, r.u32(), "memory pages at start")
	if flags&1 != 0 {
		r.u32()
	}
}

func (m *module) scanExports(r *reader) {
	n := r.count()
	m.limit(r, m.limits.Exports, n, "exports")
	for range n {
		name := r.take(r.u32())
		r.byte()
		r.u32()
		if (string(name) == Global || string(name) == Refuel) && r.err == nil {
			r.err = fmt.Errorf("%w: the module exports %q", ErrReserved, name)
			return
		}
	}
}

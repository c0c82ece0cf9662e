package meter

import (
	"fmt"
	"regexp"
	"slices"
)

// Names of the additional exports of a metered module.
const (
	Global = "kvhost_fuel" // the counter: a mutable i64
	// the function that is called when the counter is below zero; it traps if the counter is still below zero
	// afterwards
	Refuel = "kvhost_refuel"
)

// Version is raised whenever the metered form of some module changes, so that cached forms are not used any more.
const Version = 6

// Inject returns the metered form of a module. A compiler must have validated the original bytes. Function indexes,
// exports and custom sections stay as they are.
func Inject(wasm []byte) ([]byte, error) {
	m, err := Read(wasm)
	if err != nil {
		return nil, err
	}
	return (&rewriter{Module: m}).rewrite()
}

// Measure returns a module's counts of all limited items. If the module is refused, the error says so, and the counts
// are those until then.
func (m *Module) Measure() ([]Count, error) {
	_, err := (&rewriter{Module: m}).rewrite()
	return m.counts, err
}

// rewriter assembles a module with the global and the function, their exports and the charged bodies.
type rewriter struct {
	*Module
	added []added
	work  work // work of the functions so far
}

// added is a function at the module's end: first the function for more fuel, then the first forms of functions that
// have a second form in their place.
type added struct {
	kind uint32 // type
	body []byte
}

// AppendSection appends a section to a module.
func AppendSection(wasm []byte, id byte, parts ...[]byte) []byte {
	body := slices.Concat(parts...)
	return append(appendU32(append(wasm, id), uint32(len(body))), body...)
}

func appendText(b []byte, text string) []byte {
	return append(appendU32(b, uint32(len(text))), text...)
}

func (m *rewriter) rewrite() ([]byte, error) {
	if err := m.check(maxMemoryPages, m.Pages, "memory pages at start"); err != nil {
		return nil, err
	}
	code, err := m.rewriteCode() // before the functions are listed: some get a second form
	if err != nil {
		return nil, err
	}
	pending := []struct {
		id    byte
		items [][]byte
	}{{secGlobal, [][]byte{{valI64, 1, opI64Const, 0, opEnd}}}, {secExport, [][]byte{exported(Global, kindGlobal, m.globals)}}}
	if len(m.added) > 0 {
		pending[1].items = append(pending[1].items, exported(Refuel, KindFunc, m.refuel()))
	}
	out := []byte(Header)
	for _, s := range m.Sections {
		for len(pending) > 0 && !s.Custom() && rank[pending[0].id] < rank[s.ID] {
			out = AppendSection(out, pending[0].id, appendItems([]byte{0}, pending[0].items...))
			pending = pending[1:]
		}
		data := s.Body
		switch s.ID {
		case secCustom:
			data = append(appendText(nil, s.Name), data...)
		case secType:
			data = appendItems(data, []byte{0x60, 0, 0}, // type of the function that asks the host for more fuel
				[]byte{0x60, 3, valI32, valI32, valI32, 0}) // type of the functions that make large copies and fills
		case secFunction:
			for _, f := range m.added {
				data = appendItems(data, appendU32(nil, f.kind))
			}
		case secTable:
			data = m.tables
		case secCode:
			data = code
		}
		if len(pending) > 0 && s.ID == pending[0].id {
			data = appendItems(data, pending[0].items...)
			pending = pending[1:]
		}
		out = AppendSection(out, s.ID, data)
	}
	for _, p := range pending {
		out = AppendSection(out, p.id, appendItems([]byte{0}, p.items...))
	}
	return out, nil
}

func exported(name string, kind byte, index uint32) []byte {
	return appendU32(append(appendText(nil, name), kind), index)
}

// refuel returns the index of the function for more fuel, the first after the module's own.
func (m *rewriter) refuel() uint32 { return uint32(len(m.Funcs)) }

// copier and filler return the indexes of the functions for large copies and fills.
func (m *rewriter) copier() uint32 { return m.refuel() + 1 }
func (m *rewriter) filler() uint32 { return m.refuel() + 2 }

// bulkKind returns the index of their type.
func (m *rewriter) bulkKind() uint32 { return uint32(len(m.Types)) + 1 }

func appendItems(vector []byte, items ...[]byte) []byte {
	r := reader{b: vector}
	n := r.u32()
	out := appendU32(make([]byte, 0, len(vector)+64), n+uint32(len(items)))
	return append(append(out, vector[r.at:]...), slices.Concat(items...)...)
}

// library matches the names of a language's runtime and standard library, which calls seldom use and which are most of
// a small module.
var library = regexp.MustCompile(`^(runtime\.|internal[_/]|type[:_]|syscall\.|os\.)`)

func (m *rewriter) rewriteCode() ([]byte, error) {
	n := uint32(len(m.bodies))
	if n > 0 {
		m.added = append(m.added, added{uint32(len(m.Types)), refuelBody(m.globals)})
	}
	if n > 0 && m.Memories > 0 {
		w := bodyRewriter{global: m.globals, refuel: m.refuel()}
		m.added = append(m.added, added{m.bulkKind(), w.slicedCopy()}, added{m.bulkKind(), w.slicedFill()})
	}
	owned := map[uint32]bool{} // functions with names outside of the library; names prove nothing, so they decide about speed only
	for _, f := range m.FunctionNames() {
		owned[f.Index] = !library.Match(f.Text)
	}
	var out []byte
	straightened := 0
	for i, body := range m.bodies {
		index := uint32(len(m.Imports) + i)
		f := function{kind: m.Funcs[index], params: m.params(m.Funcs[index])}
		if owned[index] && f.params > 0 && straightened+len(body) <= mostStraightened {
			f.other, straightened = m.refuel()+uint32(len(m.added)), straightened+len(body)
		}
		charged, err := m.rewriteFunction(body, &f)
		if err != nil {
			return nil, fmt.Errorf("function %d: %w", index, err)
		}
		out = append(appendU32(out, uint32(len(charged))), charged...)
	}
	for _, f := range m.added {
		out = append(appendU32(out, uint32(len(f.body))), f.body...)
	}
	return append(appendU32(nil, n+uint32(len(m.added))), out...), nil
}

// function holds the inputs of rewriting a body.
type function struct {
	kind   uint32 // type
	params uint32
	other  uint32 // index of its first form, if it gets a second one; 0 if it must not
}

func (m *rewriter) rewriteFunction(body []byte, f *function) ([]byte, error) {
	if err := m.check(maxBodyBytes, uint64(len(body)), "body bytes"); err != nil {
		return nil, err
	}
	r := reader{b: body}
	groups := r.count(2)
	declared := r.at
	var locals uint64
	for range groups {
		locals += uint64(r.u32())
		r.byte()
	}
	if r.err != nil {
		return nil, r.err
	}
	if err := m.check(maxLocals, locals, "locals"); err != nil {
		return nil, err
	}
	charge := func(code, before []byte) ([]byte, error) {
		w := bodyRewriter{
			global: m.globals, refuel: m.refuel(), copier: m.copier(), filler: m.filler(), bulkKind: m.bulkKind(),
			scratch: f.params + uint32(locals), types: m.Module, out: before,
		}
		work, err := w.rewriteBody(code, locals)
		if err == nil {
			err = m.weigh(work)
		}
		if err != nil {
			return nil, err
		}
		out := make([]byte, 0, len(w.out)+r.at+4)
		if !w.uses {
			return append(append(out, body[:r.at]...), w.out...), nil
		}
		out = appendU32(out, groups+1)
		out = append(out, body[declared:r.at]...)
		out = append(out, 1, valI32)
		return append(out, w.out...), nil
	}
	first, err := charge(body[r.at:], nil)
	if err != nil || f.other == 0 {
		return first, err
	}
	straight, ok := straighten(body[r.at:])
	if !ok {
		return first, nil
	}
	m.added = append(m.added, added{f.kind, first})
	return charge(straight, entered(f.params, f.other))
}

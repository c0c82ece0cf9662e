package meter

import (
	"fmt"
	"slices"
)

// rewrite puts the module together again with the global and the function, their exports and the charged bodies.
func (m *module) rewrite() ([]byte, error) {
	out := slices.Clone(magic)
	pending := []struct {
		id    byte
		items [][]byte
	}{{secGlobal, [][]byte{{valI64, 1, opI64Const, 0, opEnd}}}, {secExport, [][]byte{exported(Global, 3, m.globals)}}}
	emit := func(id byte, data []byte) {
		out = appendU32(append(out, id), uint32(len(data)))
		out = append(out, data...)
	}
	var code []byte // before the functions are listed: some get a second form
	if i := slices.IndexFunc(m.sections, func(s section) bool { return s.id == secCode }); i >= 0 {
		var err error
		if code, err = m.rewriteCode(m.sections[i].data); err != nil {
			return nil, err
		}
	}
	if len(m.added) > 0 {
		pending[1].items = append(pending[1].items, exported(Refuel, 0, m.refuel()))
	}
	for _, s := range m.sections {
		for len(pending) > 0 && s.id != secCustom && rank[pending[0].id] < rank[s.id] {
			emit(pending[0].id, appendItems([]byte{0}, pending[0].items...))
			pending = pending[1:]
		}
		data := s.data
		switch s.id {
		case secType:
			data = appendItems(data, []byte{0x60, 0, 0}, // of the function for more fuel
				[]byte{0x60, 3, valI32, valI32, valI32, 0}) // of those for large copies and fills
		case secFunction:
			for _, f := range m.added {
				data = appendItems(data, appendU32(nil, f.kind))
			}
		case secTable:
			data = m.tables
		case secCode:
			data = code
		}
		if len(pending) > 0 && s.id == pending[0].id {
			data = appendItems(data, pending[0].items...)
			pending = pending[1:]
		}
		emit(s.id, data)
	}
	for _, p := range pending {
		emit(p.id, appendItems([]byte{0}, p.items...))
	}
	return out, nil
}

func exported(name string, kind byte, index uint32) []byte {
	return appendU32(append(append(appendU32(nil, uint32(len(name))), name...), kind), index)
}

// refuel is the index of the function for more fuel: the first behind the module's own.
func (m *module) refuel() uint32 { return uint32(m.imported) + uint32(len(m.functions)) }

// copier and filler are the indexes of the functions for large copies and fills.
func (m *module) copier() uint32 { return m.refuel() + 1 }
func (m *module) filler() uint32 { return m.refuel() + 2 }

// bulkKind is their type.
func (m *module) bulkKind() uint32 { return uint32(len(m.params)) + 1 }

// appendItems adds to a vector.
func appendItems(vector []byte, items ...[]byte) []byte {
	r := reader{b: vector}
	n := r.u32()
	out := appendU32(make([]byte, 0, len(vector)+64), n+uint32(len(items)))
	return append(append(out, vector[r.at:]...), slices.Concat(items...)...)
}

func (m *module) rewriteCode(data []byte) ([]byte, error) {
	r := reader{b: data}
	n := r.count()
	if r.err == nil && int(n) != len(m.functions) {
		return nil, fmt.Errorf("%w: %d bodies for %d functions", ErrMalformed, n, len(m.functions))
	}
	if n > 0 {
		m.added = append(m.added, added{uint32(len(m.params)), refuelBody(m.globals)})
	}
	if n > 0 && m.memory {
		w := bodyRewriter{global: m.globals, refuel: m.refuel()}
		m.added = append(m.added, added{m.bulkKind(), w.slicedCopy()}, added{m.bulkKind(), w.slicedFill()})
	}
	owned := own(m.names)
	out := make([]byte, 0, len(data)+len(data)/8)
	straightened := 0
	for i := range n {
		body := r.take(r.u32())
		if r.err != nil {
			return nil, r.err
		}
		f := function{kind: m.functions[i], params: m.params[m.functions[i]]}
		if owned[uint32(m.imported)+i] && f.params > 0 && straightened+len(body) <= mostStraightened {
			f.other, straightened = m.refuel()+uint32(len(m.added)), straightened+len(body)
		}
		charged, err := m.rewriteFunction(body, &f)
		if err != nil {
			return nil, fmt.Errorf("function %d: %w", m.imported+uint64(i), err)
		}
		out = append(appendU32(out, uint32(len(charged))), charged...)
	}
	if !r.done() {
		r.fail("bytes after the last body")
	}
	for _, f := range m.added {
		out = append(appendU32(out, uint32(len(f.body))), f.body...)
	}
	return append(appendU32(nil, n+uint32(len(m.added))), out...), r.err
}

// function is what a body's rewriting depends on.
type function struct {
	kind   uint32 // type
	params uint32
	other  uint32 // index that its first form would get, if it gets a second; 0 when it must not
}

func (m *module) rewriteFunction(body []byte, f *function) ([]byte, error) {
	if err := m.check(m.limits.BodyBytes, uint64(len(body)), "body bytes"); err != nil {
		return nil, err
	}
	r := reader{b: body}
	groups := r.count()
	declared := r.at
	var locals uint64
	for range groups {
		locals += uint64(r.u32())
		r.byte()
	}
	if r.err != nil {
		return nil, r.err
	}
	if err := m.check(m.limits.Locals, locals, "locals"); err != nil {
		return nil, err
	}
	if locals+uint64(f.params) > 0xfffffffe {
		return nil, fmt.Errorf("%w: %d locals", ErrLimit, locals)
	}
	charge := func(code, before []byte) ([]byte, error) {
		w := bodyRewriter{
			global: m.globals, refuel: m.refuel(), copier: m.copier(), filler: m.filler(), bulkKind: m.bulkKind(),
			scratch: f.params + uint32(locals), types: &m.types, out: before,
		}
		if err := w.rewriteBody(code, locals); err != nil {
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

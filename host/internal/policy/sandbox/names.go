package sandbox

import (
	"encoding/binary"
	"errors"
	"slices"
)

// Compilable is the module as decoders and compilers get it: its standard sections as they are and, of the custom ones,
// a name section with the functions' names only, each fit to be shown. The names appear in the stack of a fault.
func (s *Scan) Compilable() []byte {
	out := slices.Concat(s.standard...)
	if names := s.functionNames(); names != nil {
		out = append(out, sectionCustom)
		out = binary.AppendUvarint(out, uint64(len(names)))
		out = append(out, names...)
	}
	return out
}

const functionNames = 1 // id of a subsection

// functionNames is the content of a name section with the functions' names. It is nil if the module has none or they
// cannot be read: names are for people only.
func (s *Scan) functionNames() []byte {
	r := reader{b: s.nameBytes}
	for len(r.b) > 0 {
		id := r.byte()
		sub := reader{b: r.bytes(r.u32())}
		if r.err != nil || id != functionNames {
			continue
		}
		n := sub.count("names", 2, len(s.funcs))
		list := binary.AppendUvarint(nil, uint64(n))
		last := -1
		for range n {
			index := sub.u32()
			name := printable(string(sub.bytes(sub.u32())), maxShown)
			if int64(index) <= int64(last) || uint64(index) >= uint64(len(s.funcs)) {
				sub.fail(errors.New("functions are named out of order"))
			}
			if sub.err != nil {
				return nil
			}
			last = int(index)
			list = binary.AppendUvarint(list, uint64(index))
			list = append(binary.AppendUvarint(list, uint64(len(name))), name...)
		}
		if sub.err != nil {
			return nil
		}
		out := append([]byte{4}, "name"...)
		out = append(out, functionNames)
		out = binary.AppendUvarint(out, uint64(len(list)))
		return append(out, list...)
	}
	return nil
}

package meter

import "bytes"

// library are the names of what comes with a language and is seldom on the way of a call: it is most of a small module.
var library = [][]byte{[]byte("runtime."), []byte("internal_"), []byte("internal/"), []byte("type:"), []byte("type_"),
	[]byte("syscall."), []byte("os.")}

// own says of each function whether its name, if it has one, is the author's. Names are for speed only: they prove
// nothing, and a section that cannot be read has none.
func own(names []byte) map[uint32]bool {
	const functionNames = 1
	out := map[uint32]bool{}
	r := reader{b: names}
	for !r.done() {
		id := r.byte()
		sub := reader{b: r.take(r.u32())}
		if id != functionNames {
			continue
		}
		for range sub.count() {
			index := sub.u32()
			name := sub.take(sub.u32())
			if sub.err != nil {
				return nil
			}
			out[index] = !isLibrary(name)
		}
	}
	if r.err != nil {
		return nil
	}
	return out
}

func isLibrary(name []byte) bool {
	for _, prefix := range library {
		if bytes.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}

package meter

import (
	"encoding/binary"
	"fmt"
)

// reader walks bytes. The first error stays: later reads return zeros, so callers may check once.
type reader struct {
	b   []byte
	at  int
	err error
}

func (r *reader) fail(format string, args ...any) {
	if r.err == nil {
		r.stop(fmt.Errorf("%w: at byte %d: %s", ErrMalformed, r.at, fmt.Sprintf(format, args...)))
	}
}

// stop ends the reading with an error.
func (r *reader) stop(err error) {
	if r.err == nil {
		r.err = err
	}
	r.at = len(r.b)
}

func (r *reader) done() bool { return r.at >= len(r.b) }

func (r *reader) byte() byte {
	if r.at >= len(r.b) {
		r.fail("the binary ends early")
		return 0
	}
	r.at++
	return r.b[r.at-1]
}

func (r *reader) take(n uint32) []byte {
	if uint64(n) > uint64(len(r.b)-r.at) {
		r.fail("the binary ends early: wants %d bytes, has %d", n, len(r.b)-r.at)
		return nil
	}
	r.at += int(n)
	return r.b[r.at-int(n) : r.at]
}

// u32 reads an unsigned LEB128 of at most 32 bits.
func (r *reader) u32() uint32 {
	var v uint64
	for shift := 0; shift < 35; shift += 7 {
		b := r.byte()
		v |= uint64(b&0x7f) << shift
		if b < 0x80 {
			if v > 0xffffffff {
				break
			}
			return uint32(v)
		}
	}
	r.fail("an integer is longer than 32 bits")
	return 0
}

// skipLEB skips a LEB128 of at most the given number of bits, signed or not.
func (r *reader) skipLEB(bits int) {
	for range (bits + 6) / 7 {
		if r.byte() < 0x80 {
			return
		}
	}
	r.fail("an integer is longer than %d bits", bits)
}

// count reads a vector's length. bytes is the least size of an element: a length beyond the remaining bytes is
// malformed.
func (r *reader) count(bytes int) uint32 {
	n := r.u32()
	if uint64(n)*uint64(bytes) > uint64(len(r.b)-r.at) {
		r.fail("a vector of %d elements in %d bytes", n, len(r.b)-r.at)
		return 0
	}
	return n
}

// name reads the name of an import, an export or a custom section.
func (r *reader) name() string {
	n := r.u32()
	if n > maxName {
		r.stop(fmt.Errorf("%w: a name of %d bytes, at most %d", ErrLimit, n, maxName))
	}
	return string(r.take(n))
}

var valueTypes = map[byte]byte{valI32: 'i', valI64: 'I', 0x7d: 'f', 0x7c: 'F', 0x7b: 'v', valFuncref: 'r', valExternref: 'x'}

// valueType reads a type, and returns its letter.
func (r *reader) valueType() byte {
	b := r.byte()
	c, ok := valueTypes[b]
	if !ok {
		r.fail("a value of the unsupported type 0x%02x", b)
	}
	return c
}

func (r *reader) referenceType() (b byte) {
	if b = r.byte(); b != valFuncref && b != valExternref {
		r.fail("a reference of the unsupported type 0x%02x", b)
	}
	return b
}

// unbounded is the maximum of a table or memory without one.
const unbounded = 1<<32 - 1

// limits reads the minimum and the maximum of a table or memory.
func (r *reader) limits() (least, most uint32) {
	flags := r.byte()
	if flags > 1 {
		r.fail("flags 0x%02x: a shared or 64-bit memory or table: build without threads, for wasm32", flags)
		return 0, 0
	}
	least, most = r.u32(), unbounded
	if flags == 1 {
		most = r.u32()
	}
	return least, most
}

// constant skips a constant expression, which is one instruction and the end.
func (r *reader) constant() {
	switch op := r.byte(); op {
	case opI32Const:
		r.skipLEB(32)
	case opI64Const:
		r.skipLEB(64)
	case 0x43: // f32.const
		r.take(4)
	case 0x44: // f64.const
		r.take(8)
	case opGlobalGet, opRefFunc:
		r.u32()
	case 0xd0: // ref.null
		r.referenceType()
	case opPrefixSIMD: // v128.const
		if r.u32() != 12 {
			r.fail("a vector instruction in a constant expression")
		}
		r.take(16)
	default:
		r.fail("instruction 0x%02x in a constant expression", op)
	}
	if r.byte() != opEnd {
		r.fail("a constant expression of several instructions")
	}
}

// data skips a data segment.
func (r *reader) data() {
	const passive, indexed = 1, 2
	flags := r.u32()
	if flags > indexed {
		r.fail("a data segment of form %d", flags)
	}
	if flags == indexed {
		r.u32() // the memory
	}
	if flags != passive {
		r.constant()
	}
	r.take(r.u32())
}

func appendU32(b []byte, v uint32) []byte { return binary.AppendUvarint(b, uint64(v)) }

func appendS64(b []byte, v int64) []byte {
	for {
		c := byte(v & 0x7f)
		v >>= 7
		if (v == 0 && c&0x40 == 0) || (v == -1 && c&0x40 != 0) {
			return append(b, c)
		}
		b = append(b, c|0x80)
	}
}

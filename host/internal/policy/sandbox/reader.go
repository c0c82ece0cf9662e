package sandbox

import (
	"errors"
	"fmt"
	"strings"
)

var errTruncated = errors.New("the binary ends early")

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

// u32 reads a LEB128 of 32 bits.
func (r *reader) u32() uint32 {
	var v uint64
	for shift := 0; shift < 35; shift += 7 {
		c := r.byte()
		if v |= uint64(c&0x7f) << shift; c < 0x80 {
			if v >= 1<<32 {
				break
			}
			return uint32(v)
		}
	}
	r.fail(errors.New("a number of more than 32 bits"))
	return 0
}

// skip passes over a LEB128 of so many bits, signed or not.
func (r *reader) skip(bits int) {
	for range (bits + 6) / 7 {
		if r.byte() < 0x80 {
			return
		}
	}
	r.fail(fmt.Errorf("a number of more than %d bits", bits))
}

func (r *reader) name() string {
	n := r.u32()
	if n > maxName {
		r.fail(fmt.Errorf("a name of %d bytes, at most %d", n, maxName))
	}
	return string(r.bytes(n))
}

// count reads how many items follow, of so many bytes at least.
func (r *reader) count(what string, bytes, most int) int {
	n := uint64(r.u32())
	switch {
	case n > uint64(most):
		r.fail(fmt.Errorf("%d %s, at most %d", n, what, most))
		return 0
	case n*uint64(bytes) > uint64(len(r.b)):
		r.fail(fmt.Errorf("%d %s in %d bytes: %w", n, what, len(r.b), errTruncated))
		return 0
	}
	return int(n)
}

func (r *reader) each(what string, bytes, most int, item func()) {
	for range r.count(what, bytes, most) {
		if item(); r.err != nil {
			return
		}
	}
}

var valueTypes = map[byte]byte{0x7f: 'i', 0x7e: 'I', 0x7d: 'f', 0x7c: 'F', 0x7b: 'v', 0x70: 'r', 0x6f: 'x'}

func (r *reader) valueType() byte {
	c, ok := valueTypes[r.byte()]
	if !ok {
		r.fail(errors.New("an unsupported value type"))
	}
	return c
}

// signature is a function type: parameters, '>', results; i and I are i32 and i64.
func (r *reader) signature() string {
	if form := r.byte(); form != 0x60 {
		r.fail(fmt.Errorf("type form %#02x is not supported: build for WebAssembly 2.0 without garbage-collected types",
			form))
		return ""
	}
	var b strings.Builder
	r.each("parameters", 1, maxTypeSize, func() { b.WriteByte(r.valueType()) })
	b.WriteByte('>')
	r.each("results", 1, maxTypeSize, func() { b.WriteByte(r.valueType()) })
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

func (r *reader) table() {
	r.referenceType()
	r.limits()
}

func (r *reader) referenceType() {
	if c := r.valueType(); c != 'r' && c != 'x' {
		r.fail(errors.New("an unsupported type of reference"))
	}
}

func (r *reader) global() {
	r.valueType()
	if r.byte() > 1 {
		r.fail(errors.New("a global that is neither constant nor mutable"))
	}
	r.constant()
}

// constant passes over a constant expression, which is one instruction and the end.
func (r *reader) constant() {
	switch op := r.byte(); op {
	case 0x41: // i32.const
		r.skip(32)
	case 0x42: // i64.const
		r.skip(64)
	case 0x43: // f32.const
		r.bytes(4)
	case 0x44: // f64.const
		r.bytes(8)
	case 0x23, 0xd2: // global.get, ref.func
		r.u32()
	case 0xd0: // ref.null
		r.referenceType()
	case 0xfd: // v128.const
		if r.u32() != 12 {
			r.fail(errors.New("a vector instruction in a constant expression"))
		}
		r.bytes(16)
	default:
		r.fail(fmt.Errorf("instruction %#02x in a constant expression", op))
	}
	if r.byte() != 0x0b {
		r.fail(errors.New("a constant expression of several instructions"))
	}
}

// elements passes over an element segment and returns how many elements it has.
func (r *reader) elements(most uint64) uint64 {
	const passive, indexed, expressions = 1, 2, 4
	flags := r.u32()
	if flags > passive|indexed|expressions {
		r.fail(fmt.Errorf("an element segment of form %d", flags))
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
			r.fail(errors.New("an element segment of an unsupported kind"))
		}
	}
	n := r.count("elements", 1, int(most))
	for range n {
		if flags&expressions != 0 {
			r.constant()
		} else {
			r.u32()
		}
		if r.err != nil {
			break
		}
	}
	return uint64(n)
}

// data passes over a data segment.
func (r *reader) data() {
	const passive, indexed = 1, 2
	flags := r.u32()
	if flags > indexed {
		r.fail(fmt.Errorf("a data segment of form %d", flags))
	}
	if flags == indexed {
		r.u32() // the memory
	}
	if flags != passive {
		r.constant()
	}
	r.bytes(r.u32())
}

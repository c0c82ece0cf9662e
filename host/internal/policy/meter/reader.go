package meter

import (
	"encoding/binary"
	"fmt"
)

// reader walks bytes. The first error sticks: later reads give zeros, so that callers may check once.
type reader struct {
	b   []byte
	at  int
	err error
}

func (r *reader) fail(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("%w: at byte %d: %s", ErrMalformed, r.at, fmt.Sprintf(format, args...))
	}
	r.at = len(r.b)
}

func (r *reader) done() bool { return r.at >= len(r.b) }

func (r *reader) byte() byte {
	if r.at >= len(r.b) {
		r.fail("ends too soon")
		return 0
	}
	r.at++
	return r.b[r.at-1]
}

func (r *reader) take(n uint32) []byte {
	if uint64(n) > uint64(len(r.b)-r.at) {
		r.fail("wants %d bytes, has %d", n, len(r.b)-r.at)
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

// skipLEB passes over a LEB128 of at most the given number of bits, signed or not.
func (r *reader) skipLEB(bits int) {
	for range (bits + 6) / 7 {
		if r.byte() < 0x80 {
			return
		}
	}
	r.fail("an integer is longer than %d bits", bits)
}

// constant passes over a constant expression.
func (r *reader) constant() {
	for r.err == nil && r.next().op != opEnd {
	}
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

package pieceformat

import (
	"encoding/binary"
	"fmt"
	"io"

	"github.com/zeebo/xxh3"
)

// The list of touches, little-endian: magic, time i64, count u64, xxh3-64 of the list, and the list of fingerprints
// u64.
const (
	touchesMagic = "kvtouch1"
	touchesHead  = 32
	touchesPart  = 64 << 10
	maxTouches   = 1 << 32
)

// WriteTouches writes fingerprints, least recently touched first, and the time of the list.
func WriteTouches(w io.WriterAt, when int64, n int, fingerprint func(i int) uint64) error {
	le, sum := binary.LittleEndian, xxh3.New()
	part, at := make([]byte, 0, touchesPart), int64(touchesHead)
	for i := range n {
		part = le.AppendUint64(part, fingerprint(i))
		if len(part) == touchesPart || i == n-1 {
			_, _ = sum.Write(part)
			if _, err := w.WriteAt(part, at); err != nil {
				return err
			}
			at += int64(len(part))
			part = part[:0]
		}
	}
	part = append(part, touchesMagic...)
	part = le.AppendUint64(part, uint64(when))
	part = le.AppendUint64(part, uint64(n))
	part = le.AppendUint64(part, sum.Sum64())
	_, err := w.WriteAt(part, 0)
	return err
}

// ReadTouches calls visit with the fingerprints of a list, a part at a time, and returns the time of the list. What
// visit was given holds only if there is no error: the checksum is known at the end.
func ReadTouches(f io.ReaderAt, size int64, visit func(fingerprints []uint64)) (when int64, err error) {
	var head [touchesHead]byte
	if n, err := f.ReadAt(head[:], 0); n < touchesHead {
		if err != nil && err != io.EOF {
			return 0, err
		}
		return 0, fmt.Errorf("%w: a list of touches of %d bytes", ErrDamaged, n)
	}
	le := binary.LittleEndian
	count := le.Uint64(head[16:])
	if string(head[:8]) != touchesMagic || count > maxTouches || size != touchesHead+8*int64(count) {
		return 0, fmt.Errorf("%w: not a list of touches, or of %d in %d bytes", ErrDamaged, count, size)
	}
	sum := xxh3.New()
	part, list := make([]byte, touchesPart), make([]uint64, 0, touchesPart/8)
	for at := int64(touchesHead); at < size; at += int64(len(part)) {
		part = part[:min(int64(touchesPart), size-at)]
		if n, err := f.ReadAt(part, at); n < len(part) {
			return 0, err
		}
		_, _ = sum.Write(part)
		list = list[:0]
		for b := part; len(b) > 0; b = b[8:] {
			list = append(list, le.Uint64(b))
		}
		visit(list)
	}
	if sum.Sum64() != le.Uint64(head[24:]) {
		return 0, fmt.Errorf("%w: the list of touches has another checksum", ErrDamaged)
	}
	return int64(le.Uint64(head[8:])), nil
}

// CheckTouches compares a list of touches with its checksum.
func CheckTouches(f io.ReaderAt, size int64) error {
	_, err := ReadTouches(f, size, func([]uint64) {})
	return err
}

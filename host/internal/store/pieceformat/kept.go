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

// The state of an evict policy, little-endian: magic, time i64, slots u32, length of the format's name u32, length of
// the data u64, xxh3-64 of both; then the format's name and the data.
const (
	stateMagic = "kvstate1"
	stateHead  = 40
	// MaxState is the most bytes of state that a policy may keep.
	MaxState = 1 << 30
	// MaxStateFile is the most bytes that a state takes as a file.
	MaxStateFile = stateHead + 2*MaxState
)

// State is what an evict policy keeps. It names the checkpoint that its slots are of by the checkpoint's time.
type State struct {
	Time   int64
	Slots  uint32
	Format string
	Data   []byte
}

// Encode returns the file.
func (s *State) Encode() []byte {
	le, b := binary.LittleEndian, []byte(stateMagic)
	b = le.AppendUint64(b, uint64(s.Time))
	b = le.AppendUint32(b, s.Slots)
	b = le.AppendUint32(b, uint32(len(s.Format)))
	b = le.AppendUint64(b, uint64(len(s.Data)))
	b = le.AppendUint64(b, 0)
	b = append(append(b, s.Format...), s.Data...)
	le.PutUint64(b[stateHead-8:], xxh3.Hash(b[stateHead:]))
	return b
}

// DecodeState reads what Encode wrote.
func DecodeState(b []byte) (s State, err error) {
	format, _, sum, err := decodeStateHead(b[:min(len(b), stateHead)], int64(len(b)))
	if err != nil {
		return s, err
	}
	rest, le := b[stateHead:], binary.LittleEndian
	if got := xxh3.Hash(rest); got != sum {
		return s, fmt.Errorf("%w: policy state with checksum %016x, its head says %016x", ErrDamaged, got, sum)
	}
	return State{Time: int64(le.Uint64(b[8:])), Slots: le.Uint32(b[16:]), Format: string(rest[:format]),
		Data: rest[format:]}, nil
}

func decodeStateHead(head []byte, size int64) (format, data, sum uint64, err error) {
	le := binary.LittleEndian
	if len(head) < stateHead || string(head[:len(stateMagic)]) != stateMagic {
		return 0, 0, 0, fmt.Errorf("%w: not a policy's state", ErrDamaged)
	}
	format, data = uint64(le.Uint32(head[20:])), le.Uint64(head[24:])
	if format > MaxState || data > MaxState || uint64(size) != stateHead+format+data {
		return 0, 0, 0, fmt.Errorf("%w: policy state of %d and %d bytes in a file of %d", ErrDamaged, format, data, size)
	}
	return format, data, le.Uint64(head[stateHead-8:]), nil
}

// CheckState compares a policy's state with its checksum.
func CheckState(f io.ReaderAt, size int64) error {
	head := make([]byte, stateHead)
	n, err := f.ReadAt(head, 0)
	if err != nil && err != io.EOF {
		return err
	}
	_, _, sum, err := decodeStateHead(head[:n], size)
	if err != nil {
		return err
	}
	return checkBody(f, stateHead, size, sum)
}

// EncodeWritten is the text of a count of bytes written on a day, which is counted from 1970.
func EncodeWritten(day, bytes int64) []byte { return fmt.Appendf(nil, "%d %d\n", day, bytes) }

// DecodeWritten reads what EncodeWritten wrote.
func DecodeWritten(text []byte) (day, bytes int64, err error) {
	if _, err := fmt.Sscanf(string(text), "%d %d\n", &day, &bytes); err != nil {
		return 0, 0, fmt.Errorf("%w: count of bytes written: %w", ErrDamaged, err)
	}
	// Less than nothing would be a budget without an end.
	if day < 0 || bytes < 0 || string(EncodeWritten(day, bytes)) != string(text) {
		return 0, 0, fmt.Errorf("%w: count of bytes written: %.40q", ErrDamaged, text)
	}
	return day, bytes, nil
}

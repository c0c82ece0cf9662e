package pieceformat

import (
	"encoding/binary"
	"fmt"
	"io"

	"github.com/kvhost/kvhost/host/kv"
	"github.com/zeebo/xxh3"
)

// Layout of the file with the state of an evict policy, little-endian: magic, time i64, slots u32, length of the format's name
// u32, length of the data u64, xxh3-64 of both; then the format's name and the data.
const (
	stateMagic = "kvstate1"
	stateHead  = 40
	// MaxState is the maximum number of bytes of state that a policy may keep.
	MaxState = 1 << 30
	// MaxStateFile is the largest size of a file with a policy's state.
	MaxStateFile = stateHead + 2*MaxState
)

// State is the saved state of an evict policy. Time is the time of the checkpoint to which its slots refer.
type State struct {
	Time   int64
	Slots  uint32
	Format string
	Data   []byte
}

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

func DecodeState(b []byte) (s State, err error) {
	format, sum, err := decodeStateHead(b[:min(len(b), stateHead)], int64(len(b)))
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

func decodeStateHead(head []byte, size int64) (format, sum uint64, err error) {
	le := binary.LittleEndian
	if len(head) < stateHead || string(head[:len(stateMagic)]) != stateMagic {
		return 0, 0, fmt.Errorf("%w: not a policy's state", ErrDamaged)
	}
	format, data := uint64(le.Uint32(head[20:])), le.Uint64(head[24:])
	if format > MaxState || data > MaxState || uint64(size) != stateHead+format+data {
		return 0, 0, fmt.Errorf("%w: policy state of %d and %d bytes in a file of %d", ErrDamaged, format, data, size)
	}
	return format, le.Uint64(head[stateHead-8:]), nil
}

// CheckState verifies the checksum of a file with a policy's state.
func CheckState(f io.ReaderAt, size int64) error {
	head := make([]byte, stateHead)
	n, err := f.ReadAt(head, 0)
	if err != nil && err != io.EOF {
		return err
	}
	_, sum, err := decodeStateHead(head[:n], size)
	if err != nil {
		return err
	}
	body := xxh3.New()
	if _, err := io.Copy(body, io.NewSectionReader(f, stateHead, size-stateHead)); err != nil {
		return err
	}
	if got := body.Sum64(); got != sum {
		return fmt.Errorf("%w: checksum %016x, its head says %016x", ErrDamaged, got, sum)
	}
	return nil
}

// EncodeWritten returns the text of a count of bytes written on a day. Days are counted from 1970.
func EncodeWritten(day, bytes int64) []byte { return fmt.Appendf(nil, "%d %d\n", day, bytes) }

func DecodeWritten(text []byte) (day, bytes int64, err error) {
	if _, err := fmt.Sscanf(string(text), "%d %d\n", &day, &bytes); err != nil {
		return 0, 0, fmt.Errorf("%w: count of bytes written: %w", ErrDamaged, err)
	}
	// A negative count would make the budget unlimited.
	if day < 0 || bytes < 0 || string(EncodeWritten(day, bytes)) != string(text) {
		return 0, 0, fmt.Errorf("%w: count of bytes written: %.40q", ErrDamaged, text)
	}
	return day, bytes, nil
}

// CheckText verifies that the text of a namespace has the digest by which its file is named.
func CheckText(digest kv.Digest, text []byte) error {
	if is := kv.TextDigest(text); is != digest {
		return fmt.Errorf("%w: its digest is %s", ErrDamaged, is)
	}
	return nil
}

// DecodePlan decodes a plan and verifies that it has the digest by which its file is named.
func DecodePlan(digest kv.Digest, b []byte) (*kv.Plan, error) {
	p, err := kv.DecodePlan(b)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	if is := p.Digest(); is != digest {
		return nil, fmt.Errorf("%w: its digest is %s", ErrDamaged, is)
	}
	return p, nil
}

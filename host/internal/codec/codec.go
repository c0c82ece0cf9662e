package codec

import (
	"encoding/binary"
	"fmt"
	"sync"

	"github.com/klauspost/compress/huff0"
)

// Codec is the way in which an extent is stored.
type Codec uint8

// Codecs. The numbers are written to files.
const (
	Raw     Codec = iota // unchanged
	Huffman              // as one plane
	Planes               // as two planes: the bytes at even offsets, and those at odd offsets
	codecs
)

// MaxBytes is the maximum size of an extent.
const MaxBytes = 64 << 10

// Ways in which a plane is stored.
const (
	planeRaw = iota
	planeHuffman
	planeRepeated
)

// minGain is the least gain that is worth storing an extent encoded, as a shift: a thirty-second of the extent.
const minGain = 5

// minHuffman is the length of the shortest plane that is encoded.
const minHuffman = 64

// coder is the memory of one call.
type coder struct {
	encoder, decoder huff0.Scratch
	planes           [2][MaxBytes / 2]byte
}

var coders = sync.Pool{New: func() any {
	c := &coder{}
	c.encoder.Reuse = huff0.ReusePolicyNone
	c.encoder.Out = make([]byte, 0, 2*MaxBytes)
	return c
}}

// Known reports whether this host can decode c.
func Known(c Codec) bool { return c < codecs }

// Encode writes the stored form of an extent to dst, which must not overlap src and must have room for len(src) bytes.
// It returns the length of the stored form, at most len(src), and the codec that it chose. element is the size of the
// values in the extent: 2 for floats of 16 bits, and 1 otherwise.
func Encode(dst, src []byte, element int) (n int, by Codec) {
	if len(src) > MaxBytes {
		panic(fmt.Sprintf("codec: an extent of %d bytes, at most %d", len(src), MaxBytes))
	}
	most := len(src) - max(1, len(src)>>minGain)
	c := coders.Get().(*coder)
	defer coders.Put(c)
	if element == 2 && len(src) >= 2 {
		n, by = c.encodePlanes(dst, src, most), Planes
	} else {
		n, by = c.encodeWhole(dst, src, most), Huffman
	}
	if n == 0 {
		return copy(dst[:len(src)], src), Raw
	}
	return n, by
}

// encodeWhole encodes src as one plane in at most the given number of bytes. It returns 0 if that is not possible.
func (c *coder) encodeWhole(dst, src []byte, most int) int {
	method, stored := c.encodePlane(src)
	if method == planeRaw || 1+len(stored) > most {
		return 0
	}
	dst[0] = method
	return 1 + copy(dst[1:most], stored)
}

// encodePlanes is encodeWhole with two planes.
func (c *coder) encodePlanes(dst, src []byte, most int) int {
	lo, hi := c.planes[0][:(len(src)+1)/2], c.planes[1][:len(src)/2]
	split(lo, hi, src)
	const head = 2 + 4
	n := head
	for i, plane := range [...][]byte{lo, hi} {
		method, stored := c.encodePlane(plane)
		if n+len(stored) > most {
			return 0
		}
		dst[i] = method
		if i == 0 {
			binary.LittleEndian.PutUint32(dst[2:], uint32(len(stored)))
		}
		n += copy(dst[n:most], stored)
	}
	return n
}

// encodePlane returns the stored form of a plane. It is valid until the next call.
func (c *coder) encodePlane(plane []byte) (method byte, stored []byte) {
	if repeated(plane) {
		return planeRepeated, plane[:1]
	}
	if len(plane) < minHuffman || uniform(plane) {
		return planeRaw, plane
	}
	out, _, err := huff0.Compress4X(plane, &c.encoder)
	if err != nil || len(out) >= len(plane) {
		return planeRaw, plane
	}
	return planeHuffman, out
}

// repeated reports whether all bytes of a plane are the same.
func repeated(plane []byte) bool {
	for _, b := range plane[1:] {
		if b != plane[0] {
			return false
		}
	}
	return true
}

// Decode writes the extent that is stored as src to dst, which must have the length of the extent.
func Decode(dst, src []byte, by Codec) error {
	var err error
	switch {
	case len(dst) == 0 || len(dst) > MaxBytes:
		return fmt.Errorf("%w: an extent of %d bytes, want 1 to %d", ErrCorrupt, len(dst), MaxBytes)
	case by == Raw && len(src) == len(dst):
		copy(dst, src)
		return nil
	case by == Raw:
		return fmt.Errorf("%w: %d bytes, the extent has %d", ErrCorrupt, len(src), len(dst))
	}
	c := coders.Get().(*coder)
	defer coders.Put(c)
	switch by {
	case Huffman:
		err = c.decodeWhole(dst, src)
	case Planes:
		err = c.decodePlanes(dst, src)
	default:
		err = fmt.Errorf("%w: codec %d is not known", ErrCorrupt, by)
	}
	return err
}

func (c *coder) decodeWhole(dst, src []byte) error {
	if len(src) < 1 {
		return fmt.Errorf("%w: it is empty", ErrCorrupt)
	}
	plane, err := c.decodePlane(dst, src[1:], src[0])
	if err == nil && &plane[0] != &dst[0] {
		copy(dst, plane)
	}
	return err
}

func (c *coder) decodePlanes(dst, src []byte) error {
	const head = 2 + 4
	if len(src) < head {
		return fmt.Errorf("%w: %d bytes, its head has %d", ErrCorrupt, len(src), head)
	}
	first := binary.LittleEndian.Uint32(src[2:])
	if uint64(first) > uint64(len(src)-head) {
		return fmt.Errorf("%w: a plane of %d stored bytes in %d", ErrCorrupt, first, len(src)-head)
	}
	lo, err := c.decodePlane(c.planes[0][:(len(dst)+1)/2], src[head:head+first], src[0])
	if err != nil {
		return err
	}
	hi, err := c.decodePlane(c.planes[1][:len(dst)/2], src[head+first:], src[1])
	if err != nil {
		return err
	}
	join(dst, lo, hi)
	return nil
}

// decodePlane returns the plane that is stored as src. The result is src itself, or room with the decoded bytes.
func (c *coder) decodePlane(room, src []byte, method byte) ([]byte, error) {
	switch method {
	case planeRaw:
		if len(src) != len(room) {
			return nil, fmt.Errorf("%w: %d bytes of a plane of %d", ErrCorrupt, len(src), len(room))
		}
		return src, nil
	case planeRepeated:
		if len(src) != 1 {
			return nil, fmt.Errorf("%w: %d bytes for one that repeats", ErrCorrupt, len(src))
		}
		for i := range room {
			room[i] = src[0]
		}
		return room, nil
	case planeHuffman:
		return room, c.decodeHuffman(room, src)
	}
	return nil, fmt.Errorf("%w: a plane is stored by method %d, which is not known", ErrCorrupt, method)
}

func (c *coder) decodeHuffman(room, src []byte) error {
	if len(room) < minHuffman || len(src) >= len(room) {
		return fmt.Errorf("%w: %d bytes of Huffman codes for a plane of %d", ErrCorrupt, len(src), len(room))
	}
	s, rest, err := huff0.ReadTable(src, &c.decoder)
	if err != nil {
		return fmt.Errorf("%w: table of codes: %w", ErrCorrupt, err)
	}
	s.MaxDecodedSize = MaxBytes
	s.Out = room[:0:len(room)]
	out, err := s.Decompress4X(rest, len(room))
	s.Out = nil
	if err != nil || len(out) != len(room) {
		return fmt.Errorf("%w: codes: %w", ErrCorrupt, err)
	}
	return nil
}

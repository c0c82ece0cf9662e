package codec

import "encoding/binary"

// evenBytes are the bytes of a word at even offsets.
const evenBytes = 0x00ff00ff00ff00ff

// split writes the bytes of src at even offsets to lo and those at odd ones to hi.
func split(lo, hi, src []byte) {
	le := binary.LittleEndian
	for len(src) >= 16 {
		a, b := le.Uint64(src), le.Uint64(src[8:16])
		le.PutUint64(lo, pack(a&evenBytes)|pack(b&evenBytes)<<32)
		le.PutUint64(hi, pack(a>>8&evenBytes)|pack(b>>8&evenBytes)<<32)
		lo, hi, src = lo[8:], hi[8:], src[16:]
	}
	for i, c := range src {
		if i%2 == 0 {
			lo[i/2] = c
		} else {
			hi[i/2] = c
		}
	}
}

// join is the reverse of split.
func join(dst, lo, hi []byte) {
	le := binary.LittleEndian
	for len(dst) >= 16 {
		l, h := le.Uint64(lo), le.Uint64(hi)
		le.PutUint64(dst, unpack(l&0xffffffff)|unpack(h&0xffffffff)<<8)
		le.PutUint64(dst[8:16], unpack(l>>32)|unpack(h>>32)<<8)
		lo, hi, dst = lo[8:], hi[8:], dst[16:]
	}
	for i := range dst {
		if i%2 == 0 {
			dst[i] = lo[i/2]
		} else {
			dst[i] = hi[i/2]
		}
	}
}

// pack brings the bytes at even offsets of x together in its lower half. Those at odd ones are zero.
func pack(x uint64) uint64 {
	x = (x | x>>8) & 0x0000ffff0000ffff
	return (x | x>>16) & 0x00000000ffffffff
}

// unpack is the reverse of pack.
func unpack(x uint64) uint64 {
	x = (x | x<<16) & 0x0000ffff0000ffff
	return (x | x<<8) & evenBytes
}

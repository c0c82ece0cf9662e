// Package codec compresses extents of KV pages on the processor, without loss, and decides which chunks are worth it.
//
// KV pages in 16-bit floats have a nearly normal distribution: signs and exponents repeat, and mantissas do not. So an
// extent is divided into byte planes, one with the first bytes of its elements and one with the second bytes. Each
// plane is encoded separately, by Huffman codes with a table of its own. Repeated sequences, which zstd looks for, do
// not occur. host/docs/lab compares the two methods.
//
// The layout of an extent that is stored by [Huffman] or [Planes], little-endian:
//
//	one byte for each plane    0: the plane unchanged, 1: Huffman, 2: one byte, which all bytes of the plane equal
//	u32 for each plane but the last: its stored length
//	the planes
//
// [Huffman] has one plane. [Planes] has two: the bytes at even offsets of the extent and those at odd ones; the first
// has one byte more if the extent's length is odd. A Huffman plane has zstd's format: four streams, preceded by the
// table (RFC 8878, sections 4.2.1 and 4.2.2). An extent that would gain less than a thirty-second is stored [Raw].
//
// A decoder accepts any bytes. It writes within its destination only, and returns [ErrCorrupt] for input that no
// encoder writes. It does not detect all damage: a reader of a file compares checksums before and after decoding.
//
// The gain depends on the namespace: floats of 16 bits gain a third, and random bytes gain nothing. So a [Namespace]
// tracks the recent gain of its pieces. If it is less than required, only one piece in [Trial] is compressed, which
// shows whether the gain has changed. A [Set] has the figures by model.
//
// The required gain depends on the [Mode] of the namespace. If capacity matters, any gain that is worth the codec's
// time is enough. If time matters, a [Root] compares the speeds of its files and of the codec.
package codec

// Package codec compresses extents of KV pages on the processor, without loss, and decides which chunks are worth it.
//
// Values of KV pages in 16-bit floats are near normal: their signs and exponents repeat, their mantissas do not. So
// an extent is divided into byte planes, all first bytes of its elements and then all second bytes, and each plane
// is coded on its own, by Huffman codes with the plane's own table. Matches, as zstd looks for them, do not occur.
// host/docs/lab has both side by side.
//
// An extent that is stored by [Huffman] or [Planes] is, little-endian:
//
//	one byte for each plane    0: the plane as it is, 1: Huffman, 2: one byte that all of the plane's bytes are
//	u32 for each plane but the last: its stored length
//	the planes
//
// [Huffman] has one plane. [Planes] has two: the bytes at even offsets of the extent and those at odd ones; the first
// has one byte more if the extent's length is odd. Huffman is zstd's own form of four streams with the table before
// them (RFC 8878, sections 4.2.1 and 4.2.2). An extent that would gain less than a thirty-second is stored [Raw].
//
// A decoder takes any bytes: it writes within its destination only, and returns [ErrCorrupt] for what no encoder
// wrote. It does not find all damage. Who reads a file compares checksums before and after.
//
// What a chunk gains depends on its namespace: floats of 16 bits gain a third, bytes that look random nothing. So a
// [Namespace] watches what its pieces have gained lately. If they gain less than is asked for, no more of them are
// compressed, but for one in [Trial], which shows whether that has changed. A [Set] has the figures by model.
//
// How much is asked for depends on the namespace's [Mode]: where the capacity is what counts, anything that is worth a
// codec's time. Otherwise a [Root] compares the speeds of its files and of the codec.
package codec

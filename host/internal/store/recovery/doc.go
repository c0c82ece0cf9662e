// Package recovery is what a start finds in a root, and what an end keeps for the next start.
//
// A clean end writes a checkpoint: the index, with the evict policy's state. Otherwise a scan looks at every file and
// enters the pieces that it finds ([Root.BeginScan], [Root.Scan]): a file's header says which piece it is, and the walk
// how it is named. What becomes of a file that is not a sound piece, or of a piece that is there twice, the [Judge] of the
// root says. The order of last touch comes from a list that
// is written from time to time.
//
// While a root is scanned, the store serves: lookups find what the scan has seen, and what was stored since. Until the
// scan has ended,
//
//   - the account has, beside the entries seen, an upper bound of the bytes that the others take: all that is in use on
//     the file system. A put that does not fit beside that is shed, and nothing is evicted, because nobody knows yet
//     what is oldest.
//   - a put first looks whether its file is there already, unseen ([Root.Seek]): then it is taken into the index, and
//     the put is told that it is resident.
//   - the evict policy is told nothing. At the end it hears of everything in order of last touch, what was touched
//     meanwhile last, a slice at a time.
//
// [Directory] reads and writes the files in a root that the store keeps for itself.
package recovery

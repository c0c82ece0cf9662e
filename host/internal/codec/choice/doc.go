// Package choice decides which chunks are compressed, and counts what compression takes and gains.
//
// What a chunk gains depends on its namespace: floats of 16 bits gain a third, bytes that look random nothing. So a
// [Namespace] watches what its pieces have gained lately. If they gain less than is asked for, no more of them are
// compressed, but for one in [Trial], which shows whether that has changed. A [Set] has the figures by model.
//
// How much is asked for depends on the namespace's [Mode]: where the capacity is what counts, anything that is worth a
// codec's time. Otherwise a [Root] compares the speeds of its files and of the codec.
package choice

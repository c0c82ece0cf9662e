// Package shadow judges evict policies on live requests without letting them decide anything.
//
// What a policy would have kept follows from the requests alone. A [Shadow] has an imaginary cache of a given size,
// with its own slots. It receives every key that is looked up, found or not, and every chunk that is offered, stored or
// refused. It evicts as its policy says and counts what would have been hits. A key that the live cache had and the
// imaginary one lacks is stored there when it is looked up, because an engine that misses computes the chunk and offers
// it.
//
// # The queue may lose steps
//
// A lookup must not wait for a shadow. Each shadow has a goroutine and a bounded queue; what does not fit is dropped
// and counted. The number of keys is reported with the hit ratio, so that a shadow that cannot keep up is noticed.
//
// # A fault does not end a shadow
//
// An acting policy is restarted after a fault, and so is a shadow: its faults are part of the result. Its cache is then
// empty, and it misses until the cache is full again. Keys that are looked up while it is down are not counted. After
// six faults it is not restarted, and its figures remain readable.
//
// # It is not the simulator's cache
//
// Package sim plays a trace that it has read: chunks are small numbers, and its tables are arrays indexed by them. Here
// keys are fingerprints not seen before, of any size, and must be found by hashing.
package shadow

// Package shadow judges evict policies on live requests without letting them decide anything.
//
// The entries that a policy would have kept follow from the requests alone. A [Shadow] has an imaginary cache of a
// given size, with its own slots. It receives every key that is looked up, found or not, and every chunk that is
// offered, stored or refused. It evicts by its policy, and counts the hits that it would have had. When a key is looked
// up that only the live cache has, the shadow stores it, because an engine that misses computes the chunk and offers
// it.
//
// # The queue may lose steps
//
// A lookup must not wait for a shadow. Each shadow has a goroutine and a bounded queue; steps that do not fit are
// dropped and counted. The number of keys is reported with the hit ratio, so that a shadow that is too slow is noticed.
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

// Package shadow judges evict policies on live requests without letting them decide anything.
//
// The one idea: what a policy would have kept follows from the requests alone. A [Shadow] has an imaginary cache of a given
// size, with slots of its own: it hears every key that is looked up, found or not, and every chunk that is offered, stored or
// refused, evicts as its policy says, and counts what would have been hits. A key that the live cache had and the imaginary
// one lacks is stored there when it is looked up: an engine that misses computes the chunk and offers it.
//
// # Why a queue that loses
//
// A lookup must not wait for a policy that is on trial. Each shadow has a goroutine and a bounded queue; what does not fit is
// dropped and counted. A hit ratio stands beside the number of keys it was drawn from, so that a shadow that cannot keep up
// shows.
//
// # Why a fault is not the end
//
// A policy that acts is started again after a fault, and so is one on trial: its faults are part of the verdict. What it had is
// gone, and it misses until its cache is full again; keys that it was asked for while it was down are not counted. After six
// faults the trial is over, and what it was asked until then stays to be read.
//
// # Why it is not the simulator's cache
//
// Package sim plays a trace that it has read: chunks are small numbers, and its tables are arrays over them. Here keys are
// fingerprints that nobody has seen before, of any size, and must be found by hashing.
package shadow

// Package entries is what one root holds: the index, the evict policy that follows it, the bytes of the entries, and
// the steps of each entry's life.
//
//	Insert                       reserved by the put of its first piece
//	Join, Extend                 another piece of it is being written
//	Written, EndWrite            a piece is there, or its put has failed
//	BeginEvict, FinishEvict      lookups miss, and then its files are unlinked
//
// After FinishEvict the entry leaves the table as soon as its files are not written to. Its bytes and its slot are free
// when it has no pin.
//
// The index changes first and the policy gets the event under the same lock, so that a policy that fails at any event can
// be replaced and told everything from the index. No method touches a file: whoever unlinks files calls BeginEvict
// before and FinishEvict afterwards.
//
// # Lock
//
// A [Set] is locked by its users: each method says so where it takes the lock itself, and all others are called with it
// held. Nothing that can block on a device is done under it.
package entries

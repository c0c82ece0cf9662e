// Package entries holds the contents of one root: the index, the evict policy that follows it, the bytes of the entries, and
// the steps of each entry's life.
//
//	Insert                       reserved by the put of its first piece
//	Join, Extend                 another piece of it is being written
//	Written, EndWrite            a piece is present, or its put has failed
//	BeginEvict, FinishEvict      lookups miss, and then its files are unlinked
//
// After FinishEvict the entry leaves the table as soon as none of its files is being written. Its bytes and its slot are freed
// when it has no pin.
//
// The index changes first, and the policy gets the event under the same lock. A policy that fails at any event can therefore be
// replaced and told everything from the index. No method accesses a file: the caller that unlinks files calls BeginEvict before
// and FinishEvict afterwards.
//
// # Lock
//
// A [Set] is locked by its users. Methods that take the lock say so. All others must be called with the lock held. Nothing that
// can block on a device is done while it is held.
package entries

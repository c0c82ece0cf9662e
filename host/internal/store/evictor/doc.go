// Package evictor drives the evict policy of one root.
//
// An [Evictor] tells the policy about the root's entries and asks it for victims. If the policy fails, the least recently
// touched entries are evicted until its module has been restarted. Every entry carries its last touch, so this needs no
// preparation. A [Handover] replaces the policy during operation. The new policy takes over the state of the old one, or it is
// told all entries in slices. In both cases it gets every event that happens at the same time.
//
// # Events
//
// The index is changed first, and the event follows under the same lock. A policy that fails at any event can therefore be
// replaced and told everything from the index. PIN and UNPIN are sent when the number of pins becomes non-zero and zero. Parent
// is set in INSERT, LINK and RESIDENT, and is none in all other events.
//
// # Lock
//
// The index and the evictor share their root's lock. Methods that take the lock say so. All others must be called with the lock
// held.
package evictor

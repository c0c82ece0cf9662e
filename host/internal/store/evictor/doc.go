// Package evictor drives the evict policy of one root.
//
// An [Evictor] tells the policy what happens to the root's entries and asks it for victims. When the policy fails, the
// least recently touched entries are evicted until its module was restarted: every entry carries its last touch, so
// nothing must be told first. A [Handover] replaces the policy while sessions use the root: the new policy takes over
// the state of the old one, or gets all entries in slices, and every event that happens at the same time.
//
// # Events
//
// The index is changed first and the event follows under the same lock, so that a policy that faults on any event can
// be replaced and told everything from the index alone. PIN and UNPIN are sent when the number of pins leaves and
// reaches zero. Parent is filled in by INSERT, LINK and RESIDENT and is none in the others.
//
// # Lock
//
// The index and the evictor share their root's lock. Methods that take the lock say so; all others are called with it
// held.
package evictor

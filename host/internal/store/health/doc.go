// Package health keeps the state of one root: whether it is in service, takes stores, or is out.
//
// A [Monitor] sees the errors of the root's file operations and takes the root out of service when its device hangs,
// fails repeatedly, or its directory disappears. A root that is out is probed with growing pauses and returns by
// itself. A [Directory] tells whether the root's directory is the one it was.
//
// The package knows nothing of what a root holds. What must be brought up to date before a root serves again is its
// owner's, behind [Root].
package health

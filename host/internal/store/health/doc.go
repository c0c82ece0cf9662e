// Package health keeps the state of one root: in service, without new stores, or out of service.
//
// A [Monitor] observes the errors of the root's file operations. It takes the root out of service when its device hangs or
// fails repeatedly, or when its directory disappears. A root that is out is probed with growing pauses and returns by itself. A
// [Directory] detects whether the root's directory is still the original one.
//
// The package knows nothing of the contents of a root. Before a root returns to service, its owner brings it up to date through
// the interface [Root].
package health

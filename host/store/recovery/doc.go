// Package recovery is what a clean end keeps of a root for the next start, and how a start makes sense of what it
// finds: the checkpoint of the index, the evict policy's state, the list of touches, and the class and name of a piece
// that a scan meets.
//
// It reads and writes files and fills an index; it takes no lock and changes no account. Its caller does both.
package recovery

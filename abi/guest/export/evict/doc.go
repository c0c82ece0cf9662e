// Package evict gives a module the role "evict". Import it and register a [guest.Evictor] with Export in an init
// function.
package evict

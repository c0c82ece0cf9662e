// Package evict gives a module the role "evict": import it and register an [guest.Evictor] with Export in an init function.
package evict

// Package layout gives a module the role "layout". Import it and register a [guest.Layouter] with Export in an init
// function.
package layout

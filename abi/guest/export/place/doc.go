// Package place gives a module the role "place". Import it and register a [guest.Placer] with Export in an init
// function.
package place

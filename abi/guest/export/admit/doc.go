// Package admit gives a module the role "admit". Import it and register a [guest.Admitter] with Export in an init
// function.
package admit

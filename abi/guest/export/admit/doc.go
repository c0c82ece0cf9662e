// Package admit gives a module the role "admit": import it and register an [guest.Admitter] with Export in an init function.
package admit

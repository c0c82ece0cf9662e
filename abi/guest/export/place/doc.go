// Package place gives a module the role "place": import it and register a [guest.Placer] with Export in an init function.
package place

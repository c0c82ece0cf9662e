// Package host is a whole kvhost in one value: policies, store, engine, sessions and the read-only HTTP listener, wired
// from a configuration.
//
// The one idea: a [Host] owns everything that runs and ends it in the reverse order it was started. [New] opens what can
// be refused (policies, roots); [Host.Run] serves until its context is done. What flows through it is one configuration
// in, and errors out that say what was refused and where.
package host

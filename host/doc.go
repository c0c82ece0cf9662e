// Package host is a whole kvhost: policies, store, transfer engine, GPUs, sessions and the HTTP listener, wired from
// one configuration. [New] opens what can be refused (policies, roots), [Host.Run] serves until its context is done,
// and [Host.Close] ends the parts in the reverse order of their start.
package host

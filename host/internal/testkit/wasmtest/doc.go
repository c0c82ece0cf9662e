// Package wasmtest puts modules together by hand, so that a bad guest is a line in a table of a test and needs no toolchain.
//
// [Modules] are those that attack a host: they cost more than they say, trap, lie and loop. Every
// class is one way in which an outside attacker broke, or tried to break, a host. The modules are the same in every run.
package wasmtest

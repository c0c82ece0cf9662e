// Package plugintest judges policy modules: any .wasm file, whoever wrote it.
//
// The one idea: a module is a black box with a contract, so it is enough to make it decide. [Check] plays a host with a
// small world of entries, requests, leases and namespaces of its own, asks the module as a host would, and holds every
// answer against the contract. What the world did and what the module answered is kept, and played again to other
// instances: with the same stream (the answers must be the same), with longer records, with events that are to be ignored,
// and over a state that was saved half way. So one recording gives conformance, determinism, tolerance and the state's
// round trip. Guests run as in a host: metered, fenced, with the fuel that a host would give.
//
// A [Finding] is one thing that is wrong, and says what to do. `kvhost policy check` prints them; a vendor's own Go test
// calls [Run].
package plugintest

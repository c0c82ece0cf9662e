// Package plugintest checks policy modules: any .wasm file, by any author.
//
// [Check] plays a host with a small world of entries, requests, leases and namespaces. It asks the module as a host
// would, and checks every answer against the contract. It records the events and the answers and replays them to other
// instances: with the same events (the answers must be the same), with longer records, with events that must be
// ignored, and from a state that was saved half way. So one recording tests conformance, determinism, tolerance and the
// state's round trip. Guests run as in a host, with the fuel that a host would give.
//
// A [Finding] is one defect with a remedy. `kvhost policy check` prints findings.
package plugintest

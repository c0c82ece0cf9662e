// Package plugins tests the vendors' plugins below it: one directory each, with its source, manifest and Makefile, as a
// vendor outside this repository would have them.
//
// The one idea: what is tested is the built .wasm, in the places where it will run. Each is judged by plugintest, decides
// for a real host whose every byte is compared, and is measured beside what it would replace.
package plugins

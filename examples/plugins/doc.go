// Package plugins tests the vendors' plugins below it. Each directory is one plugin with its source, manifest and
// Makefile, as a vendor outside this repository would have them.
//
// The built .wasm is tested where it will run: it is checked by plugintest, decides for a real host whose every byte is
// compared, and is measured beside the policy that it would replace.
package plugins

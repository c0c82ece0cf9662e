// Package dist embeds the first-party policies that were built to wasm beside this file, so that one binary holds them.
//
// The one idea: whatever *.wasm stands in this directory when the host is compiled is embedded. Nothing needs to be
// built first: without any, the host still builds, and falls back to the native policies. Build them with
//
//	go run ./plugins/dist/build
package dist

import (
	"embed"
	"fmt"
	"io/fs"
	"strings"
)

// The pattern takes the directory as it is, because "*.wasm" would be an error before the first build.
//
//go:embed *
var files embed.FS

const suffix = ".wasm"

// Names are the embedded policies without ".wasm", sorted.
func Names() []string {
	var names []string
	entries, _ := files.ReadDir(".") // an embedded root is always readable
	for _, e := range entries {
		if name, ok := strings.CutSuffix(e.Name(), suffix); ok && !e.IsDir() {
			names = append(names, name)
		}
	}
	return names
}

// Read gives a policy's bytes by name, with or without ".wasm". The error matches [fs.ErrNotExist] when it is not there.
func Read(name string) ([]byte, error) {
	b, err := files.ReadFile(strings.TrimSuffix(name, suffix) + suffix)
	if err != nil {
		return nil, fmt.Errorf("dist: no embedded policy %q: %w", name, fs.ErrNotExist)
	}
	return b, nil
}

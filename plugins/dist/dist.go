// Package dist embeds first-party policies that were built to wasm, so that the binary needs no other files.
//
// It embeds every *.wasm.zst in this directory at the time of compilation. The files need not exist: without them the host
// still builds, and uses the native policies. Build them with
//
//	go run ./plugins/internal/build
package dist

import (
	"embed"
	"fmt"
	"io/fs"
	"slices"
	"strings"
)

// The pattern takes the whole directory, because "*.zst" would be an error before the first build.
//
//go:embed *
var files embed.FS

// Names returns the names of the embedded policies without ".wasm", sorted.
func Names() []string {
	var names []string
	entries, _ := files.ReadDir(".") // cannot fail for an embedded directory
	for _, e := range entries {
		if name, ok := strings.CutSuffix(e.Name(), Suffix); ok && !e.IsDir() {
			names = append(names, name)
		}
	}
	return names
}

// Read decompresses a policy, given its name with or without ".wasm". For an unknown name the error matches
// [fs.ErrNotExist].
func Read(name string) ([]byte, error) {
	name = strings.TrimSuffix(name, ".wasm")
	packed, err := files.ReadFile(name + Suffix)
	if err != nil {
		return nil, fmt.Errorf("dist: no embedded policy %q: %w", name, fs.ErrNotExist)
	}
	var base []byte
	if hasBase(packed) {
		i := slices.IndexFunc(Names(), func(n string) bool { p, _ := files.ReadFile(n + Suffix); return !hasBase(p) })
		if i < 0 {
			return nil, fmt.Errorf("dist: embedded policy %q: %w", name, errModule)
		}
		if base, err = Read(Names()[i]); err != nil {
			return nil, err
		}
	}
	module, err := Decode(packed, base)
	if err != nil {
		return nil, fmt.Errorf("dist: embedded policy %q: %w", name, err)
	}
	return module, nil
}

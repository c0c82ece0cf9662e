package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/kvhost/kvhost/plugins/dist"
)

// output is where modules go.
type output interface {
	// path is the directory.
	path() string
	// read gives the module that an earlier run wrote; nil when there is none.
	read(name string) []byte
	// write replaces it.
	write(name string, module []byte) (path string, err error)
}

// plainDir holds modules as a host reads them from files.
type plainDir string

func (d plainDir) path() string { return string(d) }

func (d plainDir) file(name string) string { return filepath.Join(string(d), name+".wasm") }

func (d plainDir) read(name string) []byte {
	b, _ := os.ReadFile(d.file(name)) // what cannot be read is written again
	return b
}

func (d plainDir) write(name string, module []byte) (string, error) {
	if bytes.Equal(d.read(name), module) {
		return d.file(name), nil
	}
	return d.file(name), replace(d.file(name), module)
}

// embedDir holds compressed modules for embedding. The base must be written first.
type embedDir struct {
	dir     string
	oldBase []byte // what the modules of an earlier run were compressed with
	base    []byte
}

func openEmbedDir(dir string) *embedDir {
	d := &embedDir{dir: dir}
	d.oldBase = d.read(dist.Base)
	return d
}

func (d *embedDir) path() string { return d.dir }

func (d *embedDir) file(name string) string { return filepath.Join(d.dir, name+dist.Suffix) }

func (d *embedDir) read(name string) []byte {
	packed, err := os.ReadFile(d.file(name))
	if err != nil {
		return nil
	}
	base := d.oldBase
	if name == dist.Base {
		base = nil
	}
	module, _ := dist.Decode(packed, base) // what cannot be read is written again
	return module
}

func (d *embedDir) write(name string, module []byte) (string, error) {
	if name == dist.Base {
		d.base = module
	} else if d.base == nil {
		return "", fmt.Errorf("the base %q is not written yet", dist.Base)
	}
	unchanged := bytes.Equal(d.base, d.oldBase) && bytes.Equal(d.read(name), module)
	if unchanged {
		return d.file(name), nil
	}
	base := d.base
	if name == dist.Base {
		base = nil
	}
	packed, err := dist.Encode(module, base)
	if err != nil {
		return "", err
	}
	return d.file(name), replace(d.file(name), packed)
}

// sweep removes modules that no plugin has any more: they would be embedded, too.
func (d *embedDir) sweep(plugins []plugin) error {
	keep := map[string]bool{}
	for _, p := range plugins {
		keep[d.file(p.name)] = true
	}
	for _, pattern := range []string{"*.wasm", "*" + dist.Suffix} {
		found, err := filepath.Glob(filepath.Join(d.dir, pattern))
		if err != nil {
			return err
		}
		for _, path := range found {
			if keep[path] {
				continue
			}
			if err := os.Remove(path); err != nil {
				return err
			}
		}
	}
	return nil
}

// writeOverlay tells the go command to find the modules next to the overlay where dist embeds them.
func writeOverlay(overlay, dir string, plugins []plugin) error {
	files := map[string]string{}
	for _, p := range plugins {
		name := p.name + dist.Suffix
		files[filepath.Join(dir, name)] = filepath.Join(filepath.Dir(overlay), name)
	}
	text, err := json.MarshalIndent(map[string]any{"Replace": files}, "", "\t")
	if err != nil {
		return err
	}
	return replace(overlay, append(text, '\n'))
}

// replace writes next to the target and renames: two builders at once do no harm, and a reader never sees half a file.
func replace(target string, data []byte) error {
	f, err := os.CreateTemp(filepath.Dir(target), ".kvhost-policy-")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Chmod(0o644), f.Close()); err == nil {
		err = os.Rename(f.Name(), target)
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}

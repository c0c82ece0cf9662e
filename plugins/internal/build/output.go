package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"

	"github.com/kvhost/kvhost/plugins/dist"
)

// output is a directory for modules, either uncompressed for a host's policy_dir or compressed for embedding. In the
// second case the base must be written first.
type output struct {
	dir        string
	compressed bool
	oldBase    []byte // base of the modules of an earlier run
	base       []byte
}

func openEmbedDir(dir string) *output {
	d := &output{dir: dir, compressed: true}
	d.oldBase = d.read(dist.Base)
	return d
}

func (d *output) file(name string) string {
	if d.compressed {
		return filepath.Join(d.dir, name+dist.Suffix)
	}
	return filepath.Join(d.dir, name+".wasm")
}

// read returns the module of an earlier run, or nil if there is none or it cannot be read.
func (d *output) read(name string) []byte {
	module, err := os.ReadFile(d.file(name))
	if err != nil || !d.compressed {
		return module
	}
	base := d.oldBase
	if name == dist.Base {
		base = nil
	}
	module, _ = dist.Decode(module, base)
	return module
}

// write replaces the file of a module.
func (d *output) write(name string, module []byte) (path string, err error) {
	path = d.file(name)
	if d.compressed && name == dist.Base {
		d.base = module
	}
	if bytes.Equal(d.base, d.oldBase) && bytes.Equal(d.read(name), module) {
		return path, nil
	}
	if d.compressed {
		base := d.base
		if name == dist.Base {
			base = nil
		}
		if module, err = dist.Encode(module, base); err != nil {
			return "", err
		}
	}
	return path, replace(path, module)
}

// sweep removes modules without a plugin, which would be embedded as well.
func (d *output) sweep(plugins []plugin) error {
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

// writeOverlay writes the overlay that makes the go command find the modules where dist embeds them.
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

// replace writes a file next to the target and renames it. Two builders can run at once, and a reader never sees half a
// file.
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

package policytest

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
)

// refresh copies a file, or a directory's source files, and leaves alone what is the same, so that make sees what
// changed.
func refresh(from, to string) error {
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		target := filepath.Join(to, rel)
		switch {
		case d.IsDir() && d.Name() == "target": // cargo's
			return filepath.SkipDir
		case d.IsDir():
			return os.MkdirAll(target, 0o700)
		case filepath.Ext(path) == ".wasm":
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if old, err := os.ReadFile(target); err == nil && bytes.Equal(old, text) {
			return nil
		}
		if err := os.MkdirAll(filepath.Dir(target), 0o700); err != nil {
			return err
		}
		return os.WriteFile(target, text, 0o600)
	})
}

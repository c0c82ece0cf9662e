package config

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"time"

	"github.com/kvhost/kvhost/staging"
)

// measure converts capacities that are a part of the root's file system to bytes.
func (l *Loaded) measure() (err error) {
	for i := range l.Config.Roots {
		r := &l.Config.Roots[i]
		if r.part == 0 {
			continue
		}
		if k := r.Kind(); !k.HasDirectory() {
			err = errors.Join(err, fmt.Errorf("%w: root %s: a capacity of %s: %s has no file system, want bytes", ErrValue, r.Path,
				Amount{Part: r.part}, k))
			continue
		}
		total, e := fileSystemBytes(r.Path)
		if e != nil {
			err = errors.Join(err, fmt.Errorf("%w: root %s: a capacity of %s: %w", ErrValue, r.Path, Amount{Part: r.part}, e))
			continue
		}
		r.Capacity, r.part = int64(r.part*float64(total))>>20<<20, 0
	}
	return err
}

// fileSystemBytes returns the size of the file system of a path, which need not exist yet. It does not wait long for a file
// system that hangs.
func fileSystemBytes(path string) (int64, error) {
	type answer struct {
		total int64
		err   error
	}
	got := make(chan answer, 1)
	go func() { // ends with the system calls
		s, err := staging.OS().Statfs(path)
		if errors.Is(err, fs.ErrNotExist) {
			s, err = staging.OS().Statfs(filepath.Dir(filepath.Clean(path)))
		}
		got <- answer{s.Total, err}
	}()
	select {
	case a := <-got:
		return a.total, a.err
	case <-time.After(readTimeout):
		return 0, fmt.Errorf("its file system does not answer in %s", readTimeout)
	}
}

package devices

import (
	"errors"
	"fmt"
	"slices"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/memfs"
	"github.com/kvhost/kvhost/staging"
)

// openMemory creates the file systems of the roots in memory. It maps the first step of each, and page-locks nothing.
func (d *Devices) openMemory() error {
	d.memory = map[int]*memfs.FS{}
	for i, r := range d.cfg.Roots {
		if !r.Kind().TakesMemory() {
			continue
		}
		fsys, err := memfs.New(r.Capacity, d.log.With("root", r.Path))
		if err != nil {
			return fmt.Errorf("root %s: %w", r.Path, err)
		}
		if r.AsNeeded {
			fsys.AsNeeded()
		}
		d.memory[i] = fsys
	}
	return nil
}

// startMemory page-locks the memory of roots near the GPUs in use, for these GPUs and for others. Each root can be used when its first step
// is ready. The rest follows in the background, and yields is called before each step.
func (d *Devices) startMemory(nodes []int, others []staging.Pinner, yields func()) {
	pinners := slices.Clone(others)
	for _, g := range d.gpus {
		pinners = append(pinners, g.Pinner())
	}
	for i, r := range d.cfg.Roots {
		if fsys := d.memory[i]; fsys != nil {
			fsys.Yields(yields)
			fsys.Start(nodes, pinners...)
			s := fsys.Stats()
			d.log.Info("memory root", "root", r.Path, "bytes", s.Wanted, "ready", s.Ready, "pages", string(s.Pages),
				"gpus", len(d.gpus), "numa_nodes", nodes)
		}
	}
}

// Memory returns the memory of roots in memory, by path.
func (d *Devices) Memory() map[string]*memfs.FS {
	out := map[string]*memfs.FS{}
	for i, fsys := range d.memory {
		out[d.cfg.Roots[i].Path] = fsys
	}
	return out
}

// RootFS returns the file system of a root and the bytes that its pieces may take. A root that is not a directory has a
// file system of its own. For a directory, RootFS returns fsys and the root's capacity without the bytes that probes
// may write.
func (d *Devices) RootFS(i int, r config.Root, fsys staging.FS) (staging.FS, int64) {
	if m := d.memory[i]; m != nil {
		return m, memfs.Usable(r.Capacity)
	}
	if b := d.bucket[i]; b != nil {
		return b, r.Capacity
	}
	return fsys, r.Capacity - d.probeBytes(r)
}

// unlockMemory ends the page-locking. It must be called while the GPUs are open.
func (d *Devices) unlockMemory() error {
	var errs []error
	for _, fsys := range d.memory {
		errs = append(errs, fsys.Unlock())
	}
	return errors.Join(errs...)
}

// CloseRoots closes the file systems of roots that are not directories. No store may use them any more.
func (d *Devices) CloseRoots() error {
	var errs []error
	for _, fsys := range d.memory {
		errs = append(errs, fsys.Close())
	}
	for _, fsys := range d.bucket {
		errs = append(errs, fsys.Close())
	}
	d.memory, d.bucket = nil, nil
	return errors.Join(errs...)
}

package store

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// apart returns an error if the root is the same directory as another root, through a link or a mount, or if one of the two
// contains the other. Each root would count, evict and sweep the files of the other. Scans skip roots that are nested more
// deeply.
func (r *root) apart() error {
	bare, above := r.Health.Bare(), r.Path+"/.."
	self, err := bare.Stat(r.Path)
	missing := errors.Is(err, fs.ErrNotExist) // a dry store does not create the directory
	if missing {
		above, err = filepath.Dir(r.Path), nil
	}
	if err != nil || r.cfg.NoDirectory {
		return err
	}
	others := map[[2]uint64]string{}
	for _, o := range r.store.roots {
		if info, err := o.Health.Bare().Stat(o.Path); o != r && !o.cfg.NoDirectory && err == nil {
			others[[2]uint64{info.Dev, info.Ino}] = o.Path
		}
	}
	if o, ok := others[[2]uint64{self.Dev, self.Ino}]; ok {
		return fmt.Errorf("%w: the roots %s and %s are one directory; name it once", ErrConfig, r.Path, o)
	}
	for below := self; ; above += "/.." {
		info, err := staging.OS().Stat(above)
		if err != nil || info.Same(below) { // no permission, or the top of the file system
			break
		}
		o, ours := others[[2]uint64{info.Dev, info.Ino}]
		if ours {
			return fmt.Errorf("%w: the root %s is inside of the root %s; move one of them", ErrConfig, r.Path, o)
		}
		if meta, err := staging.OS().Stat(above + "/" + pieceformat.MetaDir); err == nil && meta.IsDir() {
			if real, err := filepath.EvalSymlinks(above); err == nil {
				above = real
			}
			return fmt.Errorf("%w: the root %s is inside of %s, another host's root; move one of them, or remove %[3]s/%s if no host has it",
				ErrConfig, r.Path, above, pieceformat.MetaDir)
		}
		below = info
	}
	if missing {
		return nil
	}
	list, err := bare.ReadDir(r.Path)
	for _, e := range list {
		if !e.IsDir() || e.Name()[0] == '.' {
			continue
		}
		if meta, err := bare.Stat(r.Slash + e.Name() + "/" + pieceformat.MetaDir); err == nil && meta.IsDir() {
			return fmt.Errorf("%w: the root %s has another one in it, %s; move one of them, or remove %[3]s/%s if no host has it",
				ErrConfig, r.Path, r.Slash+e.Name(), pieceformat.MetaDir)
		}
	}
	return err
}

package files

import (
	"errors"
	"io/fs"
	"path/filepath"
	"strings"

	"github.com/kvhost/kvhost/host/store/pieceformat"
)

// maxMade is how often an operation makes the directory that it needs. Somebody may remove it each time before it is used.
const maxMade = 4

// InDir tries an operation that gives a file the name, and tries again with the directory made where that is not there.
func (d *Dir) InDir(name string, try func() error) error {
	err := try()
	for n := 0; n < maxMade && errors.Is(err, fs.ErrNotExist); n++ {
		if err := d.MakeDir(filepath.Dir(name)); err != nil {
			return err
		}
		err = try()
	}
	return err
}

// Leave removes the directory that a file was in, and those above it, where nothing is left in them. Each is a block of the
// file system, which counts to nobody, and a place policy may make one for each piece. A put that found one of them there
// makes it again (InDir). Other hosts may be older: what they share stays.
func (d *Dir) Leave(name string) {
	if d.shared || strings.HasPrefix(name[min(len(d.Slash), len(name)):], pieceformat.MetaDir+"/") {
		return
	}
	for dir := filepath.Dir(name); len(dir) > len(d.Path) && d.drop(dir); dir = filepath.Dir(dir) {
	}
}

// drop removes a directory that is empty. Nobody may take its name for durable who does not see it go, so it stays while
// names are made durable.
func (d *Dir) drop(dir string) bool {
	if !d.settling.TryLock() {
		return false
	}
	defer d.settling.Unlock()
	if d.FS.Remove(dir) != nil {
		return false
	}
	d.lasting.Delete(dir)
	return true
}

package files

import (
	"context"
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
// makes it again (InDir). That costs a put half as much again where each piece has one, so those that are tolerated stay.
// Other hosts may be older: what they share stays.
func (d *Dir) Leave(name string) {
	if d.shared || !d.account.DirectoriesGo() || strings.HasPrefix(name[min(len(d.Slash), len(name)):], pieceformat.MetaDir+"/") {
		return
	}
	for dir := filepath.Dir(name); len(dir) > len(d.Path) && d.drop(dir); dir = filepath.Dir(dir) {
	}
}

// drop removes a directory that is empty, while no name is made durable: nobody may take its name for durable who does not
// see it go.
func (d *Dir) drop(dir string) bool {
	d.settling.Lock()
	defer d.settling.Unlock()
	if d.FS.Remove(dir) != nil {
		return false
	}
	d.lasting.Delete(dir)
	d.account.Directories(-dirBytes)
	return true
}

// dirBytes is what a directory takes: a block. One with many names takes more, less than half of what is tolerated for
// each of them.
const dirBytes = 4096

// make makes a directory and those above it that are missing, and counts them.
func (d *Dir) make(dir string) error {
	d.settling.Lock()
	defer d.settling.Unlock()
	missing := int64(0)
	for above := dir; len(above) > len(d.Path); above = filepath.Dir(above) {
		if _, err := d.FS.Stat(above); !errors.Is(err, fs.ErrNotExist) {
			break
		}
		d.lasting.Delete(above) // the name is a new one
		missing++
	}
	err := d.FS.MkdirAll(dir, 0o700)
	if err == nil && !d.shared {
		d.account.Directories(missing * dirBytes)
	}
	return err
}

// CountDirs counts the directories that are there when the root is opened. Those without others in them, nearly all, are
// not read where the file system counts a directory's own (as links to it). The place policies that the root keeps count
// with them, for a module takes as much as hundreds of directories, but not in a root that they would take a good part of.
func (d *Dir) CountDirs(ctx context.Context) {
	n, kept, policies := int64(0), int64(0), d.Slash+pieceformat.PoliciesDir
	pending := []string{d.Path}
	for len(pending) > 0 && ctx.Err() == nil {
		dir := pending[len(pending)-1]
		pending = pending[:len(pending)-1]
		info, err := d.FS.Stat(dir)
		if err != nil || !info.IsDir() {
			continue // it went, or nobody may look into it
		}
		n++
		if info.Links == noneInside && dir != policies {
			continue
		}
		inside, err := d.FS.ReadDir(dir)
		if err != nil {
			continue
		}
		for _, e := range inside {
			if e.IsDir() {
				pending = append(pending, dir+"/"+e.Name())
			} else if dir == policies {
				info, _ := d.FS.Stat(dir + "/" + e.Name()) // nothing, if it went
				kept += (info.Size + dirBytes - 1) / dirBytes
			}
		}
	}
	if kept*dirBytes <= d.account.Capacity()/policiesShare {
		n += kept
	}
	d.account.Directories(n * dirBytes)
}

// policiesShare is the part of a root's capacity that the place policies in it may take and still count.
const policiesShare = 16

// noneInside is how many links a directory without others in it has: its name, and its own entry for itself.
const noneInside = 2

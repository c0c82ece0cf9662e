package store

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/files"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// keptDir is the files in a root that the store keeps for itself.
type keptDir struct {
	*files.Dir
	Catalog  *catalog.Catalog
	Sequence *files.Sequence
}

// maxFile bounds what Read reads.
const maxFile = 4 << 20

// Read reads a whole file, given by its path below the root.
func (d *keptDir) Read(rel string) ([]byte, error) {
	f, err := d.FS.OpenFile(d.Path+"/"+rel, os.O_RDONLY, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size > maxFile {
		return nil, fmt.Errorf("%w: %s has %d bytes", pieceformat.ErrDamaged, rel, info.Size)
	}
	b := make([]byte, info.Size)
	n, err := f.ReadAt(b, 0)
	if err != nil && err != io.EOF {
		return nil, err
	}
	if int64(n) < info.Size {
		return nil, fmt.Errorf("%w: %s: %d of %d bytes", pieceformat.ErrDamaged, rel, n, info.Size)
	}
	return b, nil
}

// Replace replaces a file, durably, name included.
func (d *keptDir) Replace(rel string, write func(staging.File) error) error {
	if err := d.replace(rel, write); err != nil {
		return err
	}
	return d.FS.SyncDir(d.Path + "/" + pieceformat.MetaDir)
}

// replace is Replace, but for the durability of the name.
func (d *keptDir) replace(rel string, write func(staging.File) error) error {
	name := d.Path + "/" + rel
	temp := d.Sequence.TempName(name)
	f, err := d.FS.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	if err = write(f); err == nil {
		err = f.Datasync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = d.FS.Rename(temp, name)
	}
	if err != nil {
		_ = d.FS.Remove(temp) // a start removes it
	}
	return err
}

// read opens a file and gives it to read, with its size.
func (d *keptDir) read(rel string, read func(f staging.File, size int64) error) error {
	f, err := d.FS.OpenFile(d.Path+"/"+rel, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err == nil {
		err = read(f, info.Size)
	}
	return errors.Join(err, f.Close())
}

// Keep writes a file with these bytes into a directory below the root, and its copy, durably, unless they are there.
func (d *keptDir) Keep(dir, base string, data []byte) error {
	for _, dir := range pieceformat.Copies(dir) {
		if err := d.keep(dir, base, data); err != nil {
			return err
		}
	}
	return nil
}

func (d *keptDir) keep(dir, base string, data []byte) error {
	name := d.Slash + dir + "/" + base
	if old, err := d.Read(dir + "/" + base); err == nil && bytes.Equal(old, data) {
		return d.syncNames(dir) // whoever wrote it may have been killed before that
	}
	temp := d.Sequence.TempName(name)
	err := d.write(temp, data)
	if err == nil {
		err = health.Clear(d.FS, name, false, d.Log)
	}
	if err == nil {
		err = d.FS.Rename(temp, name)
	}
	if err != nil {
		d.Discard(temp, int64(len(data)))
		return fmt.Errorf("store: root %s: keeping %s: %w", d.Path, dir, err)
	}
	return d.syncNames(dir)
}

// kept reads a file that Keep has written, and judges it. A copy that is missing or damaged is written again.
func (d *keptDir) kept(dir, base string, judge func([]byte) error) (data []byte, err error) {
	for _, dir := range pieceformat.Copies(dir) {
		b, bad := d.Read(dir + "/" + base)
		if bad == nil {
			bad = judge(b)
		}
		switch {
		case bad == nil:
			data = b
		case err == nil || errors.Is(err, fs.ErrNotExist):
			err = bad
		}
	}
	if data == nil || err == nil {
		return data, err
	}
	if !errors.Is(err, fs.ErrNotExist) {
		d.Log.Warn("one of two copies cannot be read and is written again", "file", dir+"/"+base, "error", err)
	}
	if err := d.Keep(dir, base, data); err != nil {
		d.Log.Warn("there is one copy of two", "file", dir+"/"+base, "error", err)
	}
	return data, nil
}

func (d *keptDir) write(name string, data []byte) error {
	f, err := d.FS.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(data, 0)
	if err == nil {
		err = f.Datasync()
	}
	return errors.Join(err, f.Close())
}

func (d *keptDir) syncNames(dir string) error {
	if err := d.FS.SyncDir(d.Slash + dir); err != nil {
		return fmt.Errorf("store: root %s: keeping %s: %w: %w", d.Path, dir, files.ErrSync, err)
	}
	return nil
}

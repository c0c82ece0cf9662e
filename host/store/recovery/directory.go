package recovery

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"

	"github.com/kvhost/kvhost/host/store/catalog"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// Directory is a root's files that the store keeps for itself.
type Directory struct {
	Path    string // the root's
	FS      staging.FS
	Log     *slog.Logger
	Catalog *catalog.Catalog
	Temp    func(target string) string // names a temporary
}

// maxFile bounds what Read reads.
const maxFile = 4 << 20

// Read reads a whole file, given by its path below the root.
func (d *Directory) Read(rel string) ([]byte, error) {
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
func (d *Directory) Replace(rel string, write func(staging.File) error) error {
	if err := d.replace(rel, write); err != nil {
		return err
	}
	return d.FS.SyncDir(d.Path + "/" + pieceformat.MetaDir)
}

// replace is Replace, but for the durability of the name.
func (d *Directory) replace(rel string, write func(staging.File) error) error {
	name := d.Path + "/" + rel
	temp := d.Temp(name)
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
func (d *Directory) read(rel string, read func(f staging.File, size int64) error) error {
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

package pieceformat

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/kvhost/kvhost/staging"
)

// ReadFile reads a whole file. It returns [ErrDamaged] if the file is longer than most bytes, or shorter than its own size
// says.
func ReadFile(fsys staging.FS, name string, most int64) ([]byte, staging.Info, error) {
	f, err := fsys.OpenFile(name, os.O_RDONLY, 0)
	if err != nil {
		return nil, staging.Info{}, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, info, err
	}
	if info.Size > most {
		return nil, info, fmt.Errorf("%w: %s has %d bytes", ErrDamaged, name, info.Size)
	}
	b := make([]byte, info.Size)
	switch n, err := f.ReadAt(b, 0); {
	case err != nil && err != io.EOF:
		return nil, info, err
	case n < len(b):
		return nil, info, fmt.Errorf("%w: %s: %d of %d bytes", ErrDamaged, name, n, len(b))
	}
	return b, info, nil
}

// ReplaceFile creates a file under a temporary name, lets write fill it, and renames it to name. With sync, the bytes are
// durable before the rename. The caller must make the name durable.
func ReplaceFile(fsys staging.FS, temp, name string, sync bool, write func(staging.File) error) error {
	f, err := fsys.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	if err = write(f); err == nil && sync {
		err = f.Datasync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = fsys.Rename(temp, name)
	}
	if err != nil {
		_ = fsys.Remove(temp) // the next start removes it
	}
	return err
}

// Holding returns a function for [ReplaceFile] that writes these bytes.
func Holding(b []byte) func(staging.File) error {
	return func(f staging.File) error {
		_, err := f.WriteAt(b, 0)
		return err
	}
}

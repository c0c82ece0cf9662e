package health

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/staging"
)

// MakeRoot makes a root's directory, unless it is there. It does not make what is above: where that is missing, a file
// system is not mounted most of the time, and kvhost would fill the one below. With mount the directory must not be on
// the file system of /.
func MakeRoot(fsys staging.FS, dir string, mount bool) error {
	if mount {
		if err := mounted(fsys, dir); err != nil {
			return err
		}
	}
	err := fsys.Mkdir(dir, 0o700)
	switch {
	case err == nil:
	case errors.Is(err, fs.ErrExist):
		info, err := fsys.Stat(dir)
		if err == nil && !info.IsDir() {
			err = &fs.PathError{Op: "mkdir", Path: dir, Err: unix.ENOTDIR}
		}
		return err
	case errors.Is(err, fs.ErrNotExist):
		above := filepath.Dir(dir)
		if _, missing := staging.OS().Stat(above); missing == nil { // it takes no directories, as /proc
			return err
		}
		return fmt.Errorf("%w: %s: mount its file system, or mkdir -p %s", ErrNoParent, above, above)
	case errors.Is(err, unix.EROFS):
		return fmt.Errorf("%w: mount a writable file system, and name a directory there as the root", err)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%w: install -d -m 0700 -o %d %s", err, os.Geteuid(), dir)
	}
	return err
}

// mounted fails when a directory, or the one above it while it is missing, is on the file system of /.
func mounted(fsys staging.FS, dir string) error {
	system, err := staging.OS().Stat("/")
	if err != nil {
		return err
	}
	info, err := fsys.Stat(dir)
	if errors.Is(err, fs.ErrNotExist) {
		info, err = staging.OS().Stat(filepath.Dir(dir))
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil // MakeRoot says that it is missing
	case err == nil && info.Dev == system.Dev:
		return fmt.Errorf("%w: mount its file system, or take require_mount away", ErrNotMounted)
	}
	return err
}

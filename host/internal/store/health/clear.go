package health

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/staging"
)

// Clear frees a name that the store needs for a file of its own, or for a directory, from what is of another kind. A
// link, a pipe, a socket or a device is unlinked. A file with several names, a file in a directory's place and a
// directory in a file's get another name beside it, because somebody may want them.
func Clear(fsys staging.FS, name string, directory bool, log *slog.Logger) error {
	info, err := fsys.Stat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case directory && info.IsDir(), !directory && info.Mode.IsRegular() && info.Links == 1:
		return nil
	}
	aside := ""
	if info.IsDir() || info.Mode.IsRegular() {
		aside = fmt.Sprintf("%s.moved-%x", name, time.Now().UnixNano())
		err = fsys.RenameNoReplace(name, aside)
	} else {
		err = fsys.Remove(name)
	}
	log.Warn("what has the name of a file or directory of kvhost is something else, and is out of the way now", "name", name,
		"mode", info.Mode, "names", info.Links, "moved_to", filepath.Base(aside), "error", err)
	return err
}

// makeOwn makes a directory that the store keeps for itself below the root, and clears what is in its way.
func makeOwn(fsys staging.FS, root, dir string, log *slog.Logger) error {
	err := fsys.MkdirAll(root+"/"+dir, 0o700)
	if !errors.Is(err, unix.ENOTDIR) && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if above := filepath.Dir(dir); above != "." {
		if err := makeOwn(fsys, root, above, log); err != nil {
			return err
		}
	}
	if err := Clear(fsys, root+"/"+dir, true, log); err != nil {
		return err
	}
	return fsys.MkdirAll(root+"/"+dir, 0o700)
}

package health

import (
	"errors"
	"fmt"
	"io"

	"github.com/kvhost/kvhost/staging"
)

// Lock takes a root's lock file, which keeps other hosts away, and, of a root that nobody shares, the directory itself:
// whoever removes the file does not open the root to another host. It does not wait.
// prepare, if any, is called in between.
func Lock(fsys staging.FS, dir, file string, alone bool, prepare func() error) (locks []io.Closer, err error) {
	if alone {
		lock, err := fsys.Lock(dir)
		if errors.Is(err, staging.ErrLocked) {
			if other, ferr := fsys.Lock(file); ferr == nil {
				err = errors.Join(fmt.Errorf("%w, whose lock file was removed", err), other.Close())
			} else if errors.Is(ferr, staging.ErrLocked) {
				err = ferr // it says who
			}
		}
		if err != nil {
			return nil, err
		}
		locks = append(locks, lock)
	}
	if prepare != nil {
		err = prepare()
	}
	var lock io.Closer
	if err == nil {
		lock, err = fsys.Lock(file)
	}
	if err != nil {
		return nil, errors.Join(err, Unlock(locks))
	}
	return append(locks, lock), nil
}

// Unlock gives locks back.
func Unlock(locks []io.Closer) error {
	var errs []error
	for _, lock := range locks {
		errs = append(errs, lock.Close())
	}
	return errors.Join(errs...)
}

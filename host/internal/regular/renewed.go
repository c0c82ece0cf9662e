package regular

import (
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"sync"
)

// Renewed holds a value that was read from files, such as a certificate. It is read again when one of the files was replaced or has another
// modification time. It is safe for concurrent use.
type Renewed[T any] struct {
	read  func() (T, error)
	log   *slog.Logger
	names []string

	mu    sync.Mutex
	value T
	files []fs.FileInfo // the files when value was read
	said  string        // the last logged error; empty after a complete renewal
}

// Renew reads the files for the first time. Later failures of a renewal are logged, each reason once.
func Renew[T any](read func() (T, error), log *slog.Logger, names ...string) (*Renewed[T], error) {
	r := &Renewed[T]{read: read, log: log, names: names}
	return r, r.load()
}

// Now returns the current value. While a renewal is incomplete, it is the previous one.
func (r *Renewed[T]) Now() T {
	r.mu.Lock()
	defer r.mu.Unlock()
	said := ""
	if err := r.load(); err != nil {
		if said = err.Error(); said != r.said {
			r.log.Warn("a renewed file cannot be used: its earlier contents count", "error", err)
		}
	}
	r.said = said
	return r.value
}

func (r *Renewed[T]) load() error {
	now := make([]fs.FileInfo, len(r.names))
	for i, name := range r.names {
		var err error
		if now[i], err = os.Stat(name); err != nil && r.files != nil {
			return err
		}
		if now[i] != nil && !now[i].Mode().IsRegular() { // opening a FIFO would block, and with it every caller of Now
			return notRegular(name, now[i])
		}
	}
	if slices.EqualFunc(now, r.files, func(a, b fs.FileInfo) bool { return os.SameFile(a, b) && a.ModTime().Equal(b.ModTime()) }) {
		return nil
	}
	value, err := r.read()
	if err == nil {
		r.value, r.files = value, now
	}
	return err
}

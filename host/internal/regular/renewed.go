package regular

import (
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"sync"
)

// Renewed is what was read of files, such as a certificate's, and is read again once one of them is another, or has another time. It is
// safe for concurrent use.
type Renewed[T any] struct {
	read  func() (T, error)
	log   *slog.Logger
	names []string

	mu    sync.Mutex
	value T
	files []fs.FileInfo // when value was read
	said  string        // the last error in the log, until a renewal is whole
}

// Renew reads files for the first time. The log has a line for each reason for which a renewal does not count yet.
func Renew[T any](read func() (T, error), log *slog.Logger, names ...string) (*Renewed[T], error) {
	r := &Renewed[T]{read: read, log: log, names: names}
	return r, r.load()
}

// Now is what counts at present. While a renewal is half written, that is what was read before.
func (r *Renewed[T]) Now() T {
	r.mu.Lock()
	defer r.mu.Unlock()
	said := ""
	if err := r.load(); err != nil {
		if said = err.Error(); said != r.said {
			r.log.Warn("a renewed file cannot be used: what it held before counts", "error", err)
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
		if now[i] != nil && !now[i].Mode().IsRegular() { // who opens a FIFO waits, and all who ask Now with it
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

package regular

import (
	"os"
	"slices"
	"sync"
	"time"
)

// Renewed is what was read of files, such as a certificate's, and is read again once one of them has another time. It is safe for
// concurrent use.
type Renewed[T any] struct {
	read  func() (T, error)
	names []string

	mu    sync.Mutex
	value T
	times []time.Time // of the files, when value was read
}

// Renew reads files for the first time.
func Renew[T any](read func() (T, error), names ...string) (*Renewed[T], error) {
	r := &Renewed[T]{read: read, names: names}
	return r, r.load()
}

// Now is what counts at present. While a renewal is half written, that is what was read before.
func (r *Renewed[T]) Now() T {
	r.mu.Lock()
	defer r.mu.Unlock()
	_ = r.load()
	return r.value
}

func (r *Renewed[T]) load() error {
	now := make([]time.Time, len(r.names))
	for i, name := range r.names {
		if st, err := os.Stat(name); err == nil {
			now[i] = st.ModTime()
		}
	}
	if slices.Equal(now, r.times) {
		return nil
	}
	value, err := r.read()
	if err == nil {
		r.value, r.times = value, now
	}
	return err
}

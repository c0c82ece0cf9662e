package server

import (
	"sync/atomic"

	"github.com/kvhost/kvhost/host/internal/transfer"
)

// withdrawals are the word by which a client takes STOREs back from a host that does not answer. A nil one takes none back.
//
// A host that is stopped may go on at any instruction of a copy. So the word is read after the pages, and never before them alone:
// what a task has read is right if the word, read later, does not name its STORE yet.
type withdrawals struct {
	word    *uint64
	mapping *mapping
}

// cover reports whether a STORE was taken back. What its task has read before is read before the word is.
func (w *withdrawals) cover(id uint64) (back bool, err error) {
	// A load may pass one that follows it, on arm64 even one that acquires. It cannot pass a store that releases, nor that store a
	// load that acquires: sync/atomic's are such.
	var read atomic.Uint32
	read.Store(1)
	err = transfer.Guard([][]byte{w.mapping.data}, func() error {
		back = atomic.LoadUint64(w.word) >= id
		return nil
	})
	return back, err
}

// of is what a STORE's tasks ask.
func (w *withdrawals) of(id uint64) func() (bool, error) {
	if w == nil {
		return nil
	}
	return func() (bool, error) { return w.cover(id) }
}

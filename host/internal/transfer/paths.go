package transfer

import (
	"slices"
	"sync"
	"time"
)

// Paths collects the roots and routes of a job's pieces. A nil Paths collects nothing.
type Paths struct {
	mu   sync.Mutex
	list []PathUse
}

// PathUse is the pieces of a job that one route moved between the client's memory and one root.
type PathUse struct {
	Root, Route    string
	Pieces, Failed int
	Bytes          int64     // bytes of the files of pieces that did not fail
	Began, Ended   time.Time // start of the first piece, end of the last
}

// add records the end of a piece.
func (p *Paths) add(root, route string, began, now time.Time, bytes int64, err error) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	i := slices.IndexFunc(p.list, func(u PathUse) bool { return u.Root == root && u.Route == route })
	if i < 0 {
		i, p.list = len(p.list), append(p.list, PathUse{Root: root, Route: route, Began: began})
	}
	use := &p.list[i]
	if began.Before(use.Began) {
		use.Began = began
	}
	use.Pieces, use.Ended = use.Pieces+1, now
	if err != nil {
		use.Failed++
	} else {
		use.Bytes += bytes
	}
}

// List returns the collected uses. The caller owns the list.
func (p *Paths) List() []PathUse {
	if p == nil {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.list)
}

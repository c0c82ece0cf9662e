package files

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
)

// Quarantine is the damaged files that a root keeps for the operator to look at: the newest few.
type Quarantine struct {
	dir      *Dir
	sequence *Sequence
	maxFiles int // 0: none are kept
	maxBytes int64

	unread atomic.Bool // Recount could not look

	mu    sync.Mutex
	files []Kept          // oldest first
	known map[string]bool // those, and what is being removed
	bytes int64
	count uint64 // files moved here
}

// Kept is a damaged file.
type Kept struct {
	name  string // absolute; empty: the file was removed instead
	Bytes int64
}

func (q *Quarantine) init(d *Dir, cfg Config) {
	q.dir, q.sequence, q.known = d, cfg.Sequence, map[string]bool{}
	q.maxFiles, q.maxBytes = max(cfg.QuarantineFiles, 0), cfg.QuarantineBytes
}

// SetBytes changes how many bytes are kept. What is too much goes when the next file comes, or when bytes are needed.
func (q *Quarantine) SetBytes(most int64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.maxBytes = most
}

// Isolate moves a file into quarantine that the index does not know, so that its name is free.
func (q *Quarantine) Isolate(name string, cause error) {
	k, _ := q.Move(name, 0, cause)
	q.Remove(q.Add(k))
}

// Move moves a file into quarantine and returns it with its size, or removes it. left is what it takes if neither can
// be done, and booked. The caller books those of the file with Add.
func (q *Quarantine) Move(name string, most int64, cause error) (k Kept, left int64) {
	d := q.dir
	info, err := d.FS.Stat(name)
	if errors.Is(err, fs.ErrNotExist) || Misled(err) || err == nil && info.IsDir() {
		q.Recount()
		return Kept{}, 0
	}
	perhaps := "" // a name that the file may have, though the rename reported an error
	if err == nil && info.Mode.IsRegular() && q.maxFiles > 0 && q.fits(pieceformat.Padded(info.Allocated)) {
		k = Kept{name: q.nameFor(name), Bytes: pieceformat.Padded(info.Allocated)}
		if err = d.FS.RenameNoReplace(name, k.name); err != nil {
			d.Orphans.AddLate(k.name, err)
			now, serr := d.FS.Stat(k.name)
			if serr != nil && !errors.Is(serr, fs.ErrNotExist) {
				perhaps = k.name
			}
			if serr != nil || !now.Same(info) {
				k = Kept{}
			}
		} else {
			d.Leave(name)
		}
	}
	d.Log.Warn("damaged piece moved to quarantine", "file", name, "kept", k.name, "cause", cause, "error", err)
	if k.name == "" {
		left, _ = d.Remove(name, most)
	}
	if perhaps != "" && left == 0 {
		left = pieceformat.Padded(info.Allocated)
		d.Orphans.AddRenamed(perhaps, info, left)
	}
	return k, left
}

func (q *Quarantine) fits(bytes int64) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return bytes <= q.maxBytes
}

func (q *Quarantine) nameFor(name string) string {
	return q.dir.Slash + pieceformat.QuarantineName(q.sequence.Stamp(), q.sequence.Number(), filepath.Base(name))
}

// Add books a file and returns those that must be removed for it.
func (q *Quarantine) Add(k Kept) (excess []Kept) {
	if k.name == "" {
		return nil
	}
	return q.enter(k, true)
}

// enter books a file that is not booked yet. A file that was moved here just now counts as one more.
func (q *Quarantine) enter(k Kept, moved bool) (excess []Kept) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.known[k.name] {
		return nil
	}
	if moved {
		q.count++
	}
	q.known[k.name] = true
	q.files = append(q.files, k)
	q.bytes += k.Bytes
	q.dir.account.Add(capacity.Quarantine, k.Bytes)
	for len(q.files) > q.maxFiles || q.bytes > q.maxBytes {
		excess = append(excess, q.oldest())
	}
	return excess
}

// oldest takes the oldest file off the list; the account has it until it is removed.
func (q *Quarantine) oldest() Kept {
	k := q.files[0]
	q.files = slices.Delete(q.files, 0, 1)
	q.bytes -= k.Bytes
	return k
}

// Remove unlinks files that were taken off the list. The caller does not hold the root's lock.
func (q *Quarantine) Remove(list []Kept) {
	for _, k := range list {
		q.dir.Discard(k.name, k.Bytes)
		q.dir.account.Remove(capacity.Quarantine, k.Bytes)
		q.mu.Lock()
		delete(q.known, k.name)
		q.mu.Unlock()
	}
}

// Shrink removes quarantined files, oldest first, until so many bytes are free. It is false when there are none.
func (q *Quarantine) Shrink(bytes int64) bool {
	q.mu.Lock()
	var list []Kept
	for len(q.files) > 0 && bytes > 0 {
		k := q.oldest()
		bytes -= k.Bytes
		list = append(list, k)
	}
	q.mu.Unlock()
	q.Remove(list)
	return len(list) > 0
}

// Load books what is there at the start.
func (q *Quarantine) Load() error {
	if err := q.book(false); err != nil { // its bytes would be in no account
		return fmt.Errorf("store: root %s: %w", q.dir.Path, err)
	}
	return nil
}

// Recount books files that another program has moved into quarantine, as a repair of the root does while this host runs. It
// is called whenever a file is missing, before the file's own bytes are free, and at the end of a scan, which may have missed
// what was moved.
func (q *Quarantine) Recount() { q.unread.Store(q.book(true) != nil) }

// book books files that are here and not on the list; with repaired those alone that a repair has moved.
func (q *Quarantine) book(repaired bool) error {
	list, err := q.dir.FS.ReadDir(q.dir.Slash + pieceformat.QuarantineDir)
	if err != nil {
		return err
	}
	for _, e := range list {
		name := q.dir.Slash + pieceformat.QuarantineDir + "/" + e.Name()
		if repaired && (!pieceformat.IsRepairName(e.Name()) || q.has(name) || q.dir.Orphans.Has(name)) {
			continue // it is booked: this host's own were when they were moved
		}
		info, err := q.dir.FS.Stat(name)
		if errors.Is(err, fs.ErrNotExist) || err == nil && !info.Mode.IsRegular() {
			continue
		} else if err != nil {
			return err
		}
		q.Remove(q.enter(Kept{name: name, Bytes: pieceformat.Padded(info.Allocated)}, repaired))
	}
	return nil
}

func (q *Quarantine) has(name string) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.known[name]
}

// Reread is Recount if that was not possible, as without descriptors.
func (q *Quarantine) Reread() {
	if q.unread.Load() {
		q.Recount()
	}
}

// Reset forgets what is here, of a root that is opened again.
func (q *Quarantine) Reset() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.files, q.known, q.bytes = nil, map[string]bool{}, 0
}

// Count is how many files were moved here.
func (q *Quarantine) Count() uint64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.count
}

// Hold returns the bytes that are kept. Until release is called nothing is added and nothing leaves.
func (q *Quarantine) Hold() (bytes int64, release func()) {
	q.mu.Lock()
	return q.bytes, q.mu.Unlock
}

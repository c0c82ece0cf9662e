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

// Quarantine holds the newest damaged files of a root, for the operator to examine.
type Quarantine struct {
	dir      *Dir
	sequence *Sequence
	maxFiles int // 0 if no files are kept
	maxBytes int64

	unread atomic.Bool // the last Recount failed

	mu    sync.Mutex
	files []Kept          // oldest first
	known map[string]bool // names in files, and those of files that are being removed
	bytes int64
	count uint64 // number of files moved here
}

// Kept is a damaged file in quarantine.
type Kept struct {
	name  string // absolute; empty if the file was removed instead
	Bytes int64
}

func (q *Quarantine) init(d *Dir, cfg Config) {
	q.dir, q.sequence, q.known = d, cfg.Sequence, map[string]bool{}
	q.maxFiles, q.maxBytes = max(cfg.QuarantineFiles, 0), cfg.QuarantineBytes
}

// SetBytes changes the most bytes that are kept. Excess files are removed when the next file arrives or when bytes are needed.
func (q *Quarantine) SetBytes(most int64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.maxBytes = most
}

// Isolate moves a file that is not in the index into quarantine, so that its name is free.
func (q *Quarantine) Isolate(name string, cause error) {
	k, _ := q.Move(name, 0, cause)
	q.Remove(q.Add(k))
}

// Move moves a file into quarantine and returns it with its size. If that is not possible, it removes the file. If that fails,
// too, left is the number of bytes that were booked for it as an orphan. The caller must book the returned file with Add.
func (q *Quarantine) Move(name string, most int64, cause error) (k Kept, left int64) {
	d := q.dir
	info, err := d.FS.Stat(name)
	if errors.Is(err, fs.ErrNotExist) || Misled(err) || err == nil && info.IsDir() {
		q.Recount()
		return Kept{}, 0
	}
	perhaps := "" // name that the file may have although the rename reported an error
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

// Add books a file and returns the files that must be removed for it.
func (q *Quarantine) Add(k Kept) (excess []Kept) {
	if k.name == "" {
		return nil
	}
	return q.enter(k, true)
}

// enter books a file unless it is booked. With moved set, it also counts the file as moved here.
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

// oldest removes the oldest file from the list. Its bytes stay in the account until it is removed from the disk.
func (q *Quarantine) oldest() Kept {
	k := q.files[0]
	q.files = slices.Delete(q.files, 0, 1)
	q.bytes -= k.Bytes
	return k
}

// Remove unlinks files that were taken off the list. The root's lock must not be held.
func (q *Quarantine) Remove(list []Kept) {
	for _, k := range list {
		q.dir.account.Leave(capacity.Quarantine, k.Bytes)
		q.dir.Discard(k.name, k.Bytes)
		q.dir.account.Remove(capacity.Quarantine, k.Bytes)
		q.dir.account.Leave(capacity.Quarantine, -k.Bytes)
		q.mu.Lock()
		delete(q.known, k.name)
		q.mu.Unlock()
	}
}

// Shrink removes files, the oldest first, until the given bytes are freed. It returns false if there are none.
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

// Load books the existing files at the start.
func (q *Quarantine) Load() error {
	if err := q.book(false); err != nil { // otherwise its bytes would be in no account
		return fmt.Errorf("store: root %s: %w", q.dir.Path, err)
	}
	return nil
}

// Recount books files that another program has moved into quarantine, as a repair does while this host runs. It is called
// whenever a file is missing, before the bytes of that file are released. It is also called at the end of a scan, which may
// have missed a moved file.
func (q *Quarantine) Recount() { q.unread.Store(q.book(true) != nil) }

// book books files in the directory that are not on the list. With repaired set, it considers only files that a repair has
// moved.
func (q *Quarantine) book(repaired bool) error {
	list, err := q.dir.FS.ReadDir(q.dir.Slash + pieceformat.QuarantineDir)
	if err != nil {
		return err
	}
	for _, e := range list {
		name := q.dir.Slash + pieceformat.QuarantineDir + "/" + e.Name()
		if repaired && (!pieceformat.IsRepairName(e.Name()) || q.has(name) || q.dir.Orphans.Has(name)) {
			continue // booked: this host's own files were booked when they were moved
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

// Reread repeats a Recount that failed, for example for lack of descriptors.
func (q *Quarantine) Reread() {
	if q.unread.Load() {
		q.Recount()
	}
}

// Reset forgets all files, for a root that is opened again.
func (q *Quarantine) Reset() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.files, q.known, q.bytes = nil, map[string]bool{}, 0
}

// Count returns the number of files moved here.
func (q *Quarantine) Count() uint64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.count
}

// Hold returns the bytes that are kept. Until release is called, nothing is added and nothing is removed.
func (q *Quarantine) Hold() (bytes int64, release func()) {
	q.mu.Lock()
	return q.bytes, q.mu.Unlock
}

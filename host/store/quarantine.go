package store

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"

	"github.com/kvhost/kvhost/host/store/capacity"
	"github.com/kvhost/kvhost/host/store/entries"
	"github.com/kvhost/kvhost/host/store/pieceformat"
)

// quarantine is the damaged files that a root keeps for somebody to look at: the newest few. It is guarded by root.mu.
type quarantine struct {
	root  *root
	files []kept // oldest first
	bytes int64
}

type kept struct {
	name  string // absolute; empty: the file was removed instead
	bytes int64
}

// quarantineShare is the part of a root's capacity, 1/n, that its quarantine may take.
const quarantineShare = 16

// isolate moves a file into quarantine that the index does not know, so that its name is free.
func (q *quarantine) isolate(name string, cause error) {
	r := q.root
	k, left := q.move(name, 0, cause)
	r.Account.Add(capacity.Orphans, left)
	r.Lock()
	excess := q.add(k)
	r.Unlock()
	q.remove(excess)
}

// move moves a file into quarantine and returns it with its size, or removes it. left is what it takes if
// neither can be done. The caller books the bytes.
func (q *quarantine) move(name string, most int64, cause error) (k kept, left int64) {
	r := q.root
	info, err := r.fs.Stat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return kept{}, 0
	}
	if err == nil && r.store.cfg.QuarantineFiles > 0 && pieceformat.Padded(info.Allocated) <= r.cfg.Capacity/quarantineShare {
		k = kept{name: q.nameFor(name), bytes: pieceformat.Padded(info.Allocated)}
		if err = r.fs.RenameNoReplace(name, k.name); err != nil {
			r.deferDeleteLate(k.name, err)
			if now, serr := r.fs.Stat(k.name); serr != nil || !now.Same(info) {
				k = kept{}
			}
		}
	}
	r.log.Warn("damaged piece moved to quarantine", "file", name, "kept", k.name, "cause", cause, "error", err)
	if k.name == "" {
		left, _ = r.remove(name, most)
	}
	return k, left
}

func (q *quarantine) nameFor(name string) string {
	r := q.root
	return r.dir + "/" + pieceformat.QuarantineName(r.store.stamp(), r.store.number(), filepath.Base(name))
}

// add books a file and returns those that must be removed for it. The caller holds mu.
func (q *quarantine) add(k kept) (excess []kept) {
	r := q.root
	if k.name == "" {
		return nil
	}
	q.files = append(q.files, k)
	q.bytes += k.bytes
	r.Account.Add(capacity.Quarantine, k.bytes)
	r.count.quarantined++
	for len(q.files) > max(r.store.cfg.QuarantineFiles, 0) || q.bytes > r.cfg.Capacity/quarantineShare {
		excess = append(excess, q.oldest())
	}
	return excess
}

// oldest takes the oldest file off the list; the account has it until it is removed.
func (q *quarantine) oldest() kept {
	k := q.files[0]
	q.files = slices.Delete(q.files, 0, 1)
	q.bytes -= k.bytes
	return k
}

// remove unlinks files that were taken off the list. The caller does not hold mu.
func (q *quarantine) remove(list []kept) {
	r := q.root
	for _, k := range list {
		left, _ := r.remove(k.name, k.bytes)
		r.Account.Add(capacity.Orphans, left)
		r.Account.Remove(capacity.Quarantine, k.bytes)
	}
}

// shrink removes quarantined files, oldest first, until so many bytes are free. It is false when there are none.
func (q *quarantine) shrink(bytes int64) bool {
	r := q.root
	r.Lock()
	var list []kept
	for len(q.files) > 0 && bytes > 0 {
		k := q.oldest()
		bytes -= k.bytes
		list = append(list, k)
	}
	r.Unlock()
	q.remove(list)
	return len(list) > 0
}

// load books what is there at the start.
func (q *quarantine) load() error {
	r := q.root
	list, err := r.fs.ReadDir(r.dir + "/" + pieceformat.QuarantineDir)
	if err != nil {
		return fmt.Errorf("store: root %s: %w", r.dir, err)
	}
	var excess []kept
	r.Lock()
	for _, e := range list {
		name := r.dir + "/" + pieceformat.QuarantineDir + "/" + e.Name()
		info, err := r.fs.Stat(name)
		if err != nil || !info.Mode.IsRegular() {
			continue
		}
		excess = append(excess, q.add(kept{name: name, bytes: pieceformat.Padded(info.Allocated)})...)
	}
	r.count.quarantined = 0
	r.Unlock()
	q.remove(excess)
	return nil
}

// recount books files that another program has moved into quarantine, as a repair of the root beside this host does. It
// is called when a piece is missing, before the piece's own bytes are free. The caller does not hold mu.
func (q *quarantine) recount() {
	r := q.root
	list, err := r.fs.ReadDir(r.dir + "/" + pieceformat.QuarantineDir)
	if err != nil {
		return // a root that is gone altogether
	}
	var excess []kept
	for _, e := range list {
		name := r.dir + "/" + pieceformat.QuarantineDir + "/" + e.Name()
		if !pieceformat.IsRepairName(e.Name()) || q.holds(name) {
			continue // this host's own were booked when they were moved
		}
		info, err := r.fs.Stat(name)
		if err != nil || !info.Mode.IsRegular() {
			continue
		}
		r.Lock()
		if !q.has(name) {
			excess = append(excess, q.add(kept{name: name, bytes: pieceformat.Padded(info.Allocated)})...)
		}
		r.Unlock()
	}
	q.remove(excess)
}

func (q *quarantine) has(name string) bool {
	return slices.ContainsFunc(q.files, func(k kept) bool { return k.name == name })
}

func (q *quarantine) holds(name string) bool {
	r := q.root
	r.Lock()
	defer r.Unlock()
	return q.has(name)
}

// dropDamaged removes an entry because of one rank's file, which goes into quarantine.
func (r *root) dropDamaged(m entries.Mark, rank uint32, name string, cause error) {
	r.Lock()
	if !r.Stands(m) {
		r.Unlock()
		return
	}
	v := r.BeginEvict(m.Slot)
	r.Count.Damaged++
	r.Unlock()
	r.custody.unlinkDamaged(&v, rank, name, cause)
	r.Lock()
	r.FinishEvict(&v)
	r.Unlock()
}

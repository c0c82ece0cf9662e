package store

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"

	"github.com/kvhost/kvhost/host/store/pieceformat"
)

// quarantine is the damaged files that a root keeps for somebody to look at: the newest few.
type quarantine struct {
	files []kept // oldest first
	bytes int64
}

type kept struct {
	name  string // absolute
	bytes int64
}

// quarantineShare is the part of a root's capacity, 1/n, that its quarantine may take.
const quarantineShare = 16

// impound moves a file into quarantine and returns it with its size, or removes it, and then it has no name; left is what it
// takes if neither can be done. mu is not held.
func (r *root) impound(name string, most int64, cause error) (k kept, left int64) {
	info, err := r.fs.Stat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return kept{}, 0
	}
	if err == nil && r.store.cfg.QuarantineFiles > 0 && pieceformat.Padded(info.Allocated) <= r.cfg.Capacity/quarantineShare {
		k = kept{name: r.quarantineName(name), bytes: pieceformat.Padded(info.Allocated)}
		if err = r.fs.RenameNoReplace(name, k.name); err != nil {
			r.deferDeleteLate(k.name, err)
			if now, serr := r.fs.Stat(k.name); serr != nil || !now.Same(info) {
				k = kept{}
			}
		}
	}
	r.log.Warn("damaged piece taken out", "file", name, "kept", k.name, "cause", cause, "error", err)
	if k.name == "" {
		left, _ = r.remove(name, most)
	}
	return k, left
}

func (r *root) quarantineName(name string) string {
	return r.dir + "/" + pieceformat.QuarantineName(r.store.stamp(), r.store.seq.Add(1), filepath.Base(name))
}

// hold enters a file into the account, on top of what is used already, and returns those that must go for it. mu is held.
func (r *root) hold(k kept) (excess []kept) {
	if k.name == "" {
		return nil
	}
	r.quar.files = append(r.quar.files, k)
	r.quar.bytes += k.bytes
	r.used += k.bytes
	r.count.quarantined++
	for len(r.quar.files) > max(r.store.cfg.QuarantineFiles, 0) || r.quar.bytes > r.cfg.Capacity/quarantineShare {
		excess = append(excess, r.quar.files[0])
		r.quar.bytes -= r.quar.files[0].bytes
		r.quar.files = slices.Delete(r.quar.files, 0, 1)
	}
	return excess
}

// destroy unlinks files that hold gave up. mu is not held.
func (r *root) destroy(list []kept) {
	for _, k := range list {
		left, _ := r.remove(k.name, k.bytes)
		r.mu.Lock()
		r.stray += left
		r.used += left - k.bytes
		r.mu.Unlock()
	}
}

// purge gives up quarantined files, oldest first, until so many bytes are free. It is called with mu held and lets go of
// it meanwhile.
func (r *root) purge(bytes int64) {
	var list []kept
	for len(r.quar.files) > 0 && bytes > 0 {
		k := r.quar.files[0]
		r.quar.files = slices.Delete(r.quar.files, 0, 1)
		r.quar.bytes -= k.bytes
		bytes -= k.bytes
		list = append(list, k)
	}
	r.mu.Unlock()
	r.destroy(list)
	r.mu.Lock()
}

// loadQuarantine accounts for what is there at the start.
func (r *root) loadQuarantine() error {
	list, err := r.fs.ReadDir(r.dir + "/" + pieceformat.QuarantineDir)
	if err != nil {
		return fmt.Errorf("store: root %s: %w", r.dir, err)
	}
	var excess []kept
	r.mu.Lock()
	for _, e := range list {
		name := r.dir + "/" + pieceformat.QuarantineDir + "/" + e.Name()
		info, err := r.fs.Stat(name)
		if err != nil || !info.Mode.IsRegular() {
			continue
		}
		excess = append(excess, r.hold(kept{name: name, bytes: pieceformat.Padded(info.Allocated)})...)
	}
	r.count.quarantined = 0
	r.mu.Unlock()
	r.destroy(excess)
	return nil
}

// recount looks for files that somebody else has moved into quarantine, as a repair of the root beside this host does, and
// accounts for them. It is called when a piece is found gone, before its own bytes are free. mu is not held.
func (r *root) recount() {
	list, err := r.fs.ReadDir(r.dir + "/" + pieceformat.QuarantineDir)
	if err != nil {
		return // a root that is gone altogether
	}
	var excess []kept
	for _, e := range list {
		name := r.dir + "/" + pieceformat.QuarantineDir + "/" + e.Name()
		if !pieceformat.IsRepairName(e.Name()) || r.keeps(name) {
			continue // this host's own are accounted for by whoever moved them
		}
		info, err := r.fs.Stat(name)
		if err != nil || !info.Mode.IsRegular() {
			continue
		}
		r.mu.Lock()
		if !slices.ContainsFunc(r.quar.files, func(k kept) bool { return k.name == name }) {
			excess = append(excess, r.hold(kept{name: name, bytes: pieceformat.Padded(info.Allocated)})...)
		}
		r.mu.Unlock()
	}
	r.destroy(excess)
}

func (r *root) keeps(name string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.ContainsFunc(r.quar.files, func(k kept) bool { return k.name == name })
}

// condemn drops an entry because of one rank's file, which goes into quarantine.
func (r *root) condemn(m mark, rank uint32, name string, cause error) {
	r.mu.Lock()
	if !r.stands(m) {
		r.mu.Unlock()
		return
	}
	d := r.leave(m.slot)
	r.count.damaged++
	r.mu.Unlock()
	if r.fellows != nil {
		r.log.Warn("damaged piece: the evictor is asked to remove it", "file", name, "cause", cause)
		d.stray = r.fellows.disown(&d, d.pieces)
		r.mu.Lock()
		r.expelled(&d)
		r.mu.Unlock()
		return
	}
	k, left := r.impound(name, d.class.fileBytes(), cause)
	d.stray, _ = r.unlink(&d, d.pieces&^(1<<rank))
	d.stray += left
	r.mu.Lock()
	r.transfer(d.slot, k.bytes)
	excess := r.hold(k)
	r.expelled(&d)
	r.mu.Unlock()
	r.destroy(excess)
}

// transfer takes bytes out of an entry's account because another account is about to hold them. mu is held.
func (r *root) transfer(slot uint32, bytes int64) {
	n := min(bytes, r.x.Bytes(slot))
	r.x.Resize(slot, -n)
	r.used -= n
	r.bill(slot, -n)
}

package store

import (
	"errors"
	"io/fs"

	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// judge is the [scanJudge] of a shared root. It leaves unusable files alone.
type judge struct{ *joint }

// Found enters a piece that a scan has found. The piece may have been removed since its header was read. If its entry was
// removed during the scan, or the other hosts have excluded this host, Found checks that the file still exists. A piece that
// cannot be entered yet is booked nevertheless, because this host may become the evictor, and no record will announce the piece
// again.
func (r judge) Found(
	_ *scan, rel, _ string, cl *catalog.Class, h *pieceformat.Header, allocated int64,
) {
	switch backend(r).see(cl, h, rel, allocated) {
	case awaited:
		r.meet(sight{rel, cl, *h, allocated})
		return
	case withheld:
		return
	}
	ticket := r.member.Ticket()
	here := ticket != 0 && ticket == r.scanned.Load()
	r.set.Lock()
	went := r.removed == nil || r.removed[shared.ID{Namespace: h.Namespace, Group: h.Group, Key: h.Key}]
	r.set.Unlock()
	if here && !went {
		return
	}
	if _, err := r.kept.FS.Stat(r.kept.Slash + rel); here && !errors.Is(err, fs.ErrNotExist) {
		return
	}
	fp := kv.Fingerprint(h.Namespace, h.Group, h.Key)
	r.set.Lock()
	slot := r.set.Index.Find(fp, cl.Base, &h.Key)
	if slot != index.None && !here {
		entries.Forget(r.set, slot) // the next scan will find it
	}
	r.set.Unlock()
	if slot != index.None && here {
		r.root.drop(entries.Mark{Slot: slot, Fingerprint: fp})
	}
}

// lookAgain judges again the pieces that scans found while their entries were being written or removed. It runs before each
// step, because the step may propose entries to which they belong.
func (r *joint) lookAgain() {
	r.set.Lock()
	list := r.met
	r.met = nil
	r.set.Unlock()
	for i := range list {
		m := &list[i]
		judge{r}.Found(nil, m.rel, "", m.class, &m.header, m.allocated)
	}
}

func (r judge) Unsound(c *scan, name, _ string, info staging.Info, err error) {
	if !pieceformat.IsDamage(err) { // info may not describe any file
		c.unreadable(name, err)
		return
	}
	r.kept.Log.Warn("file of a shared root left alone; fsck says more", "file", name, "error", err)
	r.overlook(pieceformat.Padded(info.Allocated))
}

// Unknown leaves a piece alone, because another host may know its namespace.
func (r judge) Unknown(_ *scan, name string, allocated int64, err error) {
	r.kept.Log.Warn("piece of a shared root left alone", "file", name, "error", err)
	r.scans.count.Unclaimed.Add(1)
	r.overlook(allocated)
}

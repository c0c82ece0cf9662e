package store

import (
	"errors"
	"io/fs"

	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// judge is the [scanJudge] of a shared root: what is of no use to this host is left alone.
type judge struct{ *sharedRoot }

// sight is a piece that this host has met while it wrote or removed some of its entry.
type sight struct {
	rel       string
	class     *catalog.Class
	header    pieceformat.Header
	allocated int64
}

// Found enters a piece that a scan has met. It may have gone since its header was read; and while the others do not
// count on this host it may go at any time, without its knowledge. One that cannot be entered now is in the account all
// the same, because this host may be the evictor next: no record tells it of the piece again.
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
	_, err := r.kept.FS.Stat(r.kept.Slash + rel)
	ticket := r.member.Ticket()
	here := ticket != 0 && ticket == r.scanned.Load()
	if here && !errors.Is(err, fs.ErrNotExist) {
		return
	}
	fp := kv.Fingerprint(h.Namespace, h.Group, h.Key)
	r.set.Lock()
	slot := r.set.Index.Find(fp, cl.Base, &h.Key)
	if slot != index.None && !here {
		entries.Forget(r.set, slot) // the next scan finds it
	}
	r.set.Unlock()
	if slot != index.None && here {
		r.root.drop(entries.Mark{Slot: slot, Fingerprint: fp}, 0)
	}
}

// meet has lookAgain judge a piece.
func (r *sharedRoot) meet(m sight) {
	r.set.Lock()
	r.met = append(r.met, m)
	r.set.Unlock()
}

// lookAgain judges again what was met too early. It comes before each step: what is proposed there was known.
func (r *sharedRoot) lookAgain() {
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
	if !pieceformat.IsDamage(err) { // info may be that of no file
		c.unreadable(name, err)
		return
	}
	r.kept.Log.Warn("file of a shared root left alone; fsck says more", "file", name, "error", err)
	r.overlook(pieceformat.Padded(info.Allocated))
}

// Unknown leaves a piece alone: another host may know whose it is.
func (r judge) Unknown(_ *scan, name string, allocated int64, err error) {
	r.kept.Log.Warn("piece of a shared root left alone", "file", name, "error", err)
	r.scans.count.Unclaimed.Add(1)
	r.overlook(allocated)
}

package store

import (
	"errors"
	"fmt"
	"math/bits"
	"os"

	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// A put that evicts takes over a victim's file where it can: renamed to be the put's temporary and overwritten in place.
// That spares an unlink, a create and the allocation of blocks, which cost more than the write. A victim has no pins, so
// nobody in this process has it open; and a file says in its header whose it is, so what a power failure leaves under the
// victim's name is a miss. Only a root of one's own does so: where hosts share one, another may be reading the victim.

// offerFile makes the file of one of a victim's pieces the temporary of the put, if it may have the right size, and returns
// the pieces whose files are still to be unlinked. The caller holds the turn, and not the root's lock.
func (c *ownRoot) offerFile(v *entries.Eviction, reuseFor *Put) (left uint64) {
	r := c.r
	if reuseFor == nil || reuseFor.temp != "" || c.unlinksAll || v.Pieces == 0 || reuseFor.isStored() ||
		v.Class.FileBytes() != reuseFor.class.FileBytes() {
		return v.Pieces
	}
	bit := v.Pieces & -v.Pieces
	name := r.victim(v, uint32(bits.TrailingZeros64(bit)))
	temp := r.store.seq.TempName(reuseFor.target)
	if err := r.InDir(reuseFor.target, func() error { return r.FS.Rename(name, temp) }); err != nil {
		r.Orphans.AddLate(temp, err)
		c.discard(temp, v.Class.FileBytes()) // a rename can report an error although it happened
		return v.Pieces
	}
	r.Leave(name)
	reuseFor.temp = temp
	return v.Pieces &^ bit
}

// reuseFile opens the temporary that offerFile made. A file that is not what it should be, has another name somewhere or
// belongs to another user than the root's directory is not touched.
func (p *Put) reuseFile() (staging.File, error) {
	f, err := staging.OpenDirect(p.root.FS, p.temp, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && (info.Size != p.FileBytes() || info.Links != 1 || info.Owner != p.root.directory.Owner()) {
		err = fmt.Errorf("%w: %s has %d bytes, %d names and user %d", pieceformat.ErrDamaged, p.temp, info.Size, info.Links,
			info.Owner)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	p.root.Counted(&p.root.Count.Recycled)
	return f, nil
}

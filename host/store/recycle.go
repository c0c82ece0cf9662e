package store

import (
	"errors"
	"fmt"
	"io/fs"
	"math/bits"
	"os"
	"path/filepath"

	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// A put that evicts takes over a victim's file where it can: the file is renamed to be the put's temporary and
// overwritten in place. That spares the file system an unlink, a create and the allocation of blocks, which cost more
// than the write itself. It is safe because a victim has no pins, so nobody in this process has it open, and because a
// file says in its header whose it is: should a power failure undo the renames and keep the bytes, then what stands
// under the victim's name fails its checksums or names another key, and is a miss.
//
// A shared root takes no part: another host may be reading the victim.

func (r *root) recycles() bool {
	return !r.cfg.Shared && !r.cfg.unlinks
}

// bequeath makes the file of one of a victim's pieces the heir's temporary, if it is of the right size, and returns the
// pieces whose files are still to be unlinked. mu is not held; turn is.
func (r *root) bequeath(d *departure, heir *Put) (left uint64) {
	if heir == nil || heir.temp != "" || !r.recycles() || d.pieces == 0 || d.class.fileBytes() != heir.class.fileBytes() {
		return d.pieces
	}
	bit := d.pieces & -d.pieces
	name, err := r.locate(d, uint32(bits.TrailingZeros64(bit)))
	if err != nil {
		return d.pieces
	}
	temp := pieceformat.TempName(heir.target, r.store.cfg.HostID, r.store.seq.Add(1))
	err = r.fs.Rename(name, temp)
	if errors.Is(err, fs.ErrNotExist) { // the victim's file, or the heir's directory
		if err = r.makeDir(filepath.Dir(heir.target)); err == nil {
			err = r.fs.Rename(name, temp)
		}
	}
	if err != nil {
		r.deferDeleteLate(temp, err)
		r.discard(temp, d.class.fileBytes()) // a rename can report an error although it happened
		return d.pieces
	}
	heir.temp = temp
	return d.pieces &^ bit
}

// inherit opens the temporary that bequeath left. A file that is not what it should be, or has another name somewhere,
// is not touched.
func (p *Put) inherit() (staging.File, error) {
	f, err := staging.OpenDirect(p.root.fs, p.temp, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && (info.Size != p.class.fileBytes() || info.Links != 1) {
		err = fmt.Errorf("%w: %s has %d bytes and %d names", pieceformat.ErrDamaged, p.temp, info.Size, info.Links)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	p.root.counted(&p.root.count.recycled)
	return f, nil
}

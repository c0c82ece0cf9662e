package store

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// saveState writes an evict policy's state for the checkpoint of a time.
func (d *keptDir) saveState(s policy.State, when int64) error {
	kept := pieceformat.State{Time: when, Slots: s.Slots, Format: s.Format, Data: s.Data}
	return d.Replace(pieceformat.StateFile, func(f staging.File) error {
		_, err := f.WriteAt(kept.Encode(), 0)
		return err
	})
}

// removeState removes the state of an earlier checkpoint. If it stays, its time tells that it does not belong to the
// next one.
func (d *keptDir) removeState() { _ = d.FS.Remove(d.Path + "/" + pieceformat.StateFile) }

// loadState reads the state that belongs to the checkpoint of a time, or the zero State when there is none.
func (d *keptDir) loadState(when int64) policy.State {
	var s pieceformat.State
	err := d.read(pieceformat.StateFile, func(f staging.File, size int64) (err error) {
		b := make([]byte, min(size, pieceformat.MaxStateFile))
		if _, err = f.ReadAt(b, 0); err != nil {
			return err
		}
		if s, err = pieceformat.DecodeState(b); err == nil && s.Time != when {
			err = fmt.Errorf("%w: policy state of another checkpoint", pieceformat.ErrDamaged)
		}
		return err
	})
	if err == nil {
		return policy.State{Format: s.Format, Slots: s.Slots, Data: s.Data}
	}
	if !errors.Is(err, fs.ErrNotExist) {
		d.Log.Warn("evict policy's state not used", "error", err)
	}
	return policy.State{}
}

package store

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/store/index"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// saveState keeps the state of the acting policy, or sees to it that there is none. mu is held.
func (r *root) saveState(when int64) error {
	_ = r.fs.Remove(r.dir + "/" + pieceformat.StateFile)
	if r.pinnedAtAll() {
		return nil // pins are no part of what the next run begins with
	}
	s, ok, err := r.evictor.Save(uint32(min(pieceformat.MaxState, 1<<20+256*int64(r.x.High()))))
	if err != nil || !ok {
		if err != nil {
			r.log.Warn("the evict policy's state could not be kept; the next start tells it what is here", "error", err)
		}
		return nil
	}
	return r.replaceMeta(pieceformat.StateFile, func(f staging.File) error {
		kept := pieceformat.State{Time: when, Slots: s.Slots, Format: s.Format, Data: s.Data}
		_, err := f.WriteAt(kept.Encode(), 0)
		return err
	})
}

func (r *entries) pinnedAtAll() (any bool) {
	r.x.Each(func(_ uint32, e *index.Entry) { any = any || e.Pins() > 0 })
	return any
}

// loadState reads the state that the policy kept when a checkpoint was written, or the zero State when there is none.
func (r *root) loadState(when int64) policy.State {
	s, err := r.readState(when)
	if errors.Is(err, fs.ErrNotExist) {
		return policy.State{}
	}
	if err != nil {
		r.log.Warn("evict policy's state not used", "error", err)
		return policy.State{}
	}
	return policy.State{Format: s.Format, Slots: s.Slots, Data: s.Data}
}

func (r *root) readState(when int64) (s pieceformat.State, err error) {
	f, err := r.fs.OpenFile(r.dir+"/"+pieceformat.StateFile, os.O_RDONLY, 0)
	if err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	info, err := f.Stat()
	if err != nil {
		return s, err
	}
	b := make([]byte, min(info.Size, pieceformat.MaxStateFile))
	if _, err = f.ReadAt(b, 0); err != nil {
		return s, err
	}
	if s, err = pieceformat.DecodeState(b); err == nil && s.Time != when {
		err = fmt.Errorf("%w: policy state of another checkpoint", pieceformat.ErrDamaged)
	}
	return s, err
}

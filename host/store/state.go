package store

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/store/index"
	"github.com/kvhost/kvhost/staging"
	"github.com/zeebo/xxh3"
)

// What an evict policy keeps of itself stands beside the checkpoint whose slots it speaks of, and names it by its time.
const (
	stateFile  = metaDir + "/policy"
	stateMagic = "kvstate1"
	stateHead  = 40 // magic, time i64, slots u32, bytes of the format's name u32, of the data u64, xxh3-64 of both
	maxState   = 1 << 30
)

// saveState keeps the state of the acting policy, or sees to it that there is none. mu is held.
func (r *root) saveState(when int64) error {
	_ = r.fs.Remove(r.dir + "/" + stateFile)
	if r.standin != nil || r.pinnedAtAll() {
		return nil // pins are no part of what the next run begins with
	}
	s, ok, err := r.evict.Save(uint32(min(maxState, 1<<20+256*int64(r.x.High()))))
	if err != nil || !ok {
		if err != nil {
			r.log.Warn("the evict policy's state could not be kept; the next start tells it what is here", "error", err)
		}
		return nil
	}
	return r.replaceMeta(stateFile, func(f staging.File) error {
		_, err := f.WriteAt(encodeState(&s, when), 0)
		return err
	})
}

func (r *root) pinnedAtAll() (any bool) {
	r.x.Each(func(_ uint32, e *index.Entry) { any = any || e.Pins() > 0 })
	return any
}

func encodeState(s *policy.State, when int64) []byte {
	le, b := binary.LittleEndian, []byte(stateMagic)
	b = le.AppendUint64(b, uint64(when))
	b = le.AppendUint32(b, s.Slots)
	b = le.AppendUint32(b, uint32(len(s.Format)))
	b = le.AppendUint64(b, uint64(len(s.Data)))
	b = le.AppendUint64(b, 0)
	b = append(append(b, s.Format...), s.Data...)
	le.PutUint64(b[stateHead-8:], xxh3.Hash(b[stateHead:]))
	return b
}

func decodeState(b []byte, when int64) (s policy.State, err error) {
	le := binary.LittleEndian
	if len(b) < stateHead || string(b[:8]) != stateMagic {
		return s, fmt.Errorf("%w: not a policy's state", ErrDamaged)
	}
	format, data := uint64(le.Uint32(b[20:])), le.Uint64(b[24:])
	switch rest := b[stateHead:]; {
	case format > maxState || data > maxState || uint64(len(rest)) != format+data || xxh3.Hash(rest) != le.Uint64(b[32:]):
		return s, fmt.Errorf("%w: a policy's state", ErrDamaged)
	case int64(le.Uint64(b[8:])) != when:
		return s, fmt.Errorf("%w: a policy's state that is of another checkpoint", ErrDamaged)
	default:
		return policy.State{Format: string(rest[:format]), Slots: le.Uint32(b[16:]), Data: rest[format:]}, nil
	}
}

// loadState gives what the policy kept when the checkpoint was written; the zero State when there is nothing.
func (r *root) loadState(when int64) (s policy.State) {
	f, err := r.fs.OpenFile(r.dir+"/"+stateFile, os.O_RDONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return s
	}
	if err == nil {
		var info staging.Info
		if info, err = f.Stat(); err == nil {
			b := make([]byte, min(info.Size, stateHead+2*maxState))
			if _, err = f.ReadAt(b, 0); err == nil {
				s, err = decodeState(b, when)
			}
		}
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		r.log.Warn("the evict policy's state is not used", "error", err)
		return policy.State{}
	}
	return s
}

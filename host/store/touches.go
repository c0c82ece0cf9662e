package store

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/kvhost/kvhost/host/store/index"
	"github.com/kvhost/kvhost/staging"
	"github.com/zeebo/xxh3"
)

// The order of last touch outlives the host: a list of fingerprints, oldest first, beside the pieces, written at a clean end,
// and every touchesEvery. It is advice. After a crash the last one holds for what the scan finds of it, and everything
// stored since is newer; without any, the order of storing serves. Slots, and what the evict policy keeps of itself, are not
// brought back after a crash: the policy is told of what is there in the order of the list.

const (
	touchesFile  = metaDir + "/touches"
	touchesMagic = "kvtouch1"
	touchesHead  = 32 // magic, time i64, count u64, xxh3-64 of the list
	touchesPart  = 64 << 10
	touchesEvery = 5 * time.Minute
)

// saveTouches writes the list. Sessions have the root meanwhile, but for slices of a tenth of a millisecond.
func (r *root) saveTouches() {
	name := r.dir + "/" + touchesFile
	temp := tempName(name, r.store.cfg.HostID, r.store.seq.Add(1))
	err := r.writeTouches(temp)
	if err == nil {
		err = r.fs.Rename(temp, name)
	}
	if err != nil {
		_ = r.fs.Remove(temp)
		r.log.Warn("the order of last touch could not be kept", "error", err)
	}
}

// saveTouchesEvery does that from time to time, while there is an order worth keeping. It ends with ctx.
func (r *root) saveTouchesEvery(ctx context.Context, every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for last := uint32(0); ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		r.mu.Lock()
		now, scanning := r.x.Clock(), r.scanning
		r.mu.Unlock()
		if now != last && !scanning && r.health.Takes() { // while a scan is under way the last run's list is still to be read
			last = now
			r.saveTouches()
		}
	}
}

func (r *root) writeTouches(name string) (err error) {
	f, err := r.fs.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	when := r.store.stamp() // what is stored from now on is newer
	order := r.snapshot()
	sum := xxh3.New()
	part := make([]byte, 0, touchesPart)
	at := int64(touchesHead)
	for i := range order {
		part = binary.LittleEndian.AppendUint64(part, order[i].print)
		if len(part) == touchesPart || i == len(order)-1 {
			sum.Write(part)
			if _, err := f.WriteAt(part, at); err != nil {
				return err
			}
			at += int64(len(part))
			part = part[:0]
		}
	}
	part = append(part, touchesMagic...)
	part = binary.LittleEndian.AppendUint64(part, uint64(when))
	part = binary.LittleEndian.AppendUint64(part, uint64(len(order)))
	part = binary.LittleEndian.AppendUint64(part, sum.Sum64())
	if _, err := f.WriteAt(part, 0); err != nil {
		return err
	}
	return f.Datasync()
}

// loadTouches gives each slot its place in the list, from 1 on, and the time of the list; nil when there is none to go by.
func (r *root) loadTouches() (place []uint64, when int64) {
	f, err := r.fs.OpenFile(r.dir+"/"+touchesFile, os.O_RDONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, 0
	}
	if err == nil {
		defer f.Close()
		r.mu.Lock()
		place = make([]uint64, r.x.High())
		r.mu.Unlock()
		when, err = r.readTouches(f, place)
	}
	if err != nil {
		r.log.Warn("the order of last touch could not be read; the order of storing serves", "error", err)
		return nil, 0
	}
	return place, when
}

func (r *root) readTouches(f staging.File, place []uint64) (when int64, err error) {
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	var head [touchesHead]byte
	if _, err := f.ReadAt(head[:], 0); err != nil {
		return 0, err
	}
	le := binary.LittleEndian
	count := le.Uint64(head[16:])
	if string(head[:8]) != touchesMagic || count > 1<<32 || info.Size != touchesHead+8*int64(count) {
		return 0, fmt.Errorf("%w: not a list of touches", ErrDamaged)
	}
	sum := xxh3.New()
	part := make([]byte, touchesPart)
	r.mu.Lock()
	defer r.mu.Unlock()
	for at, n := int64(touchesHead), uint64(1); at < info.Size; at += int64(len(part)) {
		part = part[:min(int64(touchesPart), info.Size-at)]
		r.mu.Unlock() // others come in between
		_, err := f.ReadAt(part, at)
		r.mu.Lock()
		if err != nil {
			return 0, err
		}
		sum.Write(part)
		for b := part; len(b) > 0; b = b[8:] {
			if slot := r.x.FindFingerprint(le.Uint64(b)); slot != index.None && int(slot) < len(place) {
				place[slot] = n
			}
			n++
		}
	}
	if sum.Sum64() != le.Uint64(head[24:]) {
		return 0, fmt.Errorf("%w: list of touches", ErrDamaged)
	}
	return int64(le.Uint64(head[8:])), nil
}

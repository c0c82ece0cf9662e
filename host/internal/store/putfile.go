package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

// The file that a put writes, while the put is filling.

// renameHead writes the put's name into the header page of its file, which is whole and has no name yet.
func (p *Put) renameHead() error {
	f, err := p.root.FS.OpenFile(p.temp, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	var page [pieceformat.Page]byte
	if _, err = f.ReadAt(page[:], 0); err == nil {
		var h pieceformat.Header
		if h, err = pieceformat.DecodeHeader(page[:]); err == nil {
			h.Name = p.name
			h.Encode(page[:])
			_, err = f.WriteAt(page[:], 0)
		}
	}
	if err == nil && p.strict() {
		err = f.Datasync()
	}
	return errors.Join(err, f.Close())
}

// Compresses says whether the put writes version 2: extents that are stored as package codec encodes them, in the plan's
// order and without gaps, under a head that [Put.HeadStored] writes when their lengths are known.
func (p *Put) Compresses() bool { return p.compresses }

// compresses says whether a put that begins in a root is to compress.
func compresses(r *root, p *Put) bool {
	plan := p.class.Plan
	copied := p.q.copy != nil && p.q.copy.header.Version() == pieceformat.CompressedVersion // it is copied as it is
	if !r.cfg.Compressed || copied || plan.PayloadBytes() < leastCompressed || len(plan.Extents()) > mostExtents {
		return false
	}
	g := plan.Geometry()
	return p.class.Namespace.Compression.Compresses(r.meter.gain, g.PageBytes())
}

// Encoded enters what the put's compression has gained, and the time of the codec.
func (p *Put) Encoded(stored int64, took time.Duration) {
	g := p.class.Plan.Geometry()
	p.class.Namespace.Compression.Encoded(g.PageBytes(), stored, took)
}

// isStored says whether the file is of version 2, so that its size is not known before it is written.
func (p *Put) isStored() bool {
	return p.Compresses() || p.q.copy != nil && p.q.copy.header.Version() == pieceformat.CompressedVersion
}

const (
	// leastCompressed is the least payload that is compressed: less does not save a page often enough.
	leastCompressed = 16 << 10
	// mostExtents is the most extents of a payload that is compressed: who reads the piece has a slot of 1 MiB for its head.
	mostExtents = 32 << 10
)

// DataOffset is where the payload starts in the file.
func (p *Put) DataOffset() int64 {
	return pieceformat.DataOffset(len(p.class.Plan.Extents()), p.Compresses())
}

// FileBytes is the size of the whole file: header, table and payload, each padded to whole pages. If the put compresses
// it is the most that the file can have.
func (p *Put) FileBytes() int64 {
	return p.DataOffset() + pieceformat.Padded(p.class.Plan.PayloadBytes())
}

// maxObstacles is how often a put tries to get a name that is taken, or that something stands on the way to.
const maxObstacles = 4

// File is the named temporary, made at the first call: a victim's file if the put was left one, else
// a new one. Publish and Abort close it.
func (p *Put) File() (staging.File, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.state > filling:
		return nil, ErrPutOver
	case p.state == filling:
		return p.file, nil
	}
	r := p.root
	if p.temp != "" {
		f, err := p.reuseFile()
		if err == nil {
			p.file, p.state = r.metered(f), filling
			return p.file, nil
		}
		r.Log.Debug("a victim's file is not taken over", "file", p.temp, "error", err)
		p.release()
		// Where the device answers neither, another entry would go for nothing.
		if health.Judge(err) != health.Other && r.Account.Excess(1) > 0 || !r.shrink(context.Background()) {
			return nil, fmt.Errorf("%w: %s: a victim's file can be neither used nor removed: %w", ErrNoSpace, r.Path, err)
		}
	}
	for range maxObstacles {
		f, err := r.owner.createTemp(p)
		if err == nil {
			p.file, p.state = f, filling
			return p.file, nil
		}
		if errors.Is(err, unix.ENOTDIR) {
			if r.Unblock(p.target, p.name == "", err) {
				continue
			}
			if p.name != "" {
				err = p.leaveName(fmt.Errorf("its name leads through a file: %w", err))
				if err == nil {
					continue
				}
			}
		}
		if !errors.Is(err, fs.ErrExist) {
			if temp := p.temp; temp != "" && !health.Judge(err).Untouched() {
				r.Discard(temp, 0) // an open can fail after the file was made
			}
			p.temp = ""
			return nil, fmt.Errorf("store: %s: %w", p.target, err)
		}
	}
	return nil, fmt.Errorf("store: %s: no free name for a temporary", p.target)
}

// Temp is the name of the temporary, or empty when there is none yet, or none any more.
func (p *Put) Temp() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.temp
}

// Head writes the header page and the checksum table of a put that does not compress to dst[:DataOffset()].
func (p *Put) Head(dst []byte, table []uint64) {
	h := p.header(len(table), false)
	h.TableSum = pieceformat.PutTable(dst[pieceformat.Page:], table)
	h.Encode(dst)
	p.size = h.FileBytes()
}

// HeadStored is Head for a put that compresses: stored says of each extent how the file has it. It returns the
// size that the file must have when it is published.
func (p *Put) HeadStored(dst []byte, table []uint64, stored []pieceformat.Stored) int64 {
	h := p.header(len(table), true)
	h.Stored = pieceformat.StoredBytes(stored)
	h.TableSum = pieceformat.PutStored(dst[pieceformat.Page:], table, stored)
	h.Encode(dst)
	p.size = h.FileBytes()
	return p.size
}

func (p *Put) header(extents int, compressed bool) pieceformat.Header {
	return pieceformat.Header{
		Namespace: p.class.Namespace.Digest, Key: p.q.Key, Parent: p.q.Parent, Depth: p.q.Depth, Group: p.class.Group, Rank: p.q.Rank,
		Blocks: p.class.Plan.Geometry().Blocks, Tenant: p.q.Tenant, Pieces: p.q.Ranks, StoreTime: p.stamp,
		Payload: p.class.Plan.PayloadBytes(), Plan: p.class.Plan.Digest(), Algorithm: kv.XXH3, Extent: kv.ExtentBytes,
		Extents: uint32(extents), DataOffset: pieceformat.DataOffset(extents, compressed), Name: p.name,
	}
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

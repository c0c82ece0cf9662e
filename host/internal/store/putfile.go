package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// This file holds the methods of a put on the file that it writes.

// renameHead writes the put's name into the header page of its file, which is complete and not yet published.
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

// Compresses reports whether the put writes version 2. The extents are then stored as package codec encodes them, in the order
// of the plan and without gaps. [Put.HeadStored] writes the head when their lengths are known.
func (p *Put) Compresses() bool { return p.compresses }

// compresses reports whether a put should compress when it begins in a root.
func compresses(r *root, p *Put) bool {
	plan := p.class.Plan
	copied := p.q.copy != nil && p.q.copy.header.Version() == pieceformat.CompressedVersion // copied in its stored form
	if !r.cfg.Compressed || copied || plan.PayloadBytes() < leastCompressed || len(plan.Extents()) > mostExtents {
		return false
	}
	g := plan.Geometry()
	return p.class.Namespace.Compression.Compresses(r.meter.gain, g.PageBytes())
}

// Encoded records the effect of the put's compression and the time of the codec.
func (p *Put) Encoded(stored int64, took time.Duration) {
	g := p.class.Plan.Geometry()
	p.class.Namespace.Compression.Encoded(g.PageBytes(), stored, took)
}

// isStored reports whether the file is of version 2, with a size that is unknown before it is written.
func (p *Put) isStored() bool {
	return p.Compresses() || p.q.copy != nil && p.q.copy.header.Version() == pieceformat.CompressedVersion
}

const (
	// leastCompressed is the smallest payload that is compressed. For smaller ones, compression rarely saves a page.
	leastCompressed = 16 << 10
	// mostExtents is the maximum number of extents of a compressed payload. Readers have a slot of 1 MiB for the head.
	mostExtents = 32 << 10
)

// DataOffset returns the offset of the payload in the file.
func (p *Put) DataOffset() int64 {
	return pieceformat.DataOffset(len(p.class.Plan.Extents()), p.Compresses())
}

// FileBytes returns the size of the whole file: header, table and payload, each padded to whole pages. For a put that
// compresses it is the largest possible size.
func (p *Put) FileBytes() int64 {
	return p.DataOffset() + pieceformat.Padded(p.class.Plan.PayloadBytes())
}

// maxObstacles is the maximum number of times that a put tries to get a name that is taken or blocked.
const maxObstacles = 4

// File returns the named temporary. The first call opens it: the file of a victim if the put has one, and a new file otherwise.
// Publish and Abort close it.
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
		// If the device fails at this, evicting another entry would not help.
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
				r.Discard(temp, 0) // an open can fail after it has created the file
			}
			p.temp = ""
			return nil, fmt.Errorf("store: %s: %w", p.target, err)
		}
	}
	return nil, fmt.Errorf("store: %s: no free name for a temporary", p.target)
}

// Temp returns the path of the temporary. It is empty before the temporary exists and after it is gone.
func (p *Put) Temp() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.temp
}

// Head writes the header page and the checksum table to dst[:DataOffset()], for a put that does not compress.
func (p *Put) Head(dst []byte, table []uint64) {
	h := p.header(len(table), false)
	h.TableSum = pieceformat.PutTable(dst[pieceformat.Page:], table)
	h.Encode(dst)
	p.size = h.FileBytes()
}

// HeadStored is Head for a put that compresses. stored describes each extent in the file. It returns the size that the file
// must have when it is published.
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

// reuseFile opens the temporary that offerFile made from the file of a victim. It refuses a file with a wrong size, with
// another name, or with an owner other than the root directory's.
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

// leaveName switches to the built-in name and creates its directory. It is called if the name of the place policy cannot be
// used, which counts as a fault of the policy.
func (p *Put) leaveName(cause error) error {
	p.class.Namespace.Place.Now().Policy.Misnamed(cause)
	p.useBuiltinName(cause)
	if p.size > 0 { // the file is complete, and its header has the old name
		if err := p.renameHead(); err != nil {
			return err
		}
	}
	return p.root.MakeDir(filepath.Dir(p.target))
}

// release ends the put's claims on the root other than its entry. It removes the temporary if there is one.
func (p *Put) release() {
	temp, left := p.temp, int64(0)
	if p.temp = ""; temp != "" {
		left = p.root.Discard(temp, p.class.FileBytes())
	}
	p.root.owner.settle(p, temp, left)
}

// Package storetest writes the file of a put as the transfer engine does, for tests of a store and of its tools. Its own tests run
// stores through random histories.
package storetest

import (
	"context"
	"time"

	"github.com/kvhost/kvhost/host/internal/codec"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// PutFile is what the writing needs of a store's put.
type PutFile interface {
	Plan() *kv.Plan
	DataOffset() int64
	FileBytes() int64
	Head(dst []byte, table []uint64)
	Compresses() bool
	Element() int
	HeadStored(dst []byte, table []uint64, stored []pieceformat.Stored) int64
	Encoded(stored int64, took time.Duration)
	File() (staging.File, error)
	Abort(cause error)
	Publish(ctx context.Context) error
}

// WritePut writes the whole file of a put. What the payload lacks is zero.
func WritePut(ctx context.Context, slots *staging.Slots, p PutFile, payload []byte) error {
	file, err := p.File()
	if err != nil {
		return err
	}
	slot, err := slots.Acquire(ctx)
	if err != nil {
		return err
	}
	defer slot.Release()
	plan, image := p.Plan(), slot.Bytes()[:p.FileBytes()]
	clear(image)
	data := image[p.DataOffset():]
	copy(data, payload)
	table := make([]uint64, len(plan.Extents()))
	kv.SumExtents(plan, 0, len(table), data, 0, table)
	if p.Compresses() {
		image = image[:compress(p, image, table)]
	} else {
		p.Head(image, table)
	}
	_, err = file.WriteAt(image, 0)
	return err
}

// compress stores the extents of an image in place, and returns the size of the file.
func compress(p PutFile, image []byte, table []uint64) int64 {
	data, at := image[p.DataOffset():], 0
	stored := make([]pieceformat.Stored, len(table))
	room := make([]byte, codec.MaxBytes)
	for i, e := range p.Plan().Extents() {
		n, by := codec.Encode(room, data[e.Off:][:e.Len], p.Element())
		stored[i] = pieceformat.Stored{Sum: kv.Sum(room[:n]), Len: uint32(n), Codec: uint8(by)}
		at += copy(data[at:], room[:n])
	}
	clear(data[at:])
	p.Encoded(int64(at), 0)
	return p.HeadStored(image, table, stored)
}

// StorePut writes the file and publishes it.
func StorePut(ctx context.Context, slots *staging.Slots, p PutFile, payload []byte) error {
	if err := WritePut(ctx, slots, p, payload); err != nil {
		p.Abort(err)
		return err
	}
	return p.Publish(ctx)
}

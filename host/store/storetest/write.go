// Package storetest is what tests of a store and of its tools share: a put's file is written as the transfer engine does.
package storetest

import (
	"context"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/staging"
)

// Put is what the writing needs of a store's put.
type Put interface {
	Plan() *chunk.Plan
	DataOffset() int64
	FileBytes() int64
	Head(dst []byte, table []uint64)
	File() (staging.File, error)
	Abort(cause error)
	Publish(ctx context.Context) error
}

// Write writes the whole file of a put. What the payload lacks is zero.
func Write(ctx context.Context, slots *staging.Slots, p Put, payload []byte) error {
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
	chunk.SumExtents(plan, 0, len(table), data, 0, table)
	p.Head(image, table)
	_, err = file.WriteAt(image, 0)
	return err
}

// Store writes the file and publishes it.
func Store(ctx context.Context, slots *staging.Slots, p Put, payload []byte) error {
	if err := Write(ctx, slots, p, payload); err != nil {
		p.Abort(err)
		return err
	}
	return p.Publish(ctx)
}

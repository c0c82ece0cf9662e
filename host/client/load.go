package client

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// NotWanted stands for a block that a load skips.
const NotWanted uint32 = 1<<32 - 1

// LoadChunk is a chunk to load: the index of its key in the lookup, and a block id for each block of the chunk, or
// NotWanted.
type LoadChunk struct {
	Index  int
	Blocks []uint32
}

// LoadOptions are the options of a load.
type LoadOptions struct {
	// Layers makes the load layer-wise: the first layer of all chunks is read before the second layer of any. The
	// function is called for each layer in order, when the layer's pages are delivered and verified in all chunks
	// except those in failed. failed holds indices into the load's chunks, which will be among the result's failures.
	// The function runs on the session's receiving goroutine, so it must be fast and must not call the session. A load
	// with a timeline of several layers is layer-wise without this function. Only its semaphores then report the
	// layers, and the host sends no message for each.
	Layers func(layer uint32, failed []int)
	// Timeline orders the load by semaphores. It is optional.
	Timeline *Timeline
}

// BlockError is a block that was not delivered.
type BlockError struct {
	Block uint32 // id of the block
	Chunk int    // index into the load's chunks
	Err   error
}

// LoadResult is the result of a load. Blocks that are not in Failed hold verified bytes.
type LoadResult struct {
	Bytes     int64
	Failed    []BlockError
	Cancelled bool
}

// LoadJob is a running load.
type LoadJob struct {
	session *Session
	id      uint64
	chunks  int
	layers  func(uint32, []int)
	order   *Timeline
	over    chan struct{}
	result  LoadResult
	err     error
}

// Load starts to fill blocks from the entries of a lookup's lease. It uses up this rank's share of the lease.
func (s *Session) Load(ctx context.Context, l *Lookup, chunks []LoadChunk, opt LoadOptions) (*LoadJob, error) {
	if err := errors.Join(ctx.Err(), opt.Timeline.check()); err != nil {
		return nil, err
	}
	m := &proto.Load{Lease: l.lease, Silent: opt.Layers == nil,
		Layers:   opt.Layers != nil || opt.Timeline != nil && opt.Timeline.Layers > 0,
		Timeline: opt.Timeline.message(), Chunks: make([]*proto.LoadChunk, len(chunks))}
	for i, c := range chunks {
		if c.Index < 0 || int(uint32(c.Index)) != c.Index {
			return nil, fmt.Errorf("%w: chunks[%d].index: %d", ErrInvalid, i, c.Index)
		}
		m.Chunks[i] = &proto.LoadChunk{Index: uint32(c.Index), Blocks: c.Blocks}
	}
	j := &LoadJob{session: s, chunks: len(chunks), layers: opt.Layers, order: opt.Timeline, over: make(chan struct{})}
	var err error
	if j.id, err = s.start(&proto.SessionRequest{Traceparent: traceparentOf(ctx), Body: &proto.SessionRequest_Load{Load: m}}, j); err != nil {
		return nil, err
	}
	return j, nil
}

func (j *LoadJob) answer(m *proto.SessionResponse) bool {
	switch b := m.GetBody().(type) {
	case *proto.SessionResponse_LoadLayer:
		if j.layers != nil {
			failed := make([]int, len(b.LoadLayer.GetFailed()))
			for i, c := range b.LoadLayer.GetFailed() {
				failed[i] = int(c)
			}
			j.layers(b.LoadLayer.GetLayer(), failed)
		}
		return false
	case *proto.SessionResponse_LoadDone:
		j.result = LoadResult{Bytes: int64(b.LoadDone.GetBytes()), Cancelled: b.LoadDone.GetCancelled()}
		for _, f := range b.LoadDone.GetFailures() {
			err := failure(f.GetCode(), f.GetMessage())
			for _, block := range f.GetBlocks() {
				j.result.Failed = append(j.result.Failed, BlockError{Block: block, Chunk: int(f.GetChunk()), Err: err})
			}
		}
	case *proto.SessionResponse_Error:
		j.err = refusal(b.Error)
		j.order.abandon()
	default:
		j.err = fmt.Errorf("%w: it answers LOAD with %T", ErrHostGone, m.GetBody())
	}
	close(j.over)
	return true
}

func (j *LoadJob) lost(err error) {
	j.err = err
	j.order.abandon()
	close(j.over)
}

// Wait returns when every block was delivered or has failed. After an error that is not the context's, no block of
// the load is usable.
func (j *LoadJob) Wait(ctx context.Context) (LoadResult, error) {
	select {
	case <-j.over:
		return j.result, j.err
	case <-ctx.Done():
		return LoadResult{}, ctx.Err()
	}
}

// Cancel returns when no copy can touch the blocks any more. The job still completes.
func (j *LoadJob) Cancel(ctx context.Context) error { return j.session.cancelJob(ctx, j.id) }

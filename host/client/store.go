package client

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/kv"
)

// StoreChunk is a chunk to store. A zero Parent means that it is the first chunk of a prefix.
type StoreChunk struct {
	Parent, Key kv.Key
	Depth       uint32
	Blocks      []uint32 // must not change until the job has read them
}

// Result is the result of one chunk of a store.
type Result uint8

// Results, with the numbers of the protocol.
const (
	Stored   Result = 1 // published
	Resident Result = 2 // exists already, or is being written by another session
	Refused  Result = 3 // refused by the admit policy
	Shed     Result = 4 // no space was left
	Failed   Result = 5 // see Err
)

var resultNames = [...]string{Stored: "stored", Resident: "resident", Refused: "refused", Shed: "shed", Failed: "failed"}

func (r Result) String() string { return nameOf(resultNames[:], int(r)) }

// nameOf returns the name of a result, or its number if this client does not know it.
func nameOf(names []string, result int) string {
	if result < len(names) && names[result] != "" {
		return names[result]
	}
	return "result " + strconv.Itoa(result)
}

// ChunkResult is the result of one chunk.
type ChunkResult struct {
	Result Result
	Err    error // error of a failed chunk
}

// StoreResult is the result of a store.
type StoreResult struct {
	Chunks    []ChunkResult // in the order of the store
	Bytes     int64         // page bytes of stored chunks
	Cancelled bool
}

// StoreJob is a running store.
type StoreJob struct {
	session   *Session
	id        uint64
	chunks    int
	order     *Timeline
	read      chan struct{} // closed when the blocks are free or the job has failed
	published chan struct{}
	isRead    bool
	result    StoreResult
	err       error
	withdrawn *uint64 // the session's word of withdrawals; nil if it had none
}

// StoreOption is an option of a store.
type StoreOption func(*storeOptions)

type storeOptions struct{ order *Timeline }

// WithTimeline orders a store by semaphores.
func WithTimeline(t *Timeline) StoreOption { return func(o *storeOptions) { o.order = t } }

// Store starts to store chunks. It reserves all of them in order before it reads any.
func (s *Session) Store(ctx context.Context, request, group uint32, chunks []StoreChunk,
	options ...StoreOption) (*StoreJob, error) {
	var o storeOptions
	for _, set := range options {
		set(&o)
	}
	order := o.order
	if err := errors.Join(ctx.Err(), order.check()); err != nil {
		return nil, err
	}
	n := s.hello.Namespace.KeyBytes
	m := &proto.Store{Request: request, Group: group, Timeline: order.message(), Chunks: make([]*proto.StoreChunk, len(chunks))}
	for i := range chunks {
		c := &chunks[i]
		m.Chunks[i] = &proto.StoreChunk{Key: c.Key[:n], Depth: c.Depth, Blocks: c.Blocks}
		if c.Parent != kv.Root {
			m.Chunks[i].Parent = c.Parent[:n]
		}
	}
	j := &StoreJob{session: s, order: order, chunks: len(chunks), read: make(chan struct{}), published: make(chan struct{}),
		withdrawn: s.withdrawn.Load()}
	var err error
	ask := &proto.SessionRequest{Traceparent: traceparentOf(ctx), Body: &proto.SessionRequest_Store{Store: m}}
	if j.id, err = s.start(ask, j); err != nil {
		return nil, err
	}
	return j, nil
}

func (j *StoreJob) answer(m *proto.SessionResponse) bool {
	switch b := m.GetBody().(type) {
	case *proto.SessionResponse_StoreRead:
		j.freed()
		return false
	case *proto.SessionResponse_StorePublished:
		j.result = storeResult(b.StorePublished)
		if len(j.result.Chunks) != j.chunks {
			j.err = fmt.Errorf("%w: %d results for %d chunks", ErrHostGone, len(j.result.Chunks), j.chunks)
		}
	case *proto.SessionResponse_Error:
		j.err = refusal(b.Error)
		j.order.abandon()
	default:
		j.err = fmt.Errorf("%w: it answers STORE with %T", ErrHostGone, m.GetBody())
	}
	j.freed()
	close(j.published)
	return true
}

func (j *StoreJob) freed() {
	if !j.isRead {
		j.isRead = true
		close(j.read)
	}
}

func (j *StoreJob) lost(err error) {
	j.err = err
	j.order.abandon()
	j.freed()
	close(j.published)
}

func storeResult(m *proto.StorePublished) StoreResult {
	r := StoreResult{Chunks: make([]ChunkResult, len(m.GetResults())), Bytes: int64(m.GetBytes()), Cancelled: m.GetCancelled()}
	for i, c := range m.GetResults() {
		r.Chunks[i].Result = Result(c)
	}
	for _, f := range m.GetFailures() {
		if int(f.GetChunk()) < len(r.Chunks) {
			r.Chunks[f.GetChunk()].Err = failure(f.GetCode(), f.GetMessage())
		}
	}
	return r
}

// Read returns when the blocks may be reused. An error means that the whole job failed. Published reports single failed
// chunks.
func (j *StoreJob) Read(ctx context.Context) error {
	select {
	case <-j.read:
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case <-j.published:
		return j.err
	default:
		return nil
	}
}

// Published returns when every chunk has its result.
func (j *StoreJob) Published(ctx context.Context) (StoreResult, error) {
	select {
	case <-j.published:
		return j.result, j.err
	case <-ctx.Done():
		return StoreResult{}, ctx.Err()
	}
}

// Cancel returns when no copy can touch the blocks any more. The job still completes.
func (j *StoreJob) Cancel(ctx context.Context) error { return j.session.cancelJob(ctx, j.id) }

func (s *Session) cancelJob(ctx context.Context, id uint64) error {
	_, err := s.ask(ctx, &proto.SessionRequest{Body: &proto.SessionRequest_Cancel{Cancel: &proto.Cancel{Job: id}}})
	return err
}

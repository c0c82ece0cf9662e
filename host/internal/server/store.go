package server

import (
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/host/kv"
)

// store handles STORE. The whole message is checked before anything is reserved. Then the chunks are reserved in order, and I/O
// starts for those that got a place. A reservation may wait for the disk, so reservations run on a queue of their own, and
// other messages do not wait for them.
func (x *session) store(j *job, m *proto.Store) error {
	reg, err := x.memory.registered(m.GetGroup())
	if err != nil {
		return err
	}
	wants, err := x.checkStore(m, reg)
	if err != nil {
		return err
	}
	number, err := x.engine.number(x.granted, m.GetRequest())
	if err != nil {
		return err
	}
	j.reg = reg
	s := newStoring(j, len(wants))
	if s.timeline, err = x.timelines.of(m.GetTimeline(), 0); err != nil {
		return err
	}
	spec := &transfer.StoreJob{ // with its own reference to the memory, since reg may be unmapped during the reservation
		Tenant: x.tenant, Memory: reg.memory, Read: s.read, Published: s.published, Withdrawn: x.memory.withdrawn(j.id), Paths: j.span.Paths,
	}
	x.reserving.Add(j.id, func() { s.reserve(wants, number, spec) })
	if j.cancelled.Load() { // the cancellation may have come before the job was queued
		x.reserving.Remove(j.id)
	}
	return nil
}

// reserve reserves a place for each chunk and submits the job with the chunks that got one.
func (s *storing) reserve(wants []store.PutRequest, number uint32, spec *transfer.StoreJob) {
	j := s.job
	waits := s.waits()
	for i, q := range wants {
		q.Request = number
		for unit := range j.reg.units {
			put, err := s.reserveOne(q, waits)
			q.Rank++
			if err != nil {
				if s.refused(i, err) != proto.ChunkResult_CHUNK_RESULT_RESIDENT {
					break // the other units would be refused for the same reason
				}
				continue
			}
			s.index = append(s.index, i)
			spec.Chunks = append(spec.Chunks,
				transfer.StoreChunk{Put: put, Unit: unit, Blocks: j.message.GetStore().Chunks[i].Blocks})
		}
	}
	j.session.submit(s, spec)
}

// waits reports whether the job must wait for its semaphore before it can start. It reads the client's semaphores, so the
// session's end waits for it.
func (s *storing) waits() bool {
	jobs := s.job.session.jobs
	if !s.timeline.holds() || !jobs.hold() {
		return false
	}
	defer jobs.waiters.Done()
	reached, err := s.timeline.reached()
	return err == nil && !reached
}

// reserveOne reserves a place for one unit of a chunk, unless the job was cancelled. While a job waits for a semaphore, its
// reservations keep room from others without any use, so their sum is bounded.
func (s *storing) reserveOne(q store.PutRequest, waits bool) (*store.Put, error) {
	j := s.job
	if j.cancelled.Load() {
		return nil, transfer.ErrCancelled
	}
	if !waits {
		return j.session.server.store.Put(j.ctx, q)
	}
	bytes := j.reg.group.Geometry.PageBytes()
	if err := j.session.share.Take(budget.Room, bytes); err != nil {
		return nil, err
	}
	put, err := j.session.server.store.Put(j.ctx, q)
	if err != nil {
		j.session.share.Give(budget.Room, bytes)
		return nil, err
	}
	s.room.Add(bytes)
	return put, nil
}

// freeRoom ends the charge for reservations of a waiting job.
func (s *storing) freeRoom() {
	if bytes := s.room.Swap(0); bytes > 0 {
		s.job.session.share.Give(budget.Room, bytes)
	}
}

// submit starts the I/O of a STORE. If the job was cancelled, it aborts the reservations instead. The session's end does not
// wait for a reservation, but it waits for submit, because submit uses the client's semaphores.
func (x *session) submit(s *storing, spec *transfer.StoreJob) {
	held := x.jobs.hold()
	if held {
		defer x.jobs.waiters.Done()
	}
	if !held || !s.job.claim() { // cancelled, or the session's end will cancel it
		for _, c := range spec.Chunks {
			c.Put.Abort(transfer.ErrCancelled)
		}
		s.freeRoom()
		return
	}
	if len(spec.Chunks) == 0 {
		s.read(transfer.Outcome{})
		s.published(transfer.Outcome{})
		s.job.neverRun()
		return
	}
	s.counted, s.job.span.Reserved = true, time.Now()
	x.server.begin()
	spec.Held = s.timeline.holds()
	s.job.run(x.queue.Store(spec))
	x.timelines.start(s.job, s.timeline, s.freeRoom)
}

// checkStore checks a STORE and returns its chunks.
func (x *session) checkStore(m *proto.Store, reg *registration) ([]store.PutRequest, error) {
	if err := x.cfg.Limits.checkChunks(len(m.GetChunks())); err != nil {
		return nil, err
	}
	wants := make([]store.PutRequest, len(m.GetChunks()))
	for i, c := range m.GetChunks() {
		key, err := proto.ParseKey(c.GetKey(), x.ns.KeyBytes)
		if err != nil {
			return nil, invalid(at("chunks", i, "key"), "%v", err)
		}
		var parent kv.Key
		if len(c.GetParent()) > 0 {
			if parent, err = proto.ParseKey(c.GetParent(), x.ns.KeyBytes); err != nil {
				return nil, invalid(at("chunks", i, "parent"), "%v", err)
			}
		}
		if parent == key {
			return nil, invalid(at("chunks", i, "parent"), "is the chunk itself")
		}
		if err := reg.checkBlocks(i, c.GetBlocks(), false); err != nil {
			return nil, err
		}
		if i > 0 && parent == wants[i-1].Key {
			wants[i-1].Continued = true
		}
		wants[i] = store.PutRequest{
			Namespace: x.engine.space, Group: reg.group.ID, Depth: c.GetDepth(), Rank: x.piece,
			Ranks:  x.engine.facts.pieces,
			Parent: parent, Key: key, Tenant: x.tenant,
		}
	}
	return wants, nil
}

// storing collects the results of a STORE for its answers. read runs before published, so it needs no lock.
type storing struct {
	job      *job
	index    []int // chunk of the message for each chunk of the transfer job
	results  []proto.ChunkResult
	failures []*proto.ChunkFailure
	counted  bool // counted among the server's jobs
	timeline *timeline
	room     atomic.Int64 // bytes reserved while the job waits for a semaphore
}

func newStoring(j *job, chunks int) *storing {
	return &storing{job: j, results: make([]proto.ChunkResult, chunks)}
}

// refused records that a unit of a chunk was not stored, and the reason.
func (s *storing) refused(i int, err error) proto.ChunkResult {
	r := resultOf(err)
	if r == proto.ChunkResult_CHUNK_RESULT_FAILED && s.results[i] != r {
		s.failures = append(s.failures, &proto.ChunkFailure{Chunk: uint32(i), Code: codeOf(err), Message: err.Error()})
	}
	s.add(i, r)
	return r
}

// weight orders results. A chunk's result is the one with the highest weight among its units, so a chunk is stored if some
// units were resident and others were stored.
var weight = [...]int{
	proto.ChunkResult_CHUNK_RESULT_RESIDENT: 1, proto.ChunkResult_CHUNK_RESULT_STORED: 2, proto.ChunkResult_CHUNK_RESULT_REFUSED: 3,
	proto.ChunkResult_CHUNK_RESULT_SHED: 4, proto.ChunkResult_CHUNK_RESULT_FAILED: 5,
}

// add combines the result of a unit with the result of its chunk.
func (s *storing) add(i int, r proto.ChunkResult) {
	if weight[r] > weight[s.results[i]] {
		s.results[i] = r
	}
}

func (s *storing) read(o transfer.Outcome) {
	s.timeline.over(len(o.Failed)+len(s.failures) > 0)
	s.job.session.reply(&proto.SessionResponse{Id: s.job.id, Body: &proto.SessionResponse_StoreRead{StoreRead: &proto.StoreRead{}}})
	s.job.session.server.latencies.Observe(AnswerStoreRead, s.job.since)
	s.job.span.Read = time.Now()
}

func (s *storing) published(o transfer.Outcome) {
	s.freeRoom()
	failed := o.Failed // Failed is in ascending order
	for k, i := range s.index {
		if len(failed) == 0 || failed[0].Chunk != k {
			s.add(i, proto.ChunkResult_CHUNK_RESULT_STORED)
			continue
		}
		s.refused(i, s.job.cause(failed[0].Err)) // for example, publication found the piece resident or the disk full
		failed = failed[1:]
	}
	x := s.job.session
	s.job.finish()
	reply := &proto.StorePublished{Results: s.results, Failures: s.failures, Bytes: uint64(o.Bytes), Cancelled: s.job.cancelled.Load()}
	x.reply(&proto.SessionResponse{Id: s.job.id, Body: &proto.SessionResponse_StorePublished{StorePublished: reply}})
	x.server.latencies.Observe(AnswerStorePublished, s.job.since)
	profile := x.profile.Load()
	profile.usage.StoredBytes.Add(reply.Bytes)
	s.job.span.Store(profile.spans, s.job.message.GetStore(), reply)
	if s.counted {
		x.server.finish()
	}
}

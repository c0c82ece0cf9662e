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

// store is STORE. All of it is checked before anything is reserved. Then every chunk is reserved, in order, and the
// I/O of those that got a place starts. A reservation may wait for the disk, so reservations have their own queue: other
// messages do not wait for it.
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
	spec := &transfer.StoreJob{ // reg may be unmapped while s reserves
		Tenant: x.tenant, Memory: reg.memory, Read: s.read, Published: s.published, Withdrawn: x.memory.withdrawn(j.id), Paths: j.span.Paths,
	}
	x.reserving.Add(j.id, func() { s.reserve(wants, number, spec) })
	if j.cancelled.Load() { // it may not have been queued yet when it was cancelled
		x.reserving.Remove(j.id)
	}
	return nil
}

// reserve reserves the chunks' places and submits the job with those that got one.
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
					break // what holds for one unit holds for the others
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

// waits reports whether the job cannot start yet. The session's end waits for this, which reads the client's semaphores.
func (s *storing) waits() bool {
	jobs := s.job.session.jobs
	if !s.timeline.holds() || !jobs.hold() {
		return false
	}
	defer jobs.waiters.Done()
	reached, err := s.timeline.reached()
	return err == nil && !reached
}

// reserveOne reserves one chunk's place, unless the job was cancelled. What a job has reserved that waits for a
// semaphore is kept from all others for nothing, so it is bounded.
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

// freeRoom notes that the job waits for no semaphore any more.
func (s *storing) freeRoom() {
	if bytes := s.room.Swap(0); bytes > 0 {
		s.job.session.share.Give(budget.Room, bytes)
	}
}

// submit starts a STORE's I/O, or drops its reservations if the job has been cancelled. The session's end
// does not wait for a reservation, but it waits for this, which reads and writes the client's semaphores.
func (x *session) submit(s *storing, spec *transfer.StoreJob) {
	held := x.jobs.hold()
	if held {
		defer x.jobs.waiters.Done()
	}
	if !held || !s.job.claim() { // the session's end cancels the job
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

// checkStore reads the chunks of a STORE.
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

// storing collects a STORE's answers. read runs before published, so it needs no lock.
type storing struct {
	job      *job
	index    []int // of the message's chunks that the job has
	results  []proto.ChunkResult
	failures []*proto.ChunkFailure
	counted  bool // among the server's jobs
	timeline *timeline
	room     atomic.Int64 // bytes reserved while the job waits for a semaphore
}

func newStoring(j *job, chunks int) *storing {
	return &storing{job: j, results: make([]proto.ChunkResult, chunks)}
}

// refused records a unit of a chunk that was not stored, and why.
func (s *storing) refused(i int, err error) proto.ChunkResult {
	r := resultOf(err)
	if r == proto.ChunkResult_CHUNK_RESULT_FAILED && s.results[i] != r {
		s.failures = append(s.failures, &proto.ChunkFailure{Chunk: uint32(i), Code: codeOf(err), Message: err.Error()})
	}
	s.add(i, r)
	return r
}

// weight orders results. Of a chunk's units the heaviest counts: what some had already, and others got, is stored.
var weight = [...]int{
	proto.ChunkResult_CHUNK_RESULT_RESIDENT: 1, proto.ChunkResult_CHUNK_RESULT_STORED: 2, proto.ChunkResult_CHUNK_RESULT_REFUSED: 3,
	proto.ChunkResult_CHUNK_RESULT_SHED: 4, proto.ChunkResult_CHUNK_RESULT_FAILED: 5,
}

// add adds a unit's result to its chunk's.
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
	failed := o.Failed // in ascending order
	for k, i := range s.index {
		if len(failed) == 0 || failed[0].Chunk != k {
			s.add(i, proto.ChunkResult_CHUNK_RESULT_STORED)
			continue
		}
		s.refused(i, s.job.cause(failed[0].Err)) // at publication another piece was there, or the disk was full, or it failed
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

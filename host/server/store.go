package server

import (
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/proto"
	"github.com/kvhost/kvhost/host/store"
	"github.com/kvhost/kvhost/host/transfer"
)

// store is STORE. All of it is checked before anything is reserved; then every chunk is reserved, in order; then the
// I/O of those that got a place begins. Reserving may wait for the disk, so it has a goroutine of its own: the turn goes on
// when the job is cancelled or the session ends, and the goroutine finds that out by itself.
func (x *session) store(j *job, m *proto.Store) error {
	reg, err := x.registered(m.GetGroup())
	if err != nil {
		return err
	}
	wants, err := x.checkStore(m, reg)
	if err != nil {
		return err
	}
	number, err := x.engine.number(x, m.GetRequest())
	if err != nil {
		return err
	}
	j.reg = reg
	s := newStoring(j, len(wants))
	if s.timeline, err = x.timelineOf(m.GetTimeline(), 0); err != nil {
		return err
	}
	sj := storeJob{memory: reg.memory, read: s.read, published: s.published}
	select {
	case x.reserving <- struct{}{}:
	case <-j.ctx.Done():
		return nil
	}
	made := make(chan struct{})
	x.server.work.Go(func() {
		defer func() { <-x.reserving }()
		defer close(made)
		foreseen := foresee(wants)
		for i, r := range wants {
			r.request, r.foreseen = number, foreseen
			put, err := x.reserve(j, r)
			if err != nil {
				s.refused(i, err)
				continue
			}
			s.results[i] = resultOf(nil)
			s.index = append(s.index, i)
			sj.puts = append(sj.puts, put)
			sj.blocks = append(sj.blocks, m.Chunks[i].Blocks)
		}
		x.submit(s, sj)
	})
	select {
	case <-made:
	case <-j.ctx.Done():
	}
	return nil
}

// submit begins a STORE's I/O, or gives up what was reserved when the job was cancelled meanwhile. The session's end, which
// does not wait for the reservation, waits for this: it reads and writes the client's semaphores.
func (x *session) submit(s *storing, sj storeJob) {
	stays := x.stay()
	if stays {
		defer x.waiters.Done()
	}
	if !stays || !s.job.claim() { // the end that has begun cancels the job
		for _, p := range sj.puts {
			p.Abort(transfer.ErrCancelled)
		}
		return
	}
	if len(sj.puts) == 0 {
		s.read(transfer.Outcome{})
		s.published(transfer.Outcome{})
		s.job.neverRun()
		return
	}
	s.counted = true
	x.server.begin()
	sj.held = s.timeline != nil && s.timeline.from > 0
	s.job.run(x.queue.store(sj))
	x.await(s.job, s.timeline)
}

func foresee(wants []reservation) *store.Foreseen {
	keys := make([]chunk.Key, len(wants))
	for i := range wants {
		keys[i] = wants[i].key
	}
	return store.Foresee(keys)
}

// reserve gets one chunk its place, unless the job was cancelled meanwhile.
func (x *session) reserve(j *job, r reservation) (reserved, error) {
	if j.cancelled.Load() {
		return nil, transfer.ErrCancelled
	}
	return x.engine.space.put(j.ctx, r)
}

func (x *session) job(id uint64) *job {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.jobs[id]
}

// checkStore reads the chunks of a STORE.
func (x *session) checkStore(m *proto.Store, reg *registration) ([]reservation, error) {
	if err := x.checkChunks(len(m.GetChunks())); err != nil {
		return nil, err
	}
	wants := make([]reservation, len(m.GetChunks()))
	for i, c := range m.GetChunks() {
		key, err := proto.ParseKey(c.GetKey(), x.ns.KeyBytes)
		if err != nil {
			return nil, invalid(at("chunks", i, "key"), "%v", err)
		}
		var parent chunk.Key
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
		wants[i] = reservation{
			group: reg.group.ID, depth: c.GetDepth(), rank: x.piece, ranks: x.engine.facts.pieces,
			parent: parent, key: key, tenant: x.tenant,
		}
	}
	return wants, nil
}

func (x *session) checkChunks(n int) error {
	if n == 0 {
		return invalid("chunks", "none")
	}
	if limit := x.server.cfg.Limits.ChunksPerJob; n > limit {
		return faultf(proto.Code_CODE_LIMIT, "chunks", "%d, at most %d in one job", n, limit)
	}
	return nil
}

// storing gathers a STORE's answers. read comes before published, so nothing here is touched twice at a time.
type storing struct {
	job      *job
	index    []int // of the message's chunks that became the job's
	results  []proto.ChunkResult
	failures []*proto.ChunkFailure
	counted  bool // among the server's jobs
	timeline *timeline
}

func newStoring(j *job, chunks int) *storing {
	return &storing{job: j, results: make([]proto.ChunkResult, chunks)}
}

// refused notes a chunk that got no place.
func (s *storing) refused(i int, err error) {
	if s.results[i] = resultOf(err); s.results[i] == proto.ChunkResult_CHUNK_RESULT_FAILED {
		s.failures = append(s.failures, &proto.ChunkFailure{Chunk: uint32(i), Code: codeOf(err), Message: err.Error()})
	}
}

func (s *storing) read(o transfer.Outcome) {
	s.timeline.over(len(o.Failed)+len(s.failures) > 0)
	s.job.session.reply(&proto.HostMessage{Id: s.job.id, Body: &proto.HostMessage_StoreRead{StoreRead: &proto.StoreRead{}}})
}

func (s *storing) published(o transfer.Outcome) {
	for _, f := range o.Failed {
		i := s.index[f.Chunk]
		s.results[i] = proto.ChunkResult_CHUNK_RESULT_FAILED
		if r := resultOf(f.Err); r != proto.ChunkResult_CHUNK_RESULT_FAILED {
			s.results[i] = r // publication found that another was faster, or the disk full
			continue
		}
		s.failures = append(s.failures, &proto.ChunkFailure{Chunk: uint32(i), Code: codeOf(f.Err), Message: f.Err.Error()})
	}
	x := s.job.session
	s.job.finish()
	x.reply(&proto.HostMessage{Id: s.job.id, Body: &proto.HostMessage_StorePublished{StorePublished: &proto.StorePublished{
		Results: s.results, Failures: s.failures, Bytes: uint64(o.Bytes), Cancelled: s.job.cancelled.Load(),
	}}})
	if s.counted {
		x.server.finish()
	}
}

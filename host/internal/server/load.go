package server

import (
	"errors"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/transfer"
)

// load handles LOAD. Invalid input is an error. If the lease is over, the LOAD is answered with a failure of every chunk
// instead, since that is not the client's fault.
func (x *session) load(j *job, m *proto.Load) error {
	if err := x.cfg.Limits.checkChunks(len(m.GetChunks())); err != nil {
		return err
	}
	s := &loading{job: j, units: int(x.units), chunks: m.GetChunks(), silent: m.GetSilent()}
	if err := s.readTimeline(m); err != nil {
		return err
	}
	l, err := x.engine.peek(m.GetLease())
	switch {
	case errors.Is(err, errLeaseOver):
		s.failAll(err)
		return nil
	case err != nil:
		return faultf(proto.Code_CODE_UNKNOWN, "lease", "%d was never granted", m.GetLease())
	}
	reg, err := x.memory.registered(l.group)
	if err != nil {
		return err
	}
	spec := transfer.LoadJob{Tenant: x.tenant, Lease: l.pins, Rank: x.piece, Memory: reg.memory, Done: s.done}
	if spec.Chunks, err = checkLoad(m, l, reg); err != nil {
		return err
	}
	if err := x.engine.take(l, x.reader()); err != nil { // this rank has loaded already, or the lease has just expired
		s.failAll(err)
		return nil
	}
	if !j.claim() { // cancelled
		x.engine.loaded(l)
		return nil
	}
	s.lease, j.reg = l, reg
	j.span.Follow(x.server.cfg.Spans, l.span, j.since)
	spec.Paths = j.span.Paths
	if m.GetLayers() {
		spec.Layers, spec.Files = &transfer.Layers{Landed: s.layer}, x.share
	}
	spec.Held = s.timeline.holds()
	x.server.begin()
	j.run(x.queue.Load(&spec))
	x.timelines.start(j, s.timeline, func() {})
	return nil
}

// readTimeline reads the timeline of the LOAD. A layer-wise LOAD has a status semaphore for each layer.
func (s *loading) readTimeline(m *proto.Load) (err error) {
	x, layers := s.job.session, 0
	if g := x.engine.leased(m.GetLease()); g != nil && m.GetLayers() {
		layers = len(transfer.LayersOf(g.Geometry))
	}
	s.timeline, err = x.timelines.of(m.GetTimeline(), layers)
	return err
}

// useUpLease uses up this rank's share of a lease for a LOAD that was cancelled in the queue, since every LOAD does so. m is
// nil for a STORE.
func (x *session) useUpLease(m *proto.Load) {
	if m == nil || x.engine == nil {
		return
	}
	if l, err := x.engine.peek(m.GetLease()); err == nil && x.engine.take(l, x.reader()) == nil {
		x.engine.loaded(l)
	}
}

// checkLoad returns the chunks of a LOAD, one for each chunk of the message and each unit of the session.
func checkLoad(m *proto.Load, l *sharedLease, reg *registration) ([]transfer.LoadChunk, error) {
	chunks := make([]transfer.LoadChunk, 0, len(m.GetChunks())*reg.units)
	used := blockSets.Get().(*blockSet)
	defer blockSets.Put(used)
	ids := 0 // number of ids in the message, which may not match the group's geometry
	for _, c := range m.GetChunks() {
		ids += len(c.GetBlocks())
	}
	used.Begin(ids)
	for i, c := range m.GetChunks() {
		if !l.granted(int(c.GetIndex())) {
			return nil, invalid(at("chunks", i, "index"), "the lease does not hold key %d of its LOOKUP", c.GetIndex())
		}
		if err := reg.checkBlocks(i, c.GetBlocks(), true); err != nil {
			return nil, err
		}
		for _, b := range c.GetBlocks() {
			if b != abi.None && !used.Add(b) {
				return nil, invalid(at("chunks", i, "blocks"), "block %d twice in one LOAD", b)
			}
		}
		for unit := range reg.units {
			chunks = append(chunks, transfer.LoadChunk{Index: int(c.GetIndex()) - l.first, Unit: unit, Blocks: c.GetBlocks()})
		}
	}
	return chunks, nil
}

// loading collects the results of a LOAD for its answer.
type loading struct {
	job      *job
	units    int // chunk i of the transfer job belongs to chunk i / units of the message
	chunks   []*proto.LoadChunk
	lease    *sharedLease // taken lease, or nil
	timeline *timeline
	silent   bool // no message for each layer
}

func (s *loading) layer(layer uint32, failed []int) {
	s.timeline.layer(len(failed) > 0)
	if s.silent {
		return
	}
	m := &proto.LoadLayer{Layer: layer}
	for _, i := range failed { // failed is in ascending order
		if at := uint32(i / s.units); len(m.Failed) == 0 || m.Failed[len(m.Failed)-1] != at {
			m.Failed = append(m.Failed, at)
		}
	}
	s.job.session.reply(&proto.SessionResponse{Id: s.job.id, Body: &proto.SessionResponse_LoadLayer{LoadLayer: m}})
}

// done completes the LOAD. The transfer engine calls it.
func (s *loading) done(o transfer.Outcome) {
	s.complete(o)
	s.job.session.server.finish()
}

// failAll completes a LOAD before any copy has started, unless a CANCEL has completed it.
func (s *loading) failAll(err error) {
	if s.job.claim() {
		s.failed(err)
		s.job.neverRun()
	}
}

// failed completes a LOAD with a failure of every chunk.
func (s *loading) failed(err error) {
	o := transfer.Outcome{Failed: make([]transfer.ChunkError, len(s.chunks))}
	for i := range s.chunks {
		o.Failed[i] = transfer.ChunkError{Chunk: i * s.units, Err: err}
	}
	s.complete(o)
}

func (s *loading) complete(o transfer.Outcome) {
	x := s.job.session
	if s.lease != nil {
		x.engine.loaded(s.lease)
	}
	s.timeline.over(len(o.Failed) > 0)
	reply := &proto.LoadDone{Bytes: uint64(o.Bytes), Cancelled: s.job.cancelled.Load()}
	for _, f := range o.Failed { // Failed is in ascending order
		at := f.Chunk / s.units
		if n := len(reply.Failures); n > 0 && reply.Failures[n-1].Chunk == uint32(at) {
			continue // another unit of the chunk has failed, too
		}
		f.Err = s.job.cause(f.Err)
		reply.Failures = append(reply.Failures, &proto.ChunkFailure{
			Chunk: uint32(at), Code: codeOf(f.Err), Message: f.Err.Error(), Blocks: wanted(s.chunks[at].GetBlocks()),
		})
	}
	s.job.finish()
	x.reply(&proto.SessionResponse{Id: s.job.id, Body: &proto.SessionResponse_LoadDone{LoadDone: reply}})
	x.server.latencies.Observe(AnswerLoad, s.job.since)
	profile := x.profile.Load()
	profile.usage.LoadedBytes.Add(reply.Bytes)
	s.job.span.Load(profile.spans, s.job.message.GetLoad(), reply)
}

// wanted returns the block ids without the holes.
func wanted(blocks []uint32) []uint32 {
	out := make([]uint32, 0, len(blocks))
	for _, b := range blocks {
		if b != abi.None {
			out = append(out, b)
		}
	}
	return out
}

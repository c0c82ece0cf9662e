package server

import (
	"errors"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/proto"
	"github.com/kvhost/kvhost/host/transfer"
)

// load is LOAD. Wrong input is an error; a lease that is over fails all blocks instead, for that is no fault of the
// client's.
func (x *session) load(j *job, m *proto.Load) error {
	if err := x.checkChunks(len(m.GetChunks())); err != nil {
		return err
	}
	s := &loading{job: j, chunks: m.GetChunks()}
	if err := s.order(m); err != nil {
		return err
	}
	l, err := x.engine.peek(m.GetLease())
	switch {
	case errors.Is(err, errLeaseOver):
		s.failAll(err)
		return nil
	case err != nil:
		return faultf(proto.Code_CODE_UNKNOWN, "lease", "%d was never given", m.GetLease())
	}
	reg, err := x.registered(l.group)
	if err != nil {
		return err
	}
	lj, err := x.checkLoad(m, l, reg)
	if err != nil {
		return err
	}
	if err := x.engine.take(l, x.reader()); err != nil { // loaded by this rank already, or expired since
		s.failAll(err)
		return nil
	}
	if !j.claim() { // by its cancel
		x.engine.loaded(l)
		return nil
	}
	s.lease, j.reg = l, reg
	lj.done = s.done
	if m.GetLayers() {
		lj.layers = &transfer.Layers{Order: m.GetOrder(), Ahead: int(m.GetPrefetch()), Landed: s.layer}
	}
	lj.held = s.timeline != nil && s.timeline.from > 0
	x.server.begin()
	j.run(x.queue.load(lj))
	x.await(j, s.timeline)
	return nil
}

// order reads the LOAD's timeline, which has semaphores for every layer.
func (s *loading) order(m *proto.Load) (err error) {
	x, layers := s.job.session, 0
	if g := x.engine.leased(m.GetLease()); g != nil && m.GetLayers() {
		layers = len(transfer.LayersOf(g.Geometry))
	}
	s.timeline, err = x.timelineOf(m.GetTimeline(), layers)
	return err
}

// forgo uses up the lease of a LOAD that was cancelled before its turn came, as every LOAD does. m is nil for a STORE.
func (x *session) forgo(m *proto.Load) {
	if m == nil || !x.greeted {
		return
	}
	if l, err := x.engine.peek(m.GetLease()); err == nil && x.engine.take(l, x.reader()) == nil {
		x.engine.loaded(l)
	}
}

// checkLoad reads the chunks of a LOAD.
func (x *session) checkLoad(m *proto.Load, l *lease, reg *registration) (loadJob, error) {
	if err := checkOrder(m, reg.group); err != nil {
		return loadJob{}, err
	}
	lj := loadJob{
		pins: l.pins, rank: x.piece, memory: reg.memory,
		index: make([]int, len(m.GetChunks())), blocks: make([][]uint32, len(m.GetChunks())),
	}
	used := reg.newUse()
	for i, c := range m.GetChunks() {
		if !l.granted(int(c.GetIndex())) {
			return lj, invalid(at("chunks", i, "index"), "the lease does not hold key %d of its LOOKUP", c.GetIndex())
		}
		if err := reg.checkBlocks(i, c.GetBlocks(), true); err != nil {
			return lj, err
		}
		for _, b := range c.GetBlocks() {
			if b != abi.None && !used.add(b) {
				return lj, invalid(at("chunks", i, "blocks"), "block %d twice in one LOAD", b)
			}
		}
		lj.index[i], lj.blocks[i] = int(c.GetIndex())-l.first, c.GetBlocks()
	}
	return lj, nil
}

// checkOrder checks what a LOAD says of layers.
func checkOrder(m *proto.Load, g *chunk.Group) error {
	switch {
	case !m.GetLayers() && len(m.GetOrder()) > 0:
		return invalid("order", "the LOAD is not layer-wise")
	case !m.GetLayers() && m.GetPrefetch() > 0:
		return invalid("prefetch", "the LOAD is not layer-wise")
	case len(m.GetOrder()) == 0:
		return nil
	}
	left := map[uint32]bool{}
	for _, p := range g.Geometry.Planes {
		left[p.Layer] = true
	}
	for i, layer := range m.GetOrder() {
		if !left[layer] {
			return invalid(at("order", i, ""), "layer %d, which group %d does not have or which came before", layer, g.ID)
		}
		delete(left, layer)
	}
	if len(left) > 0 {
		return invalid("order", "%d layers of group %d are missing", len(left), g.ID)
	}
	return nil
}

// loading gathers a LOAD's answer.
type loading struct {
	job      *job
	chunks   []*proto.LoadChunk
	lease    *lease // taken, or nil
	timeline *timeline
}

func (s *loading) layer(layer uint32, failed []int) {
	m := &proto.LoadLayer{Layer: layer}
	for _, i := range failed {
		m.Failed = append(m.Failed, uint32(i))
	}
	s.timeline.layer(len(failed) > 0)
	s.job.session.reply(&proto.HostMessage{Id: s.job.id, Body: &proto.HostMessage_LoadLayer{LoadLayer: m}})
}

// done is called by the engine.
func (s *loading) done(o transfer.Outcome) {
	s.complete(o)
	s.job.session.server.finish()
}

// failAll completes a LOAD of which no copy will be started, unless its cancel has.
func (s *loading) failAll(err error) {
	if s.job.claim() {
		s.failed(err)
		s.job.neverRun()
	}
}

// failed completes a LOAD of which nothing was delivered.
func (s *loading) failed(err error) {
	o := transfer.Outcome{Failed: make([]transfer.ChunkError, len(s.chunks))}
	for i := range s.chunks {
		o.Failed[i] = transfer.ChunkError{Chunk: i, Err: err}
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
	for _, f := range o.Failed {
		reply.Failures = append(reply.Failures, &proto.ChunkFailure{
			Chunk: uint32(f.Chunk), Code: codeOf(f.Err), Message: f.Err.Error(), Blocks: wanted(s.chunks[f.Chunk].GetBlocks()),
		})
	}
	s.job.finish()
	x.reply(&proto.HostMessage{Id: s.job.id, Body: &proto.HostMessage_LoadDone{LoadDone: reply}})
}

// wanted leaves the holes out.
func wanted(blocks []uint32) []uint32 {
	out := make([]uint32, 0, len(blocks))
	for _, b := range blocks {
		if b != abi.None {
			out = append(out, b)
		}
	}
	return out
}

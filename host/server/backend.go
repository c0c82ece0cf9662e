package server

import (
	"context"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store"
	"github.com/kvhost/kvhost/host/transfer"
)

// backend is what sessions ask of the store and the engine together. There is one real one; tests put others here to
// inject what a disk rarely does.
type backend interface {
	space(ctx context.Context, ns *chunk.Namespace) (space, error)
	queue(device string) (queue, error)
	endRequest(request uint32)
}

// space is the store under one namespace.
type space interface {
	lookup(q lookup) (pins, error)
	put(ctx context.Context, r reservation) (reserved, error)
}

type lookup struct {
	group           uint32
	keys            []chunk.Key
	ranks           uint64 // pieces that make a hit
	request, tenant uint32
}

// pins are the granted entries of a lookup.
type pins interface {
	Hits() int
	Has(i int) bool
	Release()
}

type reservation struct {
	group, depth, rank uint32
	ranks              uint64 // pieces that make the entry complete
	parent, key        chunk.Key
	request, tenant    uint32
	foreseen           *store.Foreseen // the request's keys
}

// reserved is a place for one piece: it is handed to a store job, or aborted.
type reserved interface {
	Abort(cause error)
}

// queue runs jobs. Callbacks come from its goroutines, or before the call returns.
type queue interface {
	store(j storeJob) fence
	load(j loadJob) fence
}

type storeJob struct {
	memory    transfer.Memory
	puts      []reserved
	blocks    [][]uint32
	held      bool // until Begin
	read      func(transfer.Outcome)
	published func(transfer.Outcome)
}

type loadJob struct {
	pins   pins
	rank   uint32
	memory transfer.Memory
	held   bool // until Begin
	index  []int
	blocks [][]uint32
	layers *transfer.Layers // nil unless the load is layer-wise
	done   func(transfer.Outcome)
}

// fence is a running job.
type fence interface {
	Cancel()
	Advance(layers int)
	Begin()
	Fenced() <-chan struct{}
}

// live is the backend of a store and an engine.
type live struct {
	st     *store.Store
	engine *transfer.Engine
}

func (l live) endRequest(request uint32) { l.st.EndRequest(request) }

func (l live) space(ctx context.Context, ns *chunk.Namespace) (space, error) {
	sp, err := l.st.Space(ctx, ns)
	if err != nil {
		return nil, err
	}
	return liveSpace{l.st, sp}, nil
}

func (l live) queue(device string) (queue, error) {
	q, err := l.engine.Queue(device)
	if err != nil {
		return nil, err
	}
	return liveQueue{q}, nil
}

type liveSpace struct {
	st *store.Store
	sp *store.Space
}

func (s liveSpace) lookup(q lookup) (pins, error) {
	l, err := s.st.Lookup(store.LookupRequest{
		Space: s.sp, Group: q.group, Keys: q.keys, Ranks: q.ranks, Request: q.request, Tenant: q.tenant,
	})
	if err != nil {
		return nil, err
	}
	return l, nil
}

func (s liveSpace) put(ctx context.Context, r reservation) (reserved, error) {
	p, err := s.st.Put(ctx, store.PutRequest{
		Space: s.sp, Group: r.group, Parent: r.parent, Key: r.key, Depth: r.depth, Rank: r.rank, Ranks: r.ranks,
		Request: r.request, Tenant: r.tenant, Foreseen: r.foreseen,
	})
	if err != nil {
		return nil, err
	}
	return p, nil
}

type liveQueue struct{ q *transfer.Queue }

func (l liveQueue) store(j storeJob) fence {
	chunks := make([]transfer.StoreChunk, len(j.puts))
	for i, p := range j.puts {
		chunks[i] = transfer.StoreChunk{Put: p.(*store.Put), Blocks: j.blocks[i]}
	}
	return l.q.Store(&transfer.StoreJob{Memory: j.memory, Chunks: chunks, Held: j.held, Read: j.read, Published: j.published})
}

func (l liveQueue) load(j loadJob) fence {
	chunks := make([]transfer.LoadChunk, len(j.index))
	for i, at := range j.index {
		chunks[i] = transfer.LoadChunk{Index: at, Blocks: j.blocks[i]}
	}
	return l.q.Load(&transfer.LoadJob{
		Lease: j.pins.(*store.Lease), Rank: j.rank, Memory: j.memory, Chunks: chunks, Held: j.held, Layers: j.layers, Done: j.done,
	})
}

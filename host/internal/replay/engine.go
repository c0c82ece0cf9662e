package replay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/drive"
	"github.com/kvhost/kvhost/host/internal/trace"
	"github.com/kvhost/kvhost/host/kv"
)

// engine is one session of a replay: a serving engine with the ranks of the shape. One goroutine runs it.
type engine struct {
	ranks  []*rank
	window int // most chunks in one message, and in the pages of one rank
	tally  tally
	keys   []kv.Key // keys of the current request
	again  []int    // its chunks that were hits but could not be loaded
}

// rank is one client session of an engine, with its pages.
type rank struct {
	drive.Rank
	pages *pages
}

// dial opens the sessions of one engine.
func dial(ctx context.Context, o *Options, name string) (*engine, error) {
	ns, err := o.Shape.Namespace()
	if err != nil {
		return nil, err
	}
	filling, err := o.Shape.content()
	if err != nil {
		return nil, err
	}
	g := ns.Groups[0].Geometry
	e := &engine{window: int(max(1, min(o.Memory/int64(ns.Ranks())/g.PageBytes(), 1<<20)))}
	for r := range uint32(ns.Ranks()) {
		s, err := client.Dial(ctx, client.Hello{
			Socket: o.Socket, Engine: name, Role: "worker", Rank: r, LocalRanks: uint32(ns.Ranks()), Namespace: *ns,
		})
		if err != nil {
			return nil, errors.Join(err, e.close())
		}
		e.ranks = append(e.ranks, &rank{Rank: drive.Rank{Session: s}})
		limits := s.Host().Limits
		for _, n := range []int{limits.KeysPerLookup, limits.ChunksPerJob} {
			if n > 0 {
				e.window = min(e.window, n)
			}
		}
		if n := limits.ArenaBytes; n > 0 {
			e.window = max(1, min(e.window, int(n/g.PageBytes())-2))
		}
	}
	for r, x := range e.ranks {
		p, err := newPages(uint32(r), g, filling, e.window)
		if err == nil {
			x.pages = p
			err = p.memory.Register(ctx, x.Session, drive.Heads{})
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("replay: rank %d: %w", r, err), e.close())
		}
	}
	return e, nil
}

func (e *engine) close() error {
	var errs []error
	for _, x := range e.ranks {
		errs = append(errs, x.Close())
		if x.pages != nil {
			errs = append(errs, x.pages.memory.Close())
		}
	}
	return errors.Join(errs...)
}

// each calls do for every rank concurrently.
func (e *engine) each(ctx context.Context, do func(context.Context, *rank) error) error {
	if len(e.ranks) == 1 {
		return do(ctx, e.ranks[0])
	}
	group, ctx := errgroup.WithContext(ctx)
	for _, x := range e.ranks {
		group.Go(func() error { return do(ctx, x) })
	}
	return group.Wait()
}

// play replays one request. After an error the session cannot be used any more.
func (e *engine) play(ctx context.Context, number uint32, req *trace.Request) (Request, error) {
	before := e.tally
	e.keys = drive.ChainKeys(e.keys[:0], req.HashIDs)
	e.again = e.again[:0]
	hits := 0
	for hits < len(e.keys) {
		want := min(len(e.keys)-hits, e.window)
		n, err := e.load(ctx, number, hits, want)
		if err != nil {
			return Request{}, err
		}
		hits += n
		if n < want {
			break
		}
	}
	for i := hits; i < len(e.keys); i++ {
		e.again = append(e.again, i)
	}
	for part := range slices.Chunk(e.again, e.window) {
		if err := e.store(ctx, number, part); err != nil {
			return Request{}, err
		}
	}
	if len(e.keys) > 0 {
		if err := e.each(ctx, func(ctx context.Context, x *rank) error {
			return x.EndRequest(ctx, number, hintsOf(req))
		}); err != nil {
			return Request{}, err
		}
	}
	t := &e.tally
	t.requests++
	t.accesses += int64(len(e.keys))
	return Request{
		Accesses: len(e.keys), Hits: int(t.hits - before.hits),
		Loaded: t.bytesLoaded - before.bytesLoaded, Stored: t.bytesStored - before.bytesStored,
	}, nil
}

// hintsOf returns the hints of a trace about a request in the client's form.
func hintsOf(req *trace.Request) client.Hints {
	h := req.Hints()
	return client.Hints{
		Reason: client.EndReason(h.Reason), TokensIn: h.TokensIn, TokensOut: h.TokensOut, Priority: h.Priority,
		Return: time.Duration(h.ReturnMS) * time.Millisecond,
	}
}

// load looks up the first want keys, loads the hits, and returns their number.
func (e *engine) load(ctx context.Context, number uint32, first, want int) (int, error) {
	start := time.Now()
	found, err := e.ranks[0].Lookup(ctx, client.LookupRequest{
		Request: number, Group: drive.GroupID, Keys: e.keys[first : first+want], Readers: 1<<len(e.ranks) - 1,
	})
	e.tally.lookups = append(e.tally.lookups, time.Since(start))
	if err != nil {
		return 0, fmt.Errorf("replay: lookup: %w", err)
	}
	hits := found.Hits()
	if hits == 0 {
		return 0, nil
	}
	if hits > want {
		return 0, fmt.Errorf("%w: the host grants %d hits for %d keys", ErrMismatch, hits, want)
	}
	which := make([]int, hits)
	for i := range which {
		which[i] = first + i
	}
	outcomes := make([]loaded, len(e.ranks))
	if err := e.each(ctx, func(ctx context.Context, x *rank) error {
		out := &outcomes[x.pages.rank]
		out.prompt = drive.NewPrompt(number, e.keys, which, x.pages.blocks.Draw(hits))
		x.pages.poison(&out.prompt)
		return nil
	}); err != nil {
		return 0, err
	}
	start = time.Now()
	if err := e.each(ctx, func(ctx context.Context, x *rank) error {
		return x.load(ctx, found, &outcomes[x.pages.rank])
	}); err != nil {
		return 0, err
	}
	e.tally.loads = append(e.tally.loads, time.Since(start))
	if err := e.each(ctx, func(ctx context.Context, x *rank) error {
		x.verify(&outcomes[x.pages.rank])
		return nil
	}); err != nil {
		return 0, err
	}
	e.again = e.tally.loaded(outcomes, hits, first, e.again)
	return hits, nil
}

// loaded is the outcome of one rank's load.
type loaded struct {
	prompt drive.Prompt
	result client.LoadResult
	failed []bool  // by chunk: the host reported a failure
	wrong  []int64 // by chunk: number of wrong bytes
}

func (x *rank) load(ctx context.Context, found *client.Lookup, out *loaded) error {
	results, _, err := x.Load(ctx, func(*drive.Prompt) (*client.Lookup, error) {
		if x.pages.rank != 0 {
			return x.Leased(drive.GroupID, found.Lease()), nil
		}
		return found, nil
	}, false, out.prompt)
	if err != nil {
		return fmt.Errorf("replay: rank %d: load: %w", x.pages.rank, err)
	}
	out.result = results[0]
	return nil
}

// verify compares every byte of the chunks that the host reports as loaded.
func (x *rank) verify(out *loaded) {
	chunks := out.prompt.Chunks
	out.failed, out.wrong = make([]bool, len(chunks)), make([]int64, len(chunks))
	for _, f := range out.result.Failed {
		if f.Chunk < len(chunks) {
			out.failed[f.Chunk] = true
		}
	}
	for i := range chunks {
		if !out.failed[i] {
			out.wrong[i] = x.pages.check(&chunks[i])
		}
	}
}

// store stores chunks of the request, by their index, and waits until they are published.
func (e *engine) store(ctx context.Context, number uint32, which []int) error {
	results := make([]client.StoreResult, len(e.ranks))
	elapsed := make([]time.Duration, len(e.ranks))
	err := e.each(ctx, func(ctx context.Context, x *rank) error {
		r := x.pages.rank
		prompt := drive.NewPrompt(number, e.keys, which, x.pages.blocks.Draw(len(which)))
		x.pages.fill(&prompt)
		got, took, err := x.Store(ctx, prompt)
		if err != nil {
			return fmt.Errorf("replay: rank %d: store: %w", r, err)
		}
		results[r], elapsed[r] = got[0], took
		return nil
	})
	if err != nil {
		return err
	}
	e.tally.stores = append(e.tally.stores, slices.Max(elapsed))
	e.tally.stored(results)
	return nil
}

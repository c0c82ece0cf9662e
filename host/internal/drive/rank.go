package drive

import (
	"context"
	"time"

	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/kv"
)

// GroupID is the only group of the namespaces that this package uses.
const GroupID = 0

// Rank is one client session of an engine.
type Rank struct{ *client.Session }

// Prompt is a run of chunks that one job stores or loads, with their blocks.
type Prompt struct {
	Request uint32
	Chunks  []client.StoreChunk
}

// NewPrompt returns the chunks of a request with the indexes in which, in that order. keys are the keys of all chunks of the
// request.
func NewPrompt(request uint32, keys []kv.Key, which []int, blocks [][]uint32) Prompt {
	p := Prompt{Request: request, Chunks: make([]client.StoreChunk, len(which))}
	for at, i := range which {
		p.Chunks[at] = client.StoreChunk{Key: keys[i], Depth: uint32(i), Blocks: blocks[at]}
		if i > 0 {
			p.Chunks[at].Parent = keys[i-1]
		}
	}
	return p
}

// Keys returns the keys of the chunks.
func Keys(chunks []client.StoreChunk) []kv.Key {
	keys := make([]kv.Key, len(chunks))
	for i := range chunks {
		keys[i] = chunks[i].Key
	}
	return keys
}

// Times is the duration of loads, counted from the first call.
type Times struct {
	First time.Duration // until the first layer of all prompts has arrived; 0 unless the load is layer-wise
	Whole time.Duration
}

// Store stores all prompts at the same time, with one job for each, and waits until they are published.
func (r Rank) Store(ctx context.Context, prompts ...Prompt) ([]client.StoreResult, time.Duration, error) {
	start := time.Now()
	jobs := make([]*client.StoreJob, len(prompts))
	for i, p := range prompts {
		var err error
		if jobs[i], err = r.Session.Store(ctx, p.Request, GroupID, p.Chunks); err != nil {
			return nil, 0, err
		}
	}
	results := make([]client.StoreResult, len(prompts))
	for i, job := range jobs {
		var err error
		if results[i], err = job.Published(ctx); err != nil {
			return nil, 0, err
		}
	}
	return results, time.Since(start), nil
}

// Load loads all prompts at the same time, with one job for each, and waits until the jobs are over. lease returns the lease
// for a prompt.
func (r Rank) Load(ctx context.Context, lease func(*Prompt) (*client.Lookup, error), byLayer bool, prompts ...Prompt) (
	results []client.LoadResult, took Times, err error) {
	start := time.Now()
	landed := make(chan time.Duration, len(prompts)) // arrival of each prompt's first layer
	jobs := make([]*client.LoadJob, len(prompts))
	for i := range prompts {
		found, err := lease(&prompts[i])
		if err != nil {
			return nil, took, err
		}
		chunks := make([]client.LoadChunk, len(prompts[i].Chunks))
		for at, c := range prompts[i].Chunks {
			chunks[at] = client.LoadChunk{Index: at, Blocks: c.Blocks}
		}
		var opt client.LoadOptions
		if byLayer {
			seen := false
			opt.Layers = func(uint32, []int) {
				if !seen {
					seen = true
					landed <- time.Since(start)
				}
			}
		}
		if jobs[i], err = r.Session.Load(ctx, found, chunks, opt); err != nil {
			return nil, took, err
		}
	}
	results = make([]client.LoadResult, len(prompts))
	for i, job := range jobs {
		if results[i], err = job.Wait(ctx); err != nil {
			return nil, took, err
		}
	}
	took.Whole = time.Since(start)
	for len(landed) > 0 {
		took.First = max(took.First, <-landed)
	}
	return results, took, nil
}

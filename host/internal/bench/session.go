package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/kv"
)

// chunk is one chunk of a prompt, and the blocks that hold it or are to hold it.
type chunk struct {
	parent, key kv.Key // parent is zero for a prompt's first
	depth       uint32
	blocks      []uint32
}

// promptChunks is how many chunks of a prompt are stored and loaded by one job: a prompt of 16,384 tokens.
const promptChunks = 64

// shared is the memory of the pages as the host registers it.
type shared struct {
	namespace kv.Namespace
	blocks    uint32        // of each plane, one after the other
	device    string        // UUID of the GPU; empty for host memory
	handles   [][]byte      // CUDA IPC handles of the planes: each is an allocation
	arena     *client.Arena // host memory: all planes, one after the other
}

// session stores and loads through a session of the Go client, a job for each prompt, all prompts at once.
type session struct {
	host    *hostProcess
	client  *client.Session
	request uint32
}

func newSession(ctx context.Context, h *hostProcess, group *shared) (_ *session, err error) {
	p := &session{host: h}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.closeSession())
		}
	}()
	if p.client, err = client.Dial(ctx, client.Hello{Socket: h.socket, Engine: "bench", Role: "worker", LocalRanks: 1,
		Namespace: group.namespace, DeviceUUID: group.device}); err != nil {
		return nil, err
	}
	var regions []client.PlaneRegion
	var at int64
	for _, plane := range group.namespace.Groups[0].Geometry.Planes {
		r := client.PlaneRegion{Stride: int64(plane.PageBytes), Blocks: group.blocks}
		if group.arena != nil {
			r.Offset = at
			at += int64(plane.PageBytes) * int64(group.blocks)
		}
		regions = append(regions, r)
	}
	if group.arena == nil {
		_, err = p.client.RegisterIPC(ctx, 0, group.handles, regions)
		return p, err
	}
	_, err = p.client.Register(ctx, 0, group.arena, regions)
	return p, err
}

func (p *session) store(ctx context.Context, chunks []chunk) (time.Duration, error) {
	start := time.Now()
	var jobs []*client.StoreJob
	for prompt := range slices.Chunk(chunks, promptChunks) {
		var list []client.StoreChunk
		for _, c := range prompt {
			list = append(list, client.StoreChunk{Parent: c.parent, Key: c.key, Depth: c.depth, Blocks: c.blocks})
		}
		p.request++
		job, err := p.client.Store(ctx, p.request, 0, list)
		if err != nil {
			return 0, err
		}
		jobs = append(jobs, job)
	}
	for _, job := range jobs {
		r, err := job.Published(ctx)
		if err != nil {
			return 0, err
		}
		for i, c := range r.Chunks {
			if c.Result != client.Stored {
				return 0, fmt.Errorf("%w: chunk %d: %v: %w", errChunks, i, c.Result, c.Err)
			}
		}
	}
	return time.Since(start), nil
}

func (p *session) load(ctx context.Context, chunks []chunk, byLayer bool) (first, whole time.Duration,
	err error) {
	start := time.Now()
	landed := make(chan time.Duration, len(chunks)) // of each prompt's first layer
	var jobs []*client.LoadJob
	for prompt := range slices.Chunk(chunks, promptChunks) {
		p.request++
		found, err := p.client.Lookup(ctx, client.LookupRequest{Request: p.request, Keys: keysOf(prompt)})
		if err != nil {
			return 0, 0, err
		}
		if found.Hits() != len(prompt) {
			return 0, 0, fmt.Errorf("%w: %d of %d are there", errChunks, found.Hits(), len(prompt))
		}
		list := make([]client.LoadChunk, len(prompt))
		for i, c := range prompt {
			list[i] = client.LoadChunk{Index: i, Blocks: c.blocks}
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
		job, err := p.client.Load(ctx, found, list, opt)
		if err != nil {
			return 0, 0, err
		}
		jobs = append(jobs, job)
	}
	for _, job := range jobs {
		r, err := job.Wait(ctx)
		if err != nil {
			return 0, 0, err
		}
		if len(r.Failed) > 0 {
			return 0, 0, fmt.Errorf("%w: block %d: %w", errChunks, r.Failed[0].Block, r.Failed[0].Err)
		}
	}
	whole = time.Since(start)
	for len(landed) > 0 {
		first = max(first, <-landed)
	}
	return first, whole, nil
}

func (p *session) forget(ctx context.Context, chunks []chunk) error {
	results, err := p.client.Discard(ctx, 0, keysOf(chunks))
	for i, r := range results {
		if r != client.Removed {
			err = errors.Join(err, fmt.Errorf("%w: chunk %d is %v", errChunks, i, r))
		}
	}
	return err
}

func (p *session) close() error { return errors.Join(p.closeSession(), p.host.close()) }

func (p *session) closeSession() error {
	if p.client == nil {
		return nil
	}
	return p.client.Close()
}

func keysOf(chunks []chunk) []kv.Key {
	keys := make([]kv.Key, len(chunks))
	for i := range chunks {
		keys[i] = chunks[i].key
	}
	return keys
}

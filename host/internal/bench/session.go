package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/host/client"
)

// session stores and loads through a session of the Go client, a job for each prompt, all prompts at once.
type session struct {
	host    *hostProcess
	client  *client.Session
	arena   *client.Arena
	request uint32
}

func newSession(ctx context.Context, h *hostProcess, shared *Shared) (_ *session, err error) {
	p := &session{host: h}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.closeSession())
		}
	}()
	if p.client, err = client.Dial(ctx, client.Hello{Socket: h.socket, Engine: shared.Engine, Role: "worker",
		Rank: shared.Rank, LocalRanks: uint32(shared.Namespace.Ranks()), Namespace: shared.Namespace,
		DeviceUUID: shared.Device}); err != nil {
		return nil, err
	}
	var regions []client.PlaneRegion
	for i, plane := range shared.Namespace.Groups[0].Geometry.Planes {
		r := client.PlaneRegion{Stride: int64(plane.PageBytes), Blocks: shared.Blocks}
		if shared.File != nil {
			r.Offset = shared.Offsets()[i]
		}
		regions = append(regions, r)
	}
	if shared.File == nil {
		_, err = p.client.RegisterIPC(ctx, 0, shared.Handles, regions)
		return p, err
	}
	fd, err := unix.FcntlInt(shared.File.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate the memory of the pages: %w", err)
	}
	if p.arena, err = client.OpenArena(os.NewFile(uintptr(fd), shared.File.Name())); err != nil {
		return nil, err
	}
	_, err = p.client.Register(ctx, 0, p.arena, regions)
	return p, err
}

func (p *session) Store(ctx context.Context, chunks []Chunk) (time.Duration, error) {
	start := time.Now()
	var jobs []*client.StoreJob
	for _, prompt := range Prompts(chunks) {
		var list []client.StoreChunk
		for _, c := range prompt {
			list = append(list, client.StoreChunk{Parent: c.Parent, Key: c.Key, Depth: c.Depth, Blocks: c.Blocks})
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
				return 0, fmt.Errorf("%w: chunk %d: %v: %w", ErrPath, i, c.Result, c.Err)
			}
		}
	}
	return time.Since(start), nil
}

func (p *session) Load(ctx context.Context, chunks []Chunk, byLayer bool) (first, whole time.Duration,
	err error) {
	start := time.Now()
	prompts := Prompts(chunks)
	landed := make(chan time.Duration, len(prompts)) // of each prompt's first layer
	var jobs []*client.LoadJob
	for _, prompt := range prompts {
		p.request++
		found, err := p.client.Lookup(ctx, client.LookupRequest{Request: p.request, Keys: Keys(prompt)})
		if err != nil {
			return 0, 0, err
		}
		if found.Hits() != len(prompt) {
			return 0, 0, fmt.Errorf("%w: %d of %d are there", ErrPath, found.Hits(), len(prompt))
		}
		list := make([]client.LoadChunk, len(prompt))
		for i, c := range prompt {
			list[i] = client.LoadChunk{Index: i, Blocks: c.Blocks}
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
			return 0, 0, fmt.Errorf("%w: block %d: %w", ErrPath, r.Failed[0].Block, r.Failed[0].Err)
		}
	}
	whole = time.Since(start)
	for len(landed) > 0 {
		first = max(first, <-landed)
	}
	return first, whole, nil
}

func (p *session) Forget(ctx context.Context, chunks []Chunk) error {
	results, err := p.client.Discard(ctx, 0, Keys(chunks))
	for i, r := range results {
		if r != client.Removed {
			err = errors.Join(err, fmt.Errorf("%w: chunk %d is %v", ErrPath, i, r))
		}
	}
	return err
}

func (p *session) Processor() time.Duration { return p.host.processor() }

func (p *session) Used(ctx context.Context) (int64, error) { return p.host.used(ctx) }

func (p *session) Route(ctx context.Context) (string, error) { return p.host.routeTaken(ctx) }

func (p *session) Close() error { return errors.Join(p.closeSession(), p.host.leave()) }

func (p *session) closeSession() error {
	var errs []error
	if p.client != nil {
		errs = append(errs, p.client.Close())
	}
	if p.arena != nil {
		errs = append(errs, p.arena.Close())
	}
	return errors.Join(errs...)
}

package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/drive"
)

// promptChunks is the number of chunks that one job stores or loads: a prompt of 16,384 tokens.
const promptChunks = 64

// session stores and loads through the host of a setting. Each prompt has a job of its own, and all prompts run at the same
// time.
type session struct {
	host    *hostProcess
	rank    drive.Rank
	request uint32
}

// prompts groups chunks into new requests.
func (s *session) prompts(chunks []client.StoreChunk) (list []drive.Prompt) {
	for part := range slices.Chunk(chunks, promptChunks) {
		s.request++
		list = append(list, drive.Prompt{Request: s.request, Chunks: part})
	}
	return list
}

func (s *session) store(ctx context.Context, chunks []client.StoreChunk) (drive.Times, error) {
	results, took, err := s.rank.Store(ctx, s.prompts(chunks)...)
	for _, r := range results {
		for i, c := range r.Chunks {
			if c.Result != client.Stored {
				return drive.Times{}, fmt.Errorf("%w: chunk %d: %v: %w", errChunks, i, c.Result, c.Err)
			}
		}
	}
	return drive.Times{Whole: took}, err
}

func (s *session) load(ctx context.Context, chunks []client.StoreChunk, byLayer bool) (drive.Times, error) {
	lookup := func(p *drive.Prompt) (*client.Lookup, error) {
		found, err := s.rank.Lookup(ctx, client.LookupRequest{Request: p.Request, Group: drive.GroupID, Keys: drive.Keys(p.Chunks)})
		if err == nil && found.Hits() != len(p.Chunks) {
			err = fmt.Errorf("%w: %d of %d are there", errChunks, found.Hits(), len(p.Chunks))
		}
		return found, err
	}
	results, took, err := s.rank.Load(ctx, lookup, byLayer, s.prompts(chunks)...)
	for _, r := range results {
		if len(r.Failed) > 0 {
			return drive.Times{}, fmt.Errorf("%w: block %d: %w", errChunks, r.Failed[0].Block, r.Failed[0].Err)
		}
	}
	return took, err
}

func (s *session) forget(ctx context.Context, chunks []client.StoreChunk) error {
	results, err := s.rank.Discard(ctx, drive.GroupID, drive.Keys(chunks))
	for i, r := range results {
		if r != client.Removed {
			err = errors.Join(err, fmt.Errorf("%w: chunk %d is %v", errChunks, i, r))
		}
	}
	return err
}

func (s *session) close() error { return s.rank.Close() }

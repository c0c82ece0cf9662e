package bench

import (
	"context"
	"os"
	"time"

	"github.com/kvhost/kvhost/host/kv"
)

// Path stores and loads chunks. Its times are those that its caller waits.
type Path interface {
	// Store returns when all chunks are stored, and how long that took.
	Store(ctx context.Context, chunks []Chunk) (time.Duration, error)
	// Load looks the chunks up and loads them, by layer or in any order. first is when their first layer was there.
	Load(ctx context.Context, chunks []Chunk, byLayer bool) (first, whole time.Duration, err error)
	// Forget removes the chunks, so that the next take the same memory and the same part of the disk.
	Forget(ctx context.Context, chunks []Chunk) error
	// Used is how many bytes the root takes.
	Used(ctx context.Context) (int64, error)
	// Processor is the time that processes of the path have had, this one left out.
	Processor() time.Duration
	// Route says how the bytes went. It fails if some of them went by another route.
	Route(ctx context.Context) (string, error)
	Close() error
}

// Chunk is one chunk of a prompt, and the blocks that hold it or are to hold it.
type Chunk struct {
	Parent, Key kv.Key // Parent is zero for a prompt's first
	Depth       uint32
	Blocks      []uint32
}

// promptChunks is how many chunks of a prompt are stored and loaded by one job: a prompt of 16,384 tokens.
const promptChunks = 64

// Prompts divides chunks into prompts, each of which an engine stores and loads by a job of its own.
func Prompts(chunks []Chunk) (out [][]Chunk) {
	for len(chunks) > 0 {
		n := min(promptChunks, len(chunks))
		out, chunks = append(out, chunks[:n]), chunks[n:]
	}
	return out
}

// Keys are the keys of chunks.
func Keys(chunks []Chunk) []kv.Key {
	keys := make([]kv.Key, len(chunks))
	for i := range chunks {
		keys[i] = chunks[i].Key
	}
	return keys
}

// Shared is the memory of the pages as another process registers it.
type Shared struct {
	Namespace   kv.Namespace
	Compression string // of the host that it is for, as in store.compression
	Engine      string
	Rank        uint32
	Blocks      uint32   // of each plane, one after the other
	Device      string   // UUID of the GPU; empty for host memory
	Handles     [][]byte // CUDA IPC handles of the planes: each is an allocation
	File        *os.File // host memory: all planes, one after the other
}

// Offsets are where the planes begin in File.
func (s *Shared) Offsets() []int64 {
	var at int64
	var offsets []int64
	for _, p := range s.Namespace.Groups[0].Geometry.Planes {
		offsets = append(offsets, at)
		at += int64(p.PageBytes) * int64(s.Blocks)
	}
	return offsets
}

package client_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/kv"
)

// The examples' model: 2 layers of K and V pages of 4 KiB, 16 tokens in a block, 2 blocks in a chunk.
const (
	layers, parts = 2, 2
	pageBytes     = 4096
	chunkBlocks   = 2
	blocks        = 64
	planeBytes    = blocks * pageBytes
)

func namespace() kv.Namespace {
	return kv.Namespace{
		Model: "example/model", DType: "bf16", Engine: "example", HashAlgorithm: "sha256", KeyBytes: 32, TokensPerBlock: 16,
		Groups: []kv.Group{{Geometry: kv.Uniform(chunkBlocks, layers, parts, pageBytes)}},
	}
}

// socket is that of the host for the examples: of a service it is /run/kvhost/kvhost.sock.
var socket string

// TestMain runs a host for the examples, in the order in which they stand here: what one stores another loads.
func TestMain(m *testing.M) { os.Exit(withHost(m.Run)) }

func withHost(run func() int) int {
	dir, err := os.MkdirTemp(testenv.ShortTemp(), "kv")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	socket = filepath.Join(dir, "s")
	c := config.Default()
	c.Socket, c.HTTP.Listen, c.GDS.CUDA, c.Store.Memory = socket, "", config.CUDAOff, 0
	c.Roots = []config.Root{{Path: filepath.Join(dir, "kv"), Capacity: 8 << 20}}
	h, err := host.New(context.Background(), host.Config{Config: c})
	if err != nil {
		log.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- h.Run(ctx) }()
	<-h.Ready()
	code := run()
	stop()
	if err := <-ended; err != nil {
		log.Print(err)
		return 1
	}
	return code
}

// connect opens a session whose arena holds the pages of every plane, one plane after the other.
func connect(ctx context.Context) (*client.Session, *client.Arena, error) {
	s, err := client.Dial(ctx, client.Hello{
		Socket: socket, Engine: "engine-1", LocalRanks: 1, Namespace: namespace(),
	})
	if err != nil {
		return nil, nil, err
	}
	arena, err := s.NewArena(layers * parts * planeBytes)
	if err != nil {
		s.Close()
		return nil, nil, err
	}
	var planes []client.PlaneRegion
	for i := range int64(layers * parts) {
		planes = append(planes, client.PlaneRegion{Offset: i * planeBytes, Stride: pageBytes, Blocks: blocks})
	}
	if _, err := s.Register(ctx, 0, arena, planes); err != nil {
		s.Close()
		arena.Close()
		return nil, nil, err
	}
	return s, arena, nil
}

// Store the chunks of a prefix. The blocks can be reused as soon as Read returns.
func ExampleSession_Store() {
	ctx := context.Background()
	s, arena, err := connect(ctx)
	if err != nil {
		log.Fatal(err)
	}
	defer arena.Close()
	defer s.Close()

	first, second := kv.Key{1}, kv.Key{2} // in practice a hash of the token prefix
	job, err := s.Store(ctx, 7, 0, []client.StoreChunk{
		{Key: first, Blocks: []uint32{0, 1}},
		{Key: second, Parent: first, Depth: 1, Blocks: []uint32{2, 3}},
	})
	if err != nil {
		log.Fatal(err)
	}
	if err := job.Read(ctx); err != nil { // blocks 0 to 3 are free now
		log.Fatal(err)
	}
	result, err := job.Published(ctx)
	if err != nil {
		log.Fatal(err)
	}
	for i, c := range result.Chunks {
		fmt.Println(i, c.Result)
	}
	// Output:
	// 0 stored
	// 1 stored
}

// Look a prefix up and load what is there. Blocks that fail are named and must be computed.
func ExampleSession_Load() {
	ctx := context.Background()
	s, arena, err := connect(ctx)
	if err != nil {
		log.Fatal(err)
	}
	defer arena.Close()
	defer s.Close()

	hit, err := s.Lookup(ctx, client.LookupRequest{Request: 8, Keys: []kv.Key{{1}, {2}, {3}}})
	if err != nil {
		log.Fatal(err)
	}
	var chunks []client.LoadChunk
	for i := range hit.Hits() {
		chunks = append(chunks, client.LoadChunk{Index: i, Blocks: []uint32{uint32(2 * i), uint32(2*i + 1)}})
	}
	fmt.Println(len(chunks), "of 3 chunks are there")
	if len(chunks) == 0 {
		return // compute everything
	}
	job, err := s.Load(ctx, hit, chunks, client.LoadOptions{})
	if err != nil {
		log.Fatal(err)
	}
	result, err := job.Wait(ctx)
	if err != nil {
		log.Fatal(err) // no block is usable
	}
	for _, b := range result.Failed {
		fmt.Println("compute block", b.Block, b.Err)
	}
	// Output: 2 of 3 chunks are there
}

// A layer-wise load lets a forward pass start when the first layer is there.
func ExampleLoadOptions() {
	ctx := context.Background()
	s, arena, err := connect(ctx)
	if err != nil {
		log.Fatal(err)
	}
	defer arena.Close()
	defer s.Close()

	hit, err := s.Lookup(ctx, client.LookupRequest{Keys: []kv.Key{{1}}})
	if err != nil || hit.Hits() == 0 {
		return
	}
	landed := make(chan uint32, layers)
	job, err := s.Load(ctx, hit, []client.LoadChunk{{Blocks: []uint32{0, 1}}}, client.LoadOptions{
		Layers: func(layer uint32, failed []int) {
			if len(failed) == 0 {
				landed <- layer // must not block: it runs on the session's receiver
			}
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("layer", <-landed, "can be used")
	if _, err := job.Wait(ctx); err != nil {
		log.Fatal(err)
	}
	// Output: layer 0 can be used
}

// Timeline semaphores order a store after the compute that fills its blocks, without a message in between. Their memory outlives
// the session, whose end writes the values of jobs that did not end.
func ExampleTimeline() {
	ctx := context.Background()
	memory, err := client.NewArena(4096)
	if err != nil {
		log.Fatal(err)
	}
	defer memory.Close()
	s, arena, err := connect(ctx)
	if err != nil {
		log.Fatal(err)
	}
	defer arena.Close()
	defer s.Close()

	semaphores, err := s.ShareSemaphores(ctx, memory, 0, 8)
	if err != nil {
		log.Fatal(err)
	}
	order := &client.Timeline{Semaphores: semaphores, Wait: 0, WaitValue: 1, Done: 1, DoneValue: 1, Status: 2}
	_, err = s.Store(ctx, 0, 0, []client.StoreChunk{{Key: kv.Key{9}, Blocks: []uint32{0, 1}}}, client.WithTimeline(order))
	if err != nil {
		log.Fatal(err)
	}
	// ... fill blocks 0 and 1 ...
	semaphores.Store(0, 1)                             // the store may read them
	if err := semaphores.Wait(ctx, 1, 1); err != nil { // the store has read them
		log.Fatal(err)
	}
	fmt.Println("stored:", semaphores.Load(2) == client.StatusDone)
	// Output: stored: true
}

package hosttest

import (
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/kv"
)

// Client is the session of a worker with registered pages: in each plane of its group the same number of blocks, one stride
// apart.
type Client struct {
	*client.Session
	Arena *client.Arena

	t              testing.TB
	blocks, stride int
}

// Hello is what a worker of one rank says, with chunks of a geometry.
func Hello(socket string, g kv.Geometry) client.Hello {
	return client.Hello{Socket: socket, Engine: "e", Role: "worker", LocalRanks: 1, Namespace: kv.Namespace{
		Model: "m", DType: "bf16", KeyBytes: 32, TokensPerBlock: 16, Groups: []kv.Group{{Geometry: g}}}}
}

// Dial opens a session and registers so many blocks, with a gap after each page. More bytes of the arena follow the pages.
func Dial(t testing.TB, h client.Hello, blocks, gap, more int) *Client {
	t.Helper()
	s, err := client.Dial(t.Context(), h)
	testenv.OK(t, err)
	t.Cleanup(func() { s.Close() })
	planes := h.Namespace.Groups[0].Geometry.Planes
	c := &Client{Session: s, t: t, blocks: blocks, stride: int(planes[0].PageBytes) + gap}
	if c.Arena, err = s.NewArena(int64(len(planes)*blocks*c.stride + more)); err != nil {
		t.Fatal(err)
	}
	var regions []client.PlaneRegion
	for i := range planes {
		regions = append(regions, client.PlaneRegion{Offset: int64(i * blocks * c.stride), Stride: int64(c.stride), Blocks: uint32(blocks)})
	}
	if _, err := s.Register(t.Context(), 0, c.Arena, regions); err != nil {
		t.Fatal(err)
	}
	return c
}

// Page is a page's memory, with the gap after it.
func (c *Client) Page(plane, block int) []byte {
	return c.Arena.Bytes()[(plane*c.blocks+block)*c.stride:][:c.stride]
}

func (c *Client) Poison() {
	for i := range c.Arena.Bytes() {
		c.Arena.Bytes()[i] = 0xa5
	}
}

// Put stores chunks and waits until they are published.
func (c *Client) Put(chunks ...client.StoreChunk) client.StoreResult {
	c.t.Helper()
	job, err := c.Store(c.t.Context(), 1, 0, chunks)
	testenv.OK(c.t, err)
	r, err := job.Published(c.t.Context())
	testenv.OK(c.t, err)
	return r
}

func (c *Client) Find(keys ...kv.Key) *client.Lookup {
	c.t.Helper()
	l, err := c.Lookup(c.t.Context(), client.LookupRequest{Request: 2, Keys: keys})
	testenv.OK(c.t, err)
	return l
}

// Get loads chunks of a lookup and waits for them.
func (c *Client) Get(l *client.Lookup, options client.LoadOptions, chunks ...client.LoadChunk) client.LoadResult {
	c.t.Helper()
	job, err := c.Load(c.t.Context(), l, chunks, options)
	testenv.OK(c.t, err)
	r, err := job.Wait(c.t.Context())
	testenv.OK(c.t, err)
	return r
}

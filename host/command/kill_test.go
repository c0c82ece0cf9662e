package command

import (
	"errors"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/testkit/hosttest"
	"github.com/kvhost/kvhost/host/kv"
)

const (
	killBlocks = 64
	killLayers = 8
	killPage   = 64 << 10
)

// killPeer is a session with pages and semaphores.
type killPeer struct {
	*hosttest.Client
	semaphores *client.Semaphores
}

func dialToKill(t *testing.T, socket string) *killPeer {
	t.Helper()
	const pages = killLayers * killBlocks * killPage
	p := &killPeer{Client: hosttest.Dial(t, hosttest.Hello(socket, kv.Uniform(16, killLayers, 1, killPage)), killBlocks, 0, 4096)}
	var err error
	p.semaphores, err = p.ShareSemaphores(t.Context(), p.Arena, pages, 64)
	testenv.OK(t, err)
	return p
}

func killKey(n int) (k kv.Key) {
	k[0], k[31] = byte(n), 1
	return k
}

func killIDs(i int) (ids []uint32) {
	for b := range 16 {
		ids = append(ids, uint32(16*i+b))
	}
	return ids
}

// outcome stores chunk n and returns its result.
func (p *killPeer) outcome(n int) client.ChunkResult {
	for i := range p.Arena.Bytes()[:killLayers*killBlocks*killPage] {
		p.Arena.Bytes()[i] = byte(i>>12 + n)
	}
	return p.Put(client.StoreChunk{Key: killKey(n), Blocks: killIDs(0)}).Chunks[0]
}

func (p *killPeer) mustStore(t *testing.T, n int) {
	t.Helper()
	if got := p.outcome(n); got.Result != client.Stored {
		t.Fatalf("the store of chunk %d %s: %v", n, got.Result, got.Err)
	}
}

// The host is killed while a store and a layer-wise load wait for semaphores. Waiters on their
// semaphores continue and find them failed, and both jobs end. After a restart the host serves what was stored.
func TestHostKilledUnderWaiters(t *testing.T) {
	dir := shortDir(t)
	// Of a small root, a store that waits gets too small a part for a chunk.
	args := []string{"--root", "kv=1GiB", "--socket", "s", "--http-listen", ""}
	_, _, stop := startHost(t, dir, args...)
	ctx := t.Context()
	p := dialToKill(t, filepath.Join(dir, "s"))
	p.mustStore(t, 0)
	held, err := p.Store(ctx, 0, 0, []client.StoreChunk{{Key: killKey(1), Blocks: killIDs(1)}},
		client.WithTimeline(&client.Timeline{Semaphores: p.semaphores, Wait: 0, WaitValue: 1, Done: 1, DoneValue: 1, Status: 2}))
	testenv.OK(t, err)
	load, err := p.Load(ctx, p.Find(killKey(0)), []client.LoadChunk{{Blocks: killIDs(2)}}, client.LoadOptions{
		Layers:   func(uint32, []int) {},
		Timeline: &client.Timeline{Semaphores: p.semaphores, Wait: 0, WaitValue: 1, Done: 8, DoneValue: 100, Status: 16, Layers: killLayers},
	})
	testenv.OK(t, err)
	if err := p.Ping(ctx); err != nil { // the host has both jobs
		t.Fatal(err)
	}
	stop(syscall.SIGKILL)
	for semaphore, v := range map[int]uint64{1: 1, 8: 100} {
		testenv.OK(t, p.semaphores.Wait(ctx, semaphore, v))
	}
	for _, status := range []int{2, 16, 17} { // of the store, and of the load's layers
		if got := p.semaphores.Load(status); got != client.StatusFailed {
			t.Errorf("status semaphore %d after the host's death: got %d, want %d", status, got, client.StatusFailed)
		}
	}
	if _, err := load.Wait(ctx); !errors.Is(err, client.ErrHostGone) {
		t.Error(err)
	}
	if _, err := held.Published(ctx); !errors.Is(err, client.ErrHostGone) {
		t.Error(err)
	}

	startHost(t, dir, args...)
	dialToKill(t, filepath.Join(dir, "s")).loads(t, 0)
}

// loads loads chunk n into other blocks and compares it.
func (p *killPeer) loads(t *testing.T, n int) {
	t.Helper()
	l := p.Find(killKey(n))
	if l.Hits() != 1 || !p.load(t, l, n) {
		t.Fatalf("chunk %d was not loaded: %d hits", n, l.Hits())
	}
}

// load loads chunk n under its lease into other blocks, and compares it if it came.
func (p *killPeer) load(t *testing.T, l *client.Lookup, n int) bool {
	t.Helper()
	if r := p.Get(l, client.LoadOptions{}, client.LoadChunk{Blocks: killIDs(3)}); len(r.Failed) > 0 {
		return false
	}
	for plane := range killLayers {
		base := plane * killBlocks * killPage
		for at := range 16 * killPage {
			if got, want := p.Arena.Bytes()[base+48*killPage+at], byte((base+at)>>12+n); got != want {
				t.Fatalf("chunk %d, plane %d: byte %d is %d, want %d", n, plane, at, got, want)
			}
		}
	}
	return true
}

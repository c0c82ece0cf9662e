package command

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/kv"
)

const (
	killBlocks = 64
	killLayers = 8
	killPage   = 64 << 10
)

// killPeer is a session with pages and semaphores.
type killPeer struct {
	*client.Session
	arena      *client.Arena
	semaphores *client.Semaphores
}

func dialToKill(ctx context.Context, socket, engine string) (*killPeer, error) {
	geo := kv.Uniform(16, killLayers, 1, killPage)
	s, err := client.Dial(ctx, client.Hello{Socket: socket, Engine: engine, Role: "worker", Namespace: kv.Namespace{
		Model: "kill", DType: "bf16", KeyBytes: 32, TokensPerBlock: 16, Groups: []kv.Group{{Geometry: geo}},
	}})
	if err != nil {
		return nil, err
	}
	const pages = killLayers * killBlocks * killPage
	p := &killPeer{Session: s}
	if p.arena, err = s.NewArena(pages + 4096); err != nil {
		return nil, err
	}
	var regions []client.PlaneRegion
	for i := range killLayers {
		regions = append(regions, client.PlaneRegion{Offset: int64(i) * killBlocks * killPage, Stride: killPage,
			Blocks: killBlocks})
	}
	if _, err = s.Register(ctx, 0, p.arena, regions); err != nil {
		return nil, err
	}
	p.semaphores, err = s.ShareSemaphores(ctx, p.arena, pages, 64)
	return p, err
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

func (p *killPeer) store(ctx context.Context, n int) error {
	for i := range p.arena.Bytes()[:killLayers*killBlocks*killPage] {
		p.arena.Bytes()[i] = byte(i>>12 + n)
	}
	job, err := p.Store(ctx, 0, 0, []client.StoreChunk{{Key: killKey(n), Blocks: killIDs(0)}})
	if err != nil {
		return err
	}
	_, err = job.Published(ctx)
	return err
}

// The host is killed while a store and a layer-wise load wait for semaphores. Waiters on their
// semaphores continue and find them failed, and both jobs end. After a restart the host serves what was stored.
func TestHostKilledUnderWaiters(t *testing.T) {
	dir := shortDir(t)
	// Of a small root, a store that waits gets too small a part for a chunk.
	args := []string{"--root", "kv=1GiB", "--socket", "s", "--http-listen", ""}
	_, _, stop := startHost(t, dir, args...)
	ctx := t.Context()
	p, err := dialToKill(ctx, filepath.Join(dir, "s"), "e")
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if err := p.store(ctx, 0); err != nil {
		t.Fatal(err)
	}
	held, err := p.Store(ctx, 0, 0, []client.StoreChunk{{Key: killKey(1), Blocks: killIDs(1)}},
		client.WithTimeline(&client.Timeline{Semaphores: p.semaphores, Wait: 0, WaitValue: 1, Done: 1, DoneValue: 1, Status: 2}))
	if err != nil {
		t.Fatal(err)
	}
	l, err := p.Lookup(ctx, client.LookupRequest{Keys: []kv.Key{killKey(0)}})
	if err != nil {
		t.Fatal(err)
	}
	load, err := p.Load(ctx, l, []client.LoadChunk{{Blocks: killIDs(2)}}, client.LoadOptions{
		Layers:   func(uint32, []int) {},
		Timeline: &client.Timeline{Semaphores: p.semaphores, Wait: 0, WaitValue: 1, Done: 8, DoneValue: 100, Status: 16, Layers: killLayers},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Ping(ctx); err != nil { // the host has both jobs
		t.Fatal(err)
	}
	stop(syscall.SIGKILL)
	for semaphore, v := range map[int]uint64{1: 1, 8: 100} {
		if err := p.semaphores.Wait(ctx, semaphore, v); err != nil {
			t.Fatal(err)
		}
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
	again, err := dialToKill(ctx, filepath.Join(dir, "s"), "e")
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	again.loads(t, 0)
}

// loads loads chunk n into other blocks and compares it.
func (p *killPeer) loads(t *testing.T, n int) {
	t.Helper()
	l, err := p.Lookup(t.Context(), client.LookupRequest{Keys: []kv.Key{killKey(n)}})
	if err != nil || l.Hits() != 1 {
		t.Fatalf("lookup of chunk %d: %v, %v, want a hit", n, l, err)
	}
	if !p.load(t, l, n) {
		t.Fatalf("chunk %d was not loaded", n)
	}
}

// load loads chunk n under its lease into other blocks, and compares it if it came.
func (p *killPeer) load(t *testing.T, l *client.Lookup, n int) bool {
	t.Helper()
	job, err := p.Load(t.Context(), l, []client.LoadChunk{{Blocks: killIDs(3)}}, client.LoadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	res, err := job.Wait(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(res.Failed) > 0 {
		return false
	}
	for plane := range killLayers {
		base := plane * killBlocks * killPage
		for at := range 16 * killPage {
			if got, want := p.arena.Bytes()[base+48*killPage+at], byte((base+at)>>12+n); got != want {
				t.Fatalf("chunk %d, plane %d: byte %d is %d, want %d", n, plane, at, got, want)
			}
		}
	}
	return true
}

// clientToKill is set in the process that is killed while its jobs are in flight.
const clientToKill = "KVHOST_TEST_CLIENT"

// A client is killed in the middle of its transfers, with one more job held. The host serves another client as before,
// and holds nothing of the dead one.
func TestClientKilledMidTransfer(t *testing.T) {
	if socket := os.Getenv(clientToKill); socket != "" {
		p, err := dialToKill(t.Context(), socket, "dead")
		if err != nil {
			t.Fatal(err)
		}
		_, err = p.Store(t.Context(), 0, 0, []client.StoreChunk{{Key: killKey(99), Blocks: killIDs(3)}},
			client.WithTimeline(&client.Timeline{Semaphores: p.semaphores, Wait: 0, WaitValue: 1, Done: 1, DoneValue: 1, Status: -1}))
		for n := 100; err == nil; n++ {
			if err = p.store(t.Context(), n%20+100); err == nil && n == 103 {
				os.Stdout.WriteString("under way\n")
			}
		}
		t.Fatal(err)
	}
	dir := shortDir(t)
	startHost(t, dir, "--root", "kv=256MiB", "--socket", "s", "--http-listen", "")
	socket := filepath.Join(dir, "s")
	live, err := dialToKill(t.Context(), socket, "live")
	if err != nil {
		t.Fatal(err)
	}
	defer live.Close()
	if err := live.store(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		cmd := exec.Command(os.Args[0], "-test.run=^TestClientKilledMidTransfer$")
		cmd.Env = append(os.Environ(), clientToKill+"="+socket)
		var out bytes.Buffer
		r, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		for buf := make([]byte, 256); !strings.Contains(out.String(), "under way"); {
			n, err := r.Read(buf)
			out.Write(buf[:n])
			if err != nil {
				t.Fatal(err, out.String())
			}
		}
		cmd.Process.Kill()
		cmd.Wait()
		live.loads(t, 0)
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		st, err := proto.Status(t.Context(), socket)
		if err != nil {
			t.Fatal(err)
		}
		if st.Sessions == 1 && st.Jobs == 0 && st.Leases == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the dead clients' are left: %v", st)
		}
	}
}

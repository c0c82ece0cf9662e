package server

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/gds/gdstest"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/kv"
)

// gpuRig is a rig whose host uses the double of a GPU.
type gpuRig struct {
	*rig
	gpu    *gds.GPU
	double *gdstest.Double
}

func newGPURig(t *testing.T) *gpuRig {
	t.Helper()
	double := gdstest.Build(t)
	d, err := gds.Open(nil, double.Path)
	testenv.OK(t, err)
	uuid, err := gds.ParseUUID(gdstest.UUID)
	testenv.OK(t, err)
	g, err := d.OpenGPU(uuid, gds.Config{Threads: 2})
	testenv.OK(t, err)
	t.Cleanup(func() {
		double.Rules("")
		if err := g.Close(); err != nil {
			t.Errorf("close the GPU: %v", err)
		}
		double.Forget()
	})
	r := newRig(t, func(c *Config, _ *store.Config) { c.GPUs = []*gds.GPU{g} })
	testenv.OK(t, r.engine.AddGPU(g))
	return &gpuRig{r, g, double}
}

const deviceBytes = planes * arenaBlocks * pageBytes

// dialGPU opens a session that has registered nothing.
func (r *gpuRig) dialGPU(uuid string) *client.Session {
	r.t.Helper()
	h := r.hello()
	h.DeviceUUID = uuid
	s, err := client.Dial(r.t.Context(), h)
	testenv.OK(r.t, err)
	r.t.Cleanup(func() { s.Close() })
	return s
}

// device is client memory on the GPU: how to read and write it, and how it was registered.
type device struct {
	r       *gpuRig
	address uint64
}

func (d device) do(fn func(*gds.Thread) error) {
	d.r.t.Helper()
	var err error
	if e := d.r.gpu.Do(func(t *gds.Thread) { err = fn(t) }); e != nil || err != nil {
		d.r.t.Fatal(e, err)
	}
}

func (d device) page(plane int, block uint32) uint64 {
	return d.address + uint64(base(0, plane)) + uint64(block)*pageBytes
}

func (d device) fill(n int, blocks []uint32) {
	for pl := range planes {
		for i, b := range blocks {
			d.do(func(t *gds.Thread) error { return t.Write(d.page(pl, b), deviceContent(n, pl, i)) })
		}
	}
}

func (d device) check(n int, blocks []uint32) {
	d.r.t.Helper()
	got := make([]byte, pageBytes)
	for pl := range planes {
		for i, b := range blocks {
			d.do(func(t *gds.Thread) error { return t.Read(got, d.page(pl, b)) })
			if !bytes.Equal(got, deviceContent(n, pl, i)) {
				d.r.t.Fatalf("chunk %d plane %d block %d differs", n, pl, i)
			}
		}
	}
}

func deviceContent(n, plane, block int) []byte {
	return bytes.Repeat([]byte{byte(n*31 + plane*7 + block + 1), byte(n), byte(plane), byte(block)}, pageBytes/4)
}

func (r *gpuRig) ipc() ([][]byte, device) {
	r.t.Helper()
	b, err := r.gpu.Alloc(deviceBytes)
	testenv.OK(r.t, err)
	r.t.Cleanup(func() { b.Free() })
	h, err := b.IPCHandle()
	testenv.OK(r.t, err)
	handles := make([][]byte, planes)
	for i := range handles {
		handles[i] = h
	}
	return handles, device{r, b.Address}
}

func TestDeviceMemoryRoundTrip(t *testing.T) {
	r := newGPURig(t)
	s := r.dialGPU(strings.ToUpper(strings.TrimPrefix(gdstest.UUID, "GPU-")))
	handles, d := r.ipc()
	reg, err := s.RegisterIPC(t.Context(), 0, handles, groupRegions(0))
	testenv.OK(t, err)
	const first = 10
	var chunks []client.StoreChunk
	for n := range 8 {
		blocks := []uint32{uint32(2*n + 1), uint32(2 * n)}
		d.fill(first+n, blocks)
		c := client.StoreChunk{Key: key(first + n), Depth: uint32(n), Blocks: blocks}
		if n > 0 {
			c.Parent = key(first + n - 1)
		}
		chunks = append(chunks, c)
	}
	job, err := s.Store(t.Context(), 1, 0, chunks)
	testenv.OK(t, err)
	if res, err := job.Published(t.Context()); err != nil || res.Bytes != 8*chunkBytes {
		t.Fatalf("published: %+v, %v", res, err)
	}
	d.do(func(th *gds.Thread) error { return th.Fill(d.address, 0xee, deviceBytes) })
	var keys []kv.Key
	for n := range 8 {
		keys = append(keys, key(first+n))
	}
	hit, err := s.Lookup(t.Context(), client.LookupRequest{Request: 2, Keys: keys})
	if err != nil || hit.Hits() != 8 {
		t.Fatalf("lookup: %+v, %v, want 8 hits", hit, err)
	}
	var loads []client.LoadChunk
	for n := range 8 {
		loads = append(loads, client.LoadChunk{Index: n, Blocks: []uint32{uint32(63 - 2*n), uint32(31 - n)}})
	}
	lj, err := s.Load(t.Context(), hit, loads, client.LoadOptions{})
	testenv.OK(t, err)
	if res, err := lj.Wait(t.Context()); err != nil || len(res.Failed) != 0 || res.Bytes != 8*chunkBytes {
		t.Fatalf("load: %+v, %v", res, err)
	}
	for n := range 8 {
		d.check(first+n, loads[n].Blocks)
	}
	untouched := make([]byte, pageBytes)
	d.do(func(th *gds.Thread) error { return th.Read(untouched, d.page(1, 40)) })
	if !bytes.Equal(untouched, bytes.Repeat([]byte{0xee}, pageBytes)) {
		t.Error("a block that no chunk went to was written")
	}
	before := r.double.Calls("cuIpcCloseMemHandle")
	testenv.OK(t, reg.Unregister(t.Context()))
	if n := r.double.Calls("cuIpcCloseMemHandle") - before; n != 1 {
		t.Errorf("unregistered with %d cuIpcCloseMemHandle, want 1", n)
	}
}

func TestDeviceRegionsAreRefusedByName(t *testing.T) {
	r := newGPURig(t)
	handles, _ := r.ipc()
	garbage := [][]byte{make([]byte, 64), make([]byte, 64), make([]byte, 64), make([]byte, 64)}
	other := "GPU-ffffffff-0000-0000-0000-000000000000"
	past := groupRegions(0)
	past[3].Offset++
	for _, c := range []struct {
		name, uuid string
		handles    [][]byte
		regions    []client.PlaneRegion
		kind       error
		field      string
	}{
		{"no GPU named", "", handles, groupRegions(0), client.ErrUnknown, "regions[0].cuda_ipc"},
		{"another GPU", other, handles, groupRegions(0), client.ErrUnknown, "regions[0].cuda_ipc"},
		{"garbage", gdstest.UUID, garbage, groupRegions(0), client.ErrInvalid, "regions[0].cuda_ipc"},
		{"short handle", gdstest.UUID, [][]byte{handles[0], handles[0][:8], nil, nil}, groupRegions(0),
			client.ErrInvalid, "regions[1].cuda_ipc"},
		{"past the end", gdstest.UUID, handles, past, client.ErrInvalid, "regions[3].blocks"},
	} {
		s := r.dialGPU(c.uuid)
		_, err := s.RegisterIPC(t.Context(), 0, c.handles, c.regions)
		var refused *client.HostError
		if !errors.As(err, &refused) || refused.Kind != c.kind || refused.Field != c.field {
			t.Errorf("register with %s: got %v", c.name, err)
		}
		if c.name == "another GPU" && !strings.Contains(err.Error(), gdstest.UUID) {
			t.Errorf("the answer does not say which GPUs there are: %v", err)
		}
		if _, err := s.RegisterIPC(t.Context(), 0, handles, groupRegions(0)); c.uuid == gdstest.UUID && err != nil {
			t.Errorf("%s: a right one afterwards: %v", c.name, err)
		}
		s.Close()
	}
	if open, closed := r.double.Calls("cuIpcOpenMemHandle_v2"), r.double.Calls("cuIpcCloseMemHandle"); open == 0 {
		t.Errorf("opened %d, closed %d", open, closed)
	}
}

// A GPU's error fails the blocks it concerns, and the stored piece stays good.
func TestDeviceErrorIsNotTheFiles(t *testing.T) {
	r := newGPURig(t)
	s := r.dialGPU(gdstest.UUID)
	handles, d := r.ipc()
	if _, err := s.RegisterIPC(t.Context(), 0, handles, groupRegions(0)); err != nil {
		t.Fatal(err)
	}
	d.fill(1, []uint32{4, 5})
	job, err := s.Store(t.Context(), 1, 0, []client.StoreChunk{{Key: key(1), Blocks: []uint32{4, 5}}})
	testenv.OK(t, err)
	if _, err := job.Published(t.Context()); err != nil {
		t.Fatal(err)
	}
	load := func() (client.LoadResult, error) {
		hit, err := s.Lookup(t.Context(), client.LookupRequest{Keys: []kv.Key{key(1)}})
		if err != nil || hit.Hits() != 1 {
			t.Fatalf("lookup: got %+v, %v, want a hit", hit, err)
		}
		lj, err := s.Load(t.Context(), hit, []client.LoadChunk{{Blocks: []uint32{8, 9}}}, client.LoadOptions{})
		testenv.OK(t, err)
		return lj.Wait(t.Context())
	}
	r.double.Rules("cuLaunchKernel:code=1,cuMemcpyAsync:code=1")
	if res, err := load(); err != nil || len(res.Failed) != 2 || res.Bytes != 0 {
		t.Fatalf("load with a failing GPU: got %+v, %v, want 2 failed blocks", res, err)
	}
	r.double.Rules("")
	if res, err := load(); err != nil || len(res.Failed) != 0 {
		t.Fatalf("load afterwards: got %+v, %v, want no failed block", res, err)
	}
	d.check(1, []uint32{8, 9})
	r.double.Rules("cuLaunchKernel:code=719,cuMemcpyAsync:code=719") // whichever way pages are copied by now
	for range 2 {                                                    // the second finds the GPU out of service
		if res, err := load(); err != nil || len(res.Failed) != 2 {
			t.Fatalf("load with a lost GPU: got %+v, %v, want 2 failed blocks", res, err)
		}
	}
}

// A client that goes away while the GPU copies for it: its memory is unmapped after the copy's end and not before.
func TestClientGoneMidCopy(t *testing.T) {
	r := newGPURig(t)
	s := r.dialGPU(gdstest.UUID)
	handles, d := r.ipc()
	if _, err := s.RegisterIPC(t.Context(), 0, handles, groupRegions(0)); err != nil {
		t.Fatal(err)
	}
	d.fill(1, []uint32{4, 5})
	r.double.Rules("page:nth=3:hang")
	if _, err := s.Store(t.Context(), 1, 0, []client.StoreChunk{{Key: key(1), Blocks: []uint32{4, 5}}}); err != nil {
		t.Fatal(err)
	}
	for r.double.Calls("page") < 3 {
	}
	s.Close()
	if err := r.dialGPU("").Ping(t.Context()); err != nil { // the host goes on
		t.Fatal(err)
	}
	if n := r.double.Calls("cuIpcCloseMemHandle"); n != 0 {
		t.Fatalf("unmapped under the copy")
	}
	r.double.Rules("")
	for r.double.Calls("cuIpcCloseMemHandle") == 0 {
	}
}

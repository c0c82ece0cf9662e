package transfer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/codec"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/fsck"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

func compressed(c *store.Config) { c.Roots[0].Compressed = true }

// newCompressedRig is a rig whose pieces are compressed, with pages that gain by it.
func newCompressedRig(t testing.TB, dtype string, geo kv.Geometry, blocks uint32) *deviceRig {
	r := newDeviceRigOf(t, dtype, geo, blocks, 32<<20, compressed)
	r.float = true
	if !r.gpu.FitsCoder(1, 1) {
		t.Fatal("the GPU has no codec")
	}
	return r
}

// disableCodec leaves the codec to the processor.
func (r *deviceRig) disableCodec() {
	for r.gpu.FitsCoder(1, 1) {
		r.gpu.CoderFailed(errors.New("to see what it is like without"))
	}
}

// models are pages of models. The last has several windows a chunk.
var models = map[string]struct {
	dtype string
	geo   kv.Geometry
}{
	"llama":  {"bf16", kv.Uniform(4, 4, 2, 32<<10)},
	"MLA":    {"bf16", kv.Uniform(4, 6, 1, 18432)},
	"fp8":    {"fp8_e4m3", kv.Uniform(4, 4, 2, 16<<10)},
	"larger": {"bf16", kv.Uniform(8, 9, 1, 70000)},
}

// What a GPU compressed, sessions in host memory and fsck read, and the other way round.
func TestCompressedPiecesAreEverybodys(t *testing.T) {
	testenv.Slow(t)
	for name, model := range models {
		for _, byGPU := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, stored by the GPU: %v", name, byGPU), func(t *testing.T) {
				const n = 3
				r := newCompressedRig(t, model.dtype, model.geo, n*model.geo.Blocks+3)
				host, queue, pages := r.hostMemory()
				ids := r.shuffled(n)
				for c := range n {
					put := r.put(c, ids[c])
					var read, out Outcome
					if byGPU {
						read, out = r.storeAll(put)
					} else {
						for plane := range r.geo.Planes {
							for i, id := range ids[c] {
								copy(pages(plane, id), r.content(c, plane, i))
							}
						}
						read, out = r.storeFrom(queue, host, put)
					}
					if len(read.Failed)+len(out.Failed) > 0 {
						t.Fatal(read, out)
					}
				}
				for _, by := range []*Layers{nil, {}} {
					ids = r.shuffled(n)
					if !byGPU {
						r.poison()
						if out := r.loadTo(r.queue, r.memory, []int{0, 1, 2}, ids, by); len(out.Failed) > 0 {
							t.Fatal(out.Failed)
						}
						for c := range n {
							testenv.NoError(t, r.holds(c, ids[c], false))
						}
						continue
					}
					for plane := range r.geo.Planes {
						for id := range r.memory.Blocks() {
							clear(pages(plane, id))
						}
					}
					if out := r.loadTo(queue, host, []int{0, 1, 2}, ids, by); len(out.Failed) > 0 {
						t.Fatal(out.Failed)
					}
					for c := range n {
						for plane := range r.geo.Planes {
							for i, id := range ids[c] {
								if string(pages(plane, id)) != string(r.content(c, plane, i)) {
									t.Errorf("chunk %d plane %d block %d differs", c, plane, i)
								}
							}
						}
					}
				}
				if d := r.double; d != nil && ((d.Calls("pack") > 0) != byGPU || (d.Calls("join") > 0) == byGPU) {
					t.Errorf("%d windows encoded, %d decoded", d.Calls("pack"), d.Calls("join"))
				}
				report, err := fsck.Check(context.Background(), r.root, fsck.Options{})
				if err != nil || report.Remaining > 0 || report.Compressed.Files != n ||
					report.Compressed.Bytes >= n*r.geo.PageBytes() {
					t.Errorf("fsck: got %v and %+v, want %d compressed files and nothing remaining", err, report, n)
				}
			})
		}
	}
}

// hostMemory is host memory of the rig's shape, with its queue and its pages.
func (r *deviceRig) hostMemory() (*HostMemory, *Queue, func(plane int, id uint32) []byte) {
	var regions []HostRegion
	for _, p := range r.geo.Planes {
		regions = append(regions, HostRegion{Data: make([]byte, int(p.PageBytes)*int(r.memory.Blocks())), Grid: Grid{Stride: int64(p.PageBytes), Blocks: r.memory.Blocks()}})
	}
	m, err := NewHostMemory(r.geo, regions)
	testenv.OK(r.t, err)
	q, err := r.engine.Queue("host")
	testenv.OK(r.t, err)
	return m, q, func(plane int, id uint32) []byte {
		n := int(r.geo.Planes[plane].PageBytes)
		return regions[plane].Data[int(id)*n : int(id+1)*n]
	}
}

// Damage of a file is found before a decoder sees it, and garbage under fitting checksums by the decoder: the GPU's, which the processor
// confirms, or the processor's. The chunk fails, no wrong byte reaches a page, and nobody doubts the GPU's codec.
func TestCodecFindsDamage(t *testing.T) {
	testenv.Slow(t)
	change := func(fn func(stored []byte)) func(r *deviceRig, path string) {
		return func(r *deviceRig, path string) {
			RewritePiece(r.t, path, r.plan(0), func(x int, stored []byte) {
				if x == 7 {
					fn(stored)
				}
			})
		}
	}
	for name, c := range map[string]struct {
		damage func(r *deviceRig, path string)
		want   error
	}{
		"a flipped bit": {func(r *deviceRig, path string) { flipPayload(r.t.(*testing.T), r.root) }, kv.ErrChecksum},
		"random bytes": {change(func(stored []byte) {
			for i := range stored {
				stored[i] = byte(i * i >> 3)
			}
		}), codec.ErrCorrupt},
		"a method that is not known":   {change(func(stored []byte) { stored[1] = 3 }), codec.ErrCorrupt},
		"another value in a raw plane": {change(func(stored []byte) { stored[100] ^= 1 }), kv.ErrChecksum},
		"other codes":                  {change(func(stored []byte) { stored[len(stored)-900] ^= 1 }), ErrDamaged},
	} {
		for how, by := range map[string]*Layers{"staged": nil, "by layers": {}, "direct": nil, "by the processor": nil, "by the processor and layers": {}} {
			t.Run(name+", "+how, func(t *testing.T) {
				r := newCompressedRig(t, "bf16", models["larger"].geo, 16)
				if how == "direct" {
					r.route(RouteChoice{})
				}
				byProcessor := strings.HasPrefix(how, "by the processor")
				if byProcessor {
					r.disableCodec()
				}
				r.stage(1, "")
				c.damage(r, r.path(0))
				r.poison()
				ids := r.shuffled(1)
				out := r.loadTo(r.queue, r.memory, []int{0}, ids, by)
				if len(out.Failed) != 1 || errors.Is(out.Failed[0].Err, ErrDevice) ||
					c.want != ErrDamaged && !errors.Is(out.Failed[0].Err, c.want) {
					t.Errorf("the load ended with %+v", out.Failed)
				}
				testenv.NoError(t, r.holds(0, ids[0], true))
				if q := r.store.Stats().Roots[0].Quarantined; q != 1 {
					t.Errorf("%d files in quarantine", q)
				}
				if !r.gpu.FitsCoder(1, 1) != byProcessor {
					t.Error("the codec is left for a damaged file")
				}
				if how != "direct" {
					return
				}
				if s := r.stats(); s.Stores != 1 || s.Mismatched+s.LoadFallbacks > 0 {
					t.Errorf("the route has taken %+v", s)
				}
			})
		}
	}
}

// A job that is cancelled while the GPU codes ends, and touches no page afterwards.
func TestCancelWhileTheGPUCodes(t *testing.T) {
	t.Setenv("KVHOST_TEST_GPU", "")
	r := newCompressedRig(t, "bf16", models["llama"].geo, 16)
	r.stage(1, "")
	ids := r.shuffled(1)
	during := func(kernel string, start func(done chan<- Outcome) *Handle) {
		t.Helper()
		done := make(chan Outcome, 1)
		r.double.Rules(kernel + ":hang")
		h := start(done)
		testenv.Until(t, "a call of "+kernel, func() bool { return r.double.Calls(kernel) > 0 })
		h.Cancel()
		r.double.Rules("")
		if out := <-done; len(out.Failed) != 1 || !errors.Is(out.Failed[0].Err, ErrCancelled) {
			t.Errorf("%s: a cancelled load ended with %+v, want 1 chunk failed with ErrCancelled", kernel, out)
		}
		<-h.Fenced()
	}
	l, err := r.store.Lookup(store.LookupRequest{Namespace: r.space, Keys: []kv.Key{deviceKey(0)}, Ranks: 1})
	if err != nil || l.Hits() != 1 {
		t.Fatal(err, l.Hits())
	}
	defer l.Release()
	r.poison()
	for _, by := range []*Layers{nil, {}} {
		during("join", func(done chan<- Outcome) *Handle {
			return r.queue.Load(&LoadJob{Lease: l, Memory: r.memory, Chunks: []LoadChunk{{Blocks: ids[0]}}, Layers: by,
				Done: func(o Outcome) { done <- o }})
		})
	}
	testenv.NoError(t, r.holds(0, ids[0], true))
	put := r.put(1, ids[0])
	during("pack", func(done chan<- Outcome) *Handle {
		return r.queue.Store(&StoreJob{Memory: r.memory, Chunks: []StoreChunk{put}, Read: func(Outcome) {},
			Published: func(o Outcome) { done <- o }})
	})
	if !r.gpu.FitsCoder(1, 1) {
		t.Error("the codec is left for cancelled jobs")
	}
}

// path is that of chunk n's piece.
func (r *deviceRig) path(n int) string {
	r.t.Helper()
	names, err := filepath.Glob(filepath.Join(r.root, "*", "*", "*", deviceKey(n).String()+"*"))
	if err != nil || len(names) != 1 {
		r.t.Fatal(names, err)
	}
	return names[0]
}

// plan is the layout of chunk n's piece.
func (r *deviceRig) plan(n int) *kv.Plan {
	r.t.Helper()
	l, err := r.store.Lookup(store.LookupRequest{Namespace: r.space, Keys: []kv.Key{deviceKey(n)}, Ranks: 1})
	testenv.OK(r.t, err)
	defer l.Release()
	p, err := l.Open(0, 0)
	testenv.OK(r.t, err)
	defer p.Close()
	return p.Expected().Plan
}

// RewritePiece changes the stored extents of a compressed piece in place, and makes the checksums of table and header fit.
func RewritePiece(t testing.TB, path string, plan *kv.Plan, change func(x int, stored []byte)) {
	t.Helper()
	image, err := os.ReadFile(path)
	testenv.OK(t, err)
	h, err := pieceformat.DecodeHeader(image)
	testenv.OK(t, err)
	table, stored, err := h.ReadStored(image[pieceformat.Page:], plan.Extents(), nil, nil)
	testenv.OK(t, err)
	offsets := pieceformat.Offsets(stored, nil)
	for x := range stored {
		part := image[h.DataOffset+offsets[x] : h.DataOffset+offsets[x+1]]
		change(x, part)
		if codec.Codec(stored[x].Codec) != codec.Raw {
			stored[x].Sum = kv.Sum(part)
		}
	}
	h.TableSum = pieceformat.PutStored(image[pieceformat.Page:], table, stored)
	h.Encode(image)
	testenv.OK(t, os.WriteFile(path, image, 0o600))
}

// The codec's time on a GPU is what a piece's way takes more than that of a plain one, as far as one was seen.
func TestCodecTimeIsBeyondAPlainWay(t *testing.T) {
	const n = 4 << 20
	for _, c := range []struct {
		plain      uint64 // bytes per second; 0: not known
		took, want time.Duration
	}{
		{0, 5 * time.Millisecond, 5 * time.Millisecond},
		{1 << 30, 5 * time.Millisecond, 5*time.Millisecond - time.Second/256},
		{1 << 30, 3 * time.Millisecond, 1},
	} {
		var plain staging.Bandwidth
		plain.Observe(int64(c.plain), time.Second)
		if got := beyond(&plain, n, c.took); (got - c.want).Abs() > time.Microsecond {
			t.Errorf("%v beside %d bytes per second: %v, want %v", c.took, c.plain, got, c.want)
		}
	}

	r := newCompressedRig(t, "bf16", models["llama"].geo, 16)
	r.stage(1, "")
	if _, err := r.loadOne(0, ""); err != nil {
		t.Fatal(err)
	}
	whole := r.store.Compression()[0]
	e := r.engine
	if e.gathers.BytesPerSecond()+e.scatters.BytesPerSecond() > 0 {
		t.Error("what a GPU codes is taken for plain")
	}
	for _, plain := range []*staging.Bandwidth{&e.gathers, &e.scatters} {
		plain.Observe(16<<10, time.Hour) // so that all of the codec's time is less
	}
	chunks := []StoreChunk{r.put(1, r.shuffled(1)[0])}
	r.mustStore(chunks...)
	if _, err := r.loadOne(1, ""); err != nil {
		t.Fatal(err)
	}
	beside := r.store.Compression()[0]
	for way, took := range map[string][2]time.Duration{
		"encode": {whole.Encoded.Took, beside.Encoded.Took - whole.Encoded.Took},
		"decode": {whole.Decoded.Took, beside.Decoded.Took - whole.Decoded.Took},
	} {
		if took[0] < time.Microsecond || took[1] < 1 || took[1] > time.Microsecond {
			t.Errorf("%s: %v where no plain way is known, %v beside one that takes for ever", way, took[0], took[1])
		}
	}
}

func TestPlainWaysOfAGPUAreObserved(t *testing.T) {
	plain := newDeviceRig(t, models["llama"].geo, 16, 32<<20)
	plain.stage(1, "")
	if _, err := plain.loadOne(0, ""); err != nil {
		t.Fatal(err)
	}
	if e := plain.engine; e.gathers.BytesPerSecond() == 0 || e.scatters.BytesPerSecond() == 0 {
		t.Error("plain ways are not observed")
	}
}

package transfer_test

import (
	"bytes"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/plugins/blockmajor"
)

// layerState says of a layer's pages, in all the chunks of a load but those left out, whether they hold what they
// should, and whether they are as poison left them.
func (b *bench) layerState(layer uint32, loads []transfer.LoadChunk, but []int) (right, untouched bool) {
	right, untouched = true, true
	for n, c := range loads {
		if slices.Contains(but, n) {
			continue
		}
		for plane, p := range b.geo.Planes {
			if p.Layer != layer {
				continue
			}
			for i, id := range c.Blocks {
				right = right && bytes.Equal(b.page(plane, id), b.wanted(c.Index, plane, i))
				untouched = untouched && bytes.Count(b.page(plane, id), []byte{poison}) == int(p.PageBytes)
			}
		}
	}
	return right, untouched
}

// wanted is what a page must hold; it is made once.
func (b *bench) wanted(chunk, plane, block int) []byte {
	at := [3]int{chunk, plane, block}
	if b.pageBytes == nil {
		b.pageBytes = map[[3]int][]byte{}
	}
	want := b.pageBytes[at]
	if want == nil {
		want = make([]byte, b.geo.Planes[plane].PageBytes)
		b.fill(want, key(chunk), plane, block)
		b.pageBytes[at] = want
	}
	return want
}

func (b *bench) layerIDs() (list []uint32) {
	for _, p := range b.geo.Planes {
		if !slices.Contains(list, p.Layer) {
			list = append(list, p.Layer)
		}
	}
	return list
}

// Layers land in the order of the geometry, each whole when it is told of, whatever the geometry and the layout.
func TestLayersLandInOrder(t *testing.T) {
	testenv.Slow(t)
	blockMajor := func(c *store.Config) { c.Policies.Layout = native("blockmajor", abi.RoleLayout, blockmajor.New) }
	type maker = func(t testing.TB, geo kv.Geometry, blocks uint32) *bench
	layouts := map[string]maker{
		"layer major": func(t testing.TB, geo kv.Geometry, blocks uint32) *bench { return newBench(t, geo, blocks) },
		"block major": func(t testing.TB, geo kv.Geometry, blocks uint32) *bench {
			return newBench(t, geo, blocks, blockMajor)
		},
		"compressed": func(t testing.TB, geo kv.Geometry, blocks uint32) *bench { return newCompressed(t, geo, blocks) },
		"block major, compressed": func(t testing.TB, geo kv.Geometry, blocks uint32) *bench {
			return newCompressed(t, geo, blocks, blockMajor)
		},
	}
	for layout, open := range layouts {
		for name, geo := range geometries {
			if most := int64(1 << 20); strings.HasPrefix(layout, "block major") && geo.PageBytes() > most ||
				layout == "compressed" && geo.PageBytes() > 4*most {
				continue // the smaller ones have all its cases
			}
			t.Run(layout+"/"+name, func(t *testing.T) {
				const chunks = 9 // more than the threads: two steps at a time are under way
				b := open(t, geo, geo.Blocks*chunks)
				b.storeChunks(chunks)
				order := b.layerIDs()
				l := b.lease(0, 1, 2, 3, 4, 5, 6, 7, 8)
				b.poison()
				loads := b.spread(chunks)
				var told []uint32
				out := b.load(l, loads, &transfer.Layers{Landed: func(layer uint32, failed []int) {
					if len(failed) > 0 {
						t.Errorf("layer %d failed for chunks %v", layer, failed)
					}
					at := len(told)
					told = append(told, layer)
					if right, _ := b.layerState(layer, loads, nil); !right {
						t.Errorf("layer %d was told of, and is not what it should be", layer)
					}
					// Two parts are under way at a time, and none has more layers than came before it.
					for _, later := range order[min(max(2, 4*at), len(order)):] {
						if _, untouched := b.layerState(later, loads, nil); !untouched {
							t.Errorf("layer %d has bytes before layer %d is told of", later, layer)
						}
					}
				}})
				l.Release()
				if len(out.Failed) > 0 || out.Bytes != chunks*geo.PageBytes() {
					t.Fatalf("load: %+v", out)
				}
				if !slices.Equal(told, order) {
					t.Fatalf("told of layers %v, want %v", told, order)
				}
				for n, c := range loads {
					testenv.NoError(t, b.checkPages(n, c.Blocks))
				}
				testenv.NoError(t, b.checkBetween())
			})
		}
	}
}

// files lets a load keep so many files open.
type files struct {
	mu         sync.Mutex
	left, gone int
}

func (f *files) Keep() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.left--
	return f.left >= 0
}

func (f *files) Gone() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.gone++
}

// A layer-wise load has no more files open between its steps than it may keep, and all the same brings every byte.
func TestLayersKeepFewFiles(t *testing.T) {
	const chunks, kept, workers = 40, 5, 8
	geo := kv.Uniform(2, 12, 1, 5000)
	b := newBench(t, geo, geo.Blocks*chunks)
	b.storeChunks(chunks)
	l := b.lease(slices.Collect(func(yield func(int) bool) {
		for n := range chunks {
			if !yield(n) {
				return
			}
		}
	})...)
	defer l.Release()
	b.poison()
	loads, most, may, before := b.spread(chunks), 0, &files{left: kept}, b.fs.Open()
	done := make(chan transfer.Outcome, 1)
	b.queue.Load(&transfer.LoadJob{
		Lease: l, Memory: b.memory, Chunks: loads, Done: func(o transfer.Outcome) { done <- o }, Files: may,
		Layers: &transfer.Layers{Landed: func(uint32, []int) { most = max(most, b.fs.Open()-before) }},
	})
	if out := <-done; len(out.Failed) > 0 || out.Bytes != chunks*geo.PageBytes() {
		t.Fatalf("load: got %+v, want %d bytes and no failure", out, chunks*geo.PageBytes())
	}
	if most > kept+workers || most < kept {
		t.Errorf("%d of %d pieces were open between steps, want %d and those that are being read", most, chunks, kept)
	}
	if n := b.fs.Open() - before; n != 0 || may.gone != kept {
		t.Errorf("after the load %d pieces are open and %d were given back, want 0 and %d", n, may.gone, kept)
	}
	for n, c := range loads {
		testenv.NoError(t, b.checkPages(n, c.Blocks))
	}
}

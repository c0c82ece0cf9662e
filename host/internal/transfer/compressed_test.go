package transfer_test

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"os"
	"syscall"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/codec"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/plugins/blockmajor"
)

// compress turns compression on.
func compress(c *store.Config) { c.Roots[0].Compressed = true }

// newCompressed is a bench whose pieces are compressed, and whose pages hold what gains by it.
func newCompressed(t testing.TB, geo kv.Geometry, blocks uint32, change ...func(*store.Config)) *bench {
	b := newBench(t, geo, blocks, append(change, compress)...)
	b.fill = fillNarrow
	return b
}

// fillNarrow is fillPage with few values at odd offsets, as floats of a narrow range have them: quick to make.
func fillNarrow(page []byte, key kv.Key, plane, block int) {
	fillPage(page, key, plane, block)
	for i := 1; i < len(page); i += 2 {
		page[i] = 0x3c + page[i]%4
	}
}

// fillFloats writes a normal distribution's values as 16-bit floats, as KV pages in bf16 hold them.
func fillFloats(page []byte, key kv.Key, plane, block int) {
	seed := binary.LittleEndian.Uint64(key[:]) ^ uint64(plane)<<32 ^ uint64(block)
	r := rand.New(rand.NewPCG(seed, seed^0x9e3779b97f4a7c15))
	for i := range page {
		if i%2 == 0 {
			v := math.Float32bits(float32(r.NormFloat64()))
			page[i] = byte(v >> 16)
			if i+1 < len(page) {
				page[i+1] = byte(v >> 24)
			}
		}
	}
}

// fillMixed writes floats to every second block, and random bytes to the others.
func fillMixed(page []byte, key kv.Key, plane, block int) {
	if block%2 == 0 {
		fillFloats(page, key, plane, block)
	} else {
		fillPage(page, key, plane, block)
	}
}

// What is stored compressed takes as much less as the codec's figures say, is counted so, and stays readable when
// compression is off. What would gain nothing is stored as it is.
func TestCompressedSizes(t *testing.T) {
	testenv.Slow(t)
	geo := kv.Uniform(16, 8, 2, 16384) // 4 MiB: four slots
	for _, c := range []struct {
		name string
		fill func(page []byte, key kv.Key, plane, block int)
		low  float64 // bounds of the ratio
		high float64
		of   int64 // the chunks are compressed; the first shows whether that pays
	}{
		{"floats", fillFloats, 1.4, 1.6, 3},
		{"floats and random bytes", fillMixed, 1.1, 1.2, 3},
		{"random bytes", fillPage, 0.99, 1, 1},
		{"zeros", func(page []byte, _ kv.Key, _, _ int) { clear(page) }, 100, 1e6, 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t, geo, geo.Blocks*3, compress)
			b.fill = c.fill
			b.storeChunks(3)
			var size, allocated int64
			for _, path := range b.pieces() {
				info, err := os.Stat(path)
				testenv.OK(t, err)
				size += info.Size()
				allocated += info.Sys().(*syscall.Stat_t).Blocks * 512 // a fragmented file has a block for its map
			}
			if ratio := float64(3*geo.PageBytes()) / float64(size); ratio < c.low || ratio > c.high {
				t.Errorf("files of %d bytes for %d: ratio %.3f, want %.2f to %.2f", size, 3*geo.PageBytes(), ratio, c.low,
					c.high)
			}
			if used := b.store.Stats().Roots[0].Used; used != allocated {
				t.Errorf("%d bytes in the account, the files take %d", used, allocated)
			}
			load := func() {
				t.Helper()
				b.poison()
				b.loadRight(b.spread(3), nil)
			}
			load()
			s := b.engine.Stats()
			if s.StoredBytes != size || s.LoadedBytes != size {
				t.Errorf("%d bytes stored and %d loaded, the files have %d", s.StoredBytes, s.LoadedBytes, size)
			}
			figures := b.codec()
			for what, got := range map[string]codec.Flow{"encoded": figures.Encoded, "decoded": figures.Decoded} {
				if got.Pages != c.of*geo.PageBytes() || got.Stored < size*c.of/3-3*16384 || got.Stored > size || got.Took <= 0 {
					t.Errorf("flow %s: got %+v, want %d bytes of pages", what, got, c.of*geo.PageBytes())
				}
			}
			testenv.OK(t, b.store.Close())
			b.config.Roots[0].Compressed = false
			b.open()
			load()
		})
	}
}

// codec is what compression took and gained: all namespaces of a bench have the same model.
func (b *bench) codec() codec.Figures { return b.store.Compression()[0] }

// A table of many extents fills most of a slot of the least size. One that no slot holds is not written.
func TestCompressedPieceOfManyExtents(t *testing.T) {
	testenv.Slow(t)
	for _, c := range []struct {
		layers     uint32
		compresses bool
	}{{120, true}, {140, false}} {
		geo := kv.Uniform(256, c.layers, 1, 64) // each page a segment, so an extent
		b := newCompressed(t, geo, 3*geo.Blocks, func(c *store.Config) {
			c.Policies.Layout = native("blockmajor", abi.RoleLayout, blockmajor.New)
		})
		b.storeChunks(3)
		b.poison()
		b.loadRight(b.spread(3), nil)
		if got := b.codec().Decoded.Pages; (got == geo.PageBytes()) != c.compresses { // it gains nothing
			t.Errorf("%d extents: %d bytes were decoded", 256*c.layers, got)
		}
	}
}

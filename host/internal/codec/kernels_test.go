package codec

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"
	"github.com/zeebo/xxh3"

	"github.com/kvhost/kvhost/abi/testenv"
)

// extentRow is what a kernel has of an extent.
type extentRow struct {
	offset    uint64
	len, last uint32 // last: the codec of what is stored; of page bytes, whether they could not be decoded
}

// gpuCodec is the GPU's kernels, run by a thread of the processor.
type gpuCodec struct{ encode, decode, sum uintptr }

func newGPUCodec(t *testing.T) *gpuCodec {
	testenv.Need(t, testenv.Clang)
	g, err := kernels()
	testenv.OK(t, err)
	return g
}

var kernels = sync.OnceValues(func() (*gpuCodec, error) {
	dir, err := os.MkdirTemp("", "kvhost-kernels")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "kernels.so")
	text, err := exec.Command("clang++", "-std=c++17", "-O2", "-shared", "-fPIC", "-I../../../gds/internal/kernels", "-o", path,
		"testdata/kernels.cpp").CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("compiling the kernels: %w\n%s", err, text)
	}
	lib, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	g := &gpuCodec{}
	for name, at := range map[string]*uintptr{"encode": &g.encode, "decode": &g.decode, "sum": &g.sum} {
		if err == nil {
			*at, err = purego.Dlsym(lib, name)
		}
	}
	return g, err
})

// address of the first byte of a slice.
func address[T any](s []T) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(s))) }

// gpuWindow is a window of page bytes and the memory that a GPU's kernels have beside it.
type gpuWindow struct {
	*gpuCodec
	window, scratch, coded []byte
	planes, pages, stored  []extentRow
}

// newWindow lays extents out one after the other, each at a multiple of align.
func (g *gpuCodec) newWindow(extents [][]byte, align int) *gpuWindow {
	w := &gpuWindow{gpuCodec: g, planes: make([]extentRow, 2*len(extents)), stored: make([]extentRow, len(extents))}
	size := 0
	for _, x := range extents {
		size = (size + align - 1) / align * align
		w.pages = append(w.pages, extentRow{offset: uint64(size), len: uint32(len(x))})
		size += len(x)
	}
	w.window, w.scratch, w.coded = aligned(size), aligned(2*size+64), aligned(size+64)
	return w
}

// aligned is poisoned memory at a multiple of 256 bytes, as a GPU's is.
func aligned(n int) []byte {
	b := bytes.Repeat([]byte{0xcc}, n+256)
	return b[256-address(b)%256:][:n]
}

// store encodes the extents, and returns the bytes that are stored of each.
func (w *gpuWindow) store(extents [][]byte, element int) [][]byte {
	for i, x := range extents {
		copy(w.window[w.pages[i].offset:], x)
	}
	purego.SyscallN(w.encode, address(w.window), address(w.scratch), address(w.planes), address(w.pages),
		uintptr(len(extents)), uintptr(element), address(w.coded), address(w.stored))
	out := make([][]byte, len(extents))
	for i, s := range w.stored {
		out[i] = w.coded[s.offset:][:s.len]
	}
	return out
}

// load decodes what is stored into a poisoned window. It returns the extents that no encoder wrote, or else all bytes.
func (w *gpuWindow) load(halted uint32) (loaded [][]byte, refused []int) {
	const epoch = 7
	copy(w.window, bytes.Repeat([]byte{0xcc}, len(w.window)))
	copy(w.scratch, bytes.Repeat([]byte{0xcc}, len(w.scratch)))
	for i := range w.pages {
		w.pages[i].last = 0
	}
	word := []uint32{halted}
	purego.SyscallN(w.decode, address(w.coded), address(w.scratch), address(w.window), address(w.pages), address(w.stored),
		uintptr(len(w.pages)), address(word), epoch)
	for i, p := range w.pages {
		if p.last != 0 {
			refused = append(refused, i)
		}
		loaded = append(loaded, w.window[p.offset:][:p.len])
	}
	if (word[0] == epoch) != (len(refused) > 0 || halted == epoch) {
		panic(fmt.Sprintf("the gate's word is %d, refused %v", word[0], refused))
	}
	return loaded, refused
}

// TestKernels has the GPU's kernels and the processor decode what the other encoded.
func TestKernels(t *testing.T) {
	g := newGPUCodec(t)
	r := rand.New(rand.NewPCG(1, 16))
	all := samples(r)
	names := slices.Sorted(func(yield func(string) bool) {
		for name := range all {
			if !yield(name) {
				return
			}
		}
	})
	for _, align := range []int{4096, 16, 1} {
		for _, element := range []int{1, 2} {
			t.Run(fmt.Sprintf("align %d, element %d", align, element), func(t *testing.T) {
				r.Shuffle(len(names), func(i, k int) { names[i], names[k] = names[k], names[i] })
				var extents [][]byte
				for _, name := range names {
					extents = append(extents, all[name])
				}
				w := g.newWindow(extents, align)
				end := uint64(0)
				for i, stored := range w.store(extents, element) {
					row := w.stored[i]
					out := bytes.Repeat([]byte{0xcc}, len(extents[i]))
					if err := Decode(out, stored, Codec(row.last)); err != nil || !bytes.Equal(out, extents[i]) {
						t.Errorf("%s: %d stored bytes, codec %d: %v", names[i], len(stored), row.last, err)
					}
					mine := make([]byte, len(extents[i]))
					n, _ := Encode(mine, extents[i], element)
					if row.offset != end || len(stored) > n+n/32+4 {
						t.Errorf("%s: %d bytes at %d, want %d there", names[i], len(stored), row.offset, n)
					}
					end += uint64(row.len)
				}
				w.wantLoaded(t, names, extents)
				if loaded, refused := w.load(7); len(refused) > 0 || !bytes.Equal(loaded[0], aligned(len(loaded[0]))) {
					t.Errorf("the gate is shut, but it was decoded")
				}
				end = 0
				for i, x := range extents {
					n, by := Encode(w.coded[end:][:len(x)], x, element)
					w.stored[i] = extentRow{offset: end, len: uint32(n), last: uint32(by)}
					end += uint64(n)
				}
				w.wantLoaded(t, names, extents)
			})
		}
	}
}

func (w *gpuWindow) wantLoaded(t *testing.T, names []string, extents [][]byte) {
	t.Helper()
	loaded, refused := w.load(0)
	for i := range extents {
		if len(refused) > 0 || !bytes.Equal(loaded[i], extents[i]) {
			t.Errorf("%s: not what was stored; refused: %v", names[i], refused)
		}
	}
}

// TestKernelsRefuse feeds the kernels bytes that no encoder wrote. They write within the extents, and tell of lengths that cannot
// be; what they do not find has another checksum.
func TestKernelsRefuse(t *testing.T) {
	g := newGPUCodec(t)
	r := rand.New(rand.NewPCG(2, 16))
	x := make([]byte, 4096)
	bfloat16(r, x, 1)
	extents := [][]byte{x, x, x}
	w := g.newWindow(extents, 8192)
	w.store(extents, 2)
	stored, rows := bytes.Clone(w.coded), slices.Clone(w.stored)
	refusals := 0
	for round := range 120 {
		copy(w.coded, stored)
		copy(w.stored, rows)
		at := rows[1]
		switch round % 4 {
		case 0: // a bit
			w.coded[int(at.offset)+r.IntN(int(at.len))] ^= 1 << r.IntN(8)
		case 1: // the head
			w.coded[int(at.offset)+r.IntN(6)] = byte(r.Uint32())
		case 2: // all of it
			for i := range at.len {
				w.coded[at.offset+uint64(i)] = byte(r.Uint32())
			}
			w.coded[at.offset], w.coded[at.offset+1] = byte(r.IntN(3)), byte(r.IntN(3))
		case 3: // another length, another codec
			w.stored[1].len, w.stored[1].last = 1+r.Uint32N(at.len), r.Uint32N(4)
		}
		loaded, refused := w.load(0)
		refusals += len(refused)
		for i, x := range extents {
			if i != 1 && (slices.Contains(refused, i) || len(refused) == 0 && !bytes.Equal(loaded[i], x)) {
				t.Fatalf("round %d: extent %d was not damaged", round, i)
			}
		}
		gap := w.window[w.pages[0].offset+uint64(w.pages[0].len) : w.pages[1].offset]
		if !bytes.Equal(gap, aligned(len(gap))) {
			t.Fatalf("round %d: written outside of the extents", round)
		}
	}
	if refusals < 20 {
		t.Errorf("%d of 120 were refused", refusals)
	}
}

// TestSumKernel has the kernel sum extents at all addresses, and shut the gate for one that differs.
func TestSumKernel(t *testing.T) {
	g := newGPUCodec(t)
	r := rand.New(rand.NewPCG(3, 16))
	buffer := aligned(1 << 20)
	for i := range buffer {
		buffer[i] = byte(r.Uint32())
	}
	var rows []extentRow
	var want []uint64
	for _, n := range []int{1, 16, 240, 241, 256, 1023, 1024, 1025, 4096, 18432, 46073, MaxBytes - 1, MaxBytes} {
		for skew := range 8 {
			at := 8*r.IntN(100) + skew
			rows = append(rows, extentRow{offset: uint64(at), len: uint32(n)})
			want = append(want, xxh3.Hash(buffer[at:at+n]))
		}
	}
	sums, halted := make([]uint64, len(rows)), []uint32{0}
	sum := func(expected []uint64) {
		clear(sums)
		purego.SyscallN(g.sum, address(buffer), address(rows), uintptr(len(rows)), address(sums), address(expected),
			address(halted), 7)
		for i, x := range rows {
			if sums[i] != want[i] {
				t.Errorf("%d bytes at %d: %016x, want %016x", x.len, x.offset, sums[i], want[i])
			}
		}
	}
	if sum(want); halted[0] != 0 {
		t.Error("the gate is shut, but all sums are as expected")
	}
	expected := slices.Clone(want)
	expected[r.IntN(len(expected))]++
	if sum(expected); halted[0] != 7 {
		t.Error("a sum differs, but the gate is open")
	}
}

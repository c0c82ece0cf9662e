package gds

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/gds/gdstest"
	"golang.org/x/sys/unix"
)

// open gives the GPU that the tests run on: the double's, or with KVHOST_TEST_GPU set the first real one.
func open(t testing.TB, cfg Config) (*GPU, *gdstest.Double) {
	t.Helper()
	var double *gdstest.Double
	var names []string
	if os.Getenv("KVHOST_TEST_GPU") == "" {
		double = gdstest.Build(t)
		names = []string{double.Path}
	}
	d, err := Open(nil, names...)
	testenv.OK(t, err)
	devices, err := d.Devices()
	testenv.OK(t, err)
	g, err := d.OpenGPU(devices[0].UUID, cfg)
	testenv.OK(t, err)
	t.Cleanup(func() {
		if double != nil {
			double.Rules("")
		}
		if err := g.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return g, double
}

// doubled is open for tests of faults, which only the double has.
func doubled(t testing.TB, cfg Config) (*GPU, *gdstest.Double) {
	t.Setenv("KVHOST_TEST_GPU", "")
	var g *GPU
	var double *gdstest.Double
	t.Cleanup(func() { // the last one
		if g != nil && g.Err() != nil {
			double.Forget()
		}
	})
	g, double = open(t, cfg)
	return g, double
}

// pinned is host memory, registered or not.
func slot(t testing.TB, g *GPU, size int, register bool) []byte {
	t.Helper()
	mem, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	testenv.OK(t, err)
	if register {
		testenv.OK(t, g.Pinner().Register(mem))
	}
	t.Cleanup(func() {
		if register {
			if err := g.Pinner().Unregister(mem); err != nil {
				t.Errorf("Unregister: %v", err)
			}
		}
		unix.Munmap(mem)
	})
	return mem
}

func buffer(t testing.TB, g *GPU, size int64) *Buffer {
	t.Helper()
	b, err := g.Alloc(size)
	testenv.OK(t, err)
	t.Cleanup(func() {
		if g.Err() == nil {
			if err := b.Free(); err != nil {
				t.Errorf("Free: %v", err)
			}
		}
	})
	return b
}

func on(t testing.TB, g *GPU, fn func(*Thread) error) {
	t.Helper()
	var err error
	if e := g.Do(func(th *Thread) { err = fn(th) }); e != nil {
		t.Fatal(e)
	}
	testenv.OK(t, err)
}

func random(n int) []byte {
	b := make([]byte, n)
	testenv.Fill(b, uint64(n))
	return b
}

func TestDevices(t *testing.T) {
	g, double := open(t, Config{Threads: 1})
	u, err := ParseUUID(g.UUID.String())
	if err != nil || u != g.UUID {
		t.Fatalf("UUID %s parses to %s, %v", g.UUID, u, err)
	}
	if double != nil && (g.UUID.String() != gdstest.UUID || g.PCI != "0000:ab:00.0" || g.SMs != 8 || g.Major != 9) {
		t.Errorf("device %+v", g.Device)
	}
	if g.Memory <= 0 || g.SMs <= 0 || g.Name == "" {
		t.Errorf("device %+v", g.Device)
	}
	if _, err := g.driver.OpenGPU(UUID{1}, Config{}); !errors.Is(err, ErrNoGPU) {
		t.Errorf("an unknown UUID: %v", err)
	}
	for _, bad := range []string{"", "GPU-", "GPU-zz", "GPU-00112233-4455-6677-8899-aabbccddeeff00"} {
		if _, err := ParseUUID(bad); !errors.Is(err, ErrNoGPU) {
			t.Errorf("parse UUID %q: got error %v", bad, err)
		}
	}
}

func TestNoLibrary(t *testing.T) {
	if _, err := Open(nil, "libkvhost-no-such.so.1"); !errors.Is(err, ErrNoDriver) {
		t.Errorf("open a library that is not there: got error %v, want no driver", err)
	}
	if _, err := Open(nil, "libm.so.6"); !errors.Is(err, ErrNoDriver) || !errors.Is(err, ErrSymbol) {
		t.Errorf("a library without the functions: %v", err)
	}
}

// Pages of every size and alignment, both ways, in every mode, with registered and plain memory.
func TestBatchMovesEveryByte(t *testing.T) {
	shapes := []struct{ page, stride, skew, pages int }{
		{4096, 4096, 0, 300}, {65536, 65536, 0, 40}, {18432, 18432, 0, 64}, {18432, 20000, 16, 33}, {1000, 1004, 4, 77},
		{33, 61, 1, 500}, {1, 3, 0, 2000}, {128, 128, 0, pieceSlots + 100},
	}
	for _, mode := range []Mode{Kernel, SingleCopy} {
		g, _ := open(t, Config{Threads: 2, Copy: mode, Blocks: 8})
		for _, s := range shapes {
			for _, register := range []bool{true, false} {
				total := s.page * s.pages
				pages := buffer(t, g, int64(s.stride*s.pages+s.skew))
				flat := slot(t, g, (total+15)&^15+64, register)
				want := random(total)
				order := rand.New(rand.NewPCG(1, 2)).Perm(s.pages)
				move := func(dir Direction) func(*Thread) error {
					return func(th *Thread) error {
						b := th.Begin(dir, flat, nil)
						for i, p := range order {
							if err := b.Add(pages.Address+uint64(s.skew+p*s.stride), i*s.page, s.page); err != nil {
								return err
							}
						}
						return b.Wait()
					}
				}
				on(t, g, func(th *Thread) error { return th.Fill(pages.Address, 0xa5, pages.Size) })
				copy(flat, want)
				on(t, g, move(Scatter))
				image := make([]byte, pages.Size)
				on(t, g, func(th *Thread) error { return th.Read(image, pages.Address) })
				expect := bytes.Repeat([]byte{0xa5}, len(image))
				for i, p := range order {
					copy(expect[s.skew+p*s.stride:], want[i*s.page:(i+1)*s.page])
				}
				if !bytes.Equal(image, expect) {
					t.Fatalf("%s, %+v, registered %v: scatter put a byte wrong", mode, s, register)
				}
				clear(flat)
				on(t, g, move(Gather))
				if !bytes.Equal(flat[:total], want) || !bytes.Equal(flat[total:], make([]byte, len(flat)-total)) {
					t.Fatalf("%s, %+v, registered %v: gather put a byte wrong", mode, s, register)
				}
			}
		}
		if g.Mode() != mode {
			t.Errorf("%s became %s", mode, g.Mode())
		}
	}
}

// Pieces of rows of every size and alignment, with a part of a row at their end, between pieces without rows.
func TestBatchMovesRows(t *testing.T) {
	shapes := []struct{ row, stride, rows, part, skew int }{
		{256, 2048, 16, 0, 0}, {256, 256, 16, 0, 0}, {576, 640, 40, 64, 16}, {260, 1000, 9, 4, 4}, {33, 61, 7, 5, 1}, {1, 3, 50, 0, 0},
		{4096, 8192, 12, 0, 0},
	}
	for _, mode := range []Mode{Kernel, SingleCopy} {
		g, _ := open(t, Config{Threads: 2, Copy: mode, Blocks: 8})
		for _, s := range shapes {
			const pieces, plain = 37, 48
			length, each := s.row*s.rows+s.part, s.stride*(s.rows+1)+s.skew
			pages, flat := buffer(t, g, int64(each*pieces)), slot(t, g, pieces*(length+plain), true)
			order := rand.New(rand.NewPCG(3, 4)).Perm(pieces)
			move := func(dir Direction) func(*Thread) error {
				return func(th *Thread) error {
					b, off := th.Begin(dir, flat, nil), 0
					for i, p := range order {
						at, n, row := pages.Address+uint64(p*each+s.skew), length, uint32(s.row)
						if i%5 == 4 {
							n, row = min(plain, s.stride), 0
						}
						if err := b.AddRows(at, off, n, row, uint64(s.stride)); err != nil {
							return err
						}
						off += n
					}
					return b.Wait()
				}
			}
			want := random(len(flat))
			copy(flat, want)
			on(t, g, func(th *Thread) error { return th.Fill(pages.Address, 0xa5, pages.Size) })
			on(t, g, move(Scatter))
			image, expect := make([]byte, pages.Size), bytes.Repeat([]byte{0xa5}, int(pages.Size))
			on(t, g, func(th *Thread) error { return th.Read(image, pages.Address) })
			off := 0
			for i, p := range order {
				if at := p*each + s.skew; i%5 == 4 {
					off += copy(expect[at:at+min(plain, s.stride)], want[off:])
				} else {
					for k := 0; k < length; k += s.row {
						off += copy(expect[at+k/s.row*s.stride:][:min(s.row, length-k)], want[off:])
					}
				}
			}
			if !bytes.Equal(image, expect) {
				t.Fatalf("%s, %+v: scatter put a byte wrong", mode, s)
			}
			clear(flat)
			on(t, g, move(Gather))
			if !bytes.Equal(flat[:off], want[:off]) || !bytes.Equal(flat[off:], make([]byte, len(flat)-off)) {
				t.Fatalf("%s, %+v: gather put a byte wrong", mode, s)
			}
		}
	}
}

// Rows may be farther apart than 4 GiB.
func TestBatchMovesDistantRows(t *testing.T) {
	const row, rows, stride = 32, 3, 4<<30 + 64
	for _, mode := range []Mode{Kernel, SingleCopy} {
		g, _ := open(t, Config{Threads: 1, Copy: mode, Blocks: 8})
		pages, flat := buffer(t, g, (rows-1)*stride+row), slot(t, g, rows*row, true)
		move := func(dir Direction) func(*Thread) error {
			return func(th *Thread) error {
				b := th.Begin(dir, flat, nil)
				if err := b.AddRows(pages.Address, 0, len(flat)-8, row, stride); err != nil {
					return err
				}
				return b.Wait()
			}
		}
		want := random(len(flat))
		copy(flat, want)
		on(t, g, move(Scatter))
		for k := range rows {
			got, n := make([]byte, row), min(row, len(flat)-8-k*row)
			on(t, g, func(th *Thread) error { return th.Read(got, pages.Address+uint64(k*stride)) })
			if !bytes.Equal(got[:n], want[k*row:][:n]) {
				t.Errorf("%s: row %d is elsewhere", mode, k)
			}
		}
		clear(flat)
		on(t, g, move(Gather))
		if n := len(flat) - 8; !bytes.Equal(flat[:n], want[:n]) {
			t.Errorf("%s: other rows are gathered than were scattered", mode)
		}
	}
}

func TestBatchRefusesWhatIsOutsideItsBuffer(t *testing.T) {
	g, _ := open(t, Config{Threads: 1})
	flat := slot(t, g, 4096, true)
	on(t, g, func(th *Thread) error {
		b := th.Begin(Gather, flat, nil)
		for _, c := range [][2]int{{-1, 1}, {4096, 1}, {0, 4097}, {4000, 97}, {1, -1}, {int(^uint(0) >> 1), 2}} {
			if err := b.Add(0, c[0], c[1]); !errors.Is(err, ErrConfig) {
				t.Errorf("add %v to a batch: got error %v, want a bad configuration", c, err)
			}
		}
		return b.Wait()
	})
}

// cpus are those that the calling thread may run on.
func cpus(t *testing.T) (list []int) {
	var set unix.CPUSet
	testenv.NoError(t, unix.SchedGetaffinity(0, &set))
	for cpu := range 1024 {
		if set.IsSet(cpu) {
			list = append(list, cpu)
		}
	}
	return list
}

// A GPU's own threads stay on its CPUs, and a thread that is used again by another GPU goes where that is. CPUs that a
// thread may not use are left out; if none is left, it stays where it is. A caller of Do stays where it was.
func TestThreadsStayNearTheirGPU(t *testing.T) {
	t.Setenv("KVHOST_TEST_GPU", "")
	all := cpus(t)
	last := all[len(all)-1:]
	first, _ := open(t, Config{Threads: 1, Files: 1})
	driver := first.driver
	for _, c := range []struct{ near, want []int }{
		{last, last}, {nil, all}, {append([]int{1000}, last...), last}, {[]int{1000}, all}, {all, all},
	} {
		g, err := driver.OpenGPU(first.UUID, Config{Threads: 2, Files: 2, CPUs: c.near})
		testenv.OK(t, err)
		check := func(*Thread) error {
			if got := cpus(t); !slices.Equal(got, c.want) {
				t.Errorf("near %v: on %v, want %v", c.near, got, c.want)
			}
			return nil
		}
		testenv.OK(t, g.Control(check))
		for range 4 { // each thread gets its turn
			on(t, g, func(*Thread) error {
				if got := cpus(t); !slices.Equal(got, all) {
					t.Errorf("a caller is on %v, was on %v", got, all)
				}
				return nil
			})
			if _, err := g.DoFileFor(0, check); err != nil {
				t.Fatal(err)
			}
		}
		testenv.OK(t, g.Close())
	}
}

func handleOf(t testing.TB, b *Buffer) []byte {
	t.Helper()
	h, err := b.IPCHandle()
	testenv.OK(t, err)
	return h
}

// The real driver refuses to open a handle in the process that made it, so this is the double's; the way between two
// processes is tested with a client of another process.
func TestImportIPC(t *testing.T) {
	g, double := doubled(t, Config{Threads: 1})
	pages := buffer(t, g, 3<<20)
	want := random(3 << 20)
	on(t, g, func(th *Thread) error { return th.Write(pages.Address, want) })
	double.Rules("") // counts from here
	a, err := g.ImportIPC(handleOf(t, pages))
	testenv.OK(t, err)
	b, err := g.ImportIPC(handleOf(t, pages))
	if err != nil || a != b || a.Size != 3<<20 || a.Base == pages.Address {
		t.Fatalf("imports of one handle: got %+v, %+v, %v, want the same", a, b, err)
	}
	if n := double.Calls("cuIpcOpenMemHandle_v2"); n != 1 {
		t.Errorf("the handle was opened %d times", n)
	}
	got := make([]byte, len(want))
	on(t, g, func(th *Thread) error { return th.Read(got, b.Base) })
	if !bytes.Equal(got, want) {
		t.Error("the import holds other bytes")
	}
	for i, m := range []*Import{a, b} {
		testenv.OK(t, m.Close())
		if n := double.Calls("cuIpcCloseMemHandle"); n != i {
			t.Errorf("after %d closes the handle was closed %d times", i+1, n)
		}
	}
}

func TestImportIPCRefusals(t *testing.T) {
	g, double := doubled(t, Config{Threads: 1})
	pages := buffer(t, g, 1<<20)
	good := handleOf(t, pages)
	for name, c := range map[string]struct {
		handle []byte
		rules  string
	}{
		"short":          {good[:63], ""},
		"long":           {append(bytes.Clone(good), 0), ""},
		"empty":          {nil, ""},
		"garbage":        {make([]byte, 64), ""},
		"driver refuses": {good, "cuIpcOpenMemHandle_v2:code=201"},
		"size unknown":   {good, "cuMemGetAddressRange_v2:code=1"},
		"device unknown": {good, "cuPointerGetAttribute:code=1"},
		"another GPU's":  {good, "cuPointerGetAttribute:answer=1"},
	} {
		double.Rules(c.rules)
		if _, err := g.ImportIPC(c.handle); !errors.Is(err, ErrImport) {
			t.Errorf("import of a handle that is %s: got error %v", name, err)
		}
		if opened, closed := double.Calls("cuIpcOpenMemHandle_v2"), double.Calls(
			"cuIpcCloseMemHandle"); closed > opened || (opened-closed) > 1 {
			t.Errorf("%s: opened %d, closed %d", name, opened, closed)
		}
	}
	double.Rules("")
	m, err := g.ImportIPC(good)
	testenv.OK(t, err)
	m.Close()
}

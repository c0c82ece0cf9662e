package fileio_test

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/gds/fileio"
	"github.com/kvhost/kvhost/gds/gdstest"
)

// open takes the first GPU: the double's, or with KVHOST_TEST_GPU set a real one.
func open(t *testing.T, cfg gds.Config) (*gds.GPU, *gdstest.Double) {
	t.Helper()
	var double *gdstest.Double
	var names []string
	if os.Getenv("KVHOST_TEST_GPU") == "" {
		double = gdstest.Build(t)
		names = []string{double.Path}
	}
	d, err := gds.Open(nil, names...)
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

func doubled(t *testing.T, cfg gds.Config) (*gds.GPU, *gdstest.Double) {
	t.Setenv("KVHOST_TEST_GPU", "")
	return open(t, cfg)
}

func openCuFile(t *testing.T, g *gds.GPU, path ...string) *gds.CuFile {
	t.Helper()
	c, err := gds.LoadCuFile(path...)
	testenv.OK(t, err)
	on(t, g, c.Open)
	t.Cleanup(func() { on(t, g, c.Close) })
	return c
}

func on(t *testing.T, g *gds.GPU, fn func(*gds.Thread) error) {
	t.Helper()
	var err error
	if lost := g.Do(func(th *gds.Thread) { err = fn(th) }); lost != nil || err != nil {
		t.Fatal(lost, err)
	}
}

func buffer(t *testing.T, g *gds.GPU, size int64) *gds.Buffer {
	t.Helper()
	b, err := g.Alloc(size)
	testenv.OK(t, err)
	t.Cleanup(func() {
		if err := b.Free(); err != nil {
			t.Errorf("Free: %v", err)
		}
	})
	return b
}

func random(n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{1}).Read(b)
	return b
}

func TestRoundTrip(t *testing.T) {
	for _, mode := range []fileio.Mode{fileio.Auto, fileio.Staged} {
		g, double := open(t, gds.Config{Threads: 2})
		var library []string
		if double != nil {
			library = []string{double.Path}
		}
		c := openCuFile(t, g, library...)
		fio, err := fileio.New(g, c, mode, 2)
		testenv.OK(t, err)
		const size = 10 << 20
		from, to := buffer(t, g, size), buffer(t, g, size)
		want, got := random(size), make([]byte, size)
		on(t, g, func(th *gds.Thread) error { return th.Write(from.Address, want) })
		f, err := fio.Open(filepath.Join(t.TempDir(), "f"), os.O_CREATE|os.O_RDWR, 0o600)
		testenv.OK(t, err)
		direct, why := f.Direct()
		t.Logf("mode %d: direct %v, %v", mode, direct, why)
		if mode == fileio.Staged && direct {
			t.Error("mode staged used cuFile")
		}
		for _, part := range [][2]int64{{0, 8 << 20}, {8 << 20, 2 << 20}} {
			if _, err := f.Write(from.Address+uint64(part[0]), part[1], part[0]); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := f.Read(to.Address, size, 0); err != nil {
			t.Fatal(err)
		}
		on(t, g, func(th *gds.Thread) error { return th.Read(got, to.Address) })
		if !bytes.Equal(got, want) {
			t.Errorf("mode %d: bytes differ", mode)
		}
		if _, err := f.Read(to.Address, 8192, size-4096); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("mode %d: past the end: %v", mode, err)
		}
		if _, err := f.Read(to.Address, -1, 0); !errors.Is(err, gds.ErrConfig) {
			t.Errorf("a negative size: %v", err)
		}
		testenv.NoError(t, errors.Join(f.Close(), fio.Close()))
	}
}

// Each fault: the error in mode Direct, and the fallback to host memory in mode Auto.
func TestFaults(t *testing.T) {
	for _, c := range []struct {
		rules string
		is    error
		text  string
	}{
		{"cuFileRead:errno=5", syscall.EIO, "input/output error"},
		{"cuFileRead:code=5030", nil, "CU_FILE_INTERNAL_ERROR (5030)"},
		{"cuFileRead:short=4096", gds.ErrShort, "4096 of 65536"},
		{"cuFileRead:short=0", gds.ErrShort, "0 of 65536"},
		{"cuFileRead:code=5099", nil, "cuFile error (5099)"},
	} {
		for _, mode := range []fileio.Mode{fileio.Auto, fileio.Direct} {
			g, double := doubled(t, gds.Config{Threads: 2})
			lib := openCuFile(t, g, double.Path)
			fio, err := fileio.New(g, lib, mode, 1)
			testenv.OK(t, err)
			mem := buffer(t, g, 64<<10)
			want, got := random(64<<10), make([]byte, 64<<10)
			name := filepath.Join(t.TempDir(), "f")
			testenv.OK(t, os.WriteFile(name, want, 0o600))
			f, err := fio.Open(name, os.O_RDWR, 0)
			testenv.OK(t, err)
			double.Rules(c.rules)
			route, err := f.Read(mem.Address, 64<<10, 0)
			if mode == fileio.Auto {
				on(t, g, func(th *gds.Thread) error { return th.Read(got, mem.Address) })
				if err != nil || route != fileio.ByStaging || fio.Fallbacks.Load() != 1 || !bytes.Equal(got, want) {
					t.Errorf("%s, auto: %v, route %d", c.rules, err, route)
				}
			} else if err == nil || route != fileio.ByCuFile || !strings.Contains(err.Error(), c.text) || c.is != nil &&
				!errors.Is(err, c.is) {
				t.Errorf("%s, direct: %v", c.rules, err)
			}
			testenv.NoError(t, errors.Join(f.Close(), fio.Close()))
		}
	}
}

func TestRegistrationFails(t *testing.T) {
	g, double := doubled(t, gds.Config{Threads: 1})
	lib := openCuFile(t, g, double.Path)
	name := filepath.Join(t.TempDir(), "f")
	testenv.OK(t, os.WriteFile(name, make([]byte, 4096), 0o600))
	for _, rules := range []string{"cuFileHandleRegister:code=5027", "cuFileHandleRegister:code=5011:errno=999"} {
		for _, mode := range []fileio.Mode{fileio.Auto, fileio.Direct} {
			fio, err := fileio.New(g, lib, mode, 1)
			testenv.OK(t, err)
			double.Rules(rules)
			f, err := fio.Open(name, os.O_RDWR, 0)
			double.Rules("")
			var e *gds.FileError
			if mode == fileio.Direct {
				if !errors.As(err, &e) {
					t.Errorf("%s, direct: %v", rules, err)
				}
			} else if direct, why := f.Direct(); direct || !errors.As(why, &e) || e.Code == 5011 &&
				e.CUDA != 999 {
				t.Errorf("%s, auto: %v", rules, why)
			}
			if f != nil {
				f.Close()
			}
			fio.Close()
		}
	}
	if _, err := fileio.New(g, nil, fileio.Direct, 1); !errors.Is(err, gds.ErrNoCuFile) {
		t.Error(err)
	}
}

// Example reads a file into memory of the first GPU, past the page cache where cuFile can.
func Example() {
	driver, err := gds.Open(nil)
	if err != nil {
		return // no driver
	}
	devices, err := driver.Devices()
	if err != nil || len(devices) == 0 {
		return
	}
	gpu, err := driver.OpenGPU(devices[0].UUID, gds.Config{Threads: 2})
	if err != nil {
		return
	}
	defer gpu.Close()
	memory, err := gpu.Alloc(1 << 30)
	if err != nil {
		return
	}
	defer memory.Free()
	if _, err := load(gpu, nil, "weights", memory.Address, 1<<30); err != nil {
		return
	}
}

// load reads the first bytes of a file into device memory, and says by which route. cufile may be nil.
func load(gpu *gds.GPU, cufile *gds.CuFile, name string, address uint64, size int64) (route fileio.Route, err error) {
	io, err := fileio.New(gpu, cufile, fileio.Auto, 2)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, io.Close()) }()
	file, err := io.Open(name, os.O_RDONLY, 0)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	return file.Read(address, size, 0)
}

// The example's function brings the file's bytes to the GPU, with and without cuFile.
func TestExample(t *testing.T) {
	g, double := doubled(t, gds.Config{Threads: 2})
	const size = 5 << 20
	want, name := random(size), filepath.Join(t.TempDir(), "weights")
	if err := os.WriteFile(name, want, 0o600); err != nil {
		t.Fatal(err)
	}
	for what, c := range map[fileio.Route]*gds.CuFile{fileio.ByStaging: nil, fileio.ByCuFile: openCuFile(t, g, double.Path)} {
		to, got := buffer(t, g, size), make([]byte, size)
		route, err := load(g, c, name, to.Address, size)
		if err != nil || route != what {
			t.Errorf("want route %d, got %d and %v", what, route, err)
		}
		on(t, g, func(th *gds.Thread) error { return th.Read(got, to.Address) })
		if !bytes.Equal(got, want) {
			t.Errorf("route %d: want the file's bytes in device memory, got others", route)
		}
	}
}

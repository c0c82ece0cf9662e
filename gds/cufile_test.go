package gds

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func openCuFile(t *testing.T, g *GPU, path ...string) *CuFile {
	t.Helper()
	c, err := LoadCuFile(path...)
	if err != nil {
		t.Fatal(err)
	}
	on(t, g, c.Open)
	t.Cleanup(func() {
		if g.Err() == nil {
			on(t, g, c.Close)
		}
	})
	return c
}

// cuFileOf is the double's library, or with KVHOST_TEST_GPU set the real one.
func cuFileOf(t *testing.T, g *GPU) *CuFile {
	t.Helper()
	if os.Getenv("KVHOST_TEST_GPU") != "" {
		return openCuFile(t, g)
	}
	return openCuFile(t, g, g.driver.lib.name)
}

func TestFileIORoundTrip(t *testing.T) {
	for _, mode := range []StorageMode{Auto, Staged} {
		g, _ := open(t, Config{Threads: 2})
		c := cuFileOf(t, g)
		fio, err := NewFileIO(g, c, mode, 2)
		if err != nil {
			t.Fatal(err)
		}
		const size = 10 << 20
		from, to := buffer(t, g, size), buffer(t, g, size)
		want, got := random(size), make([]byte, size)
		on(t, g, func(th *Thread) error { return th.Write(from.Address, want) })
		f, err := fio.Open(filepath.Join(t.TempDir(), "f"), os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		direct, why := f.Direct()
		t.Logf("mode %d: direct %v, %v", mode, direct, why)
		if mode == Staged && direct {
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
		on(t, g, func(th *Thread) error { return th.Read(got, to.Address) })
		if !bytes.Equal(got, want) {
			t.Errorf("mode %d: bytes differ", mode)
		}
		if _, err := f.Read(to.Address, 8192, size-4096); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("mode %d: past the end: %v", mode, err)
		}
		if _, err := f.Read(to.Address, -1, 0); !errors.Is(err, ErrConfig) {
			t.Errorf("a negative size: %v", err)
		}
		if err := errors.Join(f.Close(), fio.Close()); err != nil {
			t.Error(err)
		}
	}
}

func TestCuFileSays(t *testing.T) {
	g, _ := open(t, Config{Threads: 1})
	c := cuFileOf(t, g)
	v, err := c.Version()
	if err != nil || v < 1000 {
		t.Errorf("version %d, %v", v, err)
	}
	p, err := c.Properties()
	if err != nil || p.MaxDirectIOKB == 0 {
		t.Errorf("%+v, %v", p, err)
	}
	if err := c.SetBool(AllowCompatMode, true); err == nil {
		t.Error("a parameter was taken by an open driver")
	}
	t.Logf("version %d, %+v", v, p)
}

// Each fault: what mode direct tells, and that mode auto does the operation through host memory.
func TestCuFileFaults(t *testing.T) {
	for _, c := range []struct {
		rules string
		is    error
		text  string
	}{
		{"cuFileRead:errno=5", syscall.EIO, "input/output error"},
		{"cuFileRead:code=5030", nil, "CU_FILE_INTERNAL_ERROR (5030)"},
		{"cuFileRead:short=4096", ErrShort, "4096 of 65536"},
		{"cuFileRead:short=0", ErrShort, "0 of 65536"},
		{"cuFileRead:code=5099", nil, "cuFile error (5099)"},
	} {
		for _, mode := range []StorageMode{Auto, Direct} {
			g, double := doubled(t, Config{Threads: 2})
			lib := openCuFile(t, g, double.Path)
			fio, err := NewFileIO(g, lib, mode, 1)
			if err != nil {
				t.Fatal(err)
			}
			mem := buffer(t, g, 64<<10)
			want, got := random(64<<10), make([]byte, 64<<10)
			name := filepath.Join(t.TempDir(), "f")
			if err := os.WriteFile(name, want, 0o600); err != nil {
				t.Fatal(err)
			}
			f, err := fio.Open(name, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			double.Rules(c.rules)
			route, err := f.Read(mem.Address, 64<<10, 0)
			if mode == Auto {
				on(t, g, func(th *Thread) error { return th.Read(got, mem.Address) })
				if err != nil || route != ByStaging || fio.Fallbacks.Load() != 1 || !bytes.Equal(got, want) {
					t.Errorf("%s, auto: %v, route %d", c.rules, err, route)
				}
			} else if err == nil || route != ByCuFile || !strings.Contains(err.Error(), c.text) || c.is != nil && !errors.Is(err, c.is) {
				t.Errorf("%s, direct: %v", c.rules, err)
			}
			if err := errors.Join(f.Close(), fio.Close()); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestCuFileRegistrationFails(t *testing.T) {
	g, double := doubled(t, Config{Threads: 1})
	lib := openCuFile(t, g, double.Path)
	name := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(name, make([]byte, 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, rules := range []string{"cuFileHandleRegister:code=5027", "cuFileHandleRegister:code=5011:errno=999"} {
		for _, mode := range []StorageMode{Auto, Direct} {
			fio, err := NewFileIO(g, lib, mode, 1)
			if err != nil {
				t.Fatal(err)
			}
			double.Rules(rules)
			f, err := fio.Open(name, os.O_RDWR, 0)
			double.Rules("")
			var e *FileError
			if mode == Direct {
				if !errors.As(err, &e) {
					t.Errorf("%s, direct: %v", rules, err)
				}
			} else if direct, why := f.Direct(); direct || !errors.As(why, &e) || e.Code == fileCUDAError && e.CUDA != 999 {
				t.Errorf("%s, auto: %v", rules, why)
			}
			if f != nil {
				f.Close()
			}
			fio.Close()
		}
	}
	double.Rules("cuFileDriverOpen:code=5001")
	if err := lib.Open(nil); err == nil || !strings.Contains(err.Error(), "CU_FILE_DRIVER_NOT_INITIALIZED (5001)") {
		t.Error(err)
	}
	if _, err := LoadCuFile("libkvhost-no-such.so"); !errors.Is(err, ErrNoCuFile) {
		t.Error(err)
	}
	if _, err := NewFileIO(g, nil, Direct, 1); !errors.Is(err, ErrNoCuFile) {
		t.Error(err)
	}
}

func TestStatsNameTheRoute(t *testing.T) {
	g, _ := open(t, Config{Threads: 1})
	c := cuFileOf(t, g)
	if err := c.StartStats(); err != nil {
		t.Fatal(err)
	}
	if r, err := c.Stats(); err != nil {
		t.Errorf("%+v, %v", r, err)
	}
	for _, k := range []struct {
		r    Routes
		want string
	}{
		{Routes{}, "nothing"}, {Routes{Reads: 2, PosixReads: 2}, "compatibility"}, {Routes{Writes: 1, P2PWrites: 1}, "peer"},
		{Routes{Reads: 1, NVFSReads: 1}, "nvidia-fs"}, {Routes{Reads: 2, NVFSReads: 1, PosixReads: 1}, "mixed"},
	} {
		if !strings.Contains(k.r.String(), k.want) {
			t.Errorf("%+v: %s", k.r, k.r)
		}
	}
}

package gds

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/gds/gdstest"
)

// The proxy stands before the real libraries on machines with a GPU; here before the double. What it is not told to
// fail goes through, and what it is comes out as the library would say it.
func TestProxyFailsWhatItIsTold(t *testing.T) {
	cuda, cufile := gdstest.Proxies(t)
	d, err := Open(nil, cuda.Path)
	testenv.OK(t, err)
	devices, err := d.Devices()
	testenv.OK(t, err)
	g, err := d.OpenGPU(devices[0].UUID, Config{Threads: 1, Files: 1, Copy: SingleCopy, Window: 1 << 20,
		Codec: true})
	testenv.OK(t, err)
	t.Cleanup(func() {
		testenv.NoError(t, g.Close())
	})
	c := openCuFile(t, g, cufile.Path)
	route, err := NewDirectRoute(g, c, DirectConfig{BufferBytes: 8 << 20, Handles: 0})
	testenv.OK(t, err)
	defer func() {
		testenv.NoError(t, route.Close())
	}()
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	testenv.OK(t, err)
	defer f.Close()
	const size = 2 << 20
	want := random(size)
	s, err := route.Acquire(size, 4096, 1)
	testenv.OK(t, err)
	defer s.Release()
	file := func(code int32) func(error) bool {
		return func(err error) bool {
			var e *FileError
			return errors.As(err, &e) && e.Code == code
		}
	}
	fine := func(err error) bool { return err == nil }
	for _, test := range []struct {
		rules string // of cuFile's proxy
		write func(error) bool
		read  func(error) bool
		same  bool // what was read is what was written
	}{
		{"", fine, fine, true},
		{"cuFileHandleRegister:every=2:code=5027", fine, file(5027), false},
		{"cuFileWrite:nth=1:code=5030", file(5030), fine, false},
		{"cuFileRead:errno=5", fine, func(err error) bool { return errors.Is(err, syscall.EIO) }, false},
		{"cuFileRead:short=8192", fine, func(err error) bool { return errors.Is(err, io.ErrUnexpectedEOF) },
			false},
		{"cuFileRead:flip=5000", fine, fine, false},
		{"cuFileRead:from=2:code=5030,cuFileRead:delay=1", fine, fine, true},
	} {
		testenv.OK(t, f.Truncate(0))
		testenv.OK(t, f.Truncate(size))
		on(t, g, func(th *Thread) error { return th.Write(s.Address, want) })
		cufile.Rules(test.rules)
		if err := s.Write(int(f.Fd()), 0, size); !test.write(err) {
			t.Errorf("%q: write: %v", test.rules, err)
		}
		on(t, g, func(th *Thread) error { return th.Fill(s.Address, 0xa5, size) })
		if err := s.Read(int(f.Fd()), size); !test.read(err) {
			t.Errorf("%q: read: %v", test.rules, err)
		}
		got := make([]byte, size)
		on(t, g, func(th *Thread) error { return th.Read(got, s.Address) })
		if bytes.Equal(got, want) != test.same {
			t.Errorf("%q: equal %v, want %v", test.rules, !test.same, test.same)
		}
	}
	cuda.Rules("encode:nth=2:code=701")
	on(t, g, func(th *Thread) error {
		for call, want := range []string{"", "cuLaunchKernel", ""} {
			w := th.Window()
			b := w.Begin(Gather, nil)
			w.Extents[0] = Extent{Len: 1000}
			_, err := th.Coder().Encode(&b, 1, 2, 0)
			var e *Error
			if errors.As(err, &e) != (want != "") || e != nil && e.Call != want || cuda.Calls("pack") != (call+2)/2 {
				t.Errorf("encoding %d: %v, %d times packed", call, err, cuda.Calls("pack"))
			}
		}
		return nil
	})
	pages := buffer(t, g, 64<<10)
	flat := slot(t, g, 64<<10, true)
	cuda.Rules("cuMemcpyAsync:nth=3:code=1")
	var e *Error
	if err := move(g, Gather, flat, pages.Address, 4, 4096, nil); !errors.As(err, &e) || e.Call != "cuMemcpyAsync" ||
		cuda.Calls("cuMemcpyAsync") != 3 {
		t.Errorf("%v after %d calls", err, cuda.Calls("cuMemcpyAsync"))
	}
}

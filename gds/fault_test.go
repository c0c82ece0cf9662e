package gds

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/gds/gdstest"
	"golang.org/x/sys/unix"
)

func TestOpenFails(t *testing.T) {
	for _, c := range []struct{ rules, want string }{
		{"cuDevicePrimaryCtxRetain:code=2", "CUDA_ERROR_OUT_OF_MEMORY"},
		{"cuCtxSetCurrent:nth=2:code=201", "cuCtxSetCurrent: CUDA_ERROR_INVALID_CONTEXT (201)"},
		{"cuStreamCreate:nth=3:code=2", "cuStreamCreate"},
		{"cuEventCreate:nth=1:code=2", "cuEventCreate"},
		{"cuMemHostRegister_v2:code=304", "cuMemHostRegister"},
	} {
		g, double := doubled(t, Config{Threads: 1})
		double.Rules(c.rules)
		if _, err := g.driver.OpenGPU(g.UUID, Config{Threads: 3}); err == nil ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("open the GPU with %s: got error %v", c.rules, err)
		}
		double.Rules("")
		if again, err := g.driver.OpenGPU(g.UUID, Config{Threads: 3}); err != nil {
			t.Errorf("after %s: %v", c.rules, err)
		} else if err := again.Close(); err != nil {
			t.Errorf("after %s: %v", c.rules, err)
		}
	}
}

func move(g *GPU, dir Direction, flat []byte, page uint64, n, size int, flag *Flag) (err error) {
	if e := g.Do(func(th *Thread) {
		b := th.Begin(dir, flat, flag)
		for i := range n {
			if err = b.Add(page+uint64(i*size), i*size, size); err != nil {
				return
			}
		}
		err = b.Wait()
	}); e != nil {
		return e
	}
	return err
}

// What the kernel does not move is copied piece by piece, and a kernel that fails every time is not tried again.
func TestCopiesFallBack(t *testing.T) {
	const rules = "cuLaunchKernel:code=701"
	g, double := doubled(t, Config{Threads: 1})
	pages := buffer(t, g, 64<<10)
	flat := slot(t, g, 64<<10, true)
	data := random(64 << 10)
	copy(flat, data)
	copies := func(rules string, want Mode) {
		t.Helper()
		on(t, g, func(th *Thread) error { return th.Fill(pages.Address, 0xa5, pages.Size) })
		double.Rules(rules)
		if err := move(g, Scatter, flat, pages.Address, 16, 4096, nil); err != nil {
			t.Fatalf("scatter after %s: %v", rules, err)
		}
		double.Rules("")
		got := make([]byte, len(data))
		on(t, g, func(th *Thread) error { return th.Read(got, pages.Address) })
		if !bytes.Equal(got, data) || g.Mode() != want {
			t.Errorf("%s: mode %s, want %s, equal %v", rules, g.Mode(), want, bytes.Equal(got, data))
		}
	}
	for range 2 * failuresToDisable { // a kernel that fails now and then stays
		copies(rules, Kernel)
		copies("", Kernel)
	}
	for range failuresToDisable - 1 {
		copies(rules, Kernel)
	}
	copies(rules, SingleCopy)
	copies(rules, SingleCopy)
}

func TestWithoutTheKernel(t *testing.T) {
	g, double := doubled(t, Config{Threads: 1})
	double.Rules("cuModuleLoadData:code=222")
	g, err := g.driver.OpenGPU(g.UUID, Config{Threads: 1})
	if err != nil || g.Mode() != SingleCopy {
		t.Fatalf("%v, mode %s", err, g.Mode())
	}
	testenv.NoError(t, g.Close())
}

func TestStickyErrorTakesTheGPUOut(t *testing.T) {
	for _, rules := range []string{"cuLaunchKernel:code=700", "cuEventSynchronize:code=719", "cuMemcpyAsync:code=214"} {
		var told atomic.Int32
		done := make(chan struct{})
		g, double := doubled(t, Config{Threads: 2, Lost: func(*GPU, error) { told.Add(1); close(done) }})
		pages := buffer(t, g, 64<<10)
		flat := slot(t, g, 64<<10, !strings.HasPrefix(rules, "cuMemcpy"))
		double.Rules(rules)
		err := move(g, Gather, flat, pages.Address, 4, 4096, nil)
		if !Sticky(err) {
			t.Errorf("with %s: error %v is not sticky", rules, err)
		}
		<-done
		double.Rules("")
		if err := move(g, Gather, flat, pages.Address, 4, 4096, nil); !errors.Is(err, ErrLost) || !Sticky(err) {
			t.Errorf("%s: the next one: %v", rules, err)
		}
		if _, err := g.Alloc(1); !errors.Is(err, ErrLost) {
			t.Errorf("%s: Alloc: %v", rules, err)
		}
		if told.Load() != 1 {
			t.Errorf("%s: told %d times", rules, told.Load())
		}
		double.Forget()
	}
}

func TestPlainErrorIsOnlyTheCalls(t *testing.T) {
	g, double := doubled(t, Config{Threads: 1, Copy: SingleCopy})
	pages := buffer(t, g, 64<<10)
	flat := slot(t, g, 64<<10, true)
	double.Rules("cuMemcpyAsync:nth=3:code=1")
	err := move(g, Gather, flat, pages.Address, 4, 4096, nil)
	var e *Error
	if !errors.As(err, &e) || e.Call != "cuMemcpyAsync" || e.Code != 1 || Sticky(err) || g.Err() != nil {
		t.Errorf("%v, GPU %v", err, g.Err())
	}
	testenv.NoError(t, move(g, Gather, flat, pages.Address, 4, 4096, nil))
}

// A flag stops the kernel between two pieces: what comes after is not touched.
func TestFlagStopsTheKernel(t *testing.T) {
	g, double := doubled(t, Config{Threads: 1})
	pages := buffer(t, g, 64<<10)
	flat := slot(t, g, 64<<10, true)
	copy(flat, bytes.Repeat([]byte{1}, len(flat)))
	flag := g.NewFlag()
	double.Rules("page:nth=5:hang")
	over := make(chan error, 1)
	go func() { over <- move(g, Scatter, flat, pages.Address, 16, 4096, flag) }()
	for double.Calls("page") < 5 {
	}
	flag.Set()
	double.Rules("")
	if err := <-over; !errors.Is(err, ErrStopped) {
		t.Fatal(err)
	}
	got := make([]byte, 64<<10)
	on(t, g, func(th *Thread) error { return th.Read(got, pages.Address) })
	if n := bytes.Count(got, []byte{1}); n != 5*4096 {
		t.Errorf("%d bytes were moved, want 5 pages", n)
	}
	flag.Release()
	if err := move(g, Scatter, flat, pages.Address, 16, 4096, g.NewFlag()); err != nil {
		t.Errorf("a new flag: %v", err)
	}
}

func TestFlagsRunOut(t *testing.T) {
	g, _ := open(t, Config{Threads: 1})
	var flags []*Flag
	for range flagSlots + 2 {
		flags = append(flags, g.NewFlag())
	}
	last := flags[len(flags)-1]
	if last.Set(); last.IsSet() {
		t.Error("the flag that everybody shares was set")
	}
	for _, f := range flags {
		f.Release()
	}
}

func TestPanicIsTheCallers(t *testing.T) {
	g, _ := open(t, Config{Threads: 1, Files: 1})
	func() {
		defer func() {
			if v := recover(); v != "oops" {
				t.Errorf("recovered %v", v)
			}
		}()
		g.Do(func(*Thread) { panic("oops") })
	}()
	func() {
		defer func() {
			if v, ok := recover().(*panicked); !ok || v.value != "oops" ||
				!strings.Contains(v.String(), "TestPanicIsTheCallers") {
				t.Errorf("recovered %v", v)
			}
		}()
		g.DoFile(func(*Thread) { panic("oops") })
	}()
	testenv.NoError(t, g.DoFile(func(*Thread) {}))
	on(t, g, func(*Thread) error { return nil })
}

func TestDoFromManyAndClose(t *testing.T) {
	g, _ := open(t, Config{Threads: 3})
	var inside, most atomic.Int32
	var work sync.WaitGroup
	for range 32 {
		work.Go(func() {
			for range 20 {
				if err := g.Do(func(*Thread) {
					most.Store(max(most.Load(), inside.Add(1)))
					inside.Add(-1)
				}); err != nil && !errors.Is(err, ErrClosed) {
					t.Error(err)
				}
			}
		})
	}
	testenv.NoError(t, g.Close())
	work.Wait()
	if err := g.Do(func(*Thread) { t.Error("ran on a closed GPU") }); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
	if err := g.Control(func(*Thread) error { return nil }); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
	if most.Load() > 3 {
		t.Errorf("%d at a time", most.Load())
	}
}

// What cuFile's calls tell of the context counts as the driver's own answers do.
func TestStickyErrorInsideCuFile(t *testing.T) {
	for _, c := range []struct {
		rules string
		lost  bool
	}{
		{"cuFileHandleRegister:code=5011:errno=719", true},
		{"cuFileHandleRegister:code=5011:errno=2", false},
		{"cuFileHandleRegister:code=5030:errno=700", false}, // not a CUDA code
	} {
		t.Run(c.rules, func(t *testing.T) {
			t.Setenv("KVHOST_TEST_GPU", "")
			t.Cleanup(gdstest.Build(t).Forget)
			g, d, double := routed(t, DirectConfig{BufferBytes: 4 << 20})
			f := openFile(t, filepath.Join(t.TempDir(), "f"), os.O_CREATE|os.O_RDWR)
			s := acquire(t, d, 8192)
			testenv.OK(t, s.Write(int(f.Fd()), 0, 8192))
			double.Rules(c.rules)
			err := s.Read(int(f.Fd()), 8192)
			double.Rules("")
			if err == nil || Sticky(err) != c.lost || errors.Is(g.Err(), ErrLost) != c.lost ||
				Sticky(g.Err()) != c.lost {
				t.Errorf("%v, the GPU: %v", err, g.Err())
			}
			s.Release()
		})
	}
}

// The files of a lost GPU are closed without its library, and count as registered no more.
func TestHandlesOfALostGPU(t *testing.T) {
	t.Setenv("KVHOST_TEST_GPU", "")
	t.Cleanup(gdstest.Build(t).Forget)
	g, d, double := routed(t, DirectConfig{BufferBytes: 4 << 20, Handles: 4})
	s := acquire(t, d, 8192)
	var ids []fileID
	for i := range 3 {
		f := openFile(t, filepath.Join(t.TempDir(), strconv.Itoa(i)), os.O_CREATE|os.O_RDWR)
		testenv.OK(t, s.Write(int(f.Fd()), 0, 8192))
		var st unix.Stat_t
		testenv.OK(t, unix.Fstat(int(f.Fd()), &st))
		ids = append(ids, fileID{uint64(st.Dev), st.Ino})
	}
	s.Release()
	double.Rules("cuMemsetD8Async:code=719")
	if err := g.Do(func(t *Thread) { _ = t.Fill(s.Address, 0, 4096) }); err != nil || g.Err() == nil {
		t.Fatal(err, g.Err())
	}
	double.Rules("") // counts from here
	for i, id := range ids {
		d.Handles.Forget(id.dev, id.ino)
		if open := d.Handles.Stats().Open; open != 2-i {
			t.Errorf("%d files count as registered after %d were forgotten", open, i+1)
		}
	}
	if n := double.Calls("cuFileHandleDeregister"); n != 0 {
		t.Errorf("the library was called %d times", n)
	}
}

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

package memfs

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

func newFS(t testing.TB, size int64) *FS {
	t.Helper()
	f, err := New(size, nil)
	must(t, err)
	t.Cleanup(func() {
		testenv.NoError(t, f.Close())
	})
	return f
}

func TestSuite(t *testing.T) {
	f := newFS(t, 64<<20)
	f.Start(nil)
	faultfs.RunSuite(t, f, "/")
	used := f.Stats().Used
	must(t, removeAll(f, "/"))
	if left := f.Stats().Used; left != 0 || used == 0 {
		t.Errorf("%d bytes in use, %d after all files were removed", used, left)
	}
}

func TestSuiteWatchedAndFaulty(t *testing.T) {
	f := newFS(t, 64<<20)
	faultfs.RunSuite(t, staging.Watched(faultfs.New(f), staging.Watch{Limit: 1e10}), "/")
}

func removeAll(f *FS, dir string) error {
	list, err := f.ReadDir(dir)
	for _, e := range list {
		name := dir + "/" + e.Name()
		if e.IsDir() {
			err = errors.Join(err, removeAll(f, name))
		}
		err = errors.Join(err, f.Remove(name))
	}
	return err
}

func create(t testing.TB, f staging.FS, name string) staging.File {
	t.Helper()
	file, err := f.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	must(t, err)
	return file
}

// A file's memory is reused only when neither a name nor an open file refers to it.
func TestMemoryIsKeptWhileInUse(t *testing.T) {
	f := newFS(t, 2<<20)
	file := create(t, f, "/a")
	mem, err := staging.MemoryOf(file, 1<<20)
	if err != nil || len(mem) != 1 {
		t.Fatal(len(mem), err)
	}
	for i := range mem[0] {
		mem[0][i] = 7
	}
	reader, err := f.OpenFile("/a", os.O_RDONLY, 0)
	must(t, err)
	must(t, errors.Join(file.Close(), f.Remove("/a")))
	again, err := staging.MemoryOf(reader, 1<<20)
	if err != nil || &again[0][0] != &mem[0][0] {
		t.Fatal("an open file has other memory than before", err)
	}
	other := create(t, f, "/b")
	if _, err := staging.MemoryOf(other, 1<<20+1); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("memory of an open file was free: %v", err)
	}
	must(t, errors.Join(other.Close(), f.Remove("/b")))
	if !bytes.Equal(mem[0], bytes.Repeat([]byte{7}, 1<<20)) {
		t.Fatal("the bytes of an open file changed")
	}
	must(t, reader.Close())
	if used := f.Stats().Used; used != 0 {
		t.Fatalf("%d bytes in use after the last close", used)
	}
}

// Memory that another file had before reads as zeros wherever a file was not written.
// TestShrink: a file gives back the pages beyond its new end, in whatever extents they are, and keeps the bytes before it.
// What it grows by again is zero up to a page's end, as after any write.
func TestShrink(t *testing.T) {
	for _, holes := range []bool{false, true} {
		for _, n := range []int64{0, 1, page - 1, page, 5*page + 7, 9 * page, 10 * page, 20 * page} {
			f := newFS(t, 2<<20)
			if holes { // runs of two pages
				for i := range 2 << 20 / page / 2 {
					taken := create(t, f, fmt.Sprint("/taken", i))
					_, err := staging.MemoryOf(taken, 2*page)
					if err = errors.Join(err, taken.Close()); err != nil {
						t.Fatal(err)
					}
				}
				for i := 0; i < 2<<20/page/2; i += 2 {
					testenv.OK(t, f.Remove(fmt.Sprint("/taken", i)))
				}
			}
			file := create(t, f, "/a")
			others := f.Stats().Used
			mem, err := staging.MemoryOf(file, 10*page)
			testenv.OK(t, err)
			want := make([]byte, 10*page)
			for i := range want {
				want[i] = byte(i/page + 1)
			}
			mem.Write(want, 0)
			testenv.OK(t, staging.Shrink(file, n))
			size := min(n, 10*page)
			if got, pages := f.Stats().Used-others, (size+page-1)/page*page; got != pages {
				t.Errorf("holes %t, %d bytes: %d bytes are in use, want %d", holes, n, got, pages)
			}
			clear(want[size:])
			got := make([]byte, 10*page)
			if info, err := file.Stat(); err != nil || info.Size != size {
				t.Errorf("holes %t: the size is %d, %v, want %d", holes, info.Size, err, size)
			}
			testenv.OK(t, file.Allocate(10*page))
			if _, err := file.ReadAt(got, 0); err != nil || !bytes.Equal(got, want) {
				t.Errorf("holes %t, %d bytes: the file has other bytes, %v", holes, n, err)
			}
			file.Close()
		}
	}
}

func TestHolesAreZero(t *testing.T) {
	f := newFS(t, 1<<20)
	dirty := create(t, f, "/dirty")
	if _, err := dirty.WriteAt(bytes.Repeat([]byte{0xff}, 1<<20), 0); err != nil {
		t.Fatal(err)
	}
	must(t, errors.Join(dirty.Close(), f.Remove("/dirty")))
	rng := rand.New(rand.NewPCG(1, 1))
	for round := range 200 {
		file := create(t, f, "/a")
		want := make([]byte, 64<<10)
		size := 0
		for range 1 + rng.IntN(6) {
			off := rng.IntN(len(want))
			n := rng.IntN(min(9000, len(want)-off))
			for i := off; i < off+n; i++ {
				want[i] = byte(i + round)
			}
			if _, err := file.WriteAt(want[off:off+n], int64(off)); err != nil {
				t.Fatal(err)
			}
			if n > 0 {
				size = max(size, off+n)
			}
			if rng.IntN(8) == 0 {
				size = max(size, off)
				must(t, file.Allocate(int64(off)))
			}
		}
		got := bytes.Repeat([]byte{0xee}, size)
		if n, err := file.ReadAt(got, 0); n != size || size > 0 && err != nil {
			t.Fatalf("read %d of %d: %v", n, size, err)
		}
		if !bytes.Equal(got, want[:size]) {
			t.Fatalf("round %d: other bytes than were written", round)
		}
		if mem, err := staging.MemoryOf(file, int64(size)); err != nil {
			t.Fatal(err)
		} else if mem != nil {
			if n := mem.Read(got, 0); n != size || !bytes.Equal(got, want[:size]) {
				t.Fatalf("round %d: the memory holds other bytes than the file", round)
			}
		}
		must(t, errors.Join(file.Close(), f.Remove("/a")))
	}
}

// Segments of a file in several extents can be read and written like one memory.
func TestSegments(t *testing.T) {
	f := newFS(t, 64<<10)
	var files []staging.File
	total := int64(64<<10) / page
	for i := range total {
		file := create(t, f, fmt.Sprint("/", i))
		if _, err := staging.MemoryOf(file, page); err != nil {
			t.Fatal(err)
		}
		files = append(files, file)
	}
	for i := int64(0); i < total; i += 2 {
		must(t, errors.Join(files[i].Close(), f.Remove(fmt.Sprint("/", i))))
	}
	file := create(t, f, "/many")
	defer file.Close()
	mem, err := staging.MemoryOf(file, 5*page-7)
	if err != nil || len(mem) != 5 {
		t.Fatalf("%d segments: %v", len(mem), err)
	}
	want := make([]byte, 5*page-7)
	for i := range want {
		want[i] = byte(i * 13)
	}
	if n := mem.Write(want[100:], 100); n != len(want)-100 {
		t.Fatal(n)
	}
	clear(want[:100])
	mem.Clear(0, 100)
	got := make([]byte, len(want))
	if _, err := file.ReadAt(got, 0); err != nil || !bytes.Equal(got, want) {
		t.Fatal("other bytes", err)
	}
	if n := mem.Read(got, 3*page-5); n != 2*page+5 || !bytes.Equal(got[:n-7], want[3*page-5:]) {
		t.Fatal(n)
	}
	if mem.From(5*page) != nil {
		t.Error("memory beyond the end")
	}
	for i := int64(1); i < total; i += 2 {
		files[i].Close()
	}
}

// pinner notes what is registered, and fails from a step on.
type pinner struct {
	mu   sync.Mutex
	held map[*byte]int
	left int
}

func (p *pinner) Register(mem []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.left--; p.left < 0 {
		return unix.ENOMEM
	}
	p.held[&mem[0]] = len(mem)
	return nil
}

func (p *pinner) Unregister(mem []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.held[&mem[0]] != len(mem) {
		return fmt.Errorf("%d bytes were not registered", len(mem))
	}
	delete(p.held, &mem[0])
	return nil
}

// All memory is registered with every pinner and unregistered at the end. Memory that cannot be is not promised.
func TestGrowth(t *testing.T) {
	for name, c := range map[string]struct {
		steps [2]int // that each pinner can register
		want  int
	}{
		"all":           {[2]int{99, 99}, 4},
		"short":         {[2]int{2, 99}, 2},
		"second, short": {[2]int{99, 3}, 3},
		"none":          {[2]int{0, 99}, 1}, // the first step works without
	} {
		t.Run(name, func(t *testing.T) {
			f, err := New(200<<20, nil)
			must(t, err)
			pinners := []*pinner{{held: map[*byte]int{}, left: c.steps[0]}, {held: map[*byte]int{}, left: c.steps[1]}}
			f.Start(nil, pinners[0], pinners[1])
			<-f.Grown()
			s := f.Stats()
			if got := len(f.arena.steps); got != c.want || (s.Short == nil) != (c.want == 4) || s.Ready != min(s.Wanted, int64(got)*smallestStep) {
				t.Errorf("%d steps, %+v", got, s)
			}
			file := create(t, f, "/a")
			if _, err := staging.MemoryOf(file, s.Ready); err != nil {
				t.Error(err)
			}
			if _, err := file.WriteAt([]byte{1}, s.Ready); !errors.Is(err, unix.ENOSPC) {
				t.Errorf("one page too many: %v", err)
			}
			if err := f.Close(); !errors.Is(err, ErrOpen) {
				t.Errorf("closed with an open file: %v", err)
			}
			for _, p := range pinners {
				if len(p.held) != 0 {
					t.Errorf("%d steps are still registered", len(p.held))
				}
			}
			testenv.NoError(t, errors.Join(file.Close(), f.Close()))
		})
	}
}

// TestGrowsAgain: memory as needed that the machine lacks for a while is what is there, and grows when there is more.
func TestGrowsAgain(t *testing.T) {
	f := newFS(t, 200<<20)
	f.AsNeeded()
	f.arena.keep, f.arena.retry = 1<<20, time.Millisecond
	p := &pinner{held: map[*byte]int{}, left: 1}
	f.Start(nil, p)
	file := create(t, f, "/a")
	defer file.Close()
	_, err := file.WriteAt([]byte{1}, 0)
	must(t, err)
	for f.Stats().Short == nil {
		runtime.Gosched()
	}
	if _, err := staging.MemoryOf(file, 2*smallestStep); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("more than there is: error %v, want %v", err, unix.ENOSPC)
	}
	p.mu.Lock()
	p.left = 99
	p.mu.Unlock()
	for s := f.Stats(); s.Short != nil || s.Ready < 2*smallestStep; s = f.Stats() {
		runtime.Gosched()
	}
	if _, err := staging.MemoryOf(file, 2*smallestStep); err != nil {
		t.Errorf("memory that has come: %v", err)
	}
}

// slowPinner registers a step only when it is told to.
type slowPinner struct{ next chan struct{} }

func (p slowPinner) Register([]byte) error   { <-p.next; return nil }
func (p slowPinner) Unregister([]byte) error { return nil }

// A write that comes before its memory waits for it, and for no more.
func TestWriteWaitsForMemory(t *testing.T) {
	f := newFS(t, 200<<20)
	p := slowPinner{make(chan struct{}, 4)}
	p.next <- struct{}{}
	f.Start(nil, p)
	file := create(t, f, "/a")
	defer file.Close()
	if _, err := staging.MemoryOf(file, 60<<20); err != nil {
		t.Fatal(err)
	}
	got := make(chan error)
	second := create(t, f, "/b")
	defer second.Close()
	go func() { _, err := staging.MemoryOf(second, 60<<20); got <- err }()
	if _, err := f.Stat("/b"); err != nil { // the file system does not wait
		t.Fatal(err)
	}
	select {
	case err := <-got:
		t.Fatalf("memory that is not there was given: %v", err)
	default:
	}
	p.next <- struct{}{}
	must(t, <-got)
	third := create(t, f, "/c")
	defer third.Close()
	if _, err := staging.MemoryOf(third, 100<<20); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("more than there ever will be: %v", err)
	}
	close(p.next)
}

// Goroutines create, fill, rename, read, link and remove files at once. Each file holds what its writer wrote.
func TestConcurrent(t *testing.T) {
	f := newFS(t, 8<<20)
	f.Start(nil)
	must(t, f.MkdirAll("/x/y", 0o700))
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 1))
			buf := make([]byte, 300<<10)
			for i := range 300 {
				temp, name := fmt.Sprintf("/x/%d.tmp", g), fmt.Sprintf("/x/y/%d", rng.IntN(12))
				file, err := f.OpenFile(temp, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
				if err != nil {
					t.Error(err)
					return
				}
				n := (1 + rng.IntN(len(buf)/page)) * page
				mem, err := staging.MemoryOf(file, int64(n))
				for _, m := range mem {
					for k := range m {
						m[k] = byte(g<<4 + i%16)
					}
				}
				if err != nil && !errors.Is(err, unix.ENOSPC) {
					t.Error(err)
				}
				file.Close()
				if err != nil || f.Rename(temp, name) != nil {
					f.Remove(temp)
				}
				if rng.IntN(3) == 0 {
					f.Remove(fmt.Sprintf("/x/y/%d", rng.IntN(12)))
				}
				read, err := f.OpenFile(fmt.Sprintf("/x/y/%d", rng.IntN(12)), os.O_RDONLY, 0)
				if err != nil {
					continue
				}
				info, _ := read.Stat()
				if _, err := read.ReadAt(buf[:info.Size], 0); err != nil {
					t.Error(err)
				}
				if want := bytes.Repeat(buf[:1], int(info.Size)); !bytes.Equal(buf[:info.Size], want) {
					t.Error("a file holds bytes of several writers")
				}
				read.Close()
			}
		})
	}
	wg.Wait()
	must(t, removeAll(f, "/x"))
	if s := f.Stats(); s.Used != 0 {
		t.Errorf("%d bytes in use after all files were removed", s.Used)
	}
}

func TestErrors(t *testing.T) {
	f := newFS(t, 1<<20)
	if _, err := New(0, nil); !errors.Is(err, ErrConfig) {
		t.Error(err)
	}
	must(t, f.MkdirAll("/a/b", 0o700))
	file := create(t, f, "/a/file")
	defer file.Close()
	for name, c := range map[string]struct{ err, want error }{
		"rename a directory":   {f.Rename("/a", "/c"), unix.EPERM},
		"rename over one":      {f.Rename("/a/file", "/a/b"), unix.EISDIR},
		"rename over the top":  {f.Rename("/a/file", "/"), unix.EPERM},
		"link a directory":     {f.Link("/a", "/c"), unix.EPERM},
		"remove the top":       {f.Remove("/"), unix.EBUSY},
		"a parent":             {f.Remove("/a/../x"), unix.EINVAL},
		"a directory in files": {f.MkdirAll("/a/file/x", 0o700), unix.ENOTDIR},
		"direct I/O":           {second(f.OpenFile("/a/file", os.O_RDWR|unix.O_DIRECT, 0)), unix.EINVAL},
		"a missing directory":  {second(f.ReadDir("/none")), fs.ErrNotExist},
	} {
		if !errors.Is(c.err, c.want) || !strings.Contains(c.err.Error(), "/") {
			t.Errorf("%s: error %v, want %v with the path", name, c.err, c.want)
		}
	}
	if err := f.Rename("/a/file", "/a/./file"); err != nil {
		t.Errorf("rename to itself: %v", err)
	}
}

func second[T any](_ T, err error) error { return err }

// must ends a test that cannot go on without what failed.
var must = testenv.OK

// Memory that grows as needed is a quarter of the whole ahead of what files need. Statfs tells what is still to come.
func TestGrowsAsNeeded(t *testing.T) {
	const whole, step = 512 << 20, 4 << 20
	f := newFS(t, whole)
	f.AsNeeded()
	f.arena.keep = 1 << 20 // also on a small machine
	f.arena.step = step
	f.Start(nil)
	file := create(t, f, "/file")
	defer file.Close()
	for used := int64(0); used <= whole/4; used += step {
		_, err := file.WriteAt(make([]byte, step), used)
		must(t, err)
	}
	ready := func() int64 {
		space, err := f.Statfs("/")
		must(t, err)
		if space.Total != whole || space.Total-space.Free != f.Stats().Used {
			t.Errorf("%+v while %d bytes are in use, want a total of %d", space, f.Stats().Used, whole)
		}
		return space.Total - space.Free + space.Available
	}
	const want = whole/2 + step
	testenv.Until(t, "memory that is ready", func() bool { return ready() >= want }, func() any { return ready() })
	if got := ready(); got < want || got > want+step || f.Stats().Short != nil {
		t.Errorf("%d bytes are ready for files of %d, short: %v; want %d and at most a step of %d more", got, f.Stats().Used,
			f.Stats().Short, want, step)
	}
}

// TestStepsYield: each step but the first is page-locked only once what it would delay is over.
func TestStepsYield(t *testing.T) {
	const whole, step = 112 << 20, 16 << 20
	f := newFS(t, whole)
	f.arena.step = step
	asked, over := make(chan struct{}), make(chan struct{})
	f.Yields(func() { asked <- struct{}{}; <-over })
	ready := f.Stats().Ready
	f.Start(nil)
	for ready < whole {
		<-asked
		if got := f.Stats().Ready; got != ready {
			t.Errorf("%d bytes are ready while a load is under way, want %d", got, ready)
		}
		over <- struct{}{}
		ready += min(step, whole-ready)
	}
	<-f.Grown()
	if got := f.Stats().Ready; got != whole {
		t.Errorf("%d bytes are ready in the end, want %d", got, whole)
	}
}

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

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/gds/gdstest"
)

// routed is a GPU with a direct route: on the double, or with KVHOST_TEST_GPU set on the real one.
func routed(t testing.TB, cfg DirectConfig) (*GPU, *DirectRoute, *gdstest.Double) {
	t.Helper()
	g, double := open(t, Config{Threads: 2, Files: 4})
	var names []string
	if double != nil {
		names = []string{double.Path}
	}
	c, err := LoadCuFile(names...)
	testenv.OK(t, err)
	testenv.OK(t, g.DoFile(func(th *Thread) { err = c.Open(th) }))
	testenv.OK(t, err)
	d, err := NewDirectRoute(g, c, cfg)
	testenv.OK(t, err)
	t.Cleanup(func() {
		if double != nil {
			double.Rules("")
		}
		testenv.NoError(t, d.Close())
		if g.Err() == nil {
			if lost := g.DoFile(func(th *Thread) { err = c.Close(th) }); lost != nil || err != nil {
				t.Error(lost, err)
			}
		}
	})
	return g, d, double
}

func openFile(t testing.TB, name string, flag int) *os.File {
	t.Helper()
	f, err := os.OpenFile(name, flag|syscall.O_DIRECT, 0o600)
	testenv.OK(t, err)
	t.Cleanup(func() { f.Close() })
	return f
}

func acquire(t testing.TB, d *DirectRoute, bytes int64) *DirectSlot {
	t.Helper()
	s, err := d.Acquire(bytes, 4096, 4)
	testenv.OK(t, err)
	return s
}

func TestDirectRoundTrip(t *testing.T) {
	g, d, _ := routed(t, DirectConfig{BufferBytes: 16 << 20, Handles: 4})
	testenv.OK(t, d.CuFile().StartStats())
	before, err := d.CuFile().Stats()
	testenv.OK(t, err)
	const size = 5 << 20
	name := filepath.Join(t.TempDir(), "f")
	out, in := acquire(t, d, size), acquire(t, d, size)
	want, got := random(size), make([]byte, size)
	on(t, g, func(th *Thread) error { return th.Write(out.Address, want) })
	on(t, g, func(th *Thread) error { return th.Fill(in.Address, 0xa5, size) })
	w := openFile(t, name, os.O_CREATE|os.O_RDWR)
	if err := errors.Join(out.Write(int(w.Fd()), 8192, size),
		out.Write(int(w.Fd()), 0, 8192)); err != nil {
		t.Fatal(err)
	}
	r := openFile(t, name, os.O_RDONLY)
	testenv.OK(t, in.Read(int(r.Fd()), size))
	on(t, g, func(th *Thread) error { return th.Read(got, in.Address) })
	if !bytes.Equal(got, want) || !bytes.Equal(in.Head, want[:4096]) {
		t.Error("bytes differ")
	}
	if err := in.Read(int(r.Fd()), size+4096); !errors.Is(err, ErrShort) ||
		!errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("past the end: %v", err)
	}
	after, err := d.CuFile().Stats()
	moved := after.Since(before)
	t.Logf("%s: reads %d, %d, %d, %d; writes %d, %d, %d, %d", moved, moved.Reads, moved.P2PReads,
		moved.NVFSReads, moved.PosixReads,
		moved.Writes, moved.P2PWrites, moved.NVFSWrites, moved.PosixWrites)
	if err != nil || moved.Reads == 0 || moved.Writes == 0 {
		t.Errorf("what moved: got %s, %v, want reads and writes", moved, err)
	}
	out.Release()
	in.Release()
	if s := d.Handles.Stats(); s.Hits != 3 || s.Misses != 1 || s.Open != 1 {
		t.Errorf("cache of handles: got %+v, want 3 hits, 1 miss, 1 open", s)
	}
}

func TestDirectFaults(t *testing.T) {
	for _, c := range []struct {
		rules string
		want  error
		text  string
	}{
		{"cuFileRead:errno=5", syscall.EIO, ""},
		{"cuFileRead:errno=5030", nil, "CU_FILE_INTERNAL_ERROR"}, // a code that comes as an errno
		{"cuFileRead:code=5030", nil, "CU_FILE_INTERNAL_ERROR"},
		{"cuFileRead:short=4096", ErrShort, ""},
		{"cuFileHandleRegister:code=5027", nil, "CU_FILE_HANDLE_NOT_REGISTERED"},
	} {
		t.Run(c.rules, func(t *testing.T) {
			t.Setenv("KVHOST_TEST_GPU", "")
			_, d, double := routed(t, DirectConfig{BufferBytes: 8 << 20, Handles: 4})
			name := filepath.Join(t.TempDir(), "f")
			s := acquire(t, d, 64<<10)
			defer s.Release()
			f := openFile(t, name, os.O_CREATE|os.O_RDWR)
			testenv.OK(t, f.Truncate(64<<10))
			double.Rules(c.rules)
			err := s.Read(int(f.Fd()), 64<<10)
			if err == nil || c.want != nil && !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) {
				t.Errorf("direct operation: got error %v", err)
			}
			double.Rules("")
			if err := s.Read(int(f.Fd()), 64<<10); err != nil {
				t.Errorf("afterwards: %v", err)
			}
		})
	}
}

func TestSlotsAreBoundedAndReused(t *testing.T) {
	_, d, double := routed(t, DirectConfig{BufferBytes: 8 << 20, Handles: 1})
	a, b := acquire(t, d, 3<<20), acquire(t, d, 4<<20)
	if _, err := d.Acquire(1, 4096, 0); !errors.Is(err, ErrNoSlot) {
		t.Errorf("a third slot: %v", err)
	}
	if _, err := d.Acquire(9<<20, 4096, 0); !errors.Is(err, ErrNoSlot) {
		t.Errorf("a slot beyond the buffer: %v", err)
	}
	at := a.Address
	a.Release()
	if a = acquire(t, d, 4<<20-1); a.Address != at {
		t.Error("a free slot of the size was not taken")
	}
	a.Release()
	big, err := d.Acquire(2<<20, 64<<10, 1000) // in the place of what is free
	testenv.OK(t, err)
	if len(big.Head) != 64<<10 || len(big.Extents) != 1000 || len(big.Sums) != 1000 || big.Bytes != 2<<20 {
		t.Errorf("largest slot: got %d bytes of head, %d extents, %d sums, %d bytes", len(big.Head), len(big.Extents), len(big.Sums), big.Bytes)
	}
	if out, n := d.Slots(); out != 2 || n != 6<<20 {
		t.Errorf("%d slots are in use, %d bytes are taken", out, n)
	}
	b.Release()
	testenv.NoError(t, d.Trim())
	if out, n := d.Slots(); out != 1 || n != 2<<20 {
		t.Errorf("trimmed: %d slots are in use, %d bytes are taken", out, n)
	}
	big.Release()
	if double == nil {
		return
	}
	for _, rules := range []string{"cuMemAlloc_v2:code=2", "cuFileBufRegister:code=5036",
		"cuMemHostRegister_v2:code=304"} {
		double.Rules(rules)
		if _, err := d.Acquire(8<<20, 4096, 0); !errors.Is(err, ErrNoSlot) {
			t.Errorf("acquire with %s: got %v, want no slot", rules, err)
		}
		double.Rules("")
		s, err := d.Acquire(8<<20, 4096, 0)
		if err != nil {
			t.Fatalf("after %s: %v", rules, err)
		}
		s.Release()
		if _, n := d.Slots(); n != 8<<20 {
			t.Errorf("after %s %d bytes are taken", rules, n)
		}
		acquire(t, d, 1).Release() // in its place, so that the next one is made anew
	}
}

// TestHandlesAreSafe: bounded, found by what a file is and not by its name, usable while they are evicted or the
// file is unlinked, and then gone with their blocks.
func TestHandlesAreSafe(t *testing.T) {
	g, d, double := routed(t, DirectConfig{BufferBytes: 8 << 20, Handles: 2})
	dir := t.TempDir()
	c := d.Handles
	use := func(f *os.File, write bool) (h *Handle) {
		t.Helper()
		on(t, g, func(th *Thread) (err error) { h, err = c.Acquire(th, int(f.Fd()), write); return err })
		return h
	}
	release := func(h *Handle) { on(t, g, func(th *Thread) error { h.Release(th); return nil }) }
	var files []*os.File
	for _, n := range []string{"a", "b", "c", "d"} {
		f := openFile(t, filepath.Join(dir, n), os.O_CREATE|os.O_RDWR)
		testenv.OK(t, f.Truncate(4096))
		files = append(files, f)
	}
	a := use(files[0], false)
	for _, f := range files[1:] {
		release(use(f, false))
	}
	if s := c.Stats(); s.Open != 3 || s.Evictions != 1 || s.Misses != 4 {
		t.Errorf("one in use and two idle: %+v", s)
	}
	if again := use(files[0], true); again != a {
		t.Error("a file in use was registered twice")
	} else {
		release(again)
	}
	// Another name, another descriptor, closed at once: the same file.
	testenv.OK(t, os.Rename(filepath.Join(dir, "a"), filepath.Join(dir, "z")))
	other := openFile(t, filepath.Join(dir, "z"), os.O_RDONLY)
	if h := use(other, false); h != a {
		t.Error("a renamed file was registered again")
	} else {
		other.Close()
		release(h)
	}
	// A handle that cannot write is not used to write.
	reader := openFile(t, filepath.Join(dir, "b"), os.O_RDONLY)
	r := use(reader, false)
	w := use(files[1], true)
	if r == w {
		t.Error("a handle that only reads was given to a writer")
	}
	release(r)
	if again := use(reader, false); again != w {
		t.Error("the writer's handle does not serve a reader")
	} else {
		release(again)
	}
	release(w)
	// Unlinked while in use: usable until released, not found any more, then closed.
	var st syscall.Stat_t
	testenv.OK(t, syscall.Fstat(int(files[0].Fd()), &st))
	testenv.OK(t, os.Remove(filepath.Join(dir, "z")))
	c.Forget(st.Dev, st.Ino)
	if c.files[fileID{st.Dev, st.Ino}] != nil {
		t.Error("an unlinked file is still found")
	}
	on(t, g, func(th *Thread) error {
		s, err := d.Acquire(4096, 4096, 0)
		if err != nil {
			return err
		}
		defer s.Release()
		return s.move(th, a, false, 0, 4096)
	})
	release(a)
	files[0].Close()
	for _, n := range []int{2, 3} {
		testenv.OK(t, syscall.Fstat(int(files[n].Fd()), &st))
		c.Forget(st.Dev, st.Ino)
		c.Forget(st.Dev, st.Ino)
	}
	s := c.Stats()
	if s.Open != len(c.files) || c.idle.Len() != len(c.files) {
		t.Errorf("%+v, %d are found, %d idle", s, len(c.files), c.idle.Len())
	}
	if double != nil && double.Calls("cuFileHandleRegister")-double.Calls("cuFileHandleDeregister") != s.Open {
		t.Errorf("registered %d times, given up %d, %d open", double.Calls("cuFileHandleRegister"),
			double.Calls("cuFileHandleDeregister"), s.Open)
	}
	if double == nil {
		return // cuFile itself opens a file once more by its name, and refuses one that has none (5031)
	}
	// Unlinked before: used once, not kept.
	gone := openFile(t, filepath.Join(dir, "gone"), os.O_CREATE|os.O_RDWR)
	testenv.OK(t, os.Remove(gone.Name()))
	release(use(gone, false))
	if c.Stats().Open != s.Open {
		t.Error("an unlinked file is kept")
	}
}

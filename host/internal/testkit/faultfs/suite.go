package faultfs

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

// RunSuite tests an FS in dir, which it may fill and which must be empty, but for what the FS promises less of.
func RunSuite(t *testing.T, fsys staging.FS, dir string, without ...string) {
	t.Helper()
	for _, c := range []struct {
		name string
		run  func(*suite)
	}{
		{"open", (*suite).open},
		{"read and write", (*suite).readWrite},
		{"end of file", (*suite).endOfFile},
		{"errno", (*suite).errno},
		{"close", (*suite).close},
		{"concurrent", (*suite).concurrent},
		{"rename", (*suite).rename},
		{"rename without replacing", (*suite).renameNoReplace},
		{"one winner", (*suite).oneWinner},
		{"link and remove", (*suite).linkRemove},
		{"directories", (*suite).directories},
		{"stat", (*suite).stat},
		{"allocate", (*suite).allocate},
		{"sync", (*suite).sync},
		{"space", (*suite).space},
		{"lock", (*suite).lock},
		{"direct", (*suite).direct},
		{"direct alignment", (*suite).directAlignment},
	} {
		if slices.Contains(without, c.name) {
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			sub := filepath.Join(dir, filepath.Base(t.Name()))
			if err := fsys.Mkdir(sub, 0o700); err != nil {
				t.Fatal(err)
			}
			c.run(&suite{T: t, fs: fsys, dir: sub})
		})
	}
}

type suite struct {
	*testing.T
	fs  staging.FS
	dir string
}

const fresh = os.O_RDWR | os.O_CREATE | os.O_EXCL

func (s *suite) path(name string) string { return filepath.Join(s.dir, name) }

func (s *suite) ok(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

func (s *suite) is(err, want error) {
	s.Helper()
	if !errors.Is(err, want) {
		s.Fatalf("error %v, want %v", err, want)
	}
}

func (s *suite) create(name string, content string) {
	s.Helper()
	f, err := s.fs.OpenFile(s.path(name), fresh, 0o600)
	s.ok(err)
	_, err = f.WriteAt([]byte(content), 0)
	s.ok(err)
	s.ok(f.Close())
}

func (s *suite) content(name string) string {
	s.Helper()
	f, err := s.fs.OpenFile(s.path(name), os.O_RDONLY, 0)
	s.ok(err)
	defer f.Close()
	b, err := io.ReadAll(io.NewSectionReader(f, 0, 1<<20))
	s.ok(err)
	return string(b)
}

func (s *suite) gone(name string) {
	s.Helper()
	_, err := s.fs.Stat(s.path(name))
	s.is(err, fs.ErrNotExist)
}

func (s *suite) open() {
	_, err := s.fs.OpenFile(s.path("none"), os.O_RDONLY, 0)
	s.is(err, unix.ENOENT)
	s.create("a", "x")
	_, err = s.fs.OpenFile(s.path("a"), fresh, 0o600)
	s.is(err, fs.ErrExist)
	f, err := s.fs.OpenFile(s.path("a"), os.O_RDWR|os.O_TRUNC, 0)
	s.ok(err)
	defer f.Close()
	if f.Name() != s.path("a") || f.Direct() {
		s.Fatalf("name %q, direct %v", f.Name(), f.Direct())
	}
	info, err := f.Stat()
	s.ok(err)
	if info.Size != 0 || info.Mode.Perm() != 0o600 || !info.Mode.IsRegular() {
		s.Fatalf("%+v", info)
	}
	if f.Fd() == staging.NoFd {
		return
	}
	flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFD, 0)
	s.ok(err)
	if flags&unix.FD_CLOEXEC == 0 {
		s.Fatal("the descriptor would leak into children")
	}
}

func (s *suite) readWrite() {
	f, err := s.fs.OpenFile(s.path("a"), fresh, 0o600)
	s.ok(err)
	defer f.Close()
	want := make([]byte, 3<<20+123)
	for i := range want {
		want[i] = byte(i * 7)
	}
	n, err := f.WriteAt(want[1<<20:], 1<<20)
	s.ok(err)
	if n != len(want)-1<<20 {
		s.Fatalf("wrote %d", n)
	}
	_, err = f.WriteAt(want[:1<<20], 0)
	s.ok(err)
	got := make([]byte, len(want))
	n, err = f.ReadAt(got, 0)
	s.ok(err)
	if n != len(want) || !bytes.Equal(got, want) {
		s.Fatalf("read %d bytes, or others", n)
	}
	for _, p := range [][]byte{nil, {}} {
		n, err = f.ReadAt(p, 5)
		s.ok(err)
		m, err := f.WriteAt(p, 5)
		s.ok(err)
		if n != 0 || m != 0 {
			s.Fatal("nothing was something")
		}
	}
}

func (s *suite) endOfFile() {
	s.create("a", "hello")
	f, err := s.fs.OpenFile(s.path("a"), os.O_RDONLY, 0)
	s.ok(err)
	defer f.Close()
	var b [8]byte
	for _, c := range []struct {
		off  int64
		n    int
		err  error
		size int
	}{{0, 5, io.EOF, 8}, {0, 5, nil, 5}, {3, 2, io.EOF, 8}, {5, 0, io.EOF, 1}, {1 << 40, 0, io.EOF, 1}} {
		if n, err := f.ReadAt(b[:c.size], c.off); n != c.n || err != c.err {
			s.Errorf("%d bytes at %d: %d %v, want %d %v", c.size, c.off, n, err, c.n, c.err)
		}
	}
	if _, err := f.ReadAt(b[:], -1); err == nil || err == io.EOF {
		s.Errorf("a negative offset: %v", err)
	}
}

func (s *suite) errno() {
	s.create("file", "x")
	_, err := s.fs.OpenFile(s.path("file/below"), os.O_RDONLY, 0)
	s.is(err, unix.ENOTDIR)
	_, err = s.fs.OpenFile(s.dir, os.O_RDWR, 0)
	s.is(err, unix.EISDIR)
	long := s.path(string(bytes.Repeat([]byte("n"), 300)))
	_, err = s.fs.Stat(long)
	s.is(err, unix.ENAMETOOLONG)
	f, err := s.fs.OpenFile(s.path("file"), os.O_RDONLY, 0)
	s.ok(err)
	defer f.Close()
	_, err = f.WriteAt([]byte("y"), 0)
	s.is(err, unix.EBADF)
	var pe *fs.PathError
	if !errors.As(err, &pe) || pe.Path != f.Name() {
		s.Fatalf("%v does not name %s", err, f.Name())
	}
}

func (s *suite) close() {
	f, err := s.fs.OpenFile(s.path("a"), fresh, 0o600)
	s.ok(err)
	s.ok(f.Close())
	s.is(f.Close(), fs.ErrClosed)
	_, err = f.ReadAt(make([]byte, 1), 0)
	s.is(err, fs.ErrClosed)
	_, err = f.WriteAt(make([]byte, 1), 0)
	s.is(err, fs.ErrClosed)
	_, err = f.Stat()
	s.is(err, fs.ErrClosed)
	s.is(f.Datasync(), fs.ErrClosed)
	s.is(f.Allocate(1), fs.ErrClosed)
}

// concurrent closes a file while others read it: each of them gets its bytes or ErrClosed, never those of another
// file that took the descriptor's number.
func (s *suite) concurrent() {
	for range 20 {
		name := s.path("shared")
		f, err := s.fs.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
		s.ok(err)
		_, err = f.WriteAt(bytes.Repeat([]byte{7}, 4096), 0)
		s.ok(err)
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				b := make([]byte, 4096)
				for {
					n, err := f.ReadAt(b, 0)
					if errors.Is(err, fs.ErrClosed) {
						return
					}
					if err != nil || n != 4096 || b[0] != 7 || b[4095] != 7 {
						s.Errorf("%d %v", n, err)
						return
					}
				}
			})
		}
		s.ok(f.Close())
		other, err := s.fs.OpenFile(s.path("other"), os.O_RDWR|os.O_CREATE, 0o600)
		s.ok(err)
		_, err = other.WriteAt(bytes.Repeat([]byte{9}, 4096), 0)
		s.ok(err)
		wg.Wait()
		s.ok(other.Close())
	}
}

func (s *suite) stat() {
	dir, err := s.fs.Stat(s.dir)
	s.ok(err)
	if !dir.IsDir() {
		s.Fatalf("%+v", dir)
	}
	f, err := s.fs.OpenFile(s.path("a"), fresh, 0o640)
	s.ok(err)
	defer f.Close()
	_, err = f.WriteAt(make([]byte, 1<<20), 3<<20)
	s.ok(err)
	s.ok(f.Datasync())
	byName, err := s.fs.Stat(s.path("a"))
	s.ok(err)
	byFile, err := f.Stat()
	s.ok(err)
	if !byName.Same(byFile) || byName.Dev != dir.Dev || byName.Size != 4<<20 || byName.Links != 1 {
		s.Fatalf("%+v %+v", byName, byFile)
	}
	if byName.Allocated < 1<<20 || byName.Allocated >= 4<<20 {
		s.Fatalf("1 MiB of 4 was written, %d bytes are allocated", byName.Allocated)
	}
	if byName.ModTime.Before(dir.ModTime.Add(-1e9)) {
		s.Fatalf("made at %v, its directory at %v", byName.ModTime, dir.ModTime)
	}
	s.create("b", "")
	b, err := s.fs.Stat(s.path("b"))
	s.ok(err)
	if b.Same(byName) {
		s.Fatal("two files with one identity")
	}
}

func (s *suite) allocate() {
	f, err := s.fs.OpenFile(s.path("a"), fresh, 0o600)
	s.ok(err)
	defer f.Close()
	s.ok(f.Allocate(1 << 20))
	info, err := f.Stat()
	s.ok(err)
	if info.Size != 0 && info.Size != 1<<20 {
		s.Fatalf("size %d", info.Size)
	}
	if info.Size != 0 && info.Allocated < 1<<20 {
		s.Fatalf("allocated %d", info.Allocated)
	}
}

func (s *suite) sync() {
	s.create("a", "A")
	f, err := s.fs.OpenFile(s.path("a"), os.O_RDWR, 0)
	s.ok(err)
	defer f.Close()
	s.ok(f.Datasync())
	s.ok(s.fs.SyncDir(s.dir))
	s.ok(s.fs.SyncFS(s.dir))
	s.is(s.fs.SyncDir(s.path("none")), fs.ErrNotExist)
	s.is(s.fs.SyncDir(s.path("a")), unix.ENOTDIR)
}

func (s *suite) space() {
	sp, err := s.fs.Statfs(s.dir)
	s.ok(err)
	if sp.Total <= 0 || sp.Free > sp.Total || sp.Available > sp.Free || sp.ReadOnly || sp.Type == 0 {
		s.Fatalf("%+v", sp)
	}
	_, err = s.fs.Statfs(s.path("none"))
	s.is(err, fs.ErrNotExist)
}

func (s *suite) lock() {
	name := s.path("lock")
	held, err := s.fs.Lock(name)
	s.ok(err)
	_, err = s.fs.Lock(name)
	s.is(err, staging.ErrLocked)
	if !bytes.Contains([]byte(err.Error()), []byte(name)) {
		s.Fatalf("%v does not name %s", err, name)
	}
	s.ok(held.Close())
	again, err := s.fs.Lock(name)
	s.ok(err)
	s.ok(again.Close())
	top, err := s.fs.Lock(filepath.Dir(s.dir))
	s.ok(err)
	_, err = s.fs.Lock(filepath.Dir(s.dir))
	s.is(err, staging.ErrLocked)
	s.ok(top.Close())
	top, err = s.fs.Lock(filepath.Dir(s.dir))
	s.ok(err)
	s.ok(top.Close())
	_, err = s.fs.Lock(s.path("none/lock"))
	s.is(err, fs.ErrNotExist)
}

func (s *suite) rename() {
	s.create("a", "A")
	s.create("b", "B")
	s.ok(s.fs.Rename(s.path("a"), s.path("b")))
	s.gone("a")
	if got := s.content("b"); got != "A" {
		s.Fatalf("b holds %q", got)
	}
	s.is(s.fs.Rename(s.path("a"), s.path("b")), fs.ErrNotExist)
	if got := s.content("b"); got != "A" {
		s.Fatalf("after a rename of nothing b holds %q", got)
	}
}

func (s *suite) renameNoReplace() {
	s.create("a", "A")
	s.create("b", "B")
	s.is(s.fs.RenameNoReplace(s.path("a"), s.path("b")), fs.ErrExist)
	if s.content("a") != "A" || s.content("b") != "B" {
		s.Fatal("a refused rename changed something")
	}
	s.ok(s.fs.RenameNoReplace(s.path("a"), s.path("c")))
	s.gone("a")
	if got := s.content("c"); got != "A" {
		s.Fatalf("c holds %q", got)
	}
	s.is(s.fs.RenameNoReplace(s.path("a"), s.path("d")), fs.ErrNotExist)
	s.is(s.fs.RenameNoReplace(s.path("c"), s.path("no/d")), fs.ErrNotExist)
	if got := s.content("c"); got != "A" {
		s.Fatalf("c holds %q", got)
	}
}

// oneWinner has many publish one name at a time: one does, and its content stays.
func (s *suite) oneWinner() {
	for round := range 10 {
		target := "t" + string(rune('0'+round))
		const n = 8
		for i := range n {
			s.create(target+string(rune('a'+i)), string(rune('a'+i)))
		}
		var mu sync.Mutex
		var won []string
		var wg sync.WaitGroup
		for i := range n {
			wg.Go(func() {
				who := string(rune('a' + i))
				switch err := s.fs.RenameNoReplace(s.path(target+who), s.path(target)); {
				case err == nil:
					mu.Lock()
					won = append(won, who)
					mu.Unlock()
				case !errors.Is(err, fs.ErrExist):
					s.Error(err)
				}
			})
		}
		wg.Wait()
		if len(won) != 1 || s.content(target) != won[0] {
			s.Fatalf("winners %q, content %q", won, s.content(target))
		}
	}
}

func (s *suite) linkRemove() {
	s.create("a", "A")
	s.ok(s.fs.Link(s.path("a"), s.path("b")))
	a, err := s.fs.Stat(s.path("a"))
	s.ok(err)
	b, err := s.fs.Stat(s.path("b"))
	s.ok(err)
	if !a.Same(b) || a.Links != 2 {
		s.Fatalf("%+v %+v", a, b)
	}
	s.is(s.fs.Link(s.path("a"), s.path("b")), fs.ErrExist)
	s.ok(s.fs.Remove(s.path("a")))
	s.is(s.fs.Remove(s.path("a")), fs.ErrNotExist)
	f, err := s.fs.OpenFile(s.path("b"), os.O_RDONLY, 0)
	s.ok(err)
	defer f.Close()
	s.ok(s.fs.Remove(s.path("b")))
	info, err := f.Stat()
	s.ok(err)
	if info.Links != 0 || !info.Same(a) {
		s.Fatalf("unlinked but open: %+v", info)
	}
	var got [1]byte
	if _, err := f.ReadAt(got[:], 0); err != nil || got[0] != 'A' {
		s.Fatalf("unlinked but open: %q %v", got, err)
	}
}

func (s *suite) directories() {
	s.ok(s.fs.MkdirAll(s.path("x/y/z"), 0o700))
	s.ok(s.fs.MkdirAll(s.path("x/y/z"), 0o700))
	s.is(s.fs.Mkdir(s.path("x"), 0o700), fs.ErrExist)
	s.is(s.fs.Mkdir(s.path("p/q"), 0o700), fs.ErrNotExist)
	want := []string{"a", "b", "c", "sub"}
	for _, i := range rand.Perm(3) {
		s.create("x/"+want[i], "")
	}
	s.ok(s.fs.Mkdir(s.path("x/sub"), 0o700))
	s.ok(s.fs.Remove(s.path("x/y/z")))
	s.ok(s.fs.Remove(s.path("x/y")))
	list, err := s.fs.ReadDir(s.path("x"))
	s.ok(err)
	var got []string
	for _, e := range list {
		got = append(got, e.Name())
		if e.IsDir() != (e.Name() == "sub") {
			s.Errorf("%s is a directory: %v", e.Name(), e.IsDir())
		}
	}
	if !slices.Equal(got, want) {
		s.Fatalf("listed %q, want %q", got, want)
	}
	err = s.fs.Remove(s.path("x"))
	s.is(err, unix.ENOTEMPTY)
	_, err = s.fs.ReadDir(s.path("none"))
	s.is(err, fs.ErrNotExist)
}

func (s *suite) memory(bytes int) []byte {
	slots, err := staging.NewSlots(1, bytes)
	s.ok(err)
	s.Cleanup(func() { s.ok(slots.Close()) })
	slot, _ := slots.TryAcquire()
	s.Cleanup(slot.Release)
	return slot.Bytes()
}

// direct does aligned I/O through files of OpenDirect, whether they are direct here or not.
func (s *suite) direct() {
	mem := s.memory(1 << 20)
	for round, name := range []string{"first", "later"} {
		for i := range mem {
			mem[i] = byte(i*3 + i>>12 + round)
		}
		want := bytes.Clone(mem)
		f, err := staging.OpenDirect(s.fs, s.path(name), fresh, 0o600)
		s.ok(err)
		info, err := f.Stat()
		s.ok(err)
		if info.Size != 0 {
			s.Fatalf("a new file has %d bytes", info.Size)
		}
		_, err = f.WriteAt(mem, 0)
		s.ok(err)
		clear(mem)
		_, err = f.ReadAt(mem, 0)
		s.ok(err)
		if !bytes.Equal(mem, want) {
			s.Fatal("read other bytes than were written")
		}
		s.ok(f.Close())
		if _, err := staging.OpenDirect(s.fs, s.path(name), fresh, 0o600); !errors.Is(err, os.ErrExist) {
			s.Fatalf("opened twice as new: %v", err)
		}
	}
	s.create("odd", string(bytes.Repeat([]byte("odd"), 1500)))
	f, err := staging.OpenDirect(s.fs, s.path("odd"), os.O_RDONLY, 0)
	s.ok(err)
	defer f.Close()
	n, err := f.ReadAt(mem[:8192], 0)
	if n != 4500 || err != io.EOF {
		s.Fatalf("a file of 4500 bytes: read %d, %v", n, err)
	}
	if n, err = f.ReadAt(mem[:4096], 4096); n != 404 || err != io.EOF {
		s.Fatalf("its second page: read %d, %v", n, err)
	}
	if n, err = f.ReadAt(mem[:4096], 8192); n != 0 || err != io.EOF {
		s.Fatalf("past its end: read %d, %v", n, err)
	}
	_, err = staging.OpenDirect(s.fs, s.path("none/a"), fresh, 0o600)
	s.is(err, os.ErrNotExist)
	_, err = staging.OpenDirect(s.fs, s.path("none"), os.O_RDONLY, 0)
	s.is(err, os.ErrNotExist)
}

// directAlignment checks that what is not aligned is refused, by name, before the kernel sees it.
func (s *suite) directAlignment() {
	f, err := staging.OpenDirect(s.fs, s.path("a"), fresh, 0o600)
	s.ok(err)
	defer f.Close()
	mem := s.memory(4 * staging.Align)
	if !f.Direct() {
		_, err := f.WriteAt(mem[1:100], 3)
		s.ok(err)
		s.Log("this file system takes no direct I/O; alignment does not matter")
		return
	}
	flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0)
	s.ok(err)
	if flags&unix.O_DIRECT == 0 {
		s.Fatal("says that it is direct and is not")
	}
	for _, c := range []struct {
		p     []byte
		off   int64
		field string
	}{
		{mem[512 : 512+4096], 0, "address"},
		{mem[:4096+512], 0, "length"},
		{mem[:4096], 512, "offset"},
		{mem[1:2], 1, "address"},
	} {
		for op, do := range map[string]func([]byte, int64) (int, error){"read": f.ReadAt, "write": f.WriteAt} {
			n, err := do(c.p, c.off)
			var align *staging.AlignError
			if n != 0 || !errors.Is(err, staging.ErrAlign) || !errors.As(err, &align) || align.Field != c.field ||
				align.Op != op {
				s.Errorf("%s of %d bytes at %d: %d, %v, want its %s named", op, len(c.p), c.off, n, err, c.field)
			}
		}
	}
}

// SumTree describes everything in a directory: names, kinds, modes, owners, times of modification, sizes, and content. It
// does not show reads.
func SumTree(t testing.TB, dir string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		fmt.Fprintf(&b, "%s %o %d %s", strings.TrimPrefix(path, dir), st.Mode, st.Uid, time.Unix(st.Mtim.Unix()).UTC())
		if st.Mode&unix.S_IFMT != unix.S_IFDIR {
			fmt.Fprintf(&b, " size %d", st.Size)
		}
		if e.Type().IsRegular() {
			content, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			fmt.Fprintf(&b, " %x", sha256.Sum256(content))
		}
		b.WriteByte('\n')
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

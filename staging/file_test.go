package staging

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// step is what one system call answers: n bytes, or an errno.
type step struct {
	n   int
	err error
}

// script plays steps and notes what was asked.
type script struct {
	steps []step
	asked []string
}

func (s *script) call(p []byte, off int64) (int, error) {
	s.asked = append(s.asked, fmt.Sprintf("%d@%d", len(p), off))
	if len(s.steps) == 0 {
		return 0, errors.New("asked once too often")
	}
	st := s.steps[0]
	s.steps = s.steps[1:]
	return st.n, st.err
}

func TestTransferLoops(t *testing.T) {
	const k = Align
	intr, full, bad := step{-1, unix.EINTR}, step{-1, unix.ENOSPC}, step{-1, unix.EIO}
	for _, c := range []struct {
		name   string
		write  bool
		direct bool
		len    int
		steps  []step
		asked  string
		n      int
		err    error
	}{
		{name: "read whole", len: 10, steps: []step{{10, nil}}, asked: "10@100", n: 10},
		{name: "read in parts", len: 10, steps: []step{{3, nil}, intr, {7, nil}}, asked: "10@100 7@103 7@103", n: 10},
		{name: "read to the end", len: 10, steps: []step{{3, nil}, {0, nil}}, asked: "10@100 7@103", n: 3, err: io.EOF},
		{name: "read past the end", len: 10, steps: []step{{0, nil}}, asked: "10@100", err: io.EOF},
		{name: "read fails later", len: 10, steps: []step{{3, nil}, bad}, asked: "10@100 7@103", n: 3, err: unix.EIO},
		{name: "read nothing", len: 0},
		{name: "direct read in parts", direct: true, len: 2 * k, steps: []step{{k, nil}, {k, nil}}, asked: "8192@100 4096@4196", n: 2 * k},
		{name: "direct read to an odd end", direct: true, len: 2 * k, steps: []step{{k + 9, nil}, {9, nil}}, asked: "8192@100 4096@4196", n: k + 9, err: io.EOF},
		{name: "direct read that stops early", direct: true, len: 2 * k, steps: []step{{k + 9, nil}, {k, nil}}, asked: "8192@100 4096@4196", n: 2 * k},
		{name: "write whole", write: true, len: 10, steps: []step{{10, nil}}, asked: "10@100", n: 10},
		{name: "write in parts", write: true, len: 10, steps: []step{intr, {3, nil}, {7, nil}}, asked: "10@100 10@100 7@103", n: 10},
		{name: "write until full", write: true, len: 10, steps: []step{{3, nil}, full}, asked: "10@100 7@103", n: 3, err: unix.ENOSPC},
		{name: "write that makes no way", write: true, len: 10, steps: []step{{0, nil}, {0, nil}}, asked: "10@100 10@100", err: io.ErrShortWrite},
		{name: "write that stops once", write: true, len: 10, steps: []step{{0, nil}, {4, nil}, {0, nil}, {6, nil}}, asked: "10@100 10@100 6@104 6@104", n: 10},
		{name: "direct write cut between boundaries", write: true, direct: true, len: 2 * k, steps: []step{{k + 512, nil}, {k, nil}}, asked: "8192@100 4096@4196", n: 2 * k},
		{name: "direct write until full", write: true, direct: true, len: 2 * k, steps: []step{{512, nil}, full}, asked: "8192@100 8192@100", err: unix.ENOSPC},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := &script{steps: c.steps}
			loop := readFull
			if c.write {
				loop = writeFull
			}
			n, err := loop(s.call, make([]byte, c.len), 100, c.direct)
			if n != c.n || err != c.err || strings.Join(s.asked, " ") != c.asked || len(s.steps) != 0 {
				t.Errorf("%d %v, asked %q, left %v; want %d %v, asked %q", n, err, s.asked, s.steps, c.n, c.err, c.asked)
			}
		})
	}
}

func TestAlignErrorAdvice(t *testing.T) {
	f := newOSFile(-1, "/root/piece", true)
	err := f.classify("write", true, unix.EINVAL)
	var align *AlignError
	if !errors.Is(err, ErrAlign) || !errors.Is(err, unix.EINVAL) || !errors.As(err, &align) || align.Field != "kernel" {
		t.Fatalf("EINVAL of a direct file: %v", err)
	}
	for _, want := range []string{"/root/piece", "write", "4096", "page cache"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not say %q", err, want)
		}
	}
	if err := f.classify("write", false, unix.EINVAL); errors.Is(err, ErrAlign) {
		t.Errorf("EINVAL of a buffered file: %v", err)
	}
	if err := f.classify("read", true, unix.EIO); errors.Is(err, ErrAlign) || !errors.Is(err, unix.EIO) {
		t.Errorf("EIO of a direct file: %v", err)
	}
}

// TestCloseUnderWay closes a file while an operation holds it: Close does not wait, and the descriptor stays until
// then.
func TestCloseUnderWay(t *testing.T) {
	f, err := OS().OpenFile(filepath.Join(t.TempDir(), "a"), os.O_RDWR|os.O_CREATE, 0o600)
	must(t, err)
	of := f.(*osFile)
	if !of.enter() {
		t.Fatal("open and not to be entered")
	}
	must(t, f.Close())
	if _, err := unix.FcntlInt(f.Fd(), unix.F_GETFD, 0); err != nil {
		t.Fatalf("the descriptor went under an operation: %v", err)
	}
	if of.enter() {
		t.Fatal("entered after Close")
	}
	must(t, of.leave())
	if _, err := unix.FcntlInt(f.Fd(), unix.F_GETFD, 0); err != unix.EBADF {
		t.Fatalf("the descriptor stayed: %v", err)
	}
}

func TestNoSpace(t *testing.T) {
	f, err := OS().OpenFile("/dev/full", os.O_WRONLY, 0)
	must(t, err)
	defer f.Close()
	n, err := f.WriteAt(make([]byte, 8192), 0)
	var pe *fs.PathError
	if n != 0 || !errors.Is(err, unix.ENOSPC) || !errors.As(err, &pe) || pe.Path != "/dev/full" || pe.Op != "write" {
		t.Fatalf("%d %v", n, err)
	}
}

func TestAllocateWithoutSpace(t *testing.T) {
	dir, err := os.MkdirTemp("/dev/shm", "kvhost-staging-")
	must(t, err)
	defer os.RemoveAll(dir)
	space, err := OS().Statfs(dir)
	must(t, err)
	f, err := OS().OpenFile(filepath.Join(dir, "a"), os.O_RDWR|os.O_CREATE, 0o600)
	must(t, err)
	defer f.Close()
	if err := f.Allocate(2 * space.Total); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("reserved twice of what there is: %v", err)
	}
	if info, err := f.Stat(); err != nil || info.Allocated != 0 {
		t.Fatalf("%+v %v", info, err)
	}
	if err := newOSFile(int(f.Fd()), "a", false).Allocate(-1); !errors.Is(err, unix.EINVAL) {
		t.Fatal(err)
	}
}

func TestLockNamesHolder(t *testing.T) {
	name := filepath.Join(t.TempDir(), "lock")
	held, err := OS().Lock(name)
	must(t, err)
	defer held.Close()
	_, err = OS().Lock(name)
	if want := fmt.Sprintf("%s (process %d)", name, os.Getpid()); !errors.Is(err, ErrLocked) || !strings.Contains(err.Error(), want) {
		t.Fatalf("%v, want %q in it", err, want)
	}
	must(t, os.WriteFile(name, bytes.Repeat([]byte("x"), 100), 0o600))
	if _, err := OS().Lock(name); !errors.Is(err, ErrLocked) {
		t.Fatal(err)
	}
}

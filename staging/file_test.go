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
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/abi/testenv"
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
		t.Fatalf("write to /dev/full: %d bytes, error %v, want %v with its path", n, err, unix.ENOSPC)
	}
}

func TestAllocateWithoutSpace(t *testing.T) {
	dir := testenv.SmallDisk(t, 1<<20) // others' disk would be full for a moment
	space, err := OS().Statfs(dir)
	must(t, err)
	f, err := OS().OpenFile(filepath.Join(dir, "a"), os.O_RDWR|os.O_CREATE, 0o600)
	must(t, err)
	defer f.Close()
	if err := f.Allocate(2 * space.Total); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("reserved twice of what there is: %v", err)
	}
	if info, err := f.Stat(); err != nil || info.Allocated != 0 {
		t.Fatalf("after a reservation that failed: %+v, error %v, want nothing allocated", info, err)
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

func TestSpeedFollowsWhatIsSeen(t *testing.T) {
	var s Bandwidth
	if s.Observe(100, time.Second); s.BytesPerSecond() != 0 {
		t.Error("a tiny transfer counts")
	}
	s.Observe(1<<20, time.Second)
	if got := s.BytesPerSecond(); got != 1<<20 {
		t.Errorf("after one transfer: %d", got)
	}
	for range 200 {
		s.Observe(1<<20, time.Second/4)
	}
	if got := s.BytesPerSecond(); got < 4<<20*9/10 || got > 4<<20 {
		t.Errorf("after many: %d, want about %d", got, 4<<20)
	}
}

// Huge pages that are set aside are taken when there are enough, and then all of the memory is in them; else the kernel
// is asked for its own, and what it says of those is told.
func TestMapMemory(t *testing.T) {
	const enough = 6<<20 + 4096
	for _, c := range []struct {
		name        string
		total       int
		aside       bool
		transparent string
		want        Pages
		mapped      int
	}{
		{"set aside", enough, true, "always [madvise] never\n", HugePages, 8 << 20},
		{"transparent", enough, false, "always [madvise] never\n", TransparentPages, enough + hugePage - Align},
		{"always", enough, false, "[always] madvise never\n", TransparentPages, enough + hugePage - Align},
		{"never", enough, false, "always madvise [never]\n", SmallPages, enough + hugePage - Align},
		{"a kernel without", enough, false, "", SmallPages, enough + hugePage - Align},
		{"too small", 8192, true, "[always] madvise never\n", SmallPages, 8192},
	} {
		mmap := func(fd int, offset int64, length, prot, flags int) ([]byte, error) {
			if flags&unix.MAP_HUGETLB != 0 {
				if !c.aside {
					return nil, unix.ENOMEM
				}
				if flags&unix.MAP_NORESERVE != 0 {
					t.Errorf("%s: pages that are not reserved end the process when they run out", c.name)
				}
			}
			return unix.Mmap(fd, offset, length, prot, flags&^unix.MAP_HUGETLB&^unix.MAP_HUGE_2MB)
		}
		mapped, mem, pages, err := mapMemory(mmap, c.total, c.transparent)
		if err != nil {
			t.Fatal(c.name, err)
		}
		if pages != c.want && !(c.want == TransparentPages && transparentHere() == "") || len(mem) != c.total || len(mapped) != c.mapped {
			t.Errorf("%s: %s, %d bytes of %d", c.name, pages, len(mem), len(mapped))
		}
		if !c.aside && c.total >= hugePage && address(mem)%hugePage != 0 {
			t.Errorf("%s: starts at %#x", c.name, address(mem))
		}
		testenv.NoError(t, unix.Munmap(mapped))
	}
	broken := func(int, int64, int, int, int) ([]byte, error) { return nil, unix.ENOMEM }
	if _, _, _, err := mapMemory(broken, enough, ""); !errors.Is(err, unix.ENOMEM) {
		t.Error(err)
	}
}

// policyOf asks the kernel where it takes memory at an address from.
func policyOf(t *testing.T, mem []byte) (mode int32, nodes uint64) {
	t.Helper()
	var mask [16]uint64
	const ofAddress = 2
	if _, _, errno := unix.Syscall6(unix.SYS_GET_MEMPOLICY, uintptr(unsafe.Pointer(&mode)), uintptr(unsafe.Pointer(&mask)), uintptr(64*len(mask)),
		uintptr(unsafe.Pointer(unsafe.SliceData(mem))), ofAddress, 0); errno != 0 {
		t.Fatal(errno)
	}
	return mode, mask[0]
}

// The slots' memory comes from the nodes that are asked for, and can be used.
func TestSlotsNear(t *testing.T) {
	s := newSlots(t, 2, 2<<20)
	defer s.Close()
	testenv.NoError(t, s.Near())
	if mode, _ := policyOf(t, s.mem); mode != 0 {
		t.Errorf("policy %d before anything was asked for", mode)
	}
	const preferred = 1
	must(t, s.Near(0))
	if mode, nodes := policyOf(t, s.mem); mode != preferred || nodes != 1 {
		t.Errorf("policy %d, nodes %#x", mode, nodes)
	}
	slot, _ := s.TryAcquire()
	clear(slot.Bytes())
	slot.Release()
	for _, bad := range []int{-1, 1 << 20, 63} { // the last is not there
		if err := s.Near(bad); err == nil {
			t.Errorf("node %d was taken", bad)
		}
	}
}

// A file system without blocks, as /proc and ramfs, is not one of 0 bytes.
func TestStatfsWithoutASize(t *testing.T) {
	for name, fsys := range map[string]FS{"OS": OS(), "Below": Below("/proc")} {
		if s, err := fsys.Statfs("/proc"); !errors.Is(err, ErrNoSize) || s.Type != unix.PROC_SUPER_MAGIC {
			t.Errorf("%s: statfs of /proc: %+v, %v, want ErrNoSize and the type", name, s, err)
		}
	}
}

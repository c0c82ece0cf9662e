package staging

import (
	"errors"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

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
		if err := unix.Munmap(mapped); err != nil {
			t.Error(err)
		}
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
	if err := s.Near(); err != nil {
		t.Error(err)
	}
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

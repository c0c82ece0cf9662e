package server

import (
	"os"
	"runtime/debug"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/abi/testenv"
)

// touch reads or writes a byte and says whether that raised a fault.
func touch(p *byte, write bool) (faulted bool) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() { faulted = recover() != nil }()
	if write {
		*p = 1
	} else {
		sink = *p
	}
	return false
}

var sink byte

// An access to a missing page of a protected mapping fails and allocates nothing. Other pages are as in any mapping, also those
// that come and go.
func TestProtectedMapping(t *testing.T) {
	testenv.Need(t, testenv.UserFaults)
	page := os.Getpagesize()
	size := int64(4 * page)
	fd, err := unix.MemfdCreate("pages", unix.MFD_CLOEXEC)
	testenv.OK(t, err)
	f := os.NewFile(uintptr(fd), "pages")
	defer f.Close()
	testenv.OK(t, f.Truncate(size))
	testenv.OK(t, unix.Fallocate(fd, 0, 0, size/2))
	data, err := mapFile(f, size)
	testenv.OK(t, err)
	defer unix.Munmap(data)
	testenv.OK(t, protect(data))
	allocated := func() int64 {
		var st unix.Stat_t
		testenv.OK(t, unix.Fstat(fd, &st))
		return st.Blocks * 512
	}
	for i := range 4 {
		for _, write := range []bool{false, true} {
			if got := touch(&data[i*page+7], write); got != (i >= 2) {
				t.Errorf("page %d, write %t: faulted %t", i, write, got)
			}
		}
	}
	if n := allocated(); n != size/2 {
		t.Errorf("%d bytes are allocated", n)
	}
	if _, err := f.WriteAt([]byte{9}, 3*int64(page)); err != nil { // as its client does
		t.Fatal(err)
	}
	if touch(&data[3*page], false) || sink != 9 || touch(&data[3*page], true) {
		t.Error("a page that came is not there")
	}
	testenv.OK(t, unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, int64(page)))
	if !touch(&data[7], true) || !touch(&data[7], false) || allocated() != size/2 {
		t.Errorf("a page that went: %d bytes are allocated", allocated())
	}
}

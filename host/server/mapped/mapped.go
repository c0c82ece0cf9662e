// Package mapped maps the files that clients share with a host, such that the host never allocates a page of them.
//
// The kernel charges a page to the memory cgroup of the process that touches it first. Without more, a client could register
// memory that it never touched, or take pages out of it again, and the host would pay for what its jobs read and write there.
// A userfaultfd with UFFD_FEATURE_SIGBUS makes the kernel raise a SIGBUS instead of allocating. There is no moment in between
// in which the client could take a page out. Pages that are swapped out come back as always.
package mapped

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ErrUnprotected says that a mapping would allocate pages, because the kernel gives this process no userfaultfd.
var ErrUnprotected = errors.New("mapped: pages that are missing cannot be refused")

// The kernel's interface, from linux/userfaultfd.h.
const (
	uffdAPI          = 0xaa
	uffdUserModeOnly = 1 // needs no privilege: the host touches client memory in user mode only
	featureHugetlbfs = 1 << 4
	featureShmem     = 1 << 5
	featureSIGBUS    = 1 << 7
	modeMissing      = 1
	ioctlAPI         = 0xc018aa3f
	ioctlRegister    = 0xc020aa00
)

// File maps all bytes of a file for reading and writing.
func File(f *os.File, size int64) ([]byte, error) {
	return unix.Mmap(int(f.Fd()), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
}

// Protect makes an access to a page that a mapping's file lacks fail with a SIGBUS. It lasts until the mapping's end.
func Protect(data []byte) error {
	fd, err := faults()
	if err != nil {
		return fmt.Errorf("%w: userfaultfd: %w", ErrUnprotected, err)
	}
	register := struct{ start, length, mode, ioctls uint64 }{
		uint64(uintptr(unsafe.Pointer(unsafe.SliceData(data)))), uint64(len(data)), modeMissing, 0,
	}
	if errno := ioctl(fd, ioctlRegister, unsafe.Pointer(&register)); errno != 0 {
		return fmt.Errorf("%w: UFFDIO_REGISTER of %d bytes: %w", ErrUnprotected, len(data), errno)
	}
	return nil
}

// faults is the userfaultfd of this process. It is never closed: its end would end the protection.
var faults = sync.OnceValues(func() (int, error) {
	fd, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|unix.O_NONBLOCK|uffdUserModeOnly, 0, 0)
	if errno == unix.EINVAL { // before Linux 5.11
		fd, _, errno = unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|unix.O_NONBLOCK, 0, 0)
	}
	if errno != 0 {
		return 0, errno
	}
	api := struct{ api, features, ioctls uint64 }{uffdAPI, featureHugetlbfs | featureShmem | featureSIGBUS, 0}
	if errno := ioctl(int(fd), ioctlAPI, unsafe.Pointer(&api)); errno != 0 {
		unix.Close(int(fd))
		return 0, errno
	}
	return int(fd), nil
})

func ioctl(fd int, request uintptr, arg unsafe.Pointer) unix.Errno {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(arg))
	return errno
}

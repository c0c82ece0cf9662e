package server

import (
	"fmt"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Constants of linux/userfaultfd.h.
const (
	uffdAPI          = 0xaa
	uffdUserModeOnly = 1 // needs no privilege and is enough, because the host touches client memory in user mode only
	featureHugetlbfs = 1 << 4
	featureShmem     = 1 << 5
	featureSIGBUS    = 1 << 7
	modeMissing      = 1
	ioctlAPI         = 0xc018aa3f
	ioctlRegister    = 0xc020aa00
)

// fileID identifies a file at a certain size. A file that has grown has a new id.
type fileID struct {
	dev, ino uint64
	Size     int64
}

// mapping is a file of a client. It is mapped once, even if several regions and groups use it.
type mapping struct {
	file  fileID
	data  []byte
	users int // number of uses by registrations and semaphores
}

// identify checks that a file is shared memory with all pages allocated. Unless unsealed is set, the file must also be sealed
// against shrinking, since shrinking would remove pages under a running job.
func identify(f *os.File, unsealed bool) (fileID, error) {
	seals, err := unix.FcntlInt(f.Fd(), unix.F_GET_SEALS, 0)
	if err != nil {
		return fileID{}, fmt.Errorf("%w: it is no memfd: it has no seals (%w)", errNotMapped, err)
	}
	if seals&unix.F_SEAL_SHRINK == 0 && !unsealed {
		return fileID{}, fmt.Errorf("%w: it is not sealed against shrinking (F_SEAL_SHRINK)", errNotMapped)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return fileID{}, fmt.Errorf("%w: fstat: %w", errNotMapped, err)
	}
	if st.Size <= 0 {
		return fileID{}, fmt.Errorf("%w: it is empty", errNotMapped)
	}
	if missing := st.Size - 512*st.Blocks; missing > 0 {
		return fileID{}, fmt.Errorf("%w: %d of its %d bytes are not allocated, and the host must not be charged for them: call "+
			"fallocate first", errNotMapped, missing, st.Size)
	}
	return fileID{uint64(st.Dev), st.Ino, st.Size}, nil
}

// mapFile maps all bytes of a file for reading and writing.
func mapFile(f *os.File, size int64) ([]byte, error) {
	return unix.Mmap(int(f.Fd()), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
}

// protect makes an access to a missing page of the mapping fail with SIGBUS, so that the host never allocates a page of a
// client's file. The protection lasts as long as the mapping.
//
// The kernel charges a page to the memory cgroup of the process that touches it first. Without protection, a client could
// register memory that it has never touched, or remove pages from it later, and the host would be charged for the pages that
// its jobs touch. A userfaultfd with UFFD_FEATURE_SIGBUS makes the kernel raise SIGBUS instead of allocating the page. There is
// no time window in which the client could remove a page. Pages that are swapped out are read back as usual.
func protect(data []byte) error {
	fd, err := userfaults()
	if err != nil {
		return fmt.Errorf("%w: userfaultfd: %w", errUnprotected, err)
	}
	register := struct{ start, length, mode, ioctls uint64 }{
		uint64(uintptr(unsafe.Pointer(unsafe.SliceData(data)))), uint64(len(data)), modeMissing, 0,
	}
	if errno := ioctl(fd, ioctlRegister, unsafe.Pointer(&register)); errno != 0 {
		return fmt.Errorf("%w: UFFDIO_REGISTER of %d bytes: %w", errUnprotected, len(data), errno)
	}
	return nil
}

// userfaults opens the userfaultfd of this process. It is never closed, because closing it would end the protection.
var userfaults = sync.OnceValues(func() (int, error) {
	fd, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|unix.O_NONBLOCK|uffdUserModeOnly, 0, 0)
	if errno == unix.EINVAL { // Linux before 5.11 does not know the flag
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

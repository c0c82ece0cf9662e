"""Memory that this process shares with the host."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

# Constants of Linux, which the fcntl module has only if it was built against recent headers.
_F_ADD_SEALS = 1033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1, 2, 4
_ALLOCATE = 64 << 20


def seal(fd: int) -> None:
    """Fixes a memfd's size, so that its owner cannot truncate the memory during a copy."""
    fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)


def allocate(fd: int) -> None:
    """Allocates missing pages of a file, as memory of this process. A host refuses a file with missing pages,
    because the pages that it touches first would count as its own memory."""
    info = os.fstat(fd)
    if info.st_blocks * 512 < info.st_size:
        for at in range(0, info.st_size, _ALLOCATE):
            os.posix_fallocate(fd, at, min(_ALLOCATE, info.st_size - at))


class SharedMemory:
    """POSIX shared memory, or a file in tmpfs or hugetlbfs, that this process has mapped already and does not seal.

    A session that registers it needs ``unsealed_memory=True``. If the file is shrunk, jobs that touch the lost pages
    fail, without other harm."""

    def __init__(self, fd: int) -> None:
        """Duplicates the descriptor; the caller keeps its own. Missing pages of the file are allocated."""
        allocate(fd)
        self.fd = os.dup(fd)
        self.size = os.fstat(fd).st_size

    @classmethod
    def named(cls, name: str) -> SharedMemory:
        """Returns the memory of ``shm_open(name)``."""
        fd = os.open("/dev/shm/" + name.lstrip("/"), os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Closes the descriptor. The host keeps its mapping until it is unregistered."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Arena:
    """A memfd of fixed size, sealed so that neither side can make the other fault by truncating it."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"an arena of {size} bytes, want at least 1")
        self.fd = os.memfd_create("kvhost-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            allocate(self.fd)
            seal(self.fd)
            self._map = mmap.mmap(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise
        self.size = size
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def close(self) -> None:
        """Unmaps the memory here once no view of it is left. The host keeps its mapping until it is unregistered."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            pass  # a slice or an array of the view still exists, and the memory is freed with the last of them

    def __repr__(self) -> str:
        return f"Arena({self.size})" if self.fd >= 0 else "<closed Arena>"

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

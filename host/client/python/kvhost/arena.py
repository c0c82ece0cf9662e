"""Memory that this process shares with the host."""

from __future__ import annotations

import fcntl
import mmap
import os

# Of Linux; the fcntl module names them only where it was built against recent headers.
_F_ADD_SEALS = 1033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1, 2, 4


def seal(fd: int) -> None:
    """Fixes a memfd's size. The host refuses memory that its owner could truncate under a copy."""
    fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)


class Arena:
    """A memfd of fixed size, sealed so that neither side can be faulted by the other's truncation."""

    def __init__(self, size: int) -> None:
        self.fd = os.memfd_create("kvhost-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            seal(self.fd)
            self._map = mmap.mmap(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise
        self.size = size
        self.view = memoryview(self._map)

    def close(self) -> None:
        """Unmaps the memory here, once no view of it is left. The host keeps its mapping until it is unregistered."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self.view.release()
        try:
            self._map.close()
        except BufferError:
            pass  # somebody still holds a slice or an array of it: the memory goes with the last of them

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

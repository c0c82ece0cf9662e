"""Objects in place: memory of this process that the host maps, too."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvhost.arena import SharedMemory
from kvhost.errors import HostGoneError
from kvhost.process import Process
from kvhost.shape import Region
from kvhost.wire import answering, unreachable

_POLL = 0.01
_PAGE = os.sysconf("SC_PAGESIZE")


class NotShared(Exception):
    """Memory that this host cannot share with this process."""


@dataclass(frozen=True)
class Mapping:
    """A file that this process has mapped: POSIX shared memory or a memfd."""

    memory: SharedMemory
    file: tuple[str, str]  # device and inode, as the kernel prints them in maps
    base: int  # the address of the file's first byte

    @classmethod
    def find(cls, address: int, size: int, fd: int = -1) -> Mapping | None:
        """Returns the file behind memory of this process, by a descriptor of it or by the kernel's name for it. None
        if the memory is private or belongs to several files."""
        file, base, path = ("", "0"), 0, ""
        at, end = address, address + size
        with open("/proc/self/maps") as maps:
            for line in maps:
                span, access, offset, device, inode, *rest = line.split(maxsplit=5)
                first, last = (int(x, 16) for x in span.split("-"))
                if last <= at or first >= end:
                    continue
                here = first - int(offset, 16)
                if first > at or access[3] != "s" or (at > address and (device, inode, here) != (*file, base)):
                    return None
                file, base, path, at = (device, inode), here, rest[0].strip() if rest else "", last
        if at < end or file[1] == "0":
            return None
        try:
            own = os.dup(fd) if fd >= 0 else os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return cls(SharedMemory(own), file, base) if os.fstat(own).st_ino == int(file[1]) else None
        finally:
            os.close(own)


@dataclass(frozen=True)
class Place:
    """The place of the objects of a kind in shared memory: plane i of block b is b strides after ``planes[i]``."""

    mapping: Mapping
    planes: tuple[tuple[int, int], ...]  # (address of block 0, stride)
    blocks: int

    @classmethod
    def of_blocks(cls, mapping: Mapping, address: int, size: int, object_bytes: int) -> Place:
        """Returns the place of objects of one page each, side by side in a pool and aligned to pages of the
        processor."""
        stride = -(-object_bytes // _PAGE) * _PAGE
        return cls(mapping, ((address, stride),), (size - object_bytes) // stride + 1)

    def block(self, pages: Sequence[int]) -> int | None:
        """Returns the block of these pages; None if they are not one block."""
        address, stride = self.planes[0]
        n, rest = divmod(pages[0] - address, stride)
        if rest or not 0 <= n < self.blocks or len(pages) != len(self.planes):
            return None
        return n if all(p == a + n * s for p, (a, s) in zip(pages, self.planes)) else None

    def regions(self) -> list[Region]:
        return [Region(address - self.mapping.base, stride, self.blocks) for address, stride in self.planes]


class HostProcess(Process):
    """The host's process. When a session is lost during a job, only the process shows when its memory may be used
    again: it unmaps the memory of a session when no copy can touch it any more, or it dies."""

    def __init__(self, path: str) -> None:
        found = answering(path)
        if found is None:
            raise HostGoneError(unreachable(path))
        if found[0] <= 0:
            raise NotShared("the host's process is in another PID namespace, so its end cannot be seen")
        super().__init__(found[0])
        if self.ended():
            raise HostGoneError(f"{path}: process {found[0]} has ended, or cannot be watched")
        try:
            self.maps(("", ""))
        except OSError as e:
            raise NotShared(f"the host's process cannot be watched: {e}") from e

    def maps(self, file: tuple[str, str]) -> bool:
        """Whether the process lives and has a file mapped."""
        if self.ended():
            return False
        try:
            with open(f"/proc/{self._pid}/maps") as maps:
                return any(tuple(line.split(maxsplit=5)[3:5]) == file for line in maps)
        except ProcessLookupError:
            return False
        except FileNotFoundError:  # the process has ended, or is not visible
            return not self.ended()

    def wait_unmapped(self, mapping: Mapping) -> None:
        """Waits until the process cannot touch the memory any more, which is when its last copy has ended."""
        while self.maps(mapping.file):
            time.sleep(_POLL)

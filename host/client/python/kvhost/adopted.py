"""Host memory of another library, moved into a memfd in place so that the host can map it."""

from __future__ import annotations

import ctypes as C
import os
import weakref
from collections.abc import Iterable

from kvhost.arena import seal

_PAGE = os.sysconf("SC_PAGESIZE")
_COPY = 64 << 20
_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_MAX = -3, 32 << 20
_IS_MMAPPED = 2  # bit in the size before an allocation that has pages of its own
_MOST_TAKEN = 1 << 16  # most allocations that are taken: 4 GiB

#: The least size in bytes of allocations with pages of their own under :func:`separate_allocations`.
SEPARATE_BYTES = 64 << 10

_PROT_READ, _PROT_WRITE, _MAP_SHARED, _MAP_FIXED = 1, 2, 1, 0x10


class AdoptedMemory:
    """Spans of this process's memory, backed by one sealed memfd. Their addresses and contents stay.

    The pages under the spans are replaced by a shared mapping of the memfd. A write to them by another thread during
    that time is lost, so no other allocation may be on these pages: see :func:`separate_allocations`. The mapping
    outlives this object. Spans that were adopted before, for another host, stay in their memfd, which that host has
    mapped."""

    def __init__(self, spans: Iterable[tuple[int, int]], again: bool = False) -> None:
        """``spans`` are pairs of an address and a number of bytes. With ``again`` a new memfd adopts spans that are
        already in another one, which keeps its content."""
        self._runs: list[tuple[int, int, int]] = []  # (first address, end, offset in the memfd)
        runs = _page_runs(spans)
        self.size = sum(end - start for start, end in runs)
        for other in () if again else _adopted:
            if other.fd >= 0 and [(start, end) for start, end, _ in other._runs] == runs and other._mapped():
                self.fd, self._runs = os.dup(other.fd), other._runs
                _adopted.add(self)
                return
        self.fd = os.memfd_create("kvhost-adopted", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.size)
            seal(self.fd)
            offset = 0
            for start, end in runs:
                self._move(start, end, offset)
                self._runs.append((start, end, offset))
                offset += end - start
        except BaseException:
            os.close(self.fd)
            self.fd = -1
            raise
        _adopted.add(self)

    def _mapped(self) -> bool:
        """Whether the memfd is still mapped at the spans. It is not after they were freed and their addresses
        reused."""
        inode, left = os.fstat(self.fd).st_ino, {(start, offset): end for start, end, offset in self._runs}
        with open("/proc/self/maps") as maps:
            for line in maps:
                where, _, offset, _, number, *_ = line.split()
                if int(number) != inode:
                    continue
                start, end = (int(x, 16) for x in where.split("-"))
                at = int(offset, 16)
                for (first, place), last in [*left.items()]:  # the kernel shows adjacent mappings as one
                    if start <= first and last <= end and first - start == place - at:
                        del left[first, place]
        return not left

    def _move(self, start: int, end: int, offset: int) -> None:
        for at in range(start, end, _COPY):
            part = memoryview((C.c_ubyte * min(_COPY, end - at)).from_address(at))
            done = 0
            while done < len(part):
                done += os.pwrite(self.fd, part[done:], offset + at - start + done)
        libc = C.CDLL(None, use_errno=True)
        libc.mmap.restype = C.c_void_p
        libc.mmap.argtypes = [C.c_void_p, C.c_size_t, C.c_int, C.c_int, C.c_int, C.c_long]
        flags = _MAP_SHARED | _MAP_FIXED
        if libc.mmap(start, end - start, _PROT_READ | _PROT_WRITE, flags, self.fd, offset) != start:
            raise OSError(C.get_errno(), f"mmap of {end - start} bytes at {start:#x}")

    def offset(self, address: int) -> int:
        """Returns the offset in the memfd of an address of the spans."""
        for start, end, offset in self._runs:
            if start <= address < end:
                return offset + address - start
        raise ValueError(f"address {address:#x} is in none of the adopted spans")

    def close(self) -> None:
        """Closes the descriptor. The memory stays mapped, here and in the host."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def separate_allocations(on: bool) -> None:
    """Makes glibc's malloc give each large allocation of the calling thread its own pages, or ends that if ``on`` is
    false. ``on`` costs a system call for each allocation of :data:`SEPARATE_BYTES` or more. Most other allocators
    separate large allocations anyway."""
    libc = _glibc()
    if libc is None:
        return
    libc.mallopt(_M_MMAP_THRESHOLD, SEPARATE_BYTES if on else _MMAP_THRESHOLD_MAX)
    while _taken:
        libc.free(_taken.pop())
    while on and len(_taken) < _MOST_TAKEN:  # malloc first uses free space of the heap: leave it none
        p = libc.malloc(SEPARATE_BYTES)
        if not p:
            return
        if C.c_size_t.from_address(p - C.sizeof(C.c_size_t)).value & _IS_MMAPPED:
            libc.free(p)
            return
        _taken.append(p)


def in_heap(address: int) -> bool:
    """Whether other allocations of glibc may be on the same page."""
    if _glibc() is None:
        return False
    with open("/proc/self/maps") as maps:
        for line in maps:
            if line.rstrip().endswith("[heap]"):
                start, end = (int(x, 16) for x in line.split()[0].split("-"))
                if start <= address < end:
                    return True
    return False


_adopted: weakref.WeakSet[AdoptedMemory] = weakref.WeakSet()
_taken: list[int] = []


class _DlInfo(C.Structure):
    _fields_ = [("file", C.c_char_p), ("base", C.c_void_p), ("symbol", C.c_char_p), ("address", C.c_void_p)]


def _glibc() -> C.CDLL | None:
    """Returns the C library, if it is glibc and malloc is its own."""
    libc = C.CDLL(None)
    if not hasattr(libc, "mallopt") or not hasattr(libc, "gnu_get_libc_version"):
        return None
    info = _DlInfo()
    if not libc.dladdr(C.cast(libc.malloc, C.c_void_p), C.byref(info)) or b"libc.so" not in (info.file or b""):
        return None
    libc.malloc.restype, libc.malloc.argtypes = C.c_void_p, [C.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [C.c_void_p]
    return libc


def _page_runs(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the pages under the spans, merged if spans share or touch a page, since a page can be mapped only
    once."""
    runs: list[tuple[int, int]] = []
    for start, end in sorted((a // _PAGE * _PAGE, -(-(a + n) // _PAGE) * _PAGE) for a, n in spans if n):
        if runs and start <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(runs[-1][1], end))
        else:
            runs.append((start, end))
    return runs

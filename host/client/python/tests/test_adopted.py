"""Memory of another library is moved if nothing else is on its pages, and stays where it was moved to."""

from __future__ import annotations

import ctypes as C
import mmap
import os
import subprocess
import sys

from kvhost import AdoptedMemory

# The heap is left with free space of 1 MiB that malloc would use again.
SCRIPT = """
import ctypes as C
from kvhost.adopted import in_heap, separate_allocations
libc = C.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = C.c_void_p, [C.c_size_t], [C.c_void_p]
separate_allocations(False)
held = [libc.malloc(1 << 20) for _ in range(20)]
assert all(in_heap(p) for p in held)
for p in held[::2]:
    libc.free(p)
separate_allocations(True)
apart = [libc.malloc(400_000) for _ in range(20)]
assert not any(in_heap(p) for p in apart)
separate_allocations(False)
assert in_heap(libc.malloc(400_000))
print("well")
"""


def test_separate_allocations_do_not_use_free_space_in_the_heap() -> None:
    path = ":".join(sys.path)
    done = subprocess.run([sys.executable, "-c", SCRIPT], env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.stdout == "well\n", done.stderr


def test_two_hosts_map_one_memory() -> None:
    """The second adoption of spans leaves the first one's pages where they are."""
    size = 64 << 10
    with mmap.mmap(-1, 3 * size) as pages:
        address = C.addressof(C.c_char.from_buffer(pages))
        spans = [(address, size), (address + 2 * size, size)]
        pages[0] = 1
        first, second = AdoptedMemory(spans), AdoptedMemory(reversed(spans))
        assert os.path.sameopenfile(first.fd, second.fd) and first.fd != second.fd, "want one memfd, and a descriptor each"
        first.close()
        pages[2 * size] = 7
        assert os.pread(second.fd, 1, second.offset(address)) == b"\x01"
        assert os.pread(second.fd, 1, second.offset(address + 2 * size)) == b"\x07", "want what was written later"
        other = AdoptedMemory(spans[:1])
        assert not os.path.sameopenfile(other.fd, second.fd), "want a memfd of its own for other spans"
        again = AdoptedMemory(spans)
        assert not os.path.sameopenfile(again.fd, second.fd), "want another one where the first is not under the spans any more"
        for memory in (second, other, again):
            memory.close()

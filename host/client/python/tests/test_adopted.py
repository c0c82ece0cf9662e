"""Memory of another allocation may only be moved if nothing else is on its pages."""

from __future__ import annotations

import subprocess
import sys

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

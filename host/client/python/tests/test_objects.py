"""What batches of objects are made of, without a host."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import threading
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
from kvhost import HostGoneError
from kvhost.objects import Connector, Kind, Mapping, ObjectStore, Options, Place, Space
from kvhost.objects.inplace import HostProcess
from kvhost.shape import page_dtype
from waits import left


def test_what_pages_hold_is_no_part_of_a_kind() -> None:
    plain, told = (Kind("m", "t", (16,), page_dtype=t) for t in ("", "bfloat16"))
    assert plain == told and len({plain, told}) == 1
    a, b = plain.namespace().message(), told.namespace().message()
    assert (a.dtype, a.page_dtype) == ("opaque", "") and (b.dtype, b.page_dtype) == ("opaque", "bfloat16")
    b.ClearField("page_dtype")
    assert a == b


def test_a_page_dtype_is_that_of_all() -> None:
    assert page_dtype(["torch.bfloat16", "torch.bfloat16"]) == "bfloat16"
    assert page_dtype(["torch.float8_e4m3fn"]) == "float8_e4m3fn"
    for unknown in ([], ["torch.bfloat16", "torch.float16"], ["torch.uint8"], ["torch.int8"]):
        assert page_dtype(unknown) == ""


def test_space_gives_each_byte_once() -> None:
    space = Space(100)
    tens = space.take(10, 4, 0)
    assert tens == [0, 1, 2, 3]
    assert space.take(30, 9, 0) == [2]  # bytes 60 to 90: 40 to 60 hold no multiple of 30
    assert space.take(10, 9, 0) == [4, 5, 9]
    with pytest.raises(TimeoutError):
        space.take(1, 1, 0)
    space.give(10, [3, 1])
    space.give(10, [2])
    assert space.take(15, 9, 0) == [1]  # 15 to 30 of the free 10 to 40
    space.give(15, [1])
    space.give(10, [0, 4, 5, 9])
    space.give(30, [2])
    assert space.free_bytes() == 100
    assert space.take(100, 9, 0) == [0]


def test_space_refuses_what_never_fits() -> None:
    with pytest.raises(ValueError, match="raise arena_bytes"):
        Space(100).take(101, 1, 0)


def test_no_host_is_tried_again_after_a_growing_pause(tmp_path: Path) -> None:
    now = 0.0
    connector = Connector(Options(f"{tmp_path}/none", arena_bytes=4096, timeout=5), "test", clock=lambda: now)
    store = ObjectStore(connector)

    def attempt() -> bool:
        """Whether a connection was tried: then the cause is the socket's."""
        with pytest.raises(HostGoneError) as e:
            store.lookup(Kind("m", "t", (16,)), [bytes(32)])
        return "no such socket" in str(e.value)

    assert not connector.gone
    assert attempt()
    assert connector.gone
    tries = []
    for _ in range(600):
        now += 0.05
        if attempt():
            tries.append(now)
    pauses = [b - a for a, b in zip(tries, tries[1:])]
    assert pauses == sorted(pauses) and 0.1 < pauses[0] < 1 and 4.9 < pauses[-1] < 5.2
    assert connector.losses == 0  # it was never there
    store.close()
    with pytest.raises(HostGoneError, match="closed"):
        store.lookup(Kind("m", "t", (16,)), [bytes(32)])


def test_options_are_checked() -> None:
    parsed = Options.parse("here", {"socket": "/s", "timeout": 2})
    assert (parsed.socket, parsed.timeout, parsed.sessions) == ("/s", 2, 64)
    for wrong in (
        {"sockte": "/s"},
        {"socket": ""},
        {"socket": 3},
        {"arena_bytes": "1GiB"},
        {"arena_bytes": 0},
        {"arena_bytes": True},
        {"arena_bytes": 1.5},
        {"timeout": 0},
        {"timeout": "1s"},
        {"extra": "a"},
        {"extra": {"a": 1}},
    ):
        with pytest.raises(ValueError, match=f"here.{next(iter(wrong))}: "):
            Options.parse("here", wrong)


def test_what_the_operator_adds_is_apart() -> None:
    options = Options.parse("here", {"extra": {"weights": "2", "a": ""}})
    assert options.apart == (("operator.a", ""), ("operator.weights", "2"))
    kinds = {Kind("m", "e", (16,), extra=o.apart) for o in (Options(), Options(extra={"a": ""}), Options(extra={"b": ""}), options)}
    assert len(kinds) == 4


def address(of: mmap.mmap | memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(of))


def test_shared_memory_is_found_by_its_address() -> None:
    shared = SharedMemory(create=True, size=4 * mmap.PAGESIZE)
    assert shared.buf is not None
    try:
        at = address(shared.buf)
        found = Mapping.find(at + 100, 3 * mmap.PAGESIZE)
        assert found is not None and found.base == at
        assert os.pread(found.memory.fd, 4, 0) == bytes(4)
        shared.buf[:4] = b"here"
        assert os.pread(found.memory.fd, 4, 0) == b"here"
        assert Mapping.find(at + 100, 4 * mmap.PAGESIZE) is None  # beyond its end
        assert Mapping.find(at - 1, 2) is None
        found.memory.close()
    finally:
        shared.close()
        shared.unlink()


def test_memory_that_is_not_shared_is_none_of_a_file() -> None:
    private = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert Mapping.find(address(private), 1) is None
    fd = os.memfd_create("unlinked")
    os.ftruncate(fd, mmap.PAGESIZE)
    unlinked = mmap.mmap(fd, mmap.PAGESIZE)
    assert Mapping.find(address(unlinked), 1) is None  # its name is no path
    assert Mapping.find(address(unlinked), 1, fd) is not None
    other = os.memfd_create("other")
    assert Mapping.find(address(unlinked), 1, other) is None
    os.close(other)
    os.close(fd)


def test_objects_have_a_place_only_on_their_blocks() -> None:
    shared = Mapping(None, ("", ""), 1000)  # type: ignore[arg-type]
    place = Place(shared, ((1000, 10), (2000, 20)), 5)
    assert [place.block((1000 + 10 * b, 2000 + 20 * b)) for b in range(5)] == list(range(5))
    for pages in ((1050, 2100), (990, 1980), (1005, 2010), (1010, 2040), (1010,), (1010, 2020, 1)):
        assert place.block(pages) is None, pages
    whole = Place.of_blocks(shared, 4096, 10 * mmap.PAGESIZE, mmap.PAGESIZE + 1)
    assert whole.blocks == 5 and whole.block((4096 + 8 * mmap.PAGESIZE,)) == 4


_LISTENER = """
import mmap, os, socket, sys
s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen()
f = os.open(sys.argv[2], os.O_RDWR); m = mmap.mmap(f, 4096); os.close(f)
print("ready", flush=True)
for line in sys.stdin:
    m = None if line == "unmap\\n" else mmap.mmap(os.open(sys.argv[2], os.O_RDWR), 4096)
    print("done", flush=True)
"""


def mapping_of(path: Path) -> Mapping:
    with path.open("r+b") as f:
        shared = mmap.mmap(f.fileno(), 4096)
        found = Mapping.find(address(shared), 4096, f.fileno())
    assert found is not None
    return found


@pytest.mark.parametrize("ends", ["unmap", "death"])
def test_memory_is_ours_again_when_the_host_unmaps_it_or_dies(tmp_path: Path, ends: str) -> None:
    file, other = tmp_path / "file", tmp_path / "other"
    file.write_bytes(bytes(4096))
    other.write_bytes(bytes(4096))
    command = [sys.executable, "-c", _LISTENER, str(tmp_path / "s"), str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        process = HostProcess(str(tmp_path / "s"))
        mapping = mapping_of(file)
        assert process.maps(mapping.file) and not process.maps(mapping_of(other).file)
        waiting = threading.Thread(target=process.wait_unmapped, args=(mapping,))
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        if ends == "unmap":
            child.stdin.write(b"unmap\n")
            child.stdin.flush()
        else:
            child.kill()
        waiting.join(left())
        assert not waiting.is_alive()
        child.kill()
    with pytest.raises(HostGoneError):
        HostProcess(str(tmp_path / "s"))

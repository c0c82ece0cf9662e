"""Batches of objects against a real host: set KVHOST_SOCKET to its socket. Without it nothing is collected here."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator

import pytest
from forked import in_child
from kvhost import DiscardResult, HostGoneError, Result
from kvhost.objects import Connector, Kind, Mapping, ObjectStore, Options, Place, StoreObject
from waits import left

PAGES = (2 * 4096, 4096, 17)
SIZE = sum(PAGES)
KIND = Kind("pytest", "objects", PAGES)


class Buffers:
    """Some objects' memory. The pages of an object do not lie together."""

    def __init__(self, count: int) -> None:
        self._raw = [ctypes.create_string_buffer(os.urandom(count * size), count * size) for size in PAGES]
        self.pages = [
            [ctypes.addressof(raw) + i * size for raw, size in zip(self._raw, PAGES)] for i in range(count)
        ]

    def read(self, i: int) -> bytes:
        return b"".join(raw.raw[i * size :][:size] for raw, size in zip(self._raw, PAGES))

    def clear(self) -> None:
        for raw in self._raw:
            ctypes.memset(raw, 0, len(raw))


def connector(arena_bytes: int = 1 << 20, sessions: int = 64) -> Connector:
    options = Options(os.environ["KVHOST_SOCKET"], arena_bytes=arena_bytes, sessions=sessions)
    return Connector(options, "test")


@pytest.fixture
def store() -> Iterator[ObjectStore]:
    s = ObjectStore(connector())
    yield s
    s.close()


def keys(n: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(n)]


def test_stored_objects_come_back(store: ObjectStore) -> None:
    b, k = Buffers(5), keys(6)
    want = [b.read(i) for i in range(5)]
    objects = [StoreObject(key, m, parent, i) for i, (key, m, parent) in enumerate(zip(k, b.pages, [b"", *k]))]
    assert store.store(KIND, objects) == [Result.STORED] * 5
    assert store.store(KIND, objects[:2]) == [Result.RESIDENT] * 2
    hit = store.lookup(KIND, [k[3], k[5], k[0]])
    assert hit.found == [True, False, True]
    b.clear()
    assert store.load(KIND, [k[0], k[3]], [b.pages[0], b.pages[3]], hit) == [True, True]
    assert [b.read(0), b.read(3)] == [want[0], want[3]]
    assert store.load(KIND, k, [*b.pages, b.pages[0]]) == [True] * 5 + [False]
    assert [b.read(i) for i in range(5)] == want


def test_kinds_share_no_objects(store: ObjectStore) -> None:
    b, k = Buffers(1), keys(1)
    store.store(KIND, [StoreObject(k[0], b.pages[0])])
    for other in (
        Kind("other", "objects", PAGES),
        Kind("pytest", "other", PAGES),
        Kind("pytest", "objects", (SIZE,)),
        Kind("pytest", "objects", PAGES, extra=(("group", "1"),)),
    ):
        assert store.lookup(other, k).found == [False], other
    # Tenants share what they can name.
    assert store.lookup(Kind("pytest", "objects", PAGES, tenant=7), k).found == [True]


def test_a_batch_larger_than_the_arena(store: ObjectStore) -> None:
    n = 200  # the arena has room for 64
    b, k = Buffers(n), keys(n)
    want = [b.read(i) for i in range(n)]
    assert store.store(KIND, [StoreObject(key, m) for key, m in zip(k, b.pages)]) == [Result.STORED] * n
    b.clear()
    assert store.load(KIND, k, b.pages, store.lookup(KIND, k)) == [True] * n
    assert [b.read(i) for i in range(n)] == want


def test_a_lease_that_is_over_costs_a_lookup_only(store: ObjectStore) -> None:
    b, k = Buffers(2), keys(2)
    want = b.read(0)
    store.store(KIND, [StoreObject(key, m) for key, m in zip(k, b.pages)])
    hit = store.lookup(KIND, k)
    hit.release()
    b.clear()
    assert store.load(KIND, k, b.pages, hit) == [True, True]
    assert b.read(0) == want


def test_discarded_objects_are_gone(store: ObjectStore) -> None:
    b, k = Buffers(3), keys(4)
    store.store(KIND, [StoreObject(key, m) for key, m in zip(k, b.pages)])
    hit = store.lookup(KIND, k[:1])
    in_use, removed, absent = DiscardResult.IN_USE, DiscardResult.REMOVED, DiscardResult.ABSENT
    while (got := store.discard(KIND, [k[1], k[0], k[3]]))[0] == in_use and left() > 0:
        time.sleep(0.01)  # the host copies it to the next level
    assert got == [removed, in_use, absent]
    assert store.lookup(KIND, k).found == [True, False, True, False]
    assert store.load(KIND, k[:1], b.pages[:1], hit) == [True]
    assert store.discard(Kind("pytest", "objects", PAGES, tenant=7), k[2:3]) == [DiscardResult.OTHER_TENANT]


def test_idle_sessions_make_room() -> None:
    c = connector(sessions=2)
    store, k = ObjectStore(c), keys(1)
    for model in "abc":
        b = Buffers(1)
        store.store(Kind(model, "objects", PAGES), [StoreObject(k[0], b.pages[0])])
    assert c.sessions() == 2
    assert store.lookup(Kind("a", "objects", PAGES), k).found == [True]
    store.close()
    with pytest.raises(HostGoneError):
        store.lookup(KIND, k)


def test_processes_with_one_number_are_two_engines() -> None:
    """As the first ones of two containers are."""
    b, k = Buffers(1), keys(1)
    stores = [ObjectStore(connector()) for _ in "ab"]
    for model, store in zip("ab", stores):
        assert store.store(Kind(model, "objects", PAGES), [StoreObject(k[0], b.pages[0])]) == [Result.STORED], model
    for store in stores:
        store.close()


class Pool:
    """Shared memory of another library: a memfd that cannot be sealed, mapped somewhere else than at its start."""

    def __init__(self, pages: int) -> None:
        self.fd = os.memfd_create("pool")
        os.ftruncate(self.fd, (pages + 1) * mmap.PAGESIZE)
        self._map = mmap.mmap(self.fd, pages * mmap.PAGESIZE, offset=mmap.PAGESIZE)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))
        self.size = len(self.view)
        mapping = Mapping.find(self.address, self.size, self.fd)
        assert mapping is not None
        self.mapping = mapping


def test_objects_in_place_are_not_copied() -> None:
    pool = Pool(64)
    half, page = pool.size // 2, mmap.PAGESIZE
    kind = Kind("pytest", "objects", (page, 2 * page))
    c = connector(arena_bytes=page)  # too small for any object
    # Plane 0 in the first half of the pool, plane 1 in the second.
    c.put(kind, Place(pool.mapping, ((pool.address, page), (pool.address + half, 2 * page)), 16))
    store, k, places = ObjectStore(c), keys(3), [4, 0, 15]
    pages = [(pool.address + b * page, pool.address + half + b * 2 * page) for b in places]
    pool.view[:] = os.urandom(pool.size)
    want = bytes(pool.view)
    objects = [StoreObject(key, p) for key, p in zip(k, pages)]
    assert store.store(kind, objects) == [Result.STORED] * 3
    pool.view[:] = bytes(pool.size)
    assert store.load(kind, k, pages, store.lookup(kind, k)) == [True] * 3
    for b in range(16):
        for at, size in ((b * page, page), (half + b * 2 * page, 2 * page)):
            assert bytes(pool.view[at : at + size]) == (want[at : at + size] if b in places else bytes(size)), b
    assert c.sessions() == 1
    with pytest.raises(ValueError, match="raise arena_bytes"):
        store.store(kind, [*objects, StoreObject(k[0], (pool.address, pool.address + half + page))])
    store.close()


def test_what_the_host_does_not_map_is_copied() -> None:
    pool = Pool(8)
    kind = Kind("pytest", "objects", (100,))
    c = connector()
    c.put(kind, Place(pool.mapping, ((pool.address, 4096),), 1 << 30))  # more blocks than the memory has
    store, k = ObjectStore(c), keys(1)
    pool.view[:100] = want = os.urandom(100)
    assert store.store(kind, [StoreObject(k[0], (pool.address,))]) == [Result.STORED]
    pool.view[:100] = bytes(100)
    assert store.load(kind, k, [(pool.address,)]) == [True]
    assert bytes(pool.view[:100]) == want
    store.close()


def test_a_child_that_was_forked_has_no_objects(store: ObjectStore) -> None:
    b, k = Buffers(1), keys(1)
    objects = [StoreObject(k[0], b.pages[0])]
    assert store.store(KIND, objects) == [Result.STORED]
    calls = {
        "lookup": lambda: store.lookup(KIND, k), "store": lambda: store.store(KIND, objects),
        "load": lambda: store.load(KIND, k, b.pages), "discard": lambda: store.discard(KIND, k),
    }
    for name, call in calls.items():
        said = in_child(call)
        assert said.startswith("HostGoneError: the session is of process"), f"{name} in a child: {said}"
    assert in_child(store.close) == "returned None"
    assert "'connected': True" in in_child(store.status)
    assert store.load(KIND, k, b.pages) == [True], "the parent's connection goes on"

"""Batches of objects against a real host: set KVHOST_SOCKET to its socket. Without it nothing is collected here."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pytest
from kvhost import HostGone, Result
from kvhost.objects import Connector, Kind, Memory, ObjectStore, StoreObject

SIZE = 3 * 4096 + 17
KIND = Kind("pytest", "objects", SIZE)


class Buffers:
    """Some objects' memory, one after the other."""

    def __init__(self, count: int, size: int = SIZE) -> None:
        self._raw = ctypes.create_string_buffer(os.urandom(count * size), count * size)
        self.size = size
        self.memory = [Memory(ctypes.addressof(self._raw) + i * size, size) for i in range(count)]

    def read(self, i: int) -> bytes:
        return self._raw.raw[i * self.size :][: self.size]

    def clear(self) -> None:
        ctypes.memset(self._raw, 0, len(self._raw))


@pytest.fixture
def store() -> Iterator[ObjectStore]:
    s = ObjectStore(Connector(os.environ["KVHOST_SOCKET"], f"t{os.urandom(4).hex()}", 1 << 20))
    yield s
    s.close()


def keys(n: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(n)]


def test_stored_objects_come_back(store: ObjectStore) -> None:
    b, k = Buffers(5), keys(6)
    want = [b.read(i) for i in range(5)]
    objects = [StoreObject(key, m, parent, i) for i, (key, m, parent) in enumerate(zip(k, b.memory, [b"", *k]))]
    assert store.store(KIND, objects) == [Result.STORED] * 5
    assert store.store(KIND, objects[:2]) == [Result.RESIDENT] * 2
    hit = store.lookup(KIND, [k[3], k[5], k[0]])
    assert hit.found == [True, False, True]
    b.clear()
    assert store.load(KIND, [k[0], k[3]], [b.memory[0], b.memory[3]], hit) == [True, True]
    assert [b.read(0), b.read(3)] == [want[0], want[3]]
    assert store.load(KIND, k, [*b.memory, b.memory[0]]) == [True] * 5 + [False]
    assert [b.read(i) for i in range(5)] == want


def test_kinds_share_no_objects(store: ObjectStore) -> None:
    b, k = Buffers(1), keys(1)
    store.store(KIND, [StoreObject(k[0], b.memory[0])])
    for other in (
        Kind("other", "objects", SIZE),
        Kind("pytest", "other", SIZE),
        Kind("pytest", "objects", SIZE + 1),
        Kind("pytest", "objects", SIZE, extra=(("group", "1"),)),
    ):
        assert store.lookup(other, k).found == [False], other
    assert store.lookup(Kind("pytest", "objects", SIZE, tenant=7), k).found == [True]  # tenants share what they may name
    with pytest.raises(ValueError, match="an object of"):
        store.store(Kind("pytest", "objects", SIZE + 1), [StoreObject(k[0], b.memory[0])])


def test_a_batch_larger_than_the_arena(store: ObjectStore) -> None:
    n = 200  # the arena has room for 64
    b, k = Buffers(n), keys(n)
    want = [b.read(i) for i in range(n)]
    assert store.store(KIND, [StoreObject(key, m) for key, m in zip(k, b.memory)]) == [Result.STORED] * n
    b.clear()
    assert store.load(KIND, k, b.memory, store.lookup(KIND, k)) == [True] * n
    assert [b.read(i) for i in range(n)] == want


def test_a_lease_that_is_over_costs_a_lookup_only(store: ObjectStore) -> None:
    b, k = Buffers(2), keys(2)
    want = b.read(0)
    store.store(KIND, [StoreObject(key, m) for key, m in zip(k, b.memory)])
    hit = store.lookup(KIND, k)
    hit.release()
    b.clear()
    assert store.load(KIND, k, b.memory, hit) == [True, True]
    assert b.read(0) == want


def test_idle_sessions_make_room() -> None:
    connector = Connector(os.environ["KVHOST_SOCKET"], f"t{os.urandom(4).hex()}", 1 << 20, most_sessions=2)
    store, k = ObjectStore(connector), keys(1)
    for model in "abc":
        b = Buffers(1)
        store.store(Kind(model, "objects", SIZE), [StoreObject(k[0], b.memory[0])])
    assert connector.sessions() == 2
    assert store.lookup(Kind("a", "objects", SIZE), k).found == [True]
    store.close()
    with pytest.raises(HostGone):
        store.lookup(KIND, k)

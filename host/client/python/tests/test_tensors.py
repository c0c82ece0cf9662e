"""Tensors and arrays in arenas, against a real host where one is needed: set KVHOST_SOCKET to its socket."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import kvhost
import pytest
from kvhost.tensors import TensorPages

BLOCKS, HEADS, TOKENS, DIM = 8, 2, 16, 32
PAGE = HEADS * TOKENS * DIM * 2
GROUP = kvhost.Group.uniform(0, blocks=2, layers=2, parts=2, page_bytes=PAGE)
LIBRARIES = ["numpy", "torch"]


@pytest.fixture(params=LIBRARIES)
def make(request: pytest.FixtureRequest) -> Any:
    """Makes a tensor or array of two-byte numbers in an arena, by the library of the test's name."""
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"missing: {request.param}: pip install {request.param}")
    if request.param == "numpy":
        return lambda arena, shape, offset=None: arena.array(shape, "float16", offset)
    return lambda arena, shape, offset=None: arena.tensor(shape, "bfloat16", offset)


def test_a_tensor_is_the_arenas_memory(make: Any) -> None:
    arena = kvhost.Arena(1 << 20)
    first, second = make(arena, (4, 8)), make(arena, (3,))
    assert tuple(first.shape) == (4, 8)
    first[:], second[:] = 0, 1
    assert bytes(arena.view[:64]) == bytes(64)
    assert bytes(arena.view[4096:4102]) != bytes(6) == bytes(arena.view[4102:4108])  # the next page
    third = make(arena, (3,), 4096)
    assert (third == second).all()
    pages = TensorPages.of(first)
    assert kvhost.Arena.around(pages.address, 64) == (arena, 0)
    assert (pages.stride, pages.blocks, pages.page_bytes, pages.on_gpu) == (16, 4, 16, False)
    for shape, offset in (((1 << 19, 2), None), ((1,), 1 << 20), ((1,), -2), ((0,), None)):
        with pytest.raises(ValueError, match="of an arena of 1048576 bytes"):
            make(arena, shape, offset)
    arena.close()
    assert int(second[0]) == 1  # the memory stays as long as the tensor
    assert kvhost.Arena.around(pages.address, 64) is None
    with pytest.raises(ValueError, match="closed"):
        make(arena, (1,))


def test_pages_of_views(make: Any) -> None:
    arena = kvhost.Arena(1 << 20)
    both = make(arena, (BLOCKS, 2, HEADS, DIM))  # the keys and values of a block one after the other
    values = TensorPages.of(both[:, 1])
    assert values.address == TensorPages.of(both).address + HEADS * DIM * 2
    assert (values.stride, values.blocks, values.page_bytes) == (2 * HEADS * DIM * 2, BLOCKS, HEADS * DIM * 2)
    with pytest.raises(ValueError, match="not one run"):
        TensorPages.of(both[:, :, 0])
    with pytest.raises(ValueError, match="overlap"):
        TensorPages.of(both[0].expand(BLOCKS, 2, HEADS, DIM) if hasattr(both, "expand") else both[::-1, 0])
    with pytest.raises(ValueError, match="no pages"):
        TensorPages.of(both[0, 0, 0, 0])


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match="bytearray is neither a tensor"):
        TensorPages.of(bytearray(8))


@pytest.fixture
def session() -> Any:
    path = os.environ.get("KVHOST_SOCKET")
    if path is None:
        pytest.skip("missing: a host: KVHOST_SOCKET is not set")
    namespace = kvhost.Namespace(
        model="tensors", dtype="bf16", key_bytes=32, tokens_per_block=TOKENS, groups=[GROUP],
        hash_algorithm=kvhost.KeyChain.ALGORITHM,
    )
    with kvhost.Session(path, f"tensors-{os.urandom(8).hex()}", namespace) as s:
        yield s


def test_registered_tensors_are_stored_and_loaded(session: kvhost.Session, make: Any) -> None:
    arenas = [kvhost.Arena(4 << 20), kvhost.Arena(4 << 20)]
    shape = (BLOCKS, HEADS, TOKENS, DIM)
    planes = [make(arenas[0], shape), make(arenas[0], shape), make(arenas[1], shape)]
    planes.append(make(arenas[1], (BLOCKS, 2, HEADS, TOKENS, DIM))[:, 1])  # one with another stride
    session.register_tensors(0, planes)
    for i, plane in enumerate(planes):
        for block in range(BLOCKS):
            plane[block] = 10 * i + block
    keys = kvhost.KeyChain(2 * TOKENS, salt=os.urandom(8).hex()).extend(range(4 * TOKENS))
    chunks = [kvhost.StoreChunk(keys[n], [2 * n, 2 * n + 1], keys[0] if n else None, n) for n in range(2)]
    job = session.store(chunks)
    assert [c.result for c in job.published(30).chunks] == [kvhost.Result.STORED] * 2
    assert repr(job) == f"<StoreJob {job.id}, over>"
    for plane in planes:
        plane[4:] = -1
    found = session.lookup(keys)
    assert session.load(found, [kvhost.LoadChunk(n, [4 + 2 * n, 5 + 2 * n]) for n in range(2)]).wait(30).failed == []
    for i, plane in enumerate(planes):
        for block in range(4):
            assert (plane[4 + block] == 10 * i + block).all()
    session.unregister(0)


def test_tensors_that_cannot_be_registered(session: kvhost.Session, make: Any) -> None:
    arena, shape = kvhost.Arena(8 << 20), (BLOCKS, HEADS, TOKENS, DIM)
    good = [make(arena, shape) for _ in range(4)]
    with pytest.raises(ValueError, match="3 tensors for the 4 planes"):
        session.register_tensors(0, good[:3])
    with pytest.raises(ValueError, match="no group 5"):
        session.register_tensors(5, good)
    with pytest.raises(ValueError, match="tensor 2 has pages of 1024 bytes, the plane of layer 1, part 0 has pages of 2048"):
        session.register_tensors(0, [*good[:2], good[2][:, 0], good[3]])
    elsewhere = good[3].copy() if hasattr(good[3], "copy") else good[3].clone()
    with pytest.raises(ValueError, match="tensor 3 is in no open Arena"):
        session.register_tensors(0, [*good[:3], elsewhere])
    session.register_tensors(0, good)
    arena.close()
    with pytest.raises(ValueError, match="tensor 0 is in no open Arena"):
        session.register_tensors(0, good)

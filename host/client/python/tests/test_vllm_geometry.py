"""Pages of KV tensors as vLLM's backends lay them out: compared with what the strides themselves say."""

from __future__ import annotations

import itertools
from collections import namedtuple
from collections.abc import Sequence
from types import SimpleNamespace as Record

import pytest

from kvhost import cuda
from kvhost.errors import Refused
from kvhost.memory import PagesAt, share
from kvhost.vllm.geometry import Pages, cells_of, order_inside, pages_of

B, H, N, D = 12, 4, 16, 64  # blocks, heads, tokens of a block, head size


def contiguous(shape: Sequence[int], order: Sequence[int] | None = None) -> list[int]:
    """Strides of a tensor whose dimensions lie in memory in an order, outermost first."""
    strides, step = [0] * len(shape), 1
    for i in reversed(order or range(len(shape))):
        strides[i] = step
        step *= shape[i]
    return strides


def check(shape: Sequence[int], strides: Sequence[int], itemsize: int, dim: int, blocks: int) -> list[Pages]:
    """The pages cover exactly the bytes of each block, each once."""
    elements = [range(n) for n in shape]
    total = itemsize
    for n in shape:
        total *= n
    pages = pages_of(shape, strides, itemsize, blocks, total // blocks)
    rows = shape[dim] // blocks
    for block in (0, 1, blocks - 1):
        want = set()
        elements[dim] = range(block * rows, (block + 1) * rows)
        for at in itertools.product(*elements):
            start = sum(i * s for i, s in zip(at, strides, strict=True)) * itemsize
            want |= set(range(start, start + itemsize))
        got = [range(p.offset + block * p.stride, p.offset + block * p.stride + p.size) for p in pages]
        assert sum(len(r) for r in got) == len(want) and set().union(*got) == want
    return pages


def test_side_by_side_keys_and_values() -> None:
    shape = (B, H, 4, 16)
    for order in ((0, 2, 1, 3), (0, 1, 2, 3)):  # NHD, HND
        assert check(shape, contiguous(shape, order), 2, 0, B) == [Pages(0, H * 4 * 16 * 2, H * 4 * 16 * 2)]


def test_separate_planes_of_keys_and_values() -> None:
    shape, page = (2, B, 4, H, 8), 4 * H * 8 * 2
    assert check(shape, contiguous(shape), 2, 1, B) == [Pages(0, page, page), Pages(B * page, page, page)]
    shape = (B, 2, 4, H, 8)
    assert check(shape, contiguous(shape), 2, 0, B) == [Pages(0, 2 * page, 2 * page)]


#: A shape with the places of its blocks, heads (None: one without them) and tokens, and orders in memory, outermost first.
CELLS: list[tuple[str, tuple[int, ...], tuple[int, int | None, int], list[tuple[int, ...]]]] = [
    ("side by side", (3, 4, 6, 10), (0, 1, 2), [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)]),
    ("as many tokens as heads", (3, 4, 4, 10), (0, 1, 2), [(0, 1, 2, 3), (0, 2, 1, 3)]),
    ("planes, tokens first", (2, 3, 6, 4, 10), (1, 3, 2), [(0, 1, 2, 3, 4), (0, 1, 3, 2, 4), (1, 0, 3, 2, 4)]),
    ("blocks before planes", (3, 2, 6, 4, 10), (0, 3, 2), [(0, 1, 2, 3, 4), (0, 1, 3, 2, 4)]),
    ("latents", (3, 6, 10), (0, None, 1), [(0, 1, 2)]),
    ("one head", (3, 1, 6, 10), (0, 1, 2), [(0, 1, 2, 3), (0, 2, 1, 3)]),
    ("several kernel blocks", (6, 1, 3, 10), (0, 1, 2), [(0, 1, 2, 3)]),
]


@pytest.mark.parametrize("name,shape,places,orders", CELLS)
def test_tokens_of_heads(
    name: str, shape: tuple[int, ...], places: tuple[int, int | None, int], orders: list[tuple[int, ...]]
) -> None:
    """Whatever the order in memory, a head's token is the same elements in the same order."""
    dim, head_at, token_at = places
    blocks, itemsize = 3, 2
    rows = shape[dim] // blocks
    heads, tokens = shape[head_at] if head_at is not None else 1, shape[token_at] * rows
    total = itemsize
    for n in shape:
        total *= n
    for order in orders:
        strides = contiguous(shape, order)
        cells = cells_of(shape, strides, itemsize, blocks, total // blocks, heads, tokens, heads_first=True)
        assert len(cells) == heads
        for head, block, token in itertools.product(range(heads), range(blocks), range(tokens)):
            fixed = {dim: block * rows + token // shape[token_at], token_at: token % shape[token_at]}
            if head_at is not None:
                fixed[head_at] = head
            free = [[fixed[i]] if i in fixed else range(n) for i, n in enumerate(shape)]
            want = [sum(i * s for i, s in zip(at, strides, strict=True)) * itemsize for at in itertools.product(*free)]
            c = cells[head]
            got = [
                start + i for offset in c.offsets for start in [offset + block * c.stride + token * c.step]
                for i in range(0, c.size, itemsize)
            ]  # fmt: skip
            assert got == want, f"{name}, order {order}, head {head}, block {block}, token {token}"


@pytest.mark.parametrize(
    "shape,strides,heads,tokens,why",
    [
        ((3, 4, 6, 10), contiguous((3, 4, 6, 10)), 5, 6, "no dimensions count 5 heads and 6 tokens"),
        ((3, 4, 6, 10), contiguous((3, 4, 6, 10), (0, 1, 3, 2)), 4, 6, "numbers in a head are not in one run"),
        ((6, 4, 3, 10), contiguous((6, 4, 3, 10)), 4, 6, "a block's tokens are not in one row"),
    ],
)
def test_heads_that_cannot_be_told_are_refused(
    shape: Sequence[int], strides: Sequence[int], heads: int, tokens: int, why: str
) -> None:
    with pytest.raises(Refused, match=why):
        cells_of(shape, strides, 1, 3, shape[0] * shape[1] * shape[2] * shape[3] // 3, heads, tokens, heads_first=True)


def test_mla_and_fp8() -> None:
    assert pages_of((B, 64, 576), contiguous((B, 64, 576)), 2, B, 73728) == [Pages(0, 73728, 73728)]
    assert pages_of((B, 64, 656), contiguous((B, 64, 656)), 1, B, 41984) == [Pages(0, 41984, 41984)]


def test_blocks_of_several_kernel_blocks() -> None:
    shape = (4 * B, H, 2, 8)
    assert check(shape, contiguous(shape), 1, 0, B) == [Pages(0, 4 * H * 16, 4 * H * 16)]
    shape = (2, 4 * B, H, 8)
    assert len(check(shape, contiguous(shape), 1, 1, B)) == 2


def test_block_outermost_over_all_layers() -> None:
    layers, shape = 5, (B, H, 4, 16)
    for order in ((0, 1, 2, 3, 4), (0, 1, 3, 2, 4)):  # BLHNC, BLNHC: memory order of (B, L, H, N, C)
        strides = contiguous((B, layers, H, 4, 16), order)
        inside = [strides[0], *strides[2:]]
        assert check(shape, inside, 2, 0, B) == [Pages(0, layers * H * 4 * 16 * 2, H * 4 * 16 * 2)]


def test_heads_and_layers_inside_a_block() -> None:
    strides = contiguous((B, 5, H, 4, 16), (0, 2, 1, 3, 4))  # BHLNC: a run for each head
    assert len(check((B, H, 4, 16), [strides[0], *strides[2:]], 2, 0, B)) == H
    strides = contiguous((B, 3, 2, 2, 8), (0, 3, 2, 1, 4))  # a V1 cross-layer tensor: runs of one token and head
    assert len(check((B, 2, 2, 8), [strides[0], *strides[2:]], 2, 0, B)) == 4
    strides = contiguous((5, B, H, 4, 16), (0, 2, 1, 3, 4))  # LHBNC: a head's blocks together
    assert [p.size for p in check((B, H, 4, 16), strides[1:], 2, 0, B)] == [4 * 16 * 2] * H


def test_padded_pages() -> None:
    assert pages_of((B, 64, 656), (65536, 656, 1), 1, B, 41984) == [Pages(0, 65536, 41984)]


@pytest.mark.parametrize(
    "shape,strides,block_bytes,why",
    [
        ((B, H, N, D), contiguous((B, H, N, D)), 99, "no dimension"),
        ((B + 1, H, N, D), contiguous((B + 1, H, N, D)), 2 * H * N * D, "no dimension"),
        ((B, H, N, D), (H * N * D, 0, D, 1), 2 * H * N * D, "share memory"),
        ((B, H, N, D), (N * D, N * D, D, 1), 2 * H * N * D, "share memory"),
        ((B, 1024, 2, 2), contiguous((B, 1024, 2, 2), (1, 2, 0, 3)), 2 * 4096, "separate runs"),
    ],
)
def test_refused(shape: Sequence[int], strides: Sequence[int], block_bytes: int, why: str) -> None:
    with pytest.raises(Refused, match=why):
        pages_of(shape, strides, 2, B, block_bytes)


def test_the_order_inside_tells_layouts_apart_but_not_sizes_of_caches() -> None:
    def inside(blocks: int, order: Sequence[int]) -> str:
        shape = (blocks, H, N, D)
        return order_inside(shape, contiguous(shape, order), 0)

    assert inside(5, (0, 1, 2, 3)) == inside(99, (0, 1, 2, 3)) != inside(5, (0, 2, 1, 3))


def test_memory_that_cuda_does_not_export_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of an engine that can sleep."""

    def refuse(address: int) -> None:
        raise cuda.CudaError("cuIpcGetMemHandle", 1)

    monkeypatch.setattr(cuda, "device_uuid", lambda index: "GPU-1")
    monkeypatch.setattr(cuda, "export_ipc", refuse)
    Device = namedtuple("Device", "type index")
    layer = Record(device=Device("cuda", 0))
    with pytest.raises(Refused, match="use neither expandable segments nor an allocator for sleep mode"):
        share([layer], [PagesAt(1, 1, 1)])

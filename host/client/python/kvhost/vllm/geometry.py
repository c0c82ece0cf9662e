"""The places of a block's pages in a layer's tensor, from its shape and strides alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvhost.errors import Refused

#: More separate runs of bytes per block and layer than this are refused: the copies would be too small.
MAX_PARTS = 256


@dataclass(frozen=True)
class Pages:
    """One run of bytes per block. The run of block b is at ``offset + b * stride`` from the tensor's first byte."""

    offset: int
    stride: int
    size: int


def pages_of(
    shape: Sequence[int], strides: Sequence[int], itemsize: int, blocks: int, block_bytes: int
) -> list[Pages]:
    """Returns the runs of bytes that make up a block, in order of their offsets.

    ``strides`` count elements. ``blocks`` is the number of blocks in the engine's cache, ``block_bytes`` the size of
    one in this layer; together they show which dimension counts blocks. A block is several rows of that dimension if
    the kernel's block is smaller than the cache's. K and V side by side give one run. Separate planes of K and V, or
    a layout with the heads outside the blocks, give several."""
    what = f"shape {tuple(shape)}, strides {tuple(strides)}, {itemsize} bytes per element"
    dim = block_dimension(shape, itemsize, blocks, block_bytes)
    if dim is None:
        raise Refused(f"no dimension counts {blocks} blocks of {block_bytes} bytes: {what}")
    rows = shape[dim] // blocks
    stride = strides[dim] * rows * itemsize
    inner = [(n, s * itemsize) for i, (n, s) in enumerate(zip(shape, strides, strict=True)) if i != dim and n > 1]
    if rows > 1:
        inner.append((rows, strides[dim] * itemsize))
    if any(s <= 0 for _, s in inner) or (blocks > 1 and stride <= 0):
        raise Refused(f"elements share memory: {what}")
    _refuse_overlap([*inner, (blocks, stride)], itemsize, what)

    run, offsets = itemsize, [0]
    for n, s in sorted(inner, key=lambda d: d[1]):
        if s == run and len(offsets) == 1:
            run *= n
            continue
        if len(offsets) * n > MAX_PARTS:
            raise Refused(f"a block has more than {MAX_PARTS} separate runs of {run} bytes: {what}")
        offsets = [o + i * s for i in range(n) for o in offsets]
    return [Pages(o, stride, run) for o in sorted(offsets)]


@dataclass(frozen=True)
class Cells:
    """One KV head's bytes of a block: ``parts`` runs of ``size`` bytes for each token. Token t of block b is at
    ``offset + b * stride + t * step`` from the tensor's first byte."""

    offsets: tuple[int, ...]  # by part, in the order of the tensor's other dimensions: K before V
    stride: int
    step: int
    size: int


def cells_of(
    shape: Sequence[int], strides: Sequence[int], itemsize: int, blocks: int, block_bytes: int, heads: int, tokens: int,
    heads_first: bool,
) -> list[Cells]:
    """Returns the cells of each head in a layer's tensor, for any order of tokens and heads in memory.
    ``heads_first`` says that heads come before tokens in the shape. It is needed if there are as many heads as
    tokens."""
    what = f"shape {tuple(shape)}, strides {tuple(strides)}"
    dim = block_dimension(shape, itemsize, blocks, block_bytes)
    if dim is None:
        raise Refused(f"no dimension counts {blocks} blocks of {block_bytes} bytes: {what}")
    pages_of(shape, strides, 1, blocks, block_bytes // itemsize)  # checks that no elements share memory
    rows = shape[dim] // blocks
    rest = [i for i in range(len(shape)) if i != dim]
    head, token = _inner(shape, rest, heads, tokens // rows, heads_first)
    if token is None or tokens % rows:
        raise Refused(f"no dimensions count {heads} heads and {tokens} tokens: {what}")
    if rows > 1 and strides[dim] != strides[token] * shape[token]:
        raise Refused(f"a block's tokens are not in one row: {what}")
    others = [i for i in rest if i not in (head, token) and shape[i] > 1]
    if not others or strides[others[-1]] != 1:
        raise Refused(f"a token's numbers in a head are not in one run: {what}")
    offsets = [0]
    for i in others[:-1]:
        offsets = [o + n * strides[i] * itemsize for o in offsets for n in range(shape[i])]
    between = strides[head] * itemsize if head is not None else 0
    return [
        Cells(tuple(o + h * between for o in offsets), strides[dim] * rows * itemsize, strides[token] * itemsize,
              shape[others[-1]] * itemsize)
        for h in range(heads)
    ]


def _inner(
    shape: Sequence[int], rest: Sequence[int], heads: int, tokens: int, heads_first: bool
) -> tuple[int | None, int | None]:
    """Returns the dimensions of heads and tokens, which precede the last one. The dimension of heads is None if one
    head has none."""
    inner = list(rest[-3:-1])
    if len(inner) == 2:
        for first in (heads_first, not heads_first):
            head, token = inner if first else inner[::-1]
            if (shape[head], shape[token]) == (heads, tokens):
                return head, token
    return (None, rest[-2]) if heads == 1 and len(rest) >= 2 and shape[rest[-2]] == tokens else (None, None)


def block_dimension(shape: Sequence[int], itemsize: int, blocks: int, block_bytes: int) -> int | None:
    """Returns the dimension of a tensor that counts blocks, or None."""
    total = itemsize
    for n in shape:
        total *= n
    if total != blocks * block_bytes:
        return None
    # vLLM puts blocks first, or second after K and V. If several dimensions could count blocks, the first one does.
    return next((i for i, n in enumerate(shape) if n >= blocks and n % blocks == 0), None)


def order_inside(shape: Sequence[int], strides: Sequence[int], dim: int) -> str:
    """Returns the order of a block's elements, independent of the number of blocks: the other dimensions, outermost
    first, each with its place in the shape and its size."""
    inner = [(i, n, s) for i, (n, s) in enumerate(zip(shape, strides, strict=True)) if i != dim]
    return " ".join(f"{i}:{n}" for i, n, _ in sorted(inner, key=lambda d: (-d[2], d[0])))


def _refuse_overlap(dims: Sequence[tuple[int, int]], itemsize: int, what: str) -> None:
    extent = itemsize
    for n, s in sorted(dims, key=lambda d: d[1]):
        if n == 1:
            continue
        if s < extent:
            raise Refused(f"elements share memory: {what}")
        extent += s * (n - 1)

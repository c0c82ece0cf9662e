"""Where a block's pages are in a layer's tensor, from its shape and strides alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvhost.errors import Refused

#: More separate runs of bytes per block and layer than this are refused: the copies would be too small.
MAX_PARTS = 256


@dataclass(frozen=True)
class Pages:
    """One run of bytes per block: block b's is at ``offset + b * stride`` from the tensor's first byte."""

    offset: int
    stride: int
    size: int


def pages_of(
    shape: Sequence[int], strides: Sequence[int], itemsize: int, blocks: int, block_bytes: int
) -> list[Pages]:
    """The runs of bytes that make up a block, in order of their offset.

    ``strides`` count elements. ``blocks`` is the number of blocks in the engine's cache, ``block_bytes`` the size of one
    in this layer; both together find the dimension that counts blocks. A block may be several rows of that dimension, when
    the kernel's block is smaller than the cache's. K and V side by side give one run. Separate planes of K and V, or a
    layout with the heads outside the blocks, give several."""
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


def block_dimension(shape: Sequence[int], itemsize: int, blocks: int, block_bytes: int) -> int | None:
    """Which dimension of a tensor counts blocks, None if none does."""
    total = itemsize
    for n in shape:
        total *= n
    if total != blocks * block_bytes:
        return None
    # vLLM puts blocks first, or second behind K and V. When several dimensions could count them, the first one does.
    return next((i for i, n in enumerate(shape) if n >= blocks and n % blocks == 0), None)


def order_inside(shape: Sequence[int], strides: Sequence[int], dim: int) -> str:
    """How a block's elements are ordered, whatever the number of blocks: the other dimensions, outermost first, each as
    its place in the shape and its size."""
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

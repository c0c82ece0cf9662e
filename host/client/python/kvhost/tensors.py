"""Where the pages of torch's tensors and numpy's arrays are. Neither library is imported here before it is asked for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvhost.shape import Plane, Region


@dataclass(frozen=True)
class TensorPages:
    """The pages of one plane: the tensor's first dimension is blocks, the rest of it one block's page."""

    address: int
    stride: int  # bytes from one block to the next
    blocks: int
    page_bytes: int
    on_gpu: bool

    @classmethod
    def of(cls, tensor: Any) -> TensorPages:
        """A tensor of torch, or anything with numpy's ``__array_interface__``. The bytes of a block must be one run."""
        if hasattr(tensor, "data_ptr"):
            size = tensor.element_size()
            shape, strides = tuple(tensor.shape), [s * size for s in tensor.stride()]
            address, on_gpu = tensor.data_ptr(), tensor.device.type == "cuda"
        elif hasattr(tensor, "__array_interface__"):
            size, shape, strides = tensor.itemsize, tuple(tensor.shape), list(tensor.strides)
            address, on_gpu = tensor.__array_interface__["data"][0], False
        else:
            raise TypeError(f"{type(tensor).__name__} is neither a tensor of torch nor an array of numpy")
        if not shape or not math.prod(shape):
            raise ValueError(f"a tensor of shape {shape} has no pages: the first dimension is blocks")
        run = size
        for n, stride in zip(reversed(shape[1:]), reversed(strides[1:]), strict=True):
            if n != 1 and stride != run:
                raise ValueError(f"a block is not one run of bytes in a tensor of shape {shape}, strides {strides} bytes")
            run *= n
        stride = strides[0] if shape[0] > 1 else run
        if stride < run:
            raise ValueError(f"blocks of {run} bytes overlap in a tensor whose first stride is {stride} bytes")
        return cls(address, stride, shape[0], run, on_gpu)

    def region(self, offset: int) -> Region:
        """The pages as a region of memory in which they begin at an offset."""
        return Region(offset, self.stride, self.blocks)


def planes_pages(tensors: Iterable[Any], planes: Sequence[Plane]) -> list[TensorPages]:
    """The pages of a group's planes, one tensor for each."""
    pages = [TensorPages.of(t) for t in tensors]
    if len(pages) != len(planes):
        raise ValueError(f"{len(pages)} tensors for the {len(planes)} planes of the group, want one for each")
    for i, (have, plane) in enumerate(zip(pages, planes, strict=True)):
        if have.page_bytes != plane.page_bytes:
            raise ValueError(
                f"tensor {i} has pages of {have.page_bytes} bytes, the plane of layer {plane.layer}, part {plane.part} has "
                f"pages of {plane.page_bytes}"
            )
    if len({p.on_gpu for p in pages}) > 1:
        raise ValueError("some of the tensors are on a GPU and some are not, want all in one kind of memory")
    return pages


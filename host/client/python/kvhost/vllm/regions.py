"""The engine's KV tensors as regions of the host: one plane per layer and run of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvhost.errors import Refused
from kvhost.memory import PagesAt
from kvhost.shape import Group, Plane
from kvhost.vllm.geometry import block_dimension, order_inside, pages_of
from kvhost.vllm.groups import GroupPlan


class GroupRegions:
    """One KV cache group's planes."""

    def __init__(self, plan: GroupPlan, layers: Sequence[tuple[str, Any, int]], blocks: int) -> None:
        """``layers`` are (name, tensor, bytes of a block), ``blocks`` is how many blocks the cache has."""
        self.plan = plan
        self.planes: list[Plane] = []
        self.pages: list[PagesAt] = []
        self.layout: list[str] = []  # of each layer's block, in words
        self.positions: dict[str, int] = {}  # of the layers, in the order in which a load delivers them
        seen: dict[tuple[int, tuple[int, ...]], int] = {}
        for at, (name, tensor, block_bytes) in enumerate(layers):
            self.positions[name] = seen.setdefault((tensor.data_ptr(), tuple(tensor.stride())), len(seen))
            if len(seen) == len(self.layout):
                continue  # a layer that uses another's cache
            try:
                runs = pages_of(tensor.shape, tensor.stride(), tensor.element_size(), blocks, block_bytes)
            except Refused as e:
                raise Refused(f"layer {name}: {e}") from None
            dim = block_dimension(tensor.shape, tensor.element_size(), blocks, block_bytes)
            assert dim is not None
            rows = tensor.shape[dim] // blocks
            inside = order_inside(tensor.shape, tensor.stride(), dim)
            self.layout.append(f"{name} {tensor.dtype} {rows} rows, {inside}")
            for part, run in enumerate(runs):
                self.planes.append(Plane(at, part, run.size))
                self.pages.append(PagesAt(tensor.data_ptr() + run.offset, run.stride, blocks))

    @property
    def group(self) -> Group:
        return Group(self.plan.id, self.plan.blocks, self.planes, membership=bool(self.plan.window))

    @property
    def chunk_bytes(self) -> int:
        return self.plan.blocks * sum(p.page_bytes for p in self.planes)

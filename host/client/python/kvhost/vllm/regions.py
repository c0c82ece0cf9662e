"""The engine's KV tensors as regions of the host: one plane per layer and run of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvhost.errors import Refused
from kvhost.memory import PagesAt
from kvhost.shape import Group, Plane
from kvhost.vllm.geometry import block_dimension, cells_of, order_inside, pages_of
from kvhost.vllm.groups import GroupPlan
from kvhost.vllm.sizes import Sizes


class GroupRegions:
    """One KV cache group's planes."""

    def __init__(
        self, plan: GroupPlan, layers: Sequence[tuple[str, Any, int]], blocks: int, sizes: Sizes | None = None
    ) -> None:
        """``layers`` are (name, tensor, bytes of a block), and ``blocks`` is the number of blocks of the cache. With
        ``sizes`` a page is a token of one head, and the planes are those of a unit."""
        self.plan = plan
        self._sizes = sizes
        self._heads: list[list[list[PagesAt]]] = []  # by layer and unit, if sizes share
        self.planes: list[Plane] = []
        self.pages: list[PagesAt] = []
        self.layout: list[str] = []  # description of each layer's block
        self.positions: dict[str, int] = {}  # positions of the layers in the order of a load
        seen: dict[tuple[int, tuple[int, ...]], int] = {}
        for at, (name, tensor, block_bytes) in enumerate(layers):
            self.positions[name] = seen.setdefault((tensor.data_ptr(), tuple(tensor.stride())), len(seen))
            if len(seen) == len(self.layout):
                continue  # a layer that uses another's cache
            if sizes is not None:
                self._add_heads(at, name, tensor, blocks, block_bytes, sizes)
                continue
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

        if sizes is not None:  # by unit, not by layer
            self.pages = [p for unit in range(sizes.rank_units) for layer in self._heads for p in layer[unit]]

    def _add_heads(self, at: int, name: str, tensor: Any, blocks: int, block_bytes: int, sizes: Sizes) -> None:
        """Adds a layer with the planes of one unit."""
        tokens = self.plan.block_tokens
        try:
            heads = cells_of(
                tensor.shape, tensor.stride(), tensor.element_size(), blocks, block_bytes, sizes.rank_heads, tokens, sizes.heads_first,
            )
        except Refused as e:
            raise Refused(f"layer {name}: {e}") from None
        each = len(heads) // sizes.rank_units
        pages = [
            PagesAt(tensor.data_ptr() + offset, head.stride, blocks, tokens, head.step) for head in heads for offset in head.offsets
        ]
        parts = len(pages) // sizes.rank_units
        self._heads.append([pages[i : i + parts] for i in range(0, len(pages), parts)])
        self.planes += [Plane(at, part, heads[0].size) for part in range(parts)]
        self.layout.append(f"{name} {tensor.dtype} {each} heads of {parts // each} parts of {heads[0].size} bytes")

    @property
    def group(self) -> Group:
        return Group(self.plan.id, self._chunk_pages, self.planes, membership=bool(self.plan.window))

    @property
    def _chunk_pages(self) -> int:
        return self.plan.blocks if self._sizes is None else self.plan.chunk_tokens

    @property
    def chunk_bytes(self) -> int:
        """Returns the bytes of a rank's chunk."""
        units = self._sizes.rank_units if self._sizes is not None else 1
        return units * self._chunk_pages * sum(p.page_bytes for p in self.planes)

"""The units of chunks that engines of several tensor-parallel sizes share, and the units of a rank."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvhost.errors import Refused
from kvhost.vllm import compat

#: The most units of a chunk, and so the largest size in which each rank has bytes of its own. It is a power of two, as
#: sizes are.
MOST_UNITS = 16

#: Backends with the bytes of a head's tokens side by side, in order, so that blocks of other sizes have the same bytes.
_IN_ORDER = {
    "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "TRITON_MLA", "FLASHMLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA",
    "CUTLASS_MLA",
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """The division of a model's KV heads into units, the least part that a rank of any size loads."""

    heads: int  # heads of the model; 1 for the latents of MLA
    ranks: int  # ranks of this engine
    heads_first: bool  # heads come before tokens in the shape of a layer's tensor

    @property
    def units(self) -> int:
        return math.gcd(self.heads, MOST_UNITS)

    @property
    def rank_units(self) -> int:
        return max(1, self.units // self.ranks)

    @property
    def rank_heads(self) -> int:
        return max(1, self.heads // self.ranks)

    @property
    def sharing(self) -> list[int]:
        """Returns the sizes, powers of two, that find this engine's chunks."""
        return [n for n in (1, 2, 4, 8, 16, 32, 64) if self._fits(n)]

    def _fits(self, ranks: int) -> bool:
        return self.units % ranks == 0 or (self.units == self.heads and ranks % self.heads == 0)

    def check(self) -> None:
        if not self._fits(self.ranks):
            raise Refused(f'share is "sizes", and {self.heads} KV heads in {self.units} units cannot be divided among {self.ranks} '
                          "ranks")

    def stores(self, rank: int) -> bool:
        """Whether a rank is the first of the ranks with its unit."""
        return rank % max(1, self.ranks // self.units) == 0


def sizes(vllm_config: Any, specs: Iterable[Any], replicated: bool) -> Sizes:
    """Returns the division. ``replicated`` says that all ranks hold the same bytes."""
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1:
        raise Refused('share is "sizes", and decode context parallelism spreads the tokens of a block over ranks')
    ranks = int(parallel.tensor_parallel_size)
    heads = 1 if replicated else int(vllm_config.model_config.get_total_num_kv_heads())
    found = Sizes(heads, ranks, compat.heads_first(vllm_config))
    found.check()
    for spec in specs:
        if compat.head_slots(spec) != found.rank_heads or getattr(spec, "tokens_per_state", 1) != 1:
            raise Refused(f'share is "sizes", and a layer is cached with {compat.head_slots(spec)} heads, want {found.rank_heads} of '
                          "one state a token")
    return found


def in_order(backends: Iterable[str]) -> bool:
    """Whether blocks of other sizes have the same bytes."""
    return set(backends) <= _IN_ORDER

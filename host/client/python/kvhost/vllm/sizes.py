"""Which engines of other tensor-parallel sizes share what this one stores, and what of it a rank has."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvhost.errors import Refused
from kvhost.vllm import compat

#: Units at most, and so the largest size in which each rank has bytes of its own. A power of two: sizes are.
MOST_UNITS = 16

#: Backends with a token's bytes in a head side by side, in the order of the tokens, so that blocks of other sizes are the same bytes.
_IN_ORDER = {
    "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "TRITON_MLA", "FLASHMLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA",
    "CUTLASS_MLA",
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """How a model's KV heads are divided into units, the least that a rank of any size loads."""

    heads: int  # of the model; 1 for the latents of MLA
    ranks: int  # of this engine
    heads_first: bool  # in the shape of a layer's tensor, where numbers do not tell

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
        """The sizes that find what this engine stores, of those that are powers of two."""
        return [n for n in (1, 2, 4, 8, 16, 32, 64) if self._fits(n)]

    def _fits(self, ranks: int) -> bool:
        return self.units % ranks == 0 or (self.units == self.heads and ranks % self.heads == 0)

    def check(self) -> None:
        if not self._fits(self.ranks):
            raise Refused(f'share is "sizes", and {self.heads} KV heads in {self.units} units cannot be divided among {self.ranks} '
                          "ranks")

    def stores(self, rank: int) -> bool:
        """Whether a rank is the first of those that have its unit."""
        return rank % max(1, self.ranks // self.units) == 0


def sizes(vllm_config: Any, specs: Iterable[Any], replicated: bool) -> Sizes:
    """``replicated`` says that all ranks hold the same bytes."""
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
    """Whether blocks of other sizes are the same bytes."""
    return set(backends) <= _IN_ORDER

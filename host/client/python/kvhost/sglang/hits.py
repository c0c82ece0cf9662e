"""The lengths of a prompt that a pool can restore."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy


def leading(found: Sequence[bool]) -> int:
    return next((i for i, ok in enumerate(found) if not ok), len(found))


def restorable_lengths(transfer: Any, found: Sequence[bool]) -> set[int]:
    """Returns the lengths, in pages, that a pool can restore. ``found`` has the prompt's pages in that pool."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return set(range(1, leading(found) + 1))
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        last, run, lengths = max(1, len(transfer.keys or ())), 0, set()
        for n, ok in enumerate(found, 1):
            run = run + 1 if ok else 0
            if run >= min(n, last):
                lengths.add(n)
        return lengths
    raise ValueError(f"kvhost: hit policy {transfer.hit_policy} is not supported")

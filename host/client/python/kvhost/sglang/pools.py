"""Where the pages of SGLang's host pools are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvhost.objects import Addresses, Kind


@dataclass
class Pool:
    """A host pool and the objects that its pages become."""

    name: str
    raw: Any  # SGLang's HostKVCache or a sidecar's pool
    buffers: Kind | None  # by the pool's own buffers, None where its layout has none
    flat: Kind | None  # as one copy of the page

    @property
    def page_slots(self) -> int:
        """How many of a transfer's indices are one page."""
        return int(getattr(self.raw, "logical_page_size", 0) or getattr(self.raw, "page_size", 1) or 1)


def page_sizes(pool: Any) -> list[int]:
    """The bytes of each buffer of a page, in the pool's order. Empty where the pool's layout has no such buffers."""
    import torch

    slots = int(getattr(pool, "logical_page_size", 0) or getattr(pool, "page_size", 1) or 1)
    try:
        meta = pool.get_page_buffer_meta(torch.zeros(slots, dtype=torch.int64))
    except (AttributeError, ValueError, NotImplementedError):
        return []
    return [int(size) for size in meta[1]] if meta else []


def flat_size(pool: Any) -> int:
    """The bytes of a flat page, 0 where the pool has none."""
    try:
        page = pool.get_dummy_flat_data_page()
    except (AttributeError, ValueError, NotImplementedError):
        return 0
    return int(page.numel() * page.element_size())


def addresses(pool: Pool, indices: Any) -> list[Addresses]:
    """The buffers of each page of a transfer."""
    assert pool.buffers is not None
    found, _ = pool.raw.get_page_buffer_meta(indices)
    n = len(pool.buffers.pages)
    return [found[i : i + n] for i in range(0, len(found), n)]
